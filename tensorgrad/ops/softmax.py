"""Softmax and its logarithm along an axis. Kernels: kernels/softmax.cu.

Tests: tests/ops/test_softmax.py.

Both subtract the maximum first, so that no exponential overflows. 16-bit floats are computed in
float32 and rounded once. An axis whose values are all -inf gives NaN, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.autograd import record
from tensorgrad.backend import Array
from tensorgrad.ops.operand import axis_index, float_tensor, widened
from tensorgrad.ops.softmax_cuda import backward as _backward_cuda
from tensorgrad.ops.softmax_cuda import forward as _forward_cuda
from tensorgrad.tensor import Tensor

__all__ = ["log_softmax", "softmax"]


def softmax(x: Any, axis: int = -1) -> Tensor:
    """Return numbers that are positive and sum to 1 along an axis.

    y_i = exp(x_i) / sum_j exp(x_j)

    Args:
        x: any shape with at least one axis, any float dtype.
        axis: where the sum runs.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x is not a float.
        ArgumentError: x has no such axis.
    """
    return _run("softmax", x, axis, logarithm=False)


def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """Return the logarithm of `softmax`, accurate where that is close to 0.

    y_i = x_i - log(sum_j exp(x_j))

    Args:
        x: any shape with at least one axis, any float dtype.
        axis: where the sum runs.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x is not a float.
        ArgumentError: x has no such axis.
    """
    return _run("log_softmax", x, axis, logarithm=True)


def _run(op: str, x: Any, axis: int, logarithm: bool) -> Tensor:
    x = float_tensor(op, "x", x)
    axis = axis_index(op, axis, x.ndim)
    forward = _forward_numpy if type(x.data) is np.ndarray else _forward_cuda
    y = forward(x.data.swapaxes(axis, -1), logarithm).swapaxes(axis, -1)
    return record(op, y, (x,), _backward, (y, axis, logarithm))


def _backward(dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]) -> tuple[Array | None]:
    y, axis, logarithm = saved
    backward = _backward_numpy if type(dy) is np.ndarray else _backward_cuda
    return (backward(dy.swapaxes(axis, -1), y.swapaxes(axis, -1), logarithm).swapaxes(axis, -1),)


def _forward_numpy(x: Array, logarithm: bool) -> Array:
    if not x.size:
        return np.empty_like(x)
    wide = widened(x)
    y = np.empty(x.shape, wide.dtype)
    width = x.shape[-1]
    rows, out_rows = wide.reshape(-1, width), y.reshape(-1, width)

    def run(piece: slice) -> None:
        out = out_rows[piece]
        np.subtract(rows[piece], rows[piece].max(-1, keepdims=True), out=out)
        if logarithm:
            out -= np.log(np.exp(out).sum(-1, keepdims=True))
        else:
            np.exp(out, out=out)
            out /= out.sum(-1, keepdims=True)

    backend.parallel_blocks(run, len(rows), max(1, backend.BLOCK // width))
    return y.astype(x.dtype, copy=False)


def _backward_numpy(dy: Array, y: Array, logarithm: bool) -> Array:
    if not dy.size:
        return dy
    wide_dy, wide_y = widened(dy), widened(y)
    dx = np.empty(dy.shape, wide_dy.dtype)
    width = dy.shape[-1]
    dy_rows, y_rows, out_rows = (a.reshape(-1, width) for a in (wide_dy, wide_y, dx))

    def run(piece: slice) -> None:
        dy, y, out = dy_rows[piece], y_rows[piece], out_rows[piece]
        if logarithm:
            np.exp(y, out=out)
            out *= -dy.sum(-1, keepdims=True)
            out += dy
        else:
            np.subtract(dy, np.vecdot(dy, y)[:, None], out=out)
            out *= y

    backend.parallel_blocks(run, len(dy_rows), max(1, backend.BLOCK // width))
    return dx
