"""Pooling, softmax, GELU and the loss."""

from __future__ import annotations

from typing import Any

import numpy as np

import tensorgrad as tg
from minitorch.tensor_functions import Computed, integer, rand, tensor_from_numpy

__all__ = [
    "GELU",
    "Max",
    "argmax",
    "avgpool2d",
    "dropout",
    "layer_norm",
    "logsoftmax",
    "logsumexp",
    "max",
    "maxpool2d",
    "one_hot",
    "softmax",
    "softmax_loss",
    "tile",
]


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


class Max(Computed):
    """The maximum over an axis, which stays with length 1."""

    compute = staticmethod(lambda a, dim: _EqualMaxima.apply(a, integer(dim)))


def max(input: Any, dim: Any) -> Any:
    """Return the maximum over an axis, which stays with length 1."""
    return Max.apply(input, dim)


class _Softmax(Computed):
    compute = staticmethod(lambda a, dim: tg.softmax(a, axis=integer(dim)))


class _LogSoftmax(Computed):
    compute = staticmethod(lambda a, dim: tg.log_softmax(a, axis=integer(dim)))


class _LogSumExp(Computed):
    compute = staticmethod(lambda a, dim: tg.logsumexp(a, axis=integer(dim), keepdims=True))


class _GELU(Computed):
    compute = staticmethod(lambda a: tg.gelu(a, approximate="tanh"))


class _Normalised(Computed):
    compute = staticmethod(lambda a, eps: tg.layer_norm(a, eps=eps))


class _SoftmaxLoss(Computed):
    compute = staticmethod(
        lambda logits, target: tg.cross_entropy(logits, target.astype(np.int64), reduction="none")
    )


def softmax(input: Any, dim: Any) -> Any:
    """Return exp(x) over its sum along an axis."""
    return _Softmax.apply(input, dim)


def logsoftmax(input: Any, dim: Any) -> Any:
    """Return the logarithm of the softmax along an axis."""
    return _LogSoftmax.apply(input, dim)


def logsumexp(input: Any, dim: Any) -> Any:
    """Return log(sum(exp(x))) over an axis, which stays with length 1."""
    return _LogSumExp.apply(input, dim)


def GELU(input: Any) -> Any:
    """Return GELU(x), by its approximation with tanh."""
    return _GELU.apply(input)


def layer_norm(input: Any, eps: float = 1e-5) -> Any:
    """Return x normalised over its last axis."""
    return _Normalised.apply(input, eps)


def dropout(input: Any, rate: float, ignore: bool = False) -> Any:
    """Return x with elements set to 0 with probability `rate`; the others are not scaled."""
    return input if ignore else input * (rand(input.shape, input.backend).detach() > rate)


def one_hot(input: Any, num_classes: int) -> Any:
    """Return for each index a row of zeros with a one at its position."""
    rows = tg.one_hot(input.value.astype(np.int64), num_classes)
    return tensor_from_numpy(rows.numpy(), backend=input.backend)


def softmax_loss(logits: Any, target: Any) -> Any:
    """Return the cross-entropy of each row, (B,), of logits (B, C) and targets (B,)."""
    return _SoftmaxLoss.apply(logits, target)
