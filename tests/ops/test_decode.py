"""A step of attention against a cache, beside attention over all steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16
from tensorgrad.errors import DtypeError, ShapeError
from tensorgrad.kernels.attention import decode
from tensorgrad.ops.decode import attend

TOLERANCES = {"float64": 1e-12, "float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}
SIZES = [
    (3, 4, 2, 64, 40),
    (2, 3, 3, 40, 33),
    (1, 6, 1, 33, 9),
    (2, 2, 2, 128, 5),
    (1, 5, 1, 256, 7),
]
Arrays = dict[str, Any]


def inputs(size: tuple[int, ...], dtype: Any, device: str, seed: int = 0) -> Arrays:
    """Return arguments of `attend`; lengths are 0, full and in between, what lies beyond is NaN."""
    batch, heads, kv_heads, width, steps = size
    rng = np.random.default_rng(seed)
    qkv = rng.standard_normal((batch, (heads + 2 * kv_heads) * width))
    keys, values = rng.standard_normal((2, batch, kv_heads, steps, width))
    lengths = np.resize([steps - 1, 0, steps // 2], batch).astype(np.int32)
    for b, length in enumerate(lengths):
        keys[b, :, length:] = values[b, :, length:] = np.nan
    arrays = {"qkv": qkv, "keys": keys, "values": values}
    found = {name: backend.to_device(a.astype(dtype), device) for name, a in arrays.items()}
    return {**found, "lengths": backend.to_device(lengths, device)}


def expected(given: Arrays, window: int | None = None, angles: Any = None, **options: Any) -> Any:
    """Return the result and the caches by ops of whole sequences, in float64."""
    qkv, keys, values = (
        backend.to_numpy(given[name]).astype(np.float64) for name in ("qkv", "keys", "values")
    )
    batch, kv_heads, _, width = keys.shape
    each = qkv.reshape(batch, -1, width)
    heads = each.shape[1] - 2 * kv_heads
    y = np.zeros((batch, heads * width))
    for b, length in enumerate(backend.to_numpy(given["lengths"])):
        row = each[b : b + 1]
        if angles is not None:
            cos, sin = (backend.to_numpy(table)[length][None, None] for table in angles)
            row = tg.rotary(row, cos, sin, heads=heads + kv_heads, **options).numpy()
        keys[b, :, length] = row[0, heads : heads + kv_heads]
        values[b, :, length] = row[0, heads + kv_heads :]
        seen = slice(b, b + 1), slice(None), slice(None, length + 1)
        q = row[:, :heads].swapaxes(0, 1)[None]
        mixed = tg.attention(q, keys[seen], values[seen], causal=True, window=window)
        y[b] = mixed.numpy().reshape(-1)
    return y, keys, values


def compare(given: Arrays, **options: Any) -> None:
    """Check one call, and that a second gives the same bits."""
    reference = expected(given, **options)
    found = []
    for _ in range(2):
        copies = {name: array.copy() for name, array in given.items()}
        y = attend(**copies, **options)
        arrays = (y, copies["keys"], copies["values"])
        found.append([backend.to_numpy(array) for array in arrays])
    tolerance = TOLERANCES[str(given["qkv"].dtype)]
    for one, two, right in zip(*found, reference, strict=True):
        assert one.tobytes() == two.tobytes()
        np.testing.assert_allclose(one.astype(np.float64), right, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_step_is_attention_over_all_steps(size: tuple[int, ...], dtype: Any, device: str) -> None:
    compare(inputs(size, dtype, device))
    compare(inputs(size, dtype, device, 1), window=4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float32", bfloat16], ids=str)
def test_rotary_positions_are_those_of_each_sequence(
    dtype: Any, interleaved: bool, device: str
) -> None:
    given = inputs((3, 6, 2, 32, 20), dtype, device)
    angles = np.random.default_rng(2).uniform(-3, 3, (20, 16))
    tables = [backend.to_device(f(angles).astype(np.float32), device) for f in (np.cos, np.sin)]
    compare(given, angles=tuple(tables), interleaved=interleaved)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (5, 1), (11, 1)], ids=str)
@pytest.mark.parametrize("width", [32, 64, 72, 128, 256])
def test_long_caches_are_split_and_joined(
    width: int, heads: tuple[int, int], window: int | None
) -> None:
    for dtype in ("float32", bfloat16):
        for steps in (1000, 1111):  # by 8 warps and by 4
            compare(inputs((3, *heads, width, steps), dtype, "cuda"), window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("heads", [2, 200])  # by 8 warps and by 4
def test_the_newest_key_may_be_anywhere_in_a_tile(heads: int, width: int, dtype: Any) -> None:
    given = inputs((1, heads, heads, width, 300), dtype, "cuda")
    for length in (0, 1, 15, 16, 31, 32, 63, 64, 127, 128, 129, 255, 256, 257, 299):
        given["lengths"][...] = length
        for name in ("keys", "values"):
            values = np.random.default_rng(length).standard_normal(given[name].shape)
            values[:, :, length:] = np.nan
            given[name] = backend.to_device(values.astype(dtype), "cuda")
        compare(given)


def test_few_heads_and_short_caches_take_more_warps() -> None:
    def warps(batch: int, heads: int, seen: int, plain: bool = False) -> int:
        return decode._split(batch, heads, heads, seen, 64, plain).warps

    assert warps(1, 25, 512) == warps(4, 25, 1024) == 8
    assert warps(1, 25, 1025) == warps(6, 25, 512) == warps(1, 25, 512, plain=True) == 4


def test_views_with_strides_are_read_and_written_in_place(device: str) -> None:
    given = inputs((4, 4, 2, 48, 12), "float32", device)
    wide = {name: backend.namespace(given["qkv"]).zeros((4, 12, 2, 97), "float32") for name in "kv"}
    for name, array in (("k", given["keys"]), ("v", given["values"])):
        wide[name].swapaxes(1, 2)[..., 1:49] = array
    keys, values = (wide[name].swapaxes(1, 2)[::2, ..., 1:49] for name in "kv")
    odd = {**given, "keys": keys, "values": values, "lengths": given["lengths"][::2]}
    odd["qkv"] = given["qkv"][::2]
    y, new_keys, _ = expected(odd)
    np.testing.assert_allclose(backend.to_numpy(attend(**odd)), y, atol=2e-5)
    np.testing.assert_allclose(backend.to_numpy(keys), new_keys)
    assert not backend.to_numpy(wide["k"])[..., 49:].any()


def test_keys_whose_elements_lie_apart_are_done_all_the_same(device: str) -> None:
    given = inputs((2, 4, 2, 32, 9), "float32", device)
    y, new_keys, _ = expected(given)
    for name in ("keys", "values"):
        wide = backend.namespace(given["qkv"]).zeros((2, 2, 9, 64), "float32")
        wide[..., ::2] = given[name]
        given[name] = wide[..., ::2]
    np.testing.assert_allclose(backend.to_numpy(attend(**given)), y, atol=2e-5)
    np.testing.assert_allclose(backend.to_numpy(given["keys"]), new_keys)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(9, 6, 6, 64, 2000), (2, 16, 2, 128, 9000), (40, 12, 12, 64, 700)]
)
def test_large_caches_are_shared_among_all_blocks(shape: tuple[int, ...]) -> None:
    given = inputs(shape, bfloat16, "cuda")
    compare(given)
    before = attend(**given)
    for _ in range(20):  # the parts are joined by another block each time
        assert (attend(**given) == before).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(12, 12), (9, 3), (16, 1)], ids=str)
def test_counters_are_left_as_zeros(heads: tuple[int, int], dtype: Any) -> None:
    given = inputs((3, *heads, 64, 1500), dtype, "cuda")
    counters = backend.cupy.zeros(3 * heads[0], "uint32")
    expected = attend(**given)
    for _ in range(5):
        assert (attend(**given, counters=counters) == expected).all()
        assert not counters.any()


def test_no_sequences_give_no_rows(device: str) -> None:
    given = {name: array[:0] for name, array in inputs(SIZES[0], "float32", device).items()}
    assert attend(**given).shape == (0, 256)


@pytest.mark.gpu
def test_heads_too_wide_for_the_kernel_are_done_all_the_same() -> None:
    compare(inputs((2, 4, 2, 300, 9), "float32", "cuda"))
    compare(inputs((2, 4, 2, 300, 9), "float32", "cuda"), window=3)


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("keys", lambda a: a[0], ShapeError, r"keys have shape \(2, 40, 64\)"),
        ("values", lambda a: a[:, :1], ShapeError, "values has shape .* like keys"),
        ("qkv", lambda a: a[:, :-1], ShapeError, r"qkv has shape \(3, 511\), expected \(3, \(H"),
        ("qkv", lambda a: a[:, : 7 * 64], ShapeError, "H a multiple of 2"),
        ("qkv", lambda a: a[:, : 4 * 64], ShapeError, r"qkv has shape \(3, 256\), expected"),
        ("lengths", lambda a: a[:2], ShapeError, r"lengths has shape \(2,\), expected \(3,\)"),
        ("lengths", lambda a: a.astype("int64"), DtypeError, "dtype int64, expected int32"),
        ("values", lambda a: a.astype("float16"), DtypeError, "float16, expected float32"),
    ],
)
def test_bad_arguments_are_named(name: str, change: Any, error: Any, message: str) -> None:
    given = inputs(SIZES[0], "float32", "cpu")
    with pytest.raises(error, match=message):
        attend(**{**given, name: change(given[name])})


@pytest.mark.gpu
def test_tensors_of_another_device_are_refused() -> None:
    given = inputs(SIZES[0], "float32", "cuda")
    with pytest.raises(Exception, match="lengths is on cpu"):
        attend(**{**given, "lengths": backend.to_numpy(given["lengths"])})
    assert Tensor(given["qkv"]).device == "cuda:0"
