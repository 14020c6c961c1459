"""Tangents of checkpointed functions, and gradients of their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, checkpoint
from tensorgrad.autograd import record
from tensorgrad.autograd.functions import jvp
from tensorgrad.autograd.tangents import tangent_of
from tests.derivatives import check_derivatives

W = np.random.default_rng(2).standard_normal((4, 4))


@pytest.fixture(autouse=True)
def _generator() -> Iterator[None]:
    """Leave the generator as other tests expect it."""
    state = tg.random.get_state()
    yield
    tg.random.set_state(state)


def block(x: Tensor, w: Tensor) -> Tensor:
    return tg.tanh(x @ w) * x


def along(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of which f has a tangent inside."""

    def derivative(x: Tensor, w: Tensor) -> Tensor:
        t: Tensor = jvp(lambda w: f(x, w), (w,), (x.T @ x,))[1]
        return t

    return derivative


def squared_gradients(x: Tensor, w: Tensor) -> Tensor:
    """Return what has third derivatives of a checkpointed function for its second ones."""
    grads = tg.grad(lambda x, w: checkpoint(block)(x, w).sum(), (0, 1))(x, w)
    total: Tensor = (grads[0] ** 2).sum() + (grads[1] ** 3).sum()
    return total


def dropped(x: Tensor) -> Tensor:
    tg.random.seed(4)
    y: Tensor = checkpoint(lambda x: tg.dropout(x * x, 0.5))(x) * x
    return y


@pytest.mark.parametrize(
    "f",
    [
        checkpoint(block),
        lambda x, w: checkpoint(lambda x: block(x, w))(x),
        lambda x, w: checkpoint(lambda: block(x, w))() * x,
        lambda x, w: checkpoint(lambda x: block(x, w))(checkpoint(lambda x: block(x, w * w))(x)),
        lambda x, w: checkpoint(lambda x: checkpoint(block)(block(x, w), w))(x * x),
        lambda x, w: checkpoint(lambda x: x)(x) * block(x, w),
        lambda x, w: checkpoint(lambda x: block(x, Tensor(W)))(x) @ w,
        along(checkpoint(block)),
        along(along(lambda x, w: checkpoint(lambda x: block(x, w))(x))),
        squared_gradients,
    ],
)
def test_derivatives(f: Callable[..., Tensor]) -> None:
    rng = np.random.default_rng(1)
    check_derivatives(f, rng.standard_normal((4, 4)), W)


def test_random_numbers_are_drawn_again() -> None:
    check_derivatives(dropped, np.random.default_rng(1).standard_normal((4, 5)))


def test_tangents_keep_no_graph() -> None:
    """Arrays that ops inside save are freed after the function, before gradients flow back."""
    held: list[Any] = []

    def backward(dy: Any, saved: Any, needs: Any) -> Any:
        return (2 * saved[0] * dy,)

    @tangent_of(backward)
    def tangent(op: Any, t: Tensor) -> Any:
        return 2 * op.input(0, op.saved[0]) * t

    class Kept(np.ndarray[Any, Any]):
        """An array that can be watched."""

    def square(x: Tensor) -> Tensor:
        own = x.data.copy().view(Kept)
        held.append(weakref.ref(own))
        return record("square", np.asarray(x.data**2), (x,), backward, (own,))

    leaf = Tensor(np.array([3.0, 4.0]), requires_grad=True)
    y, t = jvp(checkpoint(lambda x: square(square(x))), (leaf,), (Tensor(np.ones(2)),))
    assert [each() for each in held] == [None, None]
    np.testing.assert_allclose(t.numpy(), 4 * leaf.numpy() ** 3)
    (y * t).sum().backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad, 28 * leaf.numpy() ** 6)
    assert len(held) == 4


def test_linearized_functions_may_be_checkpointed() -> None:
    rng = np.random.default_rng(1)
    x, w, t, u = map(Tensor, rng.standard_normal((4, 4, 4)))
    found = []
    for f in (block, checkpoint(block)):
        y, push = tg.linearize(lambda x, w, f=f: f(x, w) * f(x * x, w), x, w)
        found.append((y.tolist(), push(t, u).tolist()))
    assert found[0] == found[1]
