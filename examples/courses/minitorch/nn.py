"""Pooling, softmax, GELU and the loss."""

from __future__ import annotations

from typing import Any

import numpy as np

import tensorgrad as tg
from minitorch.autodiff import function
from minitorch.tensor import rand, tensor
from minitorch.tensor_functions import integer

__all__ = [
    "GELU", "Max", "argmax", "avgpool2d", "dropout", "layer_norm", "logsoftmax", "logsumexp", "max",
    "maxpool2d", "one_hot", "softmax", "softmax_loss", "tile",
]  # fmt: skip


def tile(input: Any, kernel: tuple[int, int]) -> tuple[Any, int, int]:
    """Return (B, C, H / I, W / J, I J) of (B, C, H, W) and a kernel (I, J); H / I; and W / J."""
    batch, channel, height, width = input.shape
    rows, columns = height // kernel[0], width // kernel[1]
    x = input.view(batch, channel, rows, kernel[0], columns, kernel[1]).permute(0, 1, 2, 4, 3, 5)
    return x.view(batch, channel, rows, columns, kernel[0] * kernel[1]), rows, columns


def avgpool2d(input: Any, kernel: tuple[int, int]) -> Any:
    """Return the mean of each tile, (B, C, H / I, W / J) of (B, C, H, W) and a kernel (I, J)."""
    x, rows, columns = tile(input, kernel)
    return x.mean(dim=4).view(*input.shape[:2], rows, columns)


def maxpool2d(input: Any, kernel: tuple[int, int]) -> Any:
    """Return the maximum of each tile, (B, C, H / I, W / J) of (B, C, H, W) and a kernel (I, J)."""
    x, rows, columns = tile(input, kernel)
    return max(x, 4).view(*input.shape[:2], rows, columns)


def argmax(input: Any, dim: int) -> Any:
    """Return 1.0 at the maxima of an axis, otherwise 0.0."""
    return input.detach() == input.f.max_reduce(input, dim)


class _EqualMaxima(tg.Function):
    """The maximum of an axis, whose gradient goes whole to each of several equal maxima."""

    @staticmethod
    def forward(ctx: Any, x: tg.Tensor, dim: int) -> tg.Tensor:
        y = x.max(axis=dim, keepdims=True)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: tg.Tensor) -> tuple[tg.Tensor, None]:
        x, y = ctx.saved_tensors
        return tg.where(x == y, dy, 0), None


# Over an axis `dim`, which stays with length 1 where it is reduced.
Max = function(lambda a, dim: _EqualMaxima.apply(a, integer(dim)))
max = Max.apply
softmax = function(lambda a, dim: tg.softmax(a, axis=integer(dim))).apply
logsoftmax = function(lambda a, dim: tg.log_softmax(a, axis=integer(dim))).apply
logsumexp = function(lambda a, dim: tg.logsumexp(a, axis=integer(dim), keepdims=True)).apply

GELU = function(lambda a: tg.gelu(a, approximate="tanh")).apply
layer_norm = function(lambda a, eps=1e-5: tg.layer_norm(a, eps=eps)).apply  # over the last axis

# The cross-entropy of each row, (B,), of logits (B, C) and targets (B,).
softmax_loss = function(
    lambda logits, target: tg.cross_entropy(logits, target.astype(np.int64), reduction="none")
).apply


def dropout(input: Any, rate: float, ignore: bool = False) -> Any:
    """Return x with elements set to 0 with probability `rate`; the others are not scaled."""
    return input if ignore else input * (rand(input.shape, input.backend).detach() > rate)


def one_hot(input: Any, num_classes: int) -> Any:
    """Return for each index a row of zeros with a one at its position."""
    rows = tg.one_hot(input.value.astype(np.int64), num_classes)
    return tensor(rows.numpy(), input.backend)
