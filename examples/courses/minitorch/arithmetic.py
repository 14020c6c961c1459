"""The operators of scalars and tensors."""

from __future__ import annotations

from typing import Any, Self

from minitorch import tensor_functions as functions
from minitorch.autodiff import Function, Variable


class Arithmetic(Variable):
    """A variable with operators; numbers beside it become variables."""

    def _ensure(self, b: Any) -> Any:
        """Return b, or the variable of a number."""
        raise NotImplementedError

    def _apply(self, function: type[Function], *others: Any) -> Self:
        result: Self = function.apply(self, *others)
        return result

    def _zip(self, function: type[Function], b: Any) -> Self:
        return self._apply(function, self._ensure(b))

    def __add__(self, b: Any) -> Self:
        return self._zip(functions.Add, b)

    __radd__ = __add__

    def __mul__(self, b: Any) -> Self:
        return self._zip(functions.Mul, b)

    __rmul__ = __mul__

    def __neg__(self) -> Self:
        return self._apply(functions.Neg)

    def __sub__(self, b: Any) -> Self:
        return self._zip(functions.Add, -self._ensure(b))

    def __rsub__(self, b: Any) -> Self:
        return (-self)._zip(functions.Add, b)

    def __truediv__(self, b: Any) -> Self:
        return self._zip(functions.Div, b)

    def __rtruediv__(self, b: Any) -> Any:
        return self._ensure(b) / self

    def __pow__(self, b: Any) -> Self:
        return self._zip(functions.PowerScalar, b)

    def __lt__(self, b: Any) -> Self:
        return self._zip(functions.LT, b)

    def __gt__(self, b: Any) -> Any:
        return self._ensure(b) < self

    def __eq__(self, b: Any) -> Self:  # type: ignore[override]  # elementwise, 1.0 or 0.0
        return self._zip(functions.EQ, b)

    __hash__ = object.__hash__

    def log(self) -> Self:
        """Return log(x + 1e-6)."""
        return self._apply(functions.Log)

    def exp(self) -> Self:
        """Return exp(x)."""
        return self._apply(functions.Exp)

    def tanh(self) -> Self:
        """Return tanh(x)."""
        return self._apply(functions.Tanh)

    def sigmoid(self) -> Self:
        """Return 1 / (1 + exp(-x))."""
        return self._apply(functions.Sigmoid)

    def relu(self) -> Self:
        """Return max(x, 0)."""
        return self._apply(functions.ReLU)
