"""Normalization layers, and the fused residual addition and norm of a transformer block."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad.core.checks import check_integer, check_range
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.operands import tensor_of
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn.dropout import Dropout
from tensorgrad.nn.module import Module, Parameter, can_fuse, check_input
from tensorgrad.nn.rows import Rows
from tensorgrad.ops.norm import add_layer_norm, add_rms_norm, group_norm, layer_norm, rms_norm


class LayerNorm(Module):
    """Normalize the last axis to mean 0 and variance 1, then scale and shift.

    y = (x - mean) / sqrt(variance + eps) * weight + bias

    Args:
        width: length of the last axis.
        eps: added to the variance; at least 0.
        elementwise_affine: whether to scale and shift.
        bias: whether to shift.

    Attributes:
        weight: (width,), initially 1; or None.
        bias: (width,), initially 0; or None.

    Example:
        >>> tg.nn.LayerNorm(4)(tg.tensor([[1.0, 1.0, 3.0, 3.0]])).round(3)
        tensor([[-1., -1.,  1.,  1.]], dtype=float32)
    """

    def __init__(
        self, width: int, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True
    ) -> None:
        check_integer("LayerNorm", "width", width, 0)
        check_range("LayerNorm", "eps", eps)
        affine = elementwise_affine
        self.weight = Parameter(np.ones(width, np.float32)) if affine else None
        self.bias = Parameter(np.zeros(width, np.float32)) if affine and bias else None
        self.width, self.eps = width, eps

    def forward(self, x: Any) -> Tensor:
        """Return y, the shape of x, for x (..., width), of the layer's dtype or a narrower one."""
        _check(self, x)
        return layer_norm(x, self.weight, self.bias, eps=self.eps)

    def add(self, x: Any, residual: Any = None) -> tuple[Tensor, Tensor]:
        """Return x + residual and its norm from one kernel; x and its norm without a residual."""
        _check(self, x, residual)
        return add_layer_norm(x, residual, self.weight, self.bias, eps=self.eps)

    def saved_bytes(self, rows: Rows) -> float:
        """Return the bytes that backward needs: x, and mean and 1 / standard deviation of rows."""
        return rows.outside * (self.width * rows.wide + 8)

    def extra_repr(self) -> str:
        """Return the size."""
        bias = "" if self.bias is not None or self.weight is None else ", bias=False"
        return f"{self.width}, eps={self.eps}{_affine(self)}{bias}"


class RMSNorm(Module):
    """Divide the last axis by its root mean square, then scale.

    y = x / sqrt(mean(x^2) + eps) * weight

    Args:
        width: length of the last axis.
        eps: added to the mean square; at least 0. None: the machine epsilon of float32, or of
            float64 for x of that dtype.
        elementwise_affine: whether to scale.

    Attributes:
        weight: (width,), initially 1; or None.

    Example:
        >>> tg.nn.RMSNorm(2)(tg.tensor([[1.0, 7.0]])).round(3)  # divided by sqrt(25)
        tensor([[0.2, 1.4]], dtype=float32)
    """

    def __init__(
        self, width: int, eps: float | None = None, elementwise_affine: bool = True
    ) -> None:
        check_integer("RMSNorm", "width", width, 0)
        if eps is not None:
            check_range("RMSNorm", "eps", eps)
        self.weight = Parameter(np.ones(width, np.float32)) if elementwise_affine else None
        self.width, self.eps = width, eps

    def forward(self, x: Any) -> Tensor:
        """Return y, the shape of x, for x (..., width), of the layer's dtype or a narrower one."""
        _check(self, x)
        return rms_norm(x, self.weight, eps=self.eps)

    def add(self, x: Any, residual: Any = None) -> tuple[Tensor, Tensor]:
        """Return x + residual and its norm from one kernel; x and its norm without a residual."""
        _check(self, x, residual)
        return add_rms_norm(x, residual, self.weight, eps=self.eps)

    def saved_bytes(self, rows: Rows) -> float:
        """Return the bytes that backward needs: x, and 1 / root of the mean square of rows."""
        return rows.outside * (self.width * rows.wide + 4)

    def extra_repr(self) -> str:
        """Return the size."""
        return f"{self.width}, eps={self.eps}{_affine(self)}"


def _check(norm: LayerNorm | RMSNorm, x: Any, residual: Any = None) -> None:
    """Check the inputs against the weight or, without one, the width."""
    if norm.weight is not None:
        check_input(norm, norm.weight, x=x, residual=residual)
    elif (shape := tensor_of(type(norm).__name__, "x", x).shape)[-1:] != (norm.width,):
        raise ShapeError(
            f"{type(norm).__name__}: x has shape {shape}, expected (..., {norm.width})"
        )


def _affine(norm: LayerNorm | RMSNorm) -> str:
    return "" if norm.weight is not None else ", elementwise_affine=False"


class GroupNorm(Module):
    """Normalize groups of channels of each example, then scale and shift the channels.

    Args:
        num_groups: divides the number of channels.
        num_channels: length of axis 1.
        eps: added to the variance; at least 0.
        affine: whether to scale and shift.

    Attributes:
        weight: (num_channels,), initially 1; or None.
        bias: (num_channels,), initially 0; or None.

    Raises:
        ArgumentError: num_groups does not divide num_channels, or eps is outside its range.

    Example:
        >>> x = tg.tensor([[1.0, 3.0, 10.0, 30.0]])  # two groups of two channels
        >>> tg.nn.GroupNorm(2, 4)(x).round(3)
        tensor([[-1.,  1., -1.,  1.]], dtype=float32)
    """

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True
    ) -> None:
        check_integer("GroupNorm", "num_groups", num_groups, 1)
        check_integer("GroupNorm", "num_channels", num_channels, 0)
        check_range("GroupNorm", "eps", eps)
        if num_channels % num_groups:
            raise ArgumentError(
                f"GroupNorm: num_groups is {num_groups}, expected a divisor of {num_channels}"
            )
        self.weight = Parameter(np.ones(num_channels, np.float32)) if affine else None
        self.bias = Parameter(np.zeros(num_channels, np.float32)) if affine else None
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps

    def forward(self, x: Any) -> Tensor:
        """Return y, the shape of x, for x (B, num_channels, ...), of a dtype not wider than ours.

        Raises:
            ShapeError: x has another number of channels.
        """
        if self.weight is not None:
            check_input(self, self.weight, x=x)
        shape = tensor_of("GroupNorm", "x", x).shape
        if shape[1:2] != (self.num_channels,):
            raise ShapeError(
                f"GroupNorm: x has shape {shape}, expected (B, {self.num_channels}, ...)"
            )
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Return the sizes."""
        affine = "" if self.weight is not None else ", affine=False"
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}{affine}"


def add_norm(x: Any, branch: Any, norm: Any, dropout: Dropout | None = None) -> tuple[Any, Tensor]:
    """Return z = x + dropout(branch) and norm(z), in one kernel where the norm offers `add`.

    Without a branch z is x; one kernel then sums the two gradients of x.
    """
    if dropout is not None and dropout.drops:
        x, branch = dropout.add(branch, x), None
    if can_fuse(norm, "add"):
        total, normed = norm.add(x, branch)
        return total, normed
    total = x if branch is None else x + branch
    return total, norm(total)
