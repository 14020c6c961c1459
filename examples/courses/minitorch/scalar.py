"""Scalars, functions of them, and a check of derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tensorgrad as tg
from minitorch.arithmetic import Arithmetic
from minitorch.autodiff import Context, Function, History, backpropagate, central_difference

__all__ = ["Scalar", "ScalarFunction", "ScalarHistory", "derivative_check"]

ScalarHistory = History


class Scalar(Arithmetic):
    """A number that remembers how it was computed, by tensorgrad in float64.

    Args:
        v: the number.
        back: its history; default: that of a leaf.
        name: for messages; default: its id.

    Attributes:
        data: the number.
    """

    def __init__(self, v: Any, back: History | None = None, name: str | None = None) -> None:
        super().__init__(History() if back is None else back, name)
        self.data = float(v)

    @property
    def value(self) -> tg.Tensor:  # type: ignore[override]
        """The number as a tensor of tensorgrad."""
        return tg.Tensor(np.array(self.data))

    @property
    def derivative(self) -> float | None:
        """The derivative of a leaf after `backward`, otherwise None."""
        derivative: float | None = self.grad
        return derivative

    def __repr__(self) -> str:
        return f"Scalar({self.data:f})"

    def __bool__(self) -> bool:
        return bool(self.data)

    def _wrap(self, value: tg.Tensor) -> Scalar:
        scalar = Scalar(value)
        scalar.history = None
        return scalar

    def _ensure(self, b: Any) -> Scalar:
        return b if isinstance(b, Scalar) else Scalar(b)

    def _fit(self, gradient: Any) -> float:
        return float(gradient)

    def backward(self, d_output: float = 1.0) -> None:
        """Add the derivatives of this scalar, times d_output, to the leaves."""
        backpropagate(self, d_output)


class ScalarFunction(Function):
    """A function of scalars: its `forward` and `backward` take and return numbers."""

    @classmethod
    def apply(cls, *vals: Any, **options: Any) -> Any:
        """Return the result for scalars or numbers, with its history."""
        scalars = [v if isinstance(v, Scalar) else Scalar(v) for v in vals]
        ctx = Context()
        result = cls.forward(ctx, *[s.data for s in scalars], **options)
        return Scalar(result, History(cls, ctx, scalars))


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
