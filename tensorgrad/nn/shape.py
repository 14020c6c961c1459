"""Layers without arithmetic: Flatten and Identity."""

from __future__ import annotations

import math
from typing import Any

from tensorgrad.core.checks import axis_index
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.operands import tensor_of
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn.module import Module
from tensorgrad.ops.shape import reshape


class Flatten(Module):
    """Join adjacent axes into one; by default all but the first.

    Args:
        start_axis: the first axis to join.
        end_axis: the last axis to join.

    Example:
        >>> tg.nn.Flatten()(tg.zeros((2, 3, 4))).shape
        (2, 12)
    """

    def __init__(self, start_axis: int = 1, end_axis: int = -1) -> None:
        self.start_axis, self.end_axis = start_axis, end_axis

    def forward(self, x: Any) -> Tensor:
        """Return x with axes `start_axis` to `end_axis` joined, a view where NumPy's is one.

        Raises:
            ArgumentError: x has no such axis, or the first is behind the last.
        """
        x = tensor_of("Flatten", "x", x)
        start = axis_index("Flatten", self.start_axis, x.ndim, "start_axis")
        end = axis_index("Flatten", self.end_axis, x.ndim, "end_axis") + 1
        if start >= end:
            raise ArgumentError(
                f"Flatten: start_axis is {start} and end_axis {end - 1}, expected them in order"
            )
        return reshape(x, (*x.shape[:start], math.prod(x.shape[start:end]), *x.shape[end:]))

    def extra_repr(self) -> str:
        """Return the axes."""
        return f"{self.start_axis}, {self.end_axis}"


class Identity(Module):
    """Return the input; stands where a layer is optional.

    Example:
        >>> tg.nn.Identity()(tg.ones(2))
        tensor([1., 1.], dtype=float32)
    """

    def forward(self, x: Any) -> Any:
        """Return x itself."""
        return x
