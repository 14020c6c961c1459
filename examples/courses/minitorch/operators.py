"""Functions of Python numbers, and map, zip and reduce over lists."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterable
from functools import reduce as fold
from math import exp, pow, tanh
from operator import add, mul, neg
from typing import Any

__all__ = [
    "EPS", "add", "addLists", "eq", "exp", "id", "inv", "inv_back", "is_close", "log", "log_back",
    "lt", "map", "max", "mul", "neg", "negList", "pow", "prod", "reduce", "relu", "relu_back",
    "sigmoid", "sum", "tanh", "zipWith",
]  # fmt: skip

EPS = 1e-6  # log(0) is finite in minitorch

max = builtins.max


def id(x: float) -> float:
    """Return x."""
    return x


def lt(x: float, y: float) -> float:
    """Return 1.0 where x < y, otherwise 0.0."""
    return float(x < y)


def eq(x: float, y: float) -> float:
    """Return 1.0 where x equals y, otherwise 0.0."""
    return float(x == y)


def is_close(x: Any, y: Any) -> Any:
    """Return whether x and y, numbers or tensors, differ by less than 0.01."""
    return (x - y < 1e-2) and (y - x < 1e-2)


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)), without overflow."""
    small = exp(-abs(x))
    return (1.0 if x >= 0 else small) / (1.0 + small)


def relu(x: float) -> float:
    """Return x where it is positive, otherwise 0.0."""
    return max(x, 0.0)


def log(x: float) -> float:
    """Return log(x + EPS)."""
    return math.log(x + EPS)


def inv(x: float) -> float:
    """Return 1 / x."""
    return 1.0 / x


def log_back(x: float, d: float) -> float:
    """Return d times the derivative of log."""
    return d / (x + EPS)


def inv_back(x: float, d: float) -> float:
    """Return d times the derivative of inv."""
    return -d / (x * x)


def relu_back(x: float, d: float) -> float:
    """Return d times the derivative of relu."""
    return d if x > 0 else 0.0


def map(fn: Callable[[Any], Any]) -> Callable[[Iterable[Any]], list[Any]]:
    """Return a function that applies fn to each element of a list."""
    return lambda xs: [fn(x) for x in xs]


def zipWith(fn: Callable[[Any, Any], Any]) -> Callable[[Iterable[Any], Iterable[Any]], list[Any]]:
    """Return a function that applies fn to the pairs of two lists of one length."""
    return lambda xs, ys: [fn(x, y) for x, y in zip(xs, ys, strict=True)]


def reduce(fn: Callable[[Any, Any], Any], start: Any) -> Callable[[Iterable[Any]], Any]:
    """Return a function that combines the elements of a list, beginning with start."""
    return lambda xs: fold(fn, xs, start)


negList = map(neg)
addLists = zipWith(add)
sum = reduce(add, 0.0)
prod = reduce(mul, 1)
