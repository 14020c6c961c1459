"""Convolutions: as wide as their input, which is followed by zeros."""

from __future__ import annotations

import tensorgrad as tg
from minitorch.autodiff import function

__all__ = ["Conv1dFun", "Conv2dFun", "conv1d", "conv2d"]


def _conv(x: tg.Tensor, weight: tg.Tensor) -> tg.Tensor:
    """Return the correlation (B, D, *sizes) of x (B, C, *sizes) with weight (D, C, *windows)."""
    dims = x.ndim - 2
    x = tg.pad(x, [(0, 0), (0, 0), *((0, size - 1) for size in weight.shape[2:])])
    for axis in range(2, 2 + dims):
        x = x.unfold(axis, weight.shape[axis])
    sizes, windows = "hw"[:dims], "ij"[:dims]
    return tg.einsum(f"bc{sizes}{windows},dc{windows}->bd{sizes}", x, weight)


Conv1dFun = Conv2dFun = function(_conv)
conv1d = conv2d = Conv1dFun.apply
