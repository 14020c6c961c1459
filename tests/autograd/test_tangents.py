"""Tangents of ops: the rules as `record` and the walks call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd import record, tangent_of
from tensorgrad.autograd.tangents import Op
from tensorgrad.errors import GradError
from tests.derivatives import check_derivatives


def sum_and_product(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """An op of two outputs whose tangent keeps to what is saved."""
    x, y = (each if isinstance(each, Tensor) else Tensor(np.asarray(each)) for each in (a, b))
    outputs = x.data + y.data, x.data * y.data
    plus, times = record("both", outputs, (x, y), _backward, (x.data, y.data))
    return plus, times


def _backward(dys: Any, saved: Any, needs: Any) -> Sequence[Any]:
    a, b = saved
    plus, times = [0 if dy is None else dy for dy in dys]
    return plus + times * b, plus + times * a


@tangent_of(_backward)
def _tangent(op: Op, ta: Tensor | None, tb: Tensor | None) -> Any:
    a, b = (op.input(i, array) for i, array in enumerate(op.saved))
    terms = [t for t in (ta, tb) if t is not None]
    products = [t * x for t, x in ((ta, b), (tb, a)) if t is not None]
    return sum(terms[1:], terms[0]), sum(products[1:], products[0])


def test_an_op_of_several_outputs() -> None:
    check_derivatives(sum_and_product, [0.5, 1.0], [2.0, -1.0])
    check_derivatives(lambda a: sum_and_product(a, [2.0, -1.0])[1], [0.5, 1.0])
    check_derivatives(lambda a: sum_and_product(tg.exp(a), a)[0] * a, [[0.5], [1.0]])
    check_derivatives(lambda a, b: sum_and_product(*sum_and_product(a, b)), 0.3, 0.4)


def test_a_chain_of_outputs_that_are_used_again() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        plus, times = sum_and_product(a, b)
        return plus * times + sum_and_product(times, times)[1]

    check_derivatives(f, [0.5, 1.0], [2.0, -1.0])
    found, f_jvp = tg.linearize(f, Tensor(np.array(0.5)), Tensor(np.array(2.0)))
    y, dy = tg.jvp(f, (0.5, 2.0), (1.0, 0.0))
    one, zero = (Tensor(np.array(value)) for value in (1.0, 0.0))
    assert f_jvp(one, zero).item() == pytest.approx(dy.item())
    assert found.item() == pytest.approx(y.item())


def constant_tangent(x: Tensor) -> Tensor:
    return record("step", np.sign(x.data), (x,), _no_gradient, ())


def _no_gradient(dy: Any, saved: Any, needs: Any) -> Sequence[Any]:
    return (None,)


@tangent_of(_no_gradient)
def _no_tangent(op: Op, t: Tensor) -> None:
    return None


def test_a_rule_may_say_that_the_output_is_constant() -> None:
    check_derivatives(lambda x: constant_tangent(x) * x, [0.5, -1.0])
    x = Tensor(np.array([0.5, -1.0]))
    y, dy = tg.jvp(constant_tangent, (x,), (x,))
    assert (y.tolist(), dy.tolist()) == ([1, -1], [0, 0])


def test_recording_costs_nothing_without_tangents() -> None:
    """Ops of what no tangent depends on have none, and no graph of forward mode is left."""
    seen: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        seen.extend([Tensor(np.ones(2)) * 2, x * 2, x.detach() * 2])
        with tg.no_grad():
            seen.append(x * 2)
        return seen[1]

    tg.jvp(f, (tg.ones(2),), (tg.ones(2),))
    assert [bool(getattr(t, "tangents", {})) for t in seen] == [False, True, False, False]
    assert [t.requires_grad for t in seen] == [False, True, False, False]
    assert seen[1].node.edges == ()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda t: t, "two: its rule returned 1 tangents, expected 2, one for each output"),
        (lambda t: (t, t.data), "two: its rule returned a ndarray, expected a tensor"),
        (lambda t: (None, tg.zeros(3)), r"a tangent of shape \(3,\), expected \(2,\)"),
    ],
)
def test_a_rule_that_returns_what_does_not_fit_is_an_error(result: Any, message: str) -> None:
    def backward(dys: Any, saved: Any, needs: Any) -> Sequence[Any]:
        return (dys[0],)

    @tangent_of(backward)
    def rule(op: Op, t: Tensor) -> Any:
        return result(t)

    def two(x: Tensor) -> Tensor:
        first, _ = record("two", (x.data * 1, x.data * 2), (x,), backward, ())
        return first

    with pytest.raises(GradError, match=message):
        tg.jvp(two, (tg.ones(2),), (tg.ones(2),))
