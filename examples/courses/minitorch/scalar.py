"""Scalars with a history, and a check of derivatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minitorch import scalar_functions as functions
from minitorch.autodiff import Context, backpropagate, central_difference

__all__ = ["Scalar", "ScalarHistory", "derivative_check"]

_ids = itertools.count()


@dataclass
class ScalarHistory:
    """The function call that made a scalar; of a leaf, none."""

    last_fn: type[functions.ScalarFunction] | None = None
    ctx: Context | None = None
    inputs: Sequence[Scalar] = ()


class Scalar:
    """A number that remembers how it was computed.

    Args:
        v: the number.
        back: its history.
        name: for messages; default: its id.

    Attributes:
        data: the number.
        derivative: of a leaf after `backward`, otherwise None.
    """

    def __init__(self, v: Any, back: ScalarHistory | None = None, name: str | None = None) -> None:
        self.unique_id = next(_ids)
        self.data = float(v)
        self.history = ScalarHistory() if back is None else back
        self.derivative: float | None = None
        self.name = str(self.unique_id) if name is None else name

    def __repr__(self) -> str:
        return f"Scalar({self.data:f})"

    def __bool__(self) -> bool:
        return bool(self.data)

    def __add__(self, b: Any) -> Scalar:
        return self._apply(functions.Add, self, b)

    __radd__ = __add__

    def __mul__(self, b: Any) -> Scalar:
        return self._apply(functions.Mul, self, b)

    __rmul__ = __mul__

    def __neg__(self) -> Scalar:
        return self._apply(functions.Neg, self)

    def __sub__(self, b: Any) -> Scalar:
        return self + self._apply(functions.Neg, b)

    def __rsub__(self, b: Any) -> Scalar:
        return self._apply(functions.Add, b, -self)

    def __truediv__(self, b: Any) -> Scalar:
        return self * self._apply(functions.Inv, b)

    def __rtruediv__(self, b: Any) -> Scalar:
        return self._apply(functions.Mul, b, self._apply(functions.Inv, self))

    def __lt__(self, b: Any) -> Scalar:
        return self._apply(functions.LT, self, b)

    def __gt__(self, b: Any) -> Scalar:
        return self._apply(functions.LT, b, self)

    def __eq__(self, b: Any) -> Scalar:  # type: ignore[override]  # 1.0 or 0.0
        return self._apply(functions.EQ, self, b)

    __hash__ = object.__hash__

    def log(self) -> Scalar:
        """Return log(x + 1e-6)."""
        return self._apply(functions.Log, self)

    def exp(self) -> Scalar:
        """Return exp(x)."""
        return self._apply(functions.Exp, self)

    def sigmoid(self) -> Scalar:
        """Return 1 / (1 + exp(-x))."""
        return self._apply(functions.Sigmoid, self)

    def relu(self) -> Scalar:
        """Return max(x, 0)."""
        return self._apply(functions.ReLU, self)

    @staticmethod
    def _apply(function: type[functions.ScalarFunction], *values: Any) -> Scalar:
        result: Scalar = function.apply(*values)
        return result

    def accumulate_derivative(self, x: float) -> None:
        """Add to the derivative of a leaf."""
        assert self.is_leaf(), "only leaves have derivatives"
        self.derivative = x + (self.derivative or 0.0)

    def is_leaf(self) -> bool:
        """Return whether no function made the scalar."""
        return self.history.last_fn is None

    def is_constant(self) -> bool:
        """Return whether the scalar has no history."""
        return self.history is None

    @property
    def parents(self) -> Iterable[Scalar]:
        """The inputs of the function that made the scalar."""
        return self.history.inputs

    def chain_rule(self, d_output: Any) -> Iterable[tuple[Scalar, Any]]:
        """Return each parent with its derivative, given that of this scalar."""
        function, ctx = self.history.last_fn, self.history.ctx
        assert function is not None
        assert ctx is not None
        return list(zip(self.parents, function._backward(ctx, d_output), strict=True))

    def backward(self, d_output: float = 1.0) -> None:
        """Add the derivatives of this scalar, times d_output, to the leaves."""
        backpropagate(self, d_output)


def derivative_check(f: Callable[..., Scalar], *scalars: Scalar) -> None:
    """Raise AssertionError unless the derivatives of f are those of differences."""
    f(*scalars).backward()
    for i, x in enumerate(scalars):
        expected = central_difference(f, *scalars, arg=i)
        assert x.derivative is not None
        np.testing.assert_allclose(
            x.derivative, expected.data, 1e-2, 1e-2,
            err_msg=f"derivative_check: argument {i} of {f} at {scalars}",
        )  # fmt: skip
