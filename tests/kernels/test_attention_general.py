"""The attention kernels for all options, with mma.sync and plain, against the NumPy path."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, random
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16
from tensorgrad.kernels.attention import short as attention_short
from tensorgrad.kernels.attention import sm80 as attention_sm80
from tensorgrad.kernels.attention import sm90 as attention_sm90
from tensorgrad.kernels.attention.options import AttentionOptions
from tensorgrad.kernels.device import has_tf32

pytestmark = pytest.mark.gpu

# By kernels and dtype: the error that results may have, of their norm.
TOLERANCES = {
    ("sm80", "float16"): 4e-3, ("sm80", "bfloat16"): 1e-2, ("sm80", "tf32"): 2e-3,
    ("simple", "float32"): 1e-5, ("simple", "float64"): 1e-13, ("simple", "float16"): 4e-3,
}  # fmt: skip
Kind = tuple[str, str]


@pytest.fixture(params=list(TOLERANCES), ids="-".join)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    """Let the public functions choose these kernels."""
    kernels, dtype = request.param
    if kernels == "sm80":
        array = backend.cupy.empty((1, 1, 1, 64), "float16")
        if not attention_sm80.supports((array, array, array), AttentionOptions(scale=1.0)):
            pytest.skip("needs a GPU of compute capability 8.0 or later")
    else:
        monkeypatch.setattr(attention_sm80, "supports", lambda arrays, options: False)
    for other in (attention_short, attention_sm90):
        monkeypatch.setattr(other, "supports", lambda arrays, options: False)
    with tg.autocast("tf32", enabled=dtype == "tf32"):
        yield kernels, dtype


def storage(kind: Kind) -> Any:
    """Return the dtype of the arrays."""
    return np.dtype(bfloat16 if kind[1] == "bfloat16" else kind[1].replace("tf32", "float32"))


def passes(device: str, arrays: list[Any], function: Any) -> list[Any]:
    """Return the result and the gradients, the last array being the result's gradient."""
    random.seed(5)
    *inputs, dy = (backend.to_device(array, device) for array in arrays)
    tensors = [Tensor(array, requires_grad=True) for array in inputs]
    y = function(*tensors)
    y.backward(dy)
    return [y.numpy(), *(backend.to_numpy(tensor.grad) for tensor in tensors)]


def compare(kind: Kind, shapes: list[tuple[int, ...]], function: Any) -> None:
    """Check that both devices agree but for rounding, and two runs on the GPU in every bit."""
    dtype = storage(kind)
    rng = np.random.default_rng(sum(map(sum, shapes)))
    arrays = [(1.5 * rng.standard_normal(shape)).astype(dtype) for shape in shapes]
    got, again = (passes("cuda", arrays, function) for _ in range(2))
    for one, two, expected in zip(got, again, passes("cpu", arrays, function), strict=True):
        assert one.tobytes() == two.tobytes()
        one, expected = one.astype("float64"), expected.astype("float64")
        assert np.isfinite(one).all()
        size = np.linalg.norm(expected) + expected.size**0.5  # some gradients cancel to 0
        assert np.linalg.norm(one - expected) <= TOLERANCES[kind] * size


def dense(width: int, heads: int, kv_heads: int, tq: int, tk: int) -> list[tuple[int, ...]]:
    q, kv = (2, heads, tq, width), (2, kv_heads, tk, width)
    return [q, kv, kv, q]


SIZES = [(2, 2, 257, 257), (4, 1, 100, 333), (2, 1, 300, 129), (1, 1, 1, 2)]
WIDTHS = [1, 7, 32, 40, 64, 96, 128, 200, 256]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", SIZES)
def test_causal(kind: Kind, size: tuple[int, int, int, int], width: int) -> None:
    compare(kind, dense(width, *size), lambda q, k, v: tg.attention(q, k, v, causal=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("window", [None, 2, 70, 200])
def test_window(kind: Kind, window: int | None, width: int, causal: bool) -> None:
    compare(
        kind, dense(width, 2, 1, 333, 400),
        lambda q, k, v: tg.attention(q, k, v, causal=causal, window=window),
    )  # fmt: skip


@pytest.mark.parametrize("width", [40, 128, 256])
@pytest.mark.parametrize("shape", [(2, 1, 1, 133), (2, 4, 100, 133), (100, 133), (1, 1)])
@pytest.mark.parametrize("added", [False, True])
def test_mask(kind: Kind, added: bool, shape: tuple[int, ...], width: int) -> None:
    rng = np.random.default_rng(1)
    mask: Any = rng.random(shape) > 0.3
    mask[..., -1] = True
    if shape[-2] > 1:
        mask[..., 1, :] = False  # a query without keys
    if added:
        mask = np.where(mask, rng.standard_normal(shape), -np.inf).astype("float32")
    compare(
        kind, dense(width, 4, 2, 100, 133),
        lambda q, k, v: tg.attention(q, k, v, Tensor(mask).to(q.device), causal=True),
    )  # fmt: skip


@pytest.mark.parametrize("tk", [128, 129])  # rows of bits that are, and are not, whole blocks
@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
def test_dropout(kind: Kind, width: int, tk: int) -> None:
    compare(
        kind, dense(width, 4, 2, 100, tk),
        lambda q, k, v: tg.attention(q, k, v, causal=True, dropout=0.3),
    )  # fmt: skip


@pytest.mark.parametrize("options", [{"causal": True}, {"dropout": 0.2}, {"window": 20}], ids=str)
@pytest.mark.parametrize("k_lengths", [None, [90, 4, 0, 70, 200]])
@pytest.mark.parametrize("width", [33, 64])
def test_sequences(
    kind: Kind, width: int, k_lengths: list[int] | None, options: dict[str, Any]
) -> None:
    lengths = [100, 0, 5, 200, 64]
    starts = np.cumsum([0, *lengths])
    k_starts = None if k_lengths is None else np.cumsum([0, *k_lengths])
    kv = (sum(k_lengths or lengths), 2, width)
    compare(
        kind, [(369, 4, width), kv, kv, (369, 4, width)],
        lambda q, k, v: tg.attention_varlen(q, k, v, starts, k_starts, **options),
    )  # fmt: skip


@pytest.mark.parametrize("width", [30, 64])
def test_packed(kind: Kind, width: int) -> None:
    compare(
        kind, [(2, 201, 8 * width), (2, 201, 4 * width)],
        lambda qkv: tg.attention_packed(qkv, 4, kv_heads=2, causal=True),
    )  # fmt: skip


def test_arrays_that_start_at_any_element(kind: Kind) -> None:
    compare(
        kind, [(1, 3, 101, 65), (1, 3, 101, 64)],
        lambda x: tg.attention(x[..., 1:], x[..., :64], x[..., 1:], causal=True),
    )  # fmt: skip


def test_any_scale(kind: Kind) -> None:
    for scale in (-0.2, 0.0, 0.5):
        shapes = dense(64, 2, 2, 65, 70)
        compare(kind, shapes, lambda q, k, v, s=scale: tg.attention(q, k, v, scale=s))


def test_a_row_of_the_least_float_gives_finite_numbers(kind: Kind) -> None:
    x = np.random.default_rng(3).standard_normal((1, 2, 70, 64)).astype("float32")
    dtype = storage(kind)
    least = Tensor(np.full((70,), np.finfo("float32").min, "float32"))
    arrays = [x.astype(dtype), x.astype(dtype)]
    for array in passes("cuda", arrays, lambda q: tg.attention(q, q, q, least.to(q.device))):
        assert np.isfinite(array.astype("float32")).all()


def test_logsumexp(kind: Kind) -> None:
    dtype = storage(kind)
    x = Tensor(np.random.default_rng(2).standard_normal((1, 2, 70, 64)).astype(dtype))
    for window in (None, 5):
        _, expected = tg.attention(x, x, x, causal=True, window=window, return_logsumexp=True)
        y = x.to("cuda")
        _, got = tg.attention(y, y, y, causal=True, window=window, return_logsumexp=True)
        np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [1, 63, 65, 200])
def test_tf32_rounds_once_and_only_where_it_is_asked_for(length: int, width: int) -> None:
    if not has_tf32(0):
        pytest.skip("needs a GPU of compute capability 8.0 or later")
    rng = np.random.default_rng()
    arrays = [rng.standard_normal((2, 2, length, width)).astype("float32") for _ in range(4)]
    expected = passes(
        "cpu", [array.astype(np.float64) for array in arrays], partial(tg.attention, causal=True)
    )

    def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # backward runs outside the block
        with tg.autocast("tf32"):
            return tg.attention(q, k, v, causal=True)

    def errors(function: Any) -> list[float]:
        return [
            float(np.linalg.norm(got - exact) / (np.linalg.norm(exact) + exact.size**0.5))
            for got, exact in zip(passes("cuda", arrays, function), expected, strict=True)
        ]

    # Errors of the formulas with all operands rounded to 10 bits; cut off, they are 2e-4 or more.
    bound = 6e-4 if length == 1 else 2e-4
    found = errors(rounded)
    assert max(found) < bound
    assert max(found) > 1e-5, "not in TF32"
    assert max(errors(partial(tg.attention, causal=True))) < 2e-6
