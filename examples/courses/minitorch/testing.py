"""Functions that the tests try on numbers, scalars and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from minitorch import operators

__all__ = ["MathTest", "MathTestVariable"]


class Case(NamedTuple):
    """A function of numbers, and the same of scalars or tensors."""

    name: str
    of_numbers: Callable[..., Any]
    of_variables: Callable[..., Any]


def _same(name: str, function: Callable[..., Any]) -> Case:
    return Case(name, function, function)


def _nested_relu(relu: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda a: 10 * relu(6 * relu(10 * a + 7) + 5)


ONE_ARGUMENT = [
    _same("neg", lambda a: -a),
    _same("addConstant", lambda a: a + 3),
    _same("subConstant", lambda a: a - 3),
    _same("multConstant", lambda a: 3 * a),
    _same("div", lambda a: a / 3),
    _same("square", lambda a: a * a),
    _same("cube", lambda a: a * a * a),
    Case("inv", lambda a: operators.inv(a + 101.5), lambda a: 1.0 / (a + 101.5)),
    Case("sig", operators.sigmoid, lambda a: a.sigmoid()),
    Case("log", lambda a: operators.log(a + 1000), lambda a: (a + 1000).log()),
    Case("relu", lambda a: operators.relu(a + 5.3), lambda a: (a + 5.3).relu()),
    Case("exp", lambda a: operators.exp(a - 150), lambda a: (a - 150).exp()),
    Case(
        "explog",
        lambda a: operators.exp(a - 150) + operators.log(a + 1000),
        lambda a: (a - 150).exp() + (a + 1000).log(),
    ),
    Case(
        "complex",
        lambda a: operators.log(operators.sigmoid(_nested_relu(operators.relu)(a))) / 50,
        lambda a: _nested_relu(lambda x: x.relu())(a).sigmoid().log() / 50,
    ),
]
TWO_ARGUMENTS = [
    _same("add2", lambda a, b: a + b),
    _same("mul2", lambda a, b: a * b),
    _same("div2", lambda a, b: a / (b + 101.5)),
    Case("eq2", lambda a, b: operators.eq(a, b + 5.3), lambda a, b: a == b + 5.3),
    Case("gt2", lambda a, b: operators.lt(b, a + 1.7), lambda a, b: a + 1.7 > b),
    Case("lt2", lambda a, b: operators.lt(a + 1.7, b), lambda a, b: a + 1.7 < b),
]
REDUCTIONS = [
    Case("sum_red", operators.sum, lambda a: a.sum(0)),
    Case("mean_red", lambda a: operators.sum(a) / len(a), lambda a: a.mean(0)),
    Case("mean_full_red", lambda a: operators.sum(a) / len(a), lambda a: a.mean()),
]


class MathTest:
    """The functions of numbers."""

    @staticmethod
    def _tests() -> tuple[list[tuple[str, Callable[..., Any]]], ...]:
        groups = ONE_ARGUMENT, TWO_ARGUMENTS, REDUCTIONS
        return tuple([(case.name, case.of_numbers) for case in group] for group in groups)


class MathTestVariable(MathTest):
    """The functions of numbers and, to compare, of scalars or tensors."""

    @staticmethod
    def _comp_testing() -> tuple[list[Case], list[Case], list[Case]]:
        return ONE_ARGUMENT, TWO_ARGUMENTS, REDUCTIONS
