"""Activation functions against NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.core import backend
from tensorgrad.dtypes import FLOATS, float16
from tensorgrad.errors import ArgumentError
from tensorgrad.testing import SIZES, Case, Ulps, check

SHAPES: list[tuple[int, ...]] = [(), (7,), (33, 31), (129, 257), *((2, n) for n in SIZES)]
erf = np.vectorize(math.erf, otypes=[float])


def gelu_tanh(x: Any) -> Tensor:
    return tg.gelu(x, approximate="tanh")


FUNCTIONS: list[tuple[Callable[..., Tensor], Callable[[Any], Any]]] = [
    (tg.relu, lambda x: np.maximum(x, 0)),
    (tg.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    (tg.silu, lambda x: x / (1 + np.exp(-x))),
    (tg.softplus, lambda x: np.log1p(np.exp(x))),
    (lambda x: tg.softplus(x, 2.0), lambda x: np.log1p(np.exp(2 * x)) / 2),
    (tg.leaky_relu, lambda x: np.where(x < 0, 0.01 * x, x)),
    (tg.elu, lambda x: np.where(x < 0, np.expm1(x), x)),
    (tg.gelu, lambda x: x / 2 * (1 + erf(x / math.sqrt(2)))),
    (gelu_tanh, lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
]
ROW = Ulps(2, "row")
# Derivatives that cross zero or are computed from the value, kept in the dtype: y * (1 - y).
CANCELS = {tg.sigmoid: Ulps(3, "row"), tg.silu: ROW, tg.gelu: ROW, gelu_tanh: ROW}
CASES = [
    *(Case(f, [s], ref, gradients=CANCELS.get(f)) for f, ref in FUNCTIONS for s in SHAPES),
    *(
        Case(tg.swiglu, [s, s], lambda g, u: g / (1 + np.exp(-g)) * u, gradients=ROW)
        for s in [(7,), (33, 31), (300, 1024), *((2, n) for n in SIZES)]
    ),
    *(
        Case(
            tg.bias_gelu, [s, s[-1:]], lambda x, b: FUNCTIONS[-1][1](x + b),
            values=ROW, terms=s[0],
        )
        for s in [(3, 7), (33, 64), (300, 1024), (0, 3), *((2, n) for n in SIZES)]
    ),
    Case(
        lambda x, b: tg.bias_gelu(x, b, approximate="none"),
        [(9, 31), (31,)],
        lambda x, b: (x + b) / 2 * (1 + erf((x + b) / math.sqrt(2))),
        values=ROW,
        terms=9,
        name="bias_gelu-none",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


# Derivatives in a form that loses no digits, of float64: what the tests below compare with.
def logistic(x: Any) -> Any:
    t = np.exp(-np.abs(x))
    return np.where(x < 0, t, 1) / (1 + t)


def gelu_inner(x: Any) -> Any:
    return math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)


def gelu_derivative(x: Any) -> Any:
    inner, slope = gelu_inner(x), math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return logistic(inner) * (1 + x * slope * logistic(-inner))


def normal_below(x: Any) -> Any:
    return np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2)) / 2


def normal_at(x: Any) -> Any:
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


ACCURATE: list[tuple[Callable[..., Tensor], Callable[[Any], Any], Callable[[Any], Any]]] = [
    (tg.sigmoid, logistic, lambda x: logistic(x) * logistic(-x)),
    (tg.silu, lambda x: x * logistic(x), lambda x: logistic(x) * (1 + x * logistic(-x))),
    (lambda x: tg.softplus(x, threshold=math.inf),
     lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), logistic),
    (tg.tanh, np.tanh, lambda x: 4 * logistic(2 * x) * logistic(-2 * x)),
    (gelu_tanh, lambda x: x * logistic(gelu_inner(x)), gelu_derivative),
    (tg.gelu, lambda x: x * normal_below(x),
     lambda x: normal_below(x) + x * normal_at(x)),
    (tg.erf, erf, lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x)),
    (tg.expm1, np.expm1, np.exp),
    (tg.reciprocal, lambda x: 1 / x, lambda x: -1 / x**2),
    (lambda x: tg.swiglu(x, np.ones_like(x.data)), lambda x: x * logistic(x),
     lambda x: logistic(x) * (1 + x * logistic(-x))),
]  # fmt: skip


# Derivatives from the value, which is kept in the dtype, so that x need not be: y * (1 - y) and so
# on, which cancel where they are small.
FROM_VALUES = (tg.sigmoid, tg.tanh, tg.expm1)
KEEP_VALUES = [i for i, (f, _, _) in enumerate(ACCURATE) if f in (*FROM_VALUES, tg.reciprocal)]


def units(got: Any, exact: Any, scale: Any, dtype: Any) -> Any:
    """Return how far numbers are from exact ones, in the place of the last digit of a scale."""
    bits, least = {"float64": (53, -1022), "float32": (24, -126), "float16": (11, -14),
                   "bfloat16": (8, -126)}[str(dtype)]  # fmt: skip
    exponent = np.maximum(np.frexp(scale)[1], least + 1)
    return np.abs(got.astype("float64") - exact) / np.ldexp(1.0, exponent - bits)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("row", range(len(ACCURATE)))
def test_values_and_gradients_keep_their_digits(row: int, dtype: Any, device: str) -> None:
    function, value, derivative = ACCURATE[row]
    low, high = (0.01, 10) if dtype == float16 else (1e-3, 34)
    x = np.concatenate([np.linspace(0.01, 6, 200), np.geomspace(low, high, 200), [8, 31, 33]])
    x = x[x <= high]
    x = np.concatenate([x, -x]).astype(dtype)
    t = Tensor(backend.to_device(x, device), requires_grad=True)
    y = function(t)
    y.backward(backend.to_device(np.ones(x.shape, dtype), device))
    wide = x.astype("float64")
    # Four roundings; the exponential amplifies that of its argument, of which x^2 is the steepest
    # here; in 16 bits the last one alone shows, but where two terms of a derivative cancel.
    bound = 8 + 4 * np.minimum(np.abs(gelu_inner(wide)), wide * wide + 20)
    if np.dtype(dtype).itemsize == 2:
        bound = np.full(x.shape, 3.5 if row in KEEP_VALUES else 2.0)
    exact_gradient = derivative(wide)
    scale = np.maximum(exact_gradient, 1) if function in FROM_VALUES else exact_gradient
    for got, exact, place in (
        (y.numpy(), value(wide), value(wide)),
        (backend.to_numpy(t.grad), exact_gradient, scale),
    ):
        far = units(got, exact, place, dtype)
        # No subnormal numbers; normal_cdf of 16 bits is good to 1.5e-7 on the GPU.
        tiny = np.abs(exact) < (1e-6 if np.dtype(dtype).itemsize == 2 else 1e-30)
        cancels = (np.abs(exact) < 0.3) & (wide < -0.2) & (wide > -2.5)
        bad = (far > bound * np.where(cancels, 64, 1)) & ~tiny & (np.abs(exact) < 6e4)
        assert not bad.any(), list(zip(x[bad], got[bad], exact[bad], far[bad], strict=True))[:5]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_at_the_ends_of_the_range(dtype: Any, device: str) -> None:
    largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    up = np.array([40.0, 5e4, largest / 2, largest, math.inf]).astype(dtype)
    for function, right, left in (
        (tg.sigmoid, 0, 0),
        (tg.silu, 1, 0),
        (tg.softplus, 1, 0),
        (tg.tanh, 0, 0),
        (gelu_tanh, 1, 0),
        (tg.gelu, 1, 0),
        (tg.erf, 0, 0),
        (tg.relu, 1, 0),
        (lambda x: tg.swiglu(x, np.ones_like(x.data)), 1, 0),
    ):
        for x, expected in ((up, right), (-up, left)):
            t = Tensor(backend.to_device(x, device), requires_grad=True)
            with np.errstate(invalid="ignore"):  # -inf * 0 is NaN in forward
                y = function(t)
            y.backward(backend.to_device(np.ones(5, dtype), device))
            got = backend.to_numpy(t.grad).astype("float64")
            np.testing.assert_allclose(got, [expected] * 5, rtol=0, atol=1e-15)


def test_no_overflow_far_from_zero() -> None:
    x = Tensor(np.array([-1e4, -100.0, 100.0, 1e4], "float32"), requires_grad=True)
    for f, expected in (
        (tg.sigmoid, [0, math.exp(-100), 1, 1]),
        (tg.softplus, [0, math.exp(-100), 100, 1e4]),
        (tg.gelu, [0, 0, 100, 1e4]),
        (gelu_tanh, [0, 0, 100, 1e4]),
        (tg.silu, [0, -100 * math.exp(-100), 100, 1e4]),
    ):
        y = f(x)
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-35)
        y.backward(np.ones(4, "float32"))
    assert np.isfinite(x.grad).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int32", "uint64", "int64"])
def test_integers_do_not_wrap_around(dtype: str) -> None:
    least = np.iinfo(dtype).min
    x = np.array([least, 0, 1, 3, 100], dtype)
    wide = x.astype("float64")
    for f in (tg.sigmoid, tg.silu, tg.softplus, tg.erf, partial(tg.gelu, approximate="tanh")):
        np.testing.assert_allclose(f(Tensor(x)).numpy(), f(Tensor(wide)).numpy(), rtol=1e-12)


def test_gelu_names_its_argument() -> None:
    with pytest.raises(ArgumentError, match="gelu: approximate is 'fast', expected one of 'tanh'"):
        tg.bias_gelu(Tensor(np.ones(2)), Tensor(np.ones(2)), approximate="fast")
    with pytest.raises(ArgumentError, match="gelu: approximate is 'fast', expected one of 'tanh'"):
        tg.gelu(Tensor(np.ones(2)), approximate="fast")


def test_softplus_is_its_operand_above_the_threshold() -> None:
    x = np.array([19.5, 20.0, 20.5])  # where float64 shows the difference
    y = tg.softplus(x).numpy()
    assert (y == x).tolist() == [False, False, True]
    np.testing.assert_array_equal(tg.softplus(x, 0.5, 9.9).numpy() == x, [False, True, True])
    np.testing.assert_allclose(tg.softplus(x, 0.5).numpy(), 2 * np.log1p(np.exp(x / 2)), 1e-15)
    for beta in (0, -1.0, math.nan):
        with pytest.raises(ArgumentError, match=f"softplus: beta is {beta}, expected more than 0"):
            tg.softplus(x, beta)
    with pytest.raises(ArgumentError, match="softplus: threshold is 'a', expected a number"):
        tg.softplus(x, 1.0, "a")  # type: ignore[arg-type]


def test_slopes_are_defaults_or_learned() -> None:
    x = np.array([-2.0, 0.0, 3.0])
    np.testing.assert_array_equal(tg.leaky_relu(x).numpy(), [-0.02, 0, 3])
    np.testing.assert_array_equal(tg.elu(x).numpy(), [np.expm1(-2), 0, 3])
    for op, expected in ((tg.leaky_relu, -2 * 5.0), (tg.elu, np.expm1(-2) * 5)):
        slope = Tensor(np.array(0.5), requires_grad=True)
        leaf = Tensor(x, requires_grad=True)
        op(leaf, slope).backward(np.full(3, 5.0))
        np.testing.assert_allclose(slope.grad, expected)  # type: ignore[arg-type]
        assert leaf.grad[1:].tolist() == [5, 5]  # type: ignore[index]
    np.testing.assert_array_equal(tg.gelu(x).numpy(), tg.gelu(x, approximate="none").numpy())
    both = tg.bias_gelu(x, np.zeros(3)).numpy()
    np.testing.assert_allclose(both, tg.gelu(x, approximate="tanh").numpy(), 1e-15)
