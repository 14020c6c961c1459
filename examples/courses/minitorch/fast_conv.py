"""Convolutions: as wide as their input, which is followed by zeros."""

from __future__ import annotations

from typing import Any

import tensorgrad as tg
from minitorch.tensor_functions import Computed

__all__ = ["Conv1dFun", "Conv2dFun", "conv1d", "conv2d"]


def _conv(x: tg.Tensor, weight: tg.Tensor) -> tg.Tensor:
    """Return the correlation of x, (B, C, *sizes), with weight, (D, C, *windows)."""
    dims = x.ndim - 2
    x = tg.pad(x, [(0, 0), (0, 0), *((0, size - 1) for size in weight.shape[2:])])
    for axis in range(2, 2 + dims):
        x = x.unfold(axis, weight.shape[axis])
    sizes, windows = "hw"[:dims], "ij"[:dims]
    return tg.einsum(f"bc{sizes}{windows},dc{windows}->bd{sizes}", x, weight)


class Conv1dFun(Computed):
    """The correlation of (B, C, T) with weights (D, C, K): (B, D, T)."""

    compute = staticmethod(_conv)


class Conv2dFun(Computed):
    """The correlation of (B, C, H, W) with weights (D, C, I, J): (B, D, H, W)."""

    compute = staticmethod(_conv)


def conv1d(x: Any, weight: Any) -> Any:
    """Return the correlation of (B, C, T) with weights (D, C, K): (B, D, T)."""
    return Conv1dFun.apply(x, weight)


def conv2d(x: Any, weight: Any) -> Any:
    """Return the correlation of (B, C, H, W) with weights (D, C, I, J): (B, D, H, W)."""
    return Conv2dFun.apply(x, weight)
