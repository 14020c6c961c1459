"""Dropout: the keep mask, the scale, and that the seed decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, random
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16, bool_
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.kernels.random import advance
from tensorgrad.ops import philox
from tensorgrad.ops.dropout import swiglu_dropout
from tensorgrad.testing import SIZES, Case, Ulps, check

SHAPES: list[tuple[int, ...]] = [(), (7,), (33, 31), (600, 257), *((3, n) for n in SIZES)]


def keep_mask(shape: tuple[int, ...], p: float, like: Any) -> Any:
    """Return which elements dropout spares, on the device of an array."""
    keep = backend.empty(shape, bool_, like)
    philox.fill_keep(keep, random.next_key(), 1 - p)
    return keep


def attention_keep_mask(shape: tuple[int, ...], p: float, like: Any) -> Any:
    """Return which attention weights (B, H, Tq, Tk) dropout spares."""
    keep = backend.empty(shape, bool_, like)
    philox.fill_attention_keep(keep, random.next_key(), 1 - p)
    return keep


def seeded(x: Tensor) -> Tensor:
    random.seed(5)
    return tg.dropout(x, 0.3)


def reference(x: Any) -> Any:
    random.seed(5)
    return x * keep_mask(x.shape, 0.3, like=x) / (1 - 0.3)


CASES = [
    *(Case(seeded, [s], reference, name="dropout") for s in SHAPES),
    Case(lambda x: tg.dropout(x, 0.0), [(3, 4)], lambda x: x, name="dropout-none"),
    Case(lambda x: tg.dropout(x, 0.9, training=False), [(3, 4)], lambda x: x, name="dropout-off"),
]


def seeded_add(x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    random.seed(5)
    return tg.dropout_add(x, residual, p=0.3, bias=bias)


def reference_add(x: Any, residual: Any, bias: Any = 0.0) -> Any:
    return residual + reference(np.asarray(x + bias))


CASES += [
    *(Case(seeded_add, [s, s], reference_add, name="dropout_add") for s in SHAPES),
    *(
        Case(seeded_add, [s, s, s[-1:]], reference_add, terms=s[0], gradients=Ulps(2, "row"),
             name="dropout_add-bias")
        for s in [(5, 7), (33, 64), (3, 5, 1032), (600, 257), (0, 4)]
    ),
    Case(
        lambda x, r, b: tg.dropout_add(x, r, p=0.9, bias=b, training=False), [(3, 4), (3, 4), (4,)],
        lambda x, r, b: x + r + b, terms=3, name="dropout_add-off",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_and_the_mean(p: float) -> None:
    random.seed(1)
    y = tg.dropout(Tensor(np.ones((500, 400), "float32")), p).numpy()
    assert (y == 0).mean() == pytest.approx(p, abs=5 * np.sqrt(p * (1 - p) / y.size))
    np.testing.assert_allclose(y[y > 0], 1 / (1 - p), rtol=1e-6)


def test_the_gradient_flows_where_the_value_did() -> None:
    x = Tensor(np.ones((64, 64), "float32"), requires_grad=True)
    y = tg.dropout(x, 0.4)
    y.backward(np.full((64, 64), 3, "float32"))
    np.testing.assert_allclose(np.asarray(x.grad), 3 * y.numpy(), rtol=1e-6)


def test_each_call_drops_others_and_the_seed_decides() -> None:
    x = Tensor(np.ones(1000, "float32"))
    random.seed(2)
    first, second = tg.dropout(x).numpy(), tg.dropout(x).numpy()
    random.seed(2)
    np.testing.assert_array_equal(tg.dropout(x).numpy(), first)
    assert 0.4 < (first != second).mean() < 0.6


def test_nothing_of_the_size_of_x_is_saved() -> None:
    x = Tensor(np.ones((64, 64)), requires_grad=True)
    node = tg.dropout(x).node
    assert node is not None
    assert not any(isinstance(s, np.ndarray) for s in node.saved or ())


@pytest.mark.gpu
def test_a_counter_on_the_device_moves_the_draws_on() -> None:
    x = np.ones(5000, "float32")
    random.seed(3)
    expected = [tg.dropout(Tensor(x), 0.4).numpy() for _ in range(3)]
    random.seed(3)
    offset = backend.cupy.zeros(1, "uint64")
    random.default.offset = offset
    try:
        for step in expected:
            random.seed(3)
            np.testing.assert_array_equal(tg.dropout(Tensor(x).to("cuda"), 0.4).numpy(), step)
            advance(offset, 1)
    finally:
        random.default.offset = None


@pytest.mark.parametrize("shape", [(8, 9), (33, 64), (600, 257), (0, 4)])
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_float32_residual_widens_the_result(
    shape: tuple[int, ...], dtype: Any, biased: bool, device: str
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(dtype)
    residual, dy = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    bias = rng.standard_normal(shape[-1:]).astype(dtype) if biased else None
    inputs = [
        None if array is None else Tensor(backend.to_device(array, device), requires_grad=True)
        for array in (x, residual, bias)
    ]
    y = seeded_add(*inputs)  # type: ignore[arg-type]  # a bias may be missing
    assert y.dtype == np.float32
    random.seed(5)
    kept = keep_mask(shape, 0.3, like=x) * np.float32(1 / 0.7)
    shifted = x.astype(np.float32) + (0 if bias is None else bias.astype(np.float32))
    np.testing.assert_allclose(y.numpy(), residual + kept * shifted, rtol=1e-5, atol=1e-6)
    y.backward(backend.to_device(dy, device))
    dx, dresidual = (backend.to_numpy(t.grad) for t in inputs[:2] if t is not None)
    assert dx.dtype == dtype
    np.testing.assert_array_equal(dx, (dy * kept).astype(dtype))
    np.testing.assert_array_equal(dresidual, dy)


@pytest.mark.parametrize("shape", [(1,), (7, 73), (33, 64), (600, 257), (0, 4)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, bfloat16])
@pytest.mark.parametrize("layout", ["plain", "transposed", "not aligned"])
def test_dropout_of_swiglu_has_the_bits_of_both(
    layout: str, dtype: Any, shape: tuple[int, ...], device: str
) -> None:
    def laid_out(array: Any) -> Any:
        if layout == "transposed":
            return backend.to_device(np.ascontiguousarray(array.T), device).T
        if layout == "not aligned":
            flat = np.concatenate([array.ravel()[:1], array.ravel()])  # an element more
            return backend.to_device(flat, device)[len(flat) - array.size :].reshape(shape)
        return backend.to_device(array, device)

    rng = np.random.default_rng(0)
    gate, up, dy = (laid_out((3 * rng.standard_normal(shape)).astype(dtype)) for _ in range(3))
    found: list[list[bytes]] = []
    for fused in (True, False):
        random.seed(5)
        inputs = Tensor(gate, requires_grad=True), Tensor(up, requires_grad=True)
        y = swiglu_dropout(*inputs, 0.3) if fused else tg.dropout(tg.swiglu(*inputs), 0.3)
        y.backward(dy)
        found.append([backend.to_numpy(a).tobytes() for a in (y.data, *(t.grad for t in inputs))])
    assert found[0] == found[1]
    random.seed(5)
    kept = backend.to_numpy(keep_mask(shape, 0.3, like=y.data))
    np.testing.assert_array_equal(y.numpy() != 0, kept)


def test_dropout_of_swiglu_promotes(device: str) -> None:
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((8, 9)).astype("float16"), rng.standard_normal((8, 9), "float32")
    found = []
    for fused in (True, False):
        random.seed(5)
        gate, up = [Tensor(backend.to_device(a, device), requires_grad=True) for a in arrays]
        y = swiglu_dropout(gate, up, 0.3) if fused else tg.dropout(tg.swiglu(gate, up), 0.3)
        assert y.dtype == np.float32
        y.sum().backward()
        found.append([backend.to_numpy(a).tobytes() for a in (y.data, gate.grad, up.grad)])
    assert found[0] == found[1]


def test_nothing_is_drawn_where_nothing_is_dropped() -> None:
    x = Tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    state = random.get_state()
    assert tg.dropout(x, 0.0) is x
    assert tg.dropout(x, training=False) is x
    np.testing.assert_array_equal(
        tg.dropout_add(x, x, p=0.0, bias=np.ones(3)).numpy(), 2 * x.data + 1
    )
    np.testing.assert_array_equal(tg.dropout_add(x, x, training=False).numpy(), 2 * x.data)
    y = swiglu_dropout(x, x, 0.0)
    np.testing.assert_array_equal(y.numpy(), tg.swiglu(x, x).numpy())
    assert random.get_state() == state
    random.seed(7)
    kept = keep_mask((2, 3), 0.5, like=x.data)  # p is 0.5 unless given
    random.seed(7)
    np.testing.assert_array_equal(tg.dropout(x).numpy(), 2 * kept * x.data)
    random.seed(7)
    np.testing.assert_array_equal(tg.dropout_add(x, x).numpy(), x.data + 2 * kept * x.data)


def test_dropout_add_promotes() -> None:
    x, residual = Tensor(np.ones((8, 9), "float32")), Tensor(np.ones((8, 9), "float16"))
    y = seeded_add(x, residual)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y.numpy(), 1 + seeded(x).numpy())


def test_dropout_add_names_what_does_not_fit() -> None:
    x = Tensor(np.ones((2, 3), "float32"))
    with pytest.raises(
        ShapeError, match=r"dropout_add: residual has shape \(3,\), expected \(2, 3"
    ):
        tg.dropout_add(x, Tensor(np.ones(3, "float32")))
    with pytest.raises(ShapeError, match=r"bias has shape \(2,\), expected \(C,\) of x \(2, 3\)"):
        tg.dropout_add(x, x, p=0.5, bias=Tensor(np.ones(2, "float32")))
    with pytest.raises(DtypeError, match="residual has dtype int64, expected a float"):
        tg.dropout_add(x, Tensor(np.ones((2, 3), "int64")))
    with pytest.raises(ArgumentError, match="dropout_add: p is 1, expected 0 <= p < 1"):
        tg.dropout_add(x, x, p=1)


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match="dropout: p is 'a', expected a number"):
        tg.dropout(np.ones(3), "a")  # type: ignore[arg-type]  # a user may do it
    with pytest.raises(ArgumentError, match=r"dropout: p is -0\.1, expected 0 <= p < 1"):
        tg.dropout(Tensor(np.ones(3)), -0.1)
    with pytest.raises(DtypeError, match="dropout: x has dtype int64, expected a float"):
        tg.dropout(Tensor(np.arange(3)), 0.1)
