"""Second derivatives of reductions, running sums and products, and statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.functions import jvp
from tests.derivatives import check_derivatives

RNG = np.random.default_rng(0)
X, CUBE = RNG.standard_normal((3, 5)), RNG.standard_normal((2, 3, 4))
LINE = RNG.standard_normal(13)
ONE_ZERO, TWO_ZEROS, ZEROS = X.copy(), X.copy(), X * (np.abs(X) > 1)
ONE_ZERO[:, 2] = TWO_ZEROS[:, [0, 3]] = 0
TIES = np.array([[3.0, 1, 3, 3], [0, 2, 1, 2]])
MASK = X > -0.3
EMPTY = np.zeros((0, 3))

# (function, its inputs)
CASES: dict[str, tuple[Any, ...]] = {
    "sum": (lambda x: tg.sum(x, (0, -1)) ** 2, CUBE),
    "mean": (lambda x: tg.mean(x, 1) ** 2, CUBE),
    "mean over all": (lambda x: tg.mean(x, keepdims=True) * x, X),
    "mean of nothing": (lambda x: tg.mean(x, ()) ** 2, X),
    "mean where": (lambda x: tg.mean(x, 1, where=MASK) ** 2, X),
    "var": (lambda x: tg.var(x, 1), X),
    "var over two axes": (lambda x: tg.var(x, (0, 2), ddof=1, keepdims=True) * x, CUBE),
    "var of few": (lambda x: tg.var(x**3, 0, ddof=0.5), X),
    "var far from 0": (lambda x: tg.var(x + 1000, 1), X),
    "var of a transposed view": (lambda x: tg.var(x.T, 0), CUBE),
    "var where": (lambda x: tg.var(x, 1, where=MASK), X),
    "std": (lambda x: tg.std(x, 0), CUBE),
    "std over all": (lambda x: tg.std(x, ddof=1, keepdims=True) * x, X),
    "std where": (lambda x: tg.std(x, 1, where=MASK), X),
    "max": (lambda x: tg.max(x, 0) ** 2, X),
    "max over two axes": (lambda x: tg.max(x, (0, 2), keepdims=True) * x, CUBE),
    "max with initial": (lambda x: tg.max(x, 1, initial=0.3) ** 2, X),
    "min": (lambda x: tg.min(x) ** 2, X),
    "prod": (lambda x: tg.prod(x, 1), X),
    "prod over all": (lambda x: tg.prod(x) ** 2, LINE),
    "prod over two axes": (lambda x: tg.prod(x, (0, 2), keepdims=True) * x, CUBE),
    "prod of one": (lambda x: tg.prod(x[:, :1], 1) ** 2, X),
    "prod of two": (lambda x: tg.prod(x[:, :2], 1), X),
    "prod of nothing": (lambda x: tg.prod(x, ()) ** 2, X),
    "prod with a 0": (lambda x: tg.prod(x, 1), ONE_ZERO),
    "prod with two 0s": (lambda x: tg.prod(x, 1), TWO_ZEROS),
    "prod with many 0s": (lambda x: tg.prod(x, 1), ZEROS),
    "prod of a transposed view": (lambda x: tg.prod(x.T, 1), CUBE),
    "logsumexp": (lambda x: tg.logsumexp(x, 1), X),
    "logsumexp over two axes": (lambda x: tg.logsumexp(x, (0, 2), keepdims=True) * x, CUBE),
    "logsumexp of large numbers": (lambda x: tg.logsumexp(x + 1000), X),
    "norm": (lambda x: tg.norm(x, 1), X),
    "norm over all": (lambda x: tg.norm(x, keepdims=True) * x, CUBE),
    "norm of order 1": (lambda x: tg.norm(x, 1, ord=1) ** 2, X),
    "norm of order inf": (lambda x: tg.norm(x, (0, 2), ord=math.inf) ** 2, CUBE),
    "norm of order 3": (lambda x: tg.linalg.vector_norm(x, axis=1, ord=3), X),
    "cumsum": (lambda x: tg.cumsum(x, 1) ** 2, X),
    "cumsum, flattened": (lambda x: tg.cumsum(x) ** 2, X),
    "cumulative_sum": (lambda x: tg.cumulative_sum(x, axis=0, include_initial=True) ** 2, X),
    "cumprod": (lambda x: tg.cumprod(x, 1), X),
    "cumprod of a line": (lambda x: tg.cumprod(x) ** 2, LINE),
    "cumprod, flattened": (lambda x: tg.cumprod(x), CUBE[0]),
    "cumprod with a 0": (lambda x: tg.cumprod(x, 1), ONE_ZERO),
    "cumprod with two 0s": (lambda x: tg.cumprod(x, -1), TWO_ZEROS),
    "cumprod of a middle axis": (lambda x: tg.cumprod(x, 1), CUBE),
    "cumprod of one": (lambda x: tg.cumprod(x[:1], 0) ** 2, X),
    "cumulative_prod": (lambda x: tg.cumulative_prod(x, axis=0, include_initial=True), X),
    "0-d": (lambda x: tg.mean(x) * tg.prod(x) * tg.norm(x) * tg.cumprod(x)[0], 0.7),
    "without elements": (lambda x: tg.prod(x, 0) + tg.norm(x, 0) + tg.cumsum(x).sum(), EMPTY),
    "mean without elements": (lambda x: tg.mean(tg.sum(x, 0)) ** 2, EMPTY),
    "median": (lambda x: tg.median(x, 1) ** 2, X),
    "quantile": (lambda x: tg.quantile(x, [0.3, 0.9], 1) ** 2, X),
    "average": (lambda x, w: tg.average(x, 0, w * w), X, X + 3),
    "cov": (tg.cov, X),
    "corrcoef": (tg.corrcoef, X),
    "diff": (lambda x: tg.diff(x, 2) ** 2, X),
    "trapezoid": (tg.trapezoid, X, X * X),
    "nanmean": (lambda x: tg.nanmean(tg.where(MASK, x, math.nan), 1) ** 2, X),
    "nanstd": (lambda x: tg.nanstd(tg.where(MASK, x, math.nan), 1), X),
    "bincount": (lambda w: tg.bincount([0, 3, 0, 1, 3], w, 6) ** 2, X[0]),
}


@pytest.mark.parametrize("name", CASES)
def test_derivatives_match_differences(name: str) -> None:
    function, *inputs = CASES[name]
    check_derivatives(function, *inputs)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: tg.max(x, 1), [3.0, 15 / 2]),
        (lambda x: tg.min(x, 1), [1.0, 4.0]),
        (lambda x: tg.norm(x, 1, ord=math.inf), [3.0, 15 / 2]),
    ],
)
def test_equal_extrema_share_their_tangents(
    function: Callable[[Tensor], Tensor], expected: list[float]
) -> None:
    t = np.array([[0.0, 1, 2, 7], [4, 5, 6, 10]])
    _, dy = jvp(function, [Tensor(TIES)], [Tensor(t)])
    np.testing.assert_array_equal(dy.numpy(), expected)


@pytest.mark.parametrize("function", [tg.std, tg.norm, lambda x: tg.norm(x, ord=1)])
def test_derivatives_are_0_at_a_kink(function: Callable[[Tensor], Tensor]) -> None:
    x, t = Tensor(np.zeros(4)), Tensor(np.arange(4.0))
    assert jvp(function, [x], [t])[1].item() == 0
    _, product = jvp(tg.grad(function), [x], [t])
    np.testing.assert_array_equal(product.numpy(), np.zeros(4))


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (tg.logsumexp, [-math.inf, -math.inf], math.nan),
        (tg.logsumexp, [-math.inf, 1.0], 1.0),
        (tg.norm, [math.inf, 1.0], math.nan),
        (lambda x: tg.var(x, ddof=2), [3.0, 1.0], math.nan),
    ],
)
def test_infinite_results_have_tangents_without_warnings(
    function: Callable[[Tensor], Tensor], x: list[float], expected: float
) -> None:
    _, dy = jvp(function, [Tensor(np.array(x))], [Tensor(np.ones(2))])
    np.testing.assert_array_equal(dy.numpy(), expected)


@pytest.mark.parametrize(
    "function",
    [
        tg.mean,
        tg.var,
        tg.std,
        tg.max,
        tg.prod,
        tg.logsumexp,
        tg.norm,
        lambda x: tg.norm(x, ord=math.inf),
        tg.cumsum,
        lambda x: tg.cumprod(x)[-1],
    ],
)
def test_tangent_of_16_bits_is_rounded_once(function: Callable[[Tensor], Tensor]) -> None:
    x = tg.astype(Tensor(1 + RNG.standard_normal(300) / 10), "float16")
    t = tg.astype(Tensor(RNG.standard_normal(300)), "float16")
    y, dy = jvp(function, [x], [t])
    _, exact = jvp(function, [tg.astype(x, "float64")], [tg.astype(t, "float64")])
    assert dy.dtype == y.dtype == "float16"
    wanted = exact.numpy()
    np.testing.assert_allclose(dy.numpy(), wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())
