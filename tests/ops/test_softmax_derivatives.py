"""Tangents and second derivatives of softmax and its logarithm against differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.functions import jvp
from tests.derivatives import check_derivatives

MASK = np.array([[True, False, True, True], [False] * 4, [True] * 4])


def values(*shape: int) -> Any:
    return np.random.default_rng(3).standard_normal(shape)


def squared_gradient(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function whose second derivatives are the third and fourth of f."""

    def loss(x: Tensor) -> Tensor:
        y = f(x)
        return (y * Tensor(np.arange(1.0, y.size + 1).reshape(y.shape))).sum()

    return lambda x: (tg.grad(loss)(x) ** 2).sum()


@pytest.mark.parametrize(
    ("f", "shape"),
    [
        (tg.softmax, (3, 5)),
        (lambda x: tg.softmax(x, 0, scale=0.7), (3, 1)),
        (lambda x: tg.softmax(x.swapaxes(0, 2), 1), (2, 3, 5)),
        (lambda x: tg.softmax(x, causal=True), (2, 3, 5)),
        (lambda x: tg.softmax(x, mask=MASK, scale=3.0), (2, 3, 4)),
        (lambda x: tg.softmax(x, mask=values(3, 1)), (3, 4)),
        (tg.softmax, (0, 4)),
        (tg.log_softmax, (3, 5)),
        (lambda x: tg.log_softmax(x, 0), (7,)),
        (lambda x: tg.log_softmax(x, 1), (2, 3, 5)),
        (squared_gradient(tg.softmax), (2, 3)),
        (squared_gradient(tg.log_softmax), (2, 3)),
    ],
)
def test_derivatives(f: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    check_derivatives(f, values(*shape))


@pytest.mark.parametrize("f", [tg.softmax, tg.log_softmax])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tangents_of_narrow_floats_are_rounded_once(f: Any, dtype: str) -> None:
    x, t = (tg.tensor(a, dtype) for a in (values(4, 100), values(4, 100) * 2))
    _, found = jvp(f, (x,), (t,))
    _, exact = jvp(f, (x.astype("float64"),), (t.astype("float64"),))
    assert found.dtype == x.dtype
    step = float(np.finfo("float32").eps) if dtype == "float32" else 2.0 ** (-8)
    error = abs(found.astype("float64") - exact).numpy().max()
    assert error <= 2 * step * abs(exact).numpy().max()
