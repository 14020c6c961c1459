"""Tangents and second derivatives of the norms against differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.functions import jvp
from tensorgrad.core.modes import mode, replaced
from tests.derivatives import check_derivatives

X = np.random.default_rng(1).standard_normal((3, 5))


def values(*shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(4)
    return [rng.standard_normal(shape) for shape in shapes]


def chained(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Use both results of a norm with a residual add, and both of another one."""
    total, y = tg.add_rms_norm(x, residual, weight)
    return tg.add_layer_norm(total * total, y * residual, weight)


def squared_gradient(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function whose second derivatives are the third and fourth of f."""
    weights = Tensor(np.arange(1.0, 7).reshape(2, 3))
    return lambda x: (tg.grad(lambda x: (f(x) * weights).sum())(x) ** 2).sum()


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (tg.layer_norm, [(3, 5)]),
        (tg.layer_norm, [(2, 1, 7), (7,), (7,)]),
        (lambda x, b: tg.layer_norm(x, None, b), [(2, 4), (4,)]),
        (lambda w: tg.layer_norm(X, w), [(5,)]),
        (lambda b: tg.layer_norm(X, X[0], b), [(5,)]),
        (lambda b: tg.layer_norm(X, None, b), [(5,)]),
        (lambda x: tg.layer_norm(x.T, X[0, :3], eps=1.0), [(3, 5)]),
        (lambda x: tg.layer_norm(x, X[0]), [(5,)]),
        (tg.layer_norm, [(0, 4)]),
        (tg.rms_norm, [(3, 5)]),
        (tg.rms_norm, [(2, 3), (3,)]),
        (lambda x, w: tg.rms_norm(x, w, eps=0.5), [(1, 4), (4,)]),
        (tg.add_layer_norm, [(3, 5), (3, 5), (5,), (5,)]),
        (lambda x, w: tg.add_layer_norm(x, None, w), [(3, 5), (5,)]),
        (lambda r: tg.add_rms_norm(X, r), [(3, 5)]),
        (tg.add_rms_norm, [(3, 5), (3, 5), (5,)]),
        (chained, [(2, 4), (2, 4), (4,)]),
        (lambda x, w, b: tg.nn.functional.group_norm(x, 2, w, b), [(2, 4, 3), (4,), (4,)]),
        (squared_gradient(tg.layer_norm), [(2, 3)]),
        (squared_gradient(tg.rms_norm), [(2, 3)]),
    ],
)
def test_derivatives(f: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    check_derivatives(f, *values(*shapes))


def test_derivatives_where_outputs_are_computed_again() -> None:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return tg.linear(tg.rms_norm(x, weight), X)

    with replaced(mode, recompute_norms=True):
        check_derivatives(layer, *values((2, 5), (5,)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tangents_of_narrow_floats(dtype: str) -> None:
    inputs = [tg.tensor(a, dtype) for a in values((4, 100), (100,))]
    tangents = [tg.tensor(a, dtype) for a in values((4, 100), (100,))[::-1]][::-1]
    wide = [tuple(a.astype("float64") for a in each) for each in (inputs, tangents)]
    _, found = jvp(tg.layer_norm, tuple(inputs), tuple(tangents))
    _, exact = jvp(tg.layer_norm, *wide)
    assert found.dtype == inputs[0].dtype
    step = 2.0 ** (-20 if dtype == "float32" else -8)
    error = abs(found.astype("float64") - exact).numpy().max()
    assert error <= 2 * step * abs(exact).numpy().max()
