"""Activation functions as modules, for `Sequential` and for settings of models."""

from __future__ import annotations

from typing import Any

from tensorgrad.core.checks import check_number
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn.module import Module
from tensorgrad.ops.elementwise import tanh
from tensorgrad.ops.elementwise.activation import elu, gelu, leaky_relu, relu, sigmoid, silu
from tensorgrad.ops.softmax import softmax


class ReLU(Module):
    """max(x, 0).

    Example:
        >>> tg.nn.ReLU()(tg.tensor([-1.0, 2.0]))
        tensor([0., 2.], dtype=float32)
    """

    def forward(self, x: Any) -> Tensor:
        """Return `relu(x)`, the shape and dtype of x."""
        return relu(x)


class LeakyReLU(Module):
    """x, or negative_slope * x below 0.

    Args:
        negative_slope: the derivative below 0.

    Example:
        >>> tg.nn.LeakyReLU(0.5)(tg.tensor([-1.0, 2.0]))
        tensor([-0.5,  2. ], dtype=float32)
    """

    def __init__(self, negative_slope: float = 0.01) -> None:
        check_number("LeakyReLU", "negative_slope", negative_slope)
        self.negative_slope = negative_slope

    def forward(self, x: Any) -> Tensor:
        """Return `leaky_relu(x, negative_slope)`, the shape and dtype of x."""
        return leaky_relu(x, self.negative_slope)

    def extra_repr(self) -> str:
        """Return the derivative below 0."""
        return str(self.negative_slope)


class ELU(Module):
    """x, or alpha * (exp(x) - 1) below 0.

    Args:
        alpha: minus the limit at -inf.

    Example:
        >>> tg.nn.ELU(alpha=2.0)(tg.tensor([-1.0, 2.0])).round(3)
        tensor([-1.264,  2.   ], dtype=float32)
    """

    def __init__(self, alpha: float = 1.0) -> None:
        check_number("ELU", "alpha", alpha)
        self.alpha = alpha

    def forward(self, x: Any) -> Tensor:
        """Return `elu(x, alpha)`, the shape and dtype of x."""
        return elu(x, self.alpha)

    def extra_repr(self) -> str:
        """Return alpha."""
        return str(self.alpha)


class GELU(Module):
    """x times the normal distribution's probability of being below x.

    Args:
        approximate: "none": exact; "tanh": the approximation of GPT-2.

    Raises:
        ArgumentError: another name for `approximate`.

    Example:
        >>> tg.nn.GELU()(tg.tensor([-1.0, 0.0, 1.0])).round(3)
        tensor([-0.159,  0.   ,  0.841], dtype=float32)
    """

    def __init__(self, approximate: str = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise ArgumentError(f"GELU: approximate is {approximate!r}, expected 'tanh' or 'none'")
        self.approximate = approximate

    def forward(self, x: Any) -> Tensor:
        """Return `gelu(x, approximate)`, the shape and dtype of x."""
        return gelu(x, approximate=self.approximate)

    def extra_repr(self) -> str:
        """Return the formula's name."""
        return f"approximate={self.approximate!r}"


class SiLU(Module):
    """x * sigmoid(x).

    Example:
        >>> tg.nn.SiLU()(tg.tensor([-1.0, 0.0, 1.0])).round(3)
        tensor([-0.269,  0.   ,  0.731], dtype=float32)
    """

    def forward(self, x: Any) -> Tensor:
        """Return `silu(x)`, the shape and dtype of x."""
        return silu(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x)).

    Example:
        >>> tg.nn.Sigmoid()(tg.tensor([-1.0, 0.0, 1.0])).round(3)
        tensor([0.269, 0.5  , 0.731], dtype=float32)
    """

    def forward(self, x: Any) -> Tensor:
        """Return `sigmoid(x)`, the shape and dtype of x."""
        return sigmoid(x)


class Tanh(Module):
    """The hyperbolic tangent.

    Example:
        >>> tg.nn.Tanh()(tg.tensor([0.0, 1.0])).round(3)
        tensor([0.   , 0.762], dtype=float32)
    """

    def forward(self, x: Any) -> Tensor:
        """Return `tanh(x)`, the shape and dtype of x."""
        return tanh(x)


class Softmax(Module):
    """exp(x) divided by its sum along an axis.

    Args:
        axis: where the sum runs; default: the last axis.

    Example:
        >>> tg.nn.Softmax()(tg.tensor([[0.0, 0.0], [0.0, 1.0]])).round(3)
        tensor([[0.5  , 0.5  ],
                [0.269, 0.731]], dtype=float32)
    """

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def forward(self, x: Any) -> Tensor:
        """Return `softmax(x, axis)`, the shape and dtype of x."""
        return softmax(x, self.axis)

    def extra_repr(self) -> str:
        """Return the axis."""
        return f"axis={self.axis}"
