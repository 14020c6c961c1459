"""The kernels of attention's tangent and its backward, against formulas in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import random
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16
from tensorgrad.kernels.attention import tangent, tangent_sm90
from tensorgrad.kernels.attention.options import (
    AttentionOptions,
    Sequences,
    TangentPass,
    empty_result,
)
from tensorgrad.ops import attention as attention_ops
from tests.ops.test_attention import repeated, scale_of, weights_of
from tests.ops.test_dropout import attention_keep_mask
from tests.poisoned import poison_memory

pytestmark = pytest.mark.gpu

# By dtype: the error that results may have, of their norm. The result and its gradient are rounded
# before they meet in backward.
TOLERANCES = {"float16": 3e-3, "bfloat16": 1.5e-2, "tf32": 3e-3}
Arrays = list[Any]  # q, k, v, tq, tk, tv and the gradient of ty


@pytest.fixture(params=list(TOLERANCES))
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a dtype for which the kernels with mma.sync are on this GPU."""
    monkeypatch.setattr(tangent_sm90, "supports", lambda arrays, options: False)
    name: str = request.param
    array = backend.cupy.empty((1, 1, 1, 128), storage(name))
    if not tangent.supports((array, array, array), AttentionOptions(1.0, tf32=name == "tf32")):
        pytest.skip("needs a GPU of compute capability 8.0 or later")
    return name


@pytest.fixture(params=["float16", "bfloat16"])
def hopper_kind(request: pytest.FixtureRequest) -> str:
    """Return a dtype for which the kernels with wgmma are on this GPU."""
    name: str = request.param
    array = backend.cupy.empty((1, 1, 1, 128), storage(name))
    if not tangent_sm90.supports((array, array, array), AttentionOptions(1.0)):
        pytest.skip("needs a GPU of compute capability 9.0")
    return name


def storage(kind: str) -> Any:
    """Return the dtype of the arrays."""
    return np.dtype(bfloat16 if kind == "bfloat16" else kind.replace("tf32", "float32"))


def draw(kind: str, shapes: list[tuple[int, ...]]) -> Arrays:
    rng = np.random.default_rng(sum(map(sum, shapes)))
    return [rng.standard_normal(shape).astype("float32").astype(storage(kind)) for shape in shapes]


def dense(kind: str, width: int, heads: int, kv_heads: int, tq: int, tk: int) -> Arrays:
    q, kv = (2, heads, tq, width), (2, kv_heads, tk, width)
    return draw(kind, [q, kv, kv, q, kv, kv, q])


def reference(arrays: Arrays, **options: Any) -> list[Any]:
    """Return ty and the gradients of q, k, v, tq, tk and tv, in float64."""
    q, k, v, tq, tk, tv, dy = (array.astype(np.float64) for array in arrays)
    kept = weights_of(q, k, **options)
    weights = weights_of(q, k, **{**options, "dropout": 0, "keep": 1})
    scale = scale_of(q, options.get("scale"))
    groups = *k.shape[:2], q.shape[1] // k.shape[1], *k.shape[2:]
    k, v, tk, tv = (repeated(array, q) for array in (k, v, tk, tv))

    def sum_of(row: Any, other: Any) -> Any:
        return (row * other).sum(-1, keepdims=True)

    def transposed(array: Any) -> Any:
        return array.swapaxes(-1, -2)

    def of_keys(array: Any, other: Any) -> Any:
        return (transposed(array) @ other).reshape(groups).sum(2)

    ts = scale * (tq @ transposed(k) + q @ transposed(tk))
    y, mean = kept @ v, sum_of(weights, ts)
    ty = (kept * ts) @ v - mean * y + kept @ tv
    e = kept * (dy @ transposed(v)) - weights * sum_of(dy, y)
    d = (ts - mean) * e + kept * (dy @ transposed(tv)) - weights * sum_of(dy, ty)
    return [
        ty, scale * (d @ k + e @ tk), scale * (of_keys(d, q) + of_keys(e, tq)),
        of_keys(kept * (ts - mean), dy), scale * (e @ k), scale * of_keys(e, q), of_keys(kept, dy),
    ]  # fmt: skip


class Setting(NamedTuple):
    """The options of an attention, as the functions of ops.attention take them."""

    causal: bool = False
    window: int | None = None
    scale: float | None = None
    dropout: float = 0.0
    mask: Any = None
    sequences: Any = None  # starts of queries and of keys, and the longest lengths


def computed(
    kind: str, arrays: Arrays, setting: Setting, gradients: list[Any] | None = None
) -> list[Any]:
    """Return ty and the six gradients of the kernels, on the GPU, written into arrays if given."""
    q, k, v, tq, tk, tv, dy = arrays
    mask = None if setting.mask is None else tg.Tensor(setting.mask).to("cuda")
    sequences = None
    if setting.sequences is not None:
        q_starts, k_starts, longest = setting.sequences
        q_starts, k_starts = (
            backend.to_device(starts.astype(np.int32), "cuda") for starts in (q_starts, k_starts)
        )
        sequences = Sequences(q_starts, k_starts, longest)
    random.seed(3)
    with tg.autocast("tf32", enabled=kind == "tf32"):
        options = attention_ops._options(
            "attention", (q, k, v), mask, setting.causal, setting.scale, setting.dropout,
            setting.window, sequences,
        )  # fmt: skip
    y, saved = attention_ops._forward((q, k, v), options)
    ty, means = tangent.forward((q, k, v), y, saved[4], (tq, tk, tv), options)
    done = TangentPass(q, k, v, y, saved[4], tq, tk, tv, ty, means, options)
    if gradients is None:
        gradients = [empty_result(array, q.dtype) for array in 2 * (q, k, v)]
    tangent.backward(dy, done, gradients)
    return [ty, *gradients]


def check_equal(kind: str, got: list[Any], expected: list[Any]) -> None:
    names = "ty", "dq", "dk", "dv", "dtq", "dtk", "dtv"
    for name, one, two in zip(names, got, expected, strict=True):
        one = one.astype(np.float64)
        assert one.shape == two.shape, name
        assert np.isfinite(one).all(), name
        size = np.linalg.norm(two) + 0.05 * two.size**0.5  # some gradients cancel to 0
        error = np.linalg.norm(one - two) / size
        assert error <= TOLERANCES[kind], (name, error)


def compare(kind: str, arrays: Arrays, **options: Any) -> None:
    """Check the kernels against the formulas, and two runs in every bit."""
    on_gpu = [backend.to_device(array, "cuda") for array in arrays]
    check_runs(kind, on_gpu, Setting(**options), reference(arrays, **options))


def check_runs(kind: str, on_gpu: Arrays, setting: Setting, expected: list[Any]) -> None:
    runs = (computed(kind, on_gpu, setting) for _ in range(2))
    got, again = ([backend.to_numpy(array) for array in run] for run in runs)
    for one, two in zip(got, again, strict=True):
        assert one.tobytes() == two.tobytes()
    check_equal(kind, got, expected)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what a kernel does not write show."""
    poison_memory(monkeypatch)


SIZES = [(2, 2, 257, 257), (4, 1, 100, 333), (2, 1, 300, 129), (1, 1, 1, 2), (3, 3, 64, 128)]
WIDTHS = [1, 7, 32, 40, 64, 96, 128]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes(kind: str, size: tuple[int, int, int, int], width: int, causal: bool) -> None:
    compare(kind, dense(kind, width, *size), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("window", [2, 70, 200])
def test_window(kind: str, window: int, width: int, causal: bool) -> None:
    compare(kind, dense(kind, width, 2, 1, 333, 400), causal=causal, window=window)


HOPPER_SIZES = [*SIZES, (4, 2, 700, 700), (1, 1, 1000, 200), (2, 2, 193, 1100)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [40, 64, 72, 128])
@pytest.mark.parametrize("size", HOPPER_SIZES)
def test_sizes_on_hopper(
    hopper_kind: str, size: tuple[int, int, int, int], width: int, causal: bool
) -> None:
    compare(hopper_kind, dense(hopper_kind, width, *size), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("window", [2, 70, 200])
def test_window_on_hopper(hopper_kind: str, window: int, width: int, causal: bool) -> None:
    arrays = dense(hopper_kind, width, 2, 1, 333, 400)
    compare(hopper_kind, arrays, causal=causal, window=window)


@pytest.mark.parametrize("width", [64, 128])
def test_more_tiles_than_processors(hopper_kind: str, width: int) -> None:
    kv = (3, 4, 1000, width)
    q = (3, 24, 1000, width)
    arrays = draw(hopper_kind, [q, kv, kv, q, kv, kv, q])
    compare(hopper_kind, arrays, causal=True, scale=0.1)


@pytest.mark.parametrize("width", [40, 64, 128])
@pytest.mark.parametrize("shape", [(2, 1, 1, 133), (2, 4, 100, 133), (100, 133)])
@pytest.mark.parametrize("added", [False, True])
def test_mask(kind: str, added: bool, shape: tuple[int, ...], width: int) -> None:
    rng = np.random.default_rng(1)
    mask: Any = rng.random(shape) > 0.3
    mask[..., -1] = True
    if shape[-2] > 1:
        mask[..., 1, :] = False  # a query without keys
    if added:
        mask = np.where(mask, rng.standard_normal(shape), -np.inf).astype("float32")
    compare(kind, dense(kind, width, 4, 2, 100, 133), mask=mask, causal=True)


@pytest.mark.parametrize("tk", [128, 129])  # rows of bits that are, and are not, whole blocks
@pytest.mark.parametrize("width", [32, 64, 96, 128])
def test_dropout(kind: str, width: int, tk: int) -> None:
    compare(kind, dense(kind, width, 4, 2, 100, tk), causal=True, dropout=0.3)


def test_scale(kind: str) -> None:
    compare(kind, dense(kind, 64, 2, 2, 65, 70), scale=0.5)


@pytest.mark.parametrize("options", [{"causal": True}, {"dropout": 0.2}, {"window": 20}], ids=str)
@pytest.mark.parametrize("k_lengths", [None, [90, 4, 0, 70, 200]])
@pytest.mark.parametrize("width", [33, 64, 128])
def test_sequences(
    kind: str, width: int, k_lengths: list[int] | None, options: dict[str, Any]
) -> None:
    lengths = [100, 0, 5, 200, 64]
    k_lengths = k_lengths or lengths
    longest = max(lengths), max(k_lengths)
    q, kv = (1, 4, sum(lengths), width), (1, 2, sum(k_lengths), width)
    arrays = draw(kind, [q, kv, kv, q, kv, kv, q])
    dropout = options.get("dropout", 0.0)
    shape = len(lengths), 4, *longest
    random.seed(3)
    keep = np.ones(shape)
    if dropout:
        keep = attention_keep_mask(shape, dropout, like=arrays[0]) / (1 - dropout)
    own = {name: value for name, value in options.items() if name != "dropout"}
    expected: list[list[Any]] = []
    row = key = 0
    for s, (tq, tk) in enumerate(zip(lengths, k_lengths, strict=True)):
        rows, keys = slice(row, row + tq), slice(key, key + tk)
        each = [a[:, :, keys if i in (1, 2, 4, 5) else rows] for i, a in enumerate(arrays)]
        expected.append(reference(each, **own, keep=keep[s : s + 1, :, :tq, :tk]))
        row, key = row + tq, key + tk
    starts = [np.cumsum([0, *each]) for each in (lengths, k_lengths)]
    on_gpu = [
        backend.to_device(np.ascontiguousarray(array.swapaxes(1, 2)), "cuda").swapaxes(1, 2)
        for array in arrays
    ]
    setting = Setting(**options, sequences=(*starts, longest))
    joined = [np.concatenate(parts, 2) for parts in zip(*expected, strict=True)]
    check_runs(kind, on_gpu, setting, joined)


@pytest.mark.parametrize("width", [30, 64])
def test_packed_operands(kind: str, width: int) -> None:
    check_packed(kind, width)


@pytest.mark.parametrize("width", [64, 128])
def test_packed_operands_on_hopper(hopper_kind: str, width: int) -> None:
    check_packed(hopper_kind, width)


def check_packed(kind: str, width: int) -> None:
    packed = draw(kind, [(2, 201, 8, width), (2, 201, 8, width), (2, 201, 4, width)])
    heads = slice(0, 4), slice(4, 6), slice(6, 8)

    def unpacked(arrays: Arrays) -> Arrays:
        qkv, tqkv, dy = (array.swapaxes(1, 2) for array in arrays)
        return [*(qkv[:, part] for part in heads), *(tqkv[:, part] for part in heads), dy]

    on_gpu = unpacked([backend.to_device(array, "cuda") for array in packed])
    expected = reference(unpacked(packed), causal=True)
    check_runs(kind, on_gpu, Setting(causal=True), expected)


@pytest.mark.parametrize("width", [30, 64, 128])
def test_gradients_in_given_arrays(kind: str, width: int) -> None:
    check_given_arrays(kind, width)


@pytest.mark.parametrize("width", [64, 128])
def test_gradients_in_given_arrays_on_hopper(hopper_kind: str, width: int) -> None:
    check_given_arrays(hopper_kind, width)


def check_given_arrays(kind: str, width: int) -> None:
    """Check gradients in parts of one array, in unlike layouts, and without some of them."""
    shapes = [(2, 4, 150, width), *2 * [(2, 2, 150, width)]]
    on_gpu = [
        backend.to_device(array, "cuda") for array in draw(kind, [*shapes, *shapes, shapes[0]])
    ]
    expected = computed(kind, on_gpu, Setting(causal=True))
    heads = slice(0, 4), slice(4, 6), slice(6, 8)
    for start in (0, 1):  # elements before the first: rows that are aligned, and that are not
        whole = backend.empty((2, 2 * 150 * 8 * width + start), storage(kind), like=on_gpu[0])
        packed = whole[:, start:].reshape(2, 2, 150, 8, width).swapaxes(2, 3)
        parts = [packed[i][:, part] for i in (0, 1) for part in heads]
        for unwanted in ((), (0,), (1, 5), (2, 3, 4), (0, 3), (1, 2, 4, 5)):
            whole[...] = 0
            given = [None if i in unwanted else part for i, part in enumerate(parts)]
            for i, found in enumerate(computed(kind, on_gpu, Setting(causal=True), given)):
                if found is not None:
                    assert found.tobytes() == expected[i].tobytes(), (start, unwanted, i)
            assert all(not parts[i].any() for i in unwanted)
    mixed = [
        *parts[:4], *(empty_result(array, storage(kind)) for array in on_gpu[4:6])
    ]  # fmt: skip
    for one, two in zip(computed(kind, on_gpu, Setting(causal=True), mixed), expected, strict=True):
        assert one.tobytes() == two.tobytes()


def test_arrays_that_start_at_any_element(kind: str) -> None:
    wide = draw(kind, [(1, 3, 101, 65) for _ in range(7)])
    arrays = [array[..., i % 2 : i % 2 + 64] for i, array in enumerate(wide)]
    on_gpu = [
        backend.to_device(array, "cuda")[..., i % 2 : i % 2 + 64] for i, array in enumerate(wide)
    ]
    check_runs(kind, on_gpu, Setting(causal=True), reference(arrays, causal=True))
    on_gpu[:3] = [array.copy() for array in on_gpu[:3]]  # tangents that are not aligned
    check_runs(kind, on_gpu, Setting(causal=True), reference(arrays, causal=True))


def test_float32_and_wide_heads_have_no_kernel() -> None:
    def supports(width: int, dtype: str, **options: Any) -> bool:
        array = backend.cupy.empty((1, 1, 1, width), dtype)
        return tangent.supports((array, array, array), AttentionOptions(**options))

    assert not supports(64, "float32", scale=1.0)
    assert not supports(129, "float16", scale=1.0)
    assert not supports(64, "float16", scale=-1.0)
