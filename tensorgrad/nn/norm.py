"""Normalization layers, and the fused residual addition and norm of a transformer block."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad.checks import check_integer, check_range
from tensorgrad.errors import ArgumentError, ShapeError
from tensorgrad.nn.dropout import Dropout
from tensorgrad.nn.module import Module, Parameter, check_input, offers
from tensorgrad.operands import tensor_of
from tensorgrad.ops.norm import add_layer_norm, add_rms_norm, group_norm, layer_norm, rms_norm
from tensorgrad.tensor import Tensor


class LayerNorm(Module):
    """Normalize the last axis to mean 0 and variance 1, then scale and shift.

    y = (x - mean) / sqrt(variance + eps) * weight + bias

    Args:
        width: length of the last axis.
        eps: added to the variance; at least 0.
        bias: whether to add a bias.

    Attributes:
        weight: (width,), initially 1.
        bias: (width,), initially 0; or None.
    """

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True) -> None:
        check_integer("LayerNorm", "width", width, 0)
        check_range("LayerNorm", "eps", eps)
        self.weight = Parameter(np.ones(width, np.float32))
        self.bias = Parameter(np.zeros(width, np.float32)) if bias else None
        self.eps = eps

    def forward(self, x: Any) -> Tensor:
        """Return y, the shape of x, for x (..., width), of the layer's dtype or a narrower one."""
        check_input(self, self.weight, x=x)
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Any, residual: Any = None) -> tuple[Tensor, Tensor]:
        """Return x + residual and its norm from one kernel; x and its norm without a residual."""
        check_input(self, self.weight, x=x, residual=residual)
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Return the size."""
        bias = "" if self.bias is not None else ", bias=False"
        return f"{self.weight.size}, eps={self.eps}{bias}"


class RMSNorm(Module):
    """Divide the last axis by its root mean square, then scale.

    y = x / sqrt(mean(x^2) + eps) * weight

    Args:
        width: length of the last axis.
        eps: added to the mean square; at least 0.

    Attributes:
        weight: (width,), initially 1.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        check_integer("RMSNorm", "width", width, 0)
        check_range("RMSNorm", "eps", eps)
        self.weight = Parameter(np.ones(width, np.float32))
        self.eps = eps

    def forward(self, x: Any) -> Tensor:
        """Return y, the shape of x, for x (..., width), of the layer's dtype or a narrower one."""
        check_input(self, self.weight, x=x)
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Any, residual: Any = None) -> tuple[Tensor, Tensor]:
        """Return x + residual and its norm from one kernel; x and its norm without a residual."""
        check_input(self, self.weight, x=x, residual=residual)
        return add_rms_norm(x, residual, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Return the size."""
        return f"{self.weight.size}, eps={self.eps}"


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
    if offers(norm, "add"):
        total, normed = norm.add(x, branch)
        return total, normed
    total = x if branch is None else x + branch
    return total, norm(total)
