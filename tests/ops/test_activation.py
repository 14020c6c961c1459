"""Activation functions against NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, ops
from tensorgrad.errors import ArgumentError
from tests.opcheck import SIZES, Case, Ulps, check

SHAPES: list[tuple[int, ...]] = [(), (7,), (33, 31), (129, 257), *((2, n) for n in SIZES)]
erf = np.vectorize(math.erf, otypes=[float])
FUNCTIONS: list[tuple[Callable[..., Tensor], Callable[[Any], Any]]] = [
    (ops.relu, lambda x: np.maximum(x, 0)),
    (ops.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    (ops.silu, lambda x: x / (1 + np.exp(-x))),
    (ops.softplus, lambda x: np.log1p(np.exp(x))),
    (ops.gelu, lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
]
ROW = Ulps(2, "row")
# Derivatives that cross zero or are computed from the value, kept in the dtype: y * (1 - y).
CANCELS = {ops.sigmoid: Ulps(3, "row"), ops.silu: ROW, ops.gelu: ROW}
CASES = [
    *(Case(f, [s], ref, gradients=CANCELS.get(f)) for f, ref in FUNCTIONS for s in SHAPES),
    Case(
        lambda x: ops.gelu(x, approximate="none"),
        [(33, 31)],
        lambda x: x / 2 * (1 + erf(x / math.sqrt(2))),
        gradients=ROW,
        name="gelu-none",
    ),
    *(
        Case(ops.swiglu, [s, s], lambda g, u: g / (1 + np.exp(-g)) * u, gradients=ROW)
        for s in [(7,), (33, 31), (300, 1024), *((2, n) for n in SIZES)]
    ),
    *(
        Case(
            ops.bias_gelu, [s, s[-1:]], lambda x, b: FUNCTIONS[-1][1](x + b),
            values=ROW, terms=s[0],
        )
        for s in [(3, 7), (33, 64), (300, 1024), (0, 3), *((2, n) for n in SIZES)]
    ),
    Case(
        lambda x, b: ops.bias_gelu(x, b, "none"),
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


def test_no_overflow_far_from_zero() -> None:
    x = Tensor(np.array([-1e4, -100.0, 100.0, 1e4], "float32"), requires_grad=True)
    for f, expected in (
        (ops.sigmoid, [0, math.exp(-100), 1, 1]),
        (ops.softplus, [0, math.exp(-100), 100, 1e4]),
        (ops.gelu, [0, 0, 100, 1e4]),
        (ops.silu, [0, -100 * math.exp(-100), 100, 1e4]),
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
    for f in (ops.sigmoid, ops.silu, ops.softplus, ops.erf):
        np.testing.assert_allclose(f(Tensor(x)).numpy(), f(Tensor(wide)).numpy(), rtol=1e-12)


def test_gelu_names_its_argument() -> None:
    with pytest.raises(ArgumentError, match="gelu: approximate is 'fast', expected 'tanh' or"):
        ops.bias_gelu(Tensor(np.ones(2)), Tensor(np.ones(2)), "fast")
    with pytest.raises(ArgumentError, match="gelu: approximate is 'fast', expected 'tanh' or"):
        ops.gelu(Tensor(np.ones(2)), approximate="fast")
