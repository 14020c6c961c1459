"""Operators of models against matrices made of first derivatives in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn
from tensorgrad.curvature import (
    Operator,
    eigenpairs,
    model_fisher,
    model_gauss_newton,
    model_hessian,
)
from tensorgrad.errors import ArgumentError

RNG = np.random.default_rng(0)
BATCHES = [(RNG.standard_normal((n, 3)), RNG.standard_normal(n)) for n in (4, 4, 2)]
_STEP = 1e-5


class Curve(nn.Module):
    """tanh(x weight) scale + offset: a frozen parameter, dropout, and one that is used twice."""

    def __init__(self, dtype: str = "float64") -> None:
        rng = np.random.default_rng(1)
        self.weight = nn.Parameter(rng.standard_normal(3).astype(dtype))
        self.frozen = nn.Parameter(np.full(1, 0.5, dtype), requires_grad=False)
        self.scale = nn.Parameter(rng.standard_normal(1).astype(dtype))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Any) -> Tensor:
        inside = tg.tanh((Tensor(x) * self.weight).sum(1))
        y: Tensor = self.dropout(inside) * self.scale + self.frozen * self.scale
        return y


def squares(z: Tensor, x: Any, y: Any) -> Tensor:
    total: Tensor = ((z - y) * (z - y)).sum() / (2 * len(y))
    return total


def loss(model: Any, x: Any, y: Any) -> Tensor:
    return squares(model(x), x, y)


def values_of(model: Curve) -> np.ndarray[Any, Any]:
    return np.concatenate([p.data.ravel() for p in (model.weight, model.scale)])


def differences(f: Callable[[Curve], Any]) -> np.ndarray[Any, Any]:
    """Return the derivatives of arrays by the parameters, (outputs, 4)."""
    columns = []
    for place in range(4):
        ends = []
        for step in (_STEP, -_STEP):
            model = Curve().eval()
            (model.weight.data if place < 3 else model.scale.data)[place % 3] += step
            ends.append(np.asarray(f(model)))
        columns.append((ends[0] - ends[1]) / (2 * _STEP))
    return np.stack(columns, -1)


def gradient(batch: tuple[Any, ...], model: Curve) -> np.ndarray[Any, Any]:
    loss(model, *batch).backward()
    found = np.concatenate([np.asarray(p.grad).ravel() for p in (model.weight, model.scale)])
    model.weight.grad = model.scale.grad = None
    return found


def dense(operator: Operator) -> np.ndarray[Any, Any]:
    return np.stack([operator(v) for v in np.eye(operator.size, dtype=operator.dtype)])


def hessian_by_differences() -> np.ndarray[Any, Any]:
    found = [differences(partial(gradient, batch)) for batch in BATCHES]
    return np.mean(found, 0)  # type: ignore[no-any-return]


def jacobians() -> list[np.ndarray[Any, Any]]:
    return [differences(lambda model: model(x).numpy()) for x, _ in BATCHES]  # noqa: B023


def test_a_hessian_is_the_mean_over_batches() -> None:
    operator = model_hessian(Curve(), loss, BATCHES)
    assert operator.size == 4
    assert operator.dtype == np.float64
    found = dense(operator)
    np.testing.assert_allclose(found, found.T, atol=1e-15)
    np.testing.assert_allclose(found, hessian_by_differences(), atol=1e-8)
    assert np.linalg.eigvalsh(found)[0] < -0.01  # so it is no Gauss-Newton matrix
    values = eigenpairs(operator, 4, tolerance=1e-6).values
    np.testing.assert_allclose(values, np.linalg.eigvalsh(found)[::-1], atol=1e-12)


def test_a_gauss_newton_matrix_has_no_second_derivatives_of_the_model() -> None:
    operator = model_gauss_newton(Curve(), lambda model, x, y: model(x), squares, BATCHES)
    expected = np.mean([j.T @ j / len(j) for j in jacobians()], 0)
    np.testing.assert_allclose(dense(operator), expected, atol=1e-8)


def test_a_fisher_matrix_is_the_mean_of_products_of_gradients() -> None:
    def losses(model: Any, x: Any, y: Any) -> Tensor:
        away: Tensor = model(x) - y
        return away * away / 2

    operator = model_fisher(Curve(), losses, BATCHES)
    gradients = [
        differences(lambda model: losses(model, *batch).numpy())  # noqa: B023
        for batch in BATCHES
    ]
    expected = np.mean([g.T @ g / len(g) for g in gradients], 0)
    np.testing.assert_allclose(dense(operator), expected, atol=1e-8)


def test_products_change_nothing_of_the_model() -> None:
    model = Curve("float32")
    before = values_of(model).copy()
    operator = model_hessian(model, loss, [(x.astype("float32"), y) for x, y in BATCHES])
    assert operator.dtype == np.float32
    found = dense(operator)
    np.testing.assert_allclose(found, hessian_by_differences(), atol=1e-5)
    np.testing.assert_array_equal(found, dense(operator))
    assert model.training
    assert model.weight.grad is None
    np.testing.assert_array_equal(values_of(model), before)
    model.weight.data += 1  # which later products see
    assert (dense(operator) != found).any()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match="model_hessian: batches is empty, expected one or"):
        model_hessian(Curve(), loss, [])
    model = Curve()
    model.weight.requires_grad = model.scale.requires_grad = False
    with pytest.raises(ArgumentError, match="model_fisher: model has no parameters that require"):
        model_fisher(model, loss, BATCHES)
