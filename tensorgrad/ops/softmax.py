"""Softmax and its logarithm along an axis. Kernels: kernels/softmax.cu.

Both subtract the maximum first, so that no exponential overflows. 16-bit floats are computed in
float32 and rounded once. An axis whose values are all -inf gives NaN, as in PyTorch, but 0 under a
mask. Tests: tests/ops/test_softmax.py.
"""

from __future__ import annotations

from typing import Any, Never, SupportsIndex

import numpy as np

from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.backend import Array, upcast
from tensorgrad.core.checks import axis_index
from tensorgrad.core.dtypes import DtypeLike, compute_dtype
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.operands import tensor_of
from tensorgrad.core.record import record
from tensorgrad.core.signature import Float, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.kernels.softmax import backward as _backward_cuda
from tensorgrad.kernels.softmax import forward as _forward_cuda
from tensorgrad.ops.arguments import broadcast, mask_operand
from tensorgrad.ops.elementwise import exp
from tensorgrad.ops.reduce import sum as reduce_sum
from tensorgrad.ops.shape import astype

__all__ = ["log_softmax", "softmax"]

takes = Signatures(globals())


def softmax(
    x: Float[ArrayLike, "..."],
    axis: SupportsIndex = -1,
    *,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
    dtype: DtypeLike | None = None,
    **unknown: Never,
) -> Tensor:
    """Return numbers that are positive and sum to 1 along an axis; 0 where a mask excludes.

    y_i = exp(z_i) / sum_j exp(z_j), z = scale * x + mask

    Args:
        x: any shape with at least one axis, any float dtype.
        axis: where the sum runs.
        scale: factor on x; default 1.
        mask: broadcastable to x; bool, False where x is excluded, or float, added. Views with
            strides are read in place, so a mask of padding costs no memory of the size of x.
        causal: x is (..., Tq, Tk) and query i attends to the keys up to i + Tk - Tq.
        dtype: to convert x to first.

    Returns:
        The shape and dtype of x; 0 where all of an axis is masked.

    Raises:
        DtypeError: x does not hold floats.
        DtypeError: mask is neither bool nor float.
        ArgumentError: x has no such axis, or causal with an axis that is not the last.
        ShapeError: mask does not broadcast to x, or causal without two axes.
        DeviceError: the arguments are on different devices.
        GradError: mask requires a gradient.

    Example:
        >>> tg.softmax([[0.0, 0.0]]).tolist()
        [[0.5, 0.5]]
        >>> tg.softmax([[1.0, 2.0, 3.0]], mask=[[True, False, False]]).tolist()
        [[1.0, 0.0, 0.0]]
    """
    op = "softmax"
    if dtype is not None:
        x = astype(x, dtype, copy=False)
    elif mask is not None:
        x = tensor_of(op, "x", x, mask)  # a literal takes its dtype with the mask
    (x,) = takes.softmax(x, scale, causal, unknown)
    place = axis_index(op, axis, x.data.ndim)
    if causal and x.ndim < 2:
        raise ShapeError(f"{op}: x has shape {x.shape}, expected (..., Tq, Tk) for causal")
    if causal and place != x.ndim - 1:
        raise ArgumentError(f"{op}: axis is {place}, expected {x.ndim - 1} (the last) for causal")
    if mask is not None:
        mask = _swapped(broadcast(op, "mask", mask_operand(op, mask, "x", x.data), x.shape), place)
    return _run(op, x, place, 1.0 if scale is None else float(scale), mask, causal)


def log_softmax(
    x: Float[ArrayLike, "..."],
    axis: SupportsIndex = -1,
    *,
    dtype: DtypeLike | None = None,
    **unknown: Never,
) -> Tensor:
    """Return the logarithm of `softmax`, accurate where that is close to 0.

    y_i = x_i - log(sum_j exp(x_j))

    Args:
        x: any shape with at least one axis, any float dtype.
        axis: where the sum runs.
        dtype: to convert x to first.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.
        ArgumentError: x has no such axis.

    Example:
        >>> tg.log_softmax([0.0, 0.0]).tolist()
        [-0.693..., -0.693...]
    """
    if dtype is not None:
        x = astype(x, dtype, copy=False)
    (x,) = takes.log_softmax(x, unknown)
    return _run("log_softmax", x, axis_index("log_softmax", axis, x.data.ndim), logarithm=True)


def _run(
    op: str,
    x: Tensor,
    axis: int,
    scale: float = 1.0,
    mask: Array | None = None,
    causal: bool = False,
    logarithm: bool = False,
) -> Tensor:
    """Return softmax or its logarithm; the mask has the shape of x with the axis moved last."""
    forward = _forward_numpy if type(x.data) is np.ndarray else _forward_cuda
    y = _swapped(forward(_swapped(x.data, axis), scale, mask, causal, logarithm), axis)
    return record(op, y, (x,), _backward, (y, axis, scale, logarithm))


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    y, axis, scale, logarithm = saved
    backward = _backward_numpy if type(dy) is np.ndarray else _backward_cuda
    dx = backward(_swapped(dy, axis), _swapped(y, axis), scale, logarithm)
    return (_swapped(dx, axis),)


@tangent_of(_backward)
def _tangent(op: Op, t: Tensor) -> Tensor:
    y, axis, scale, logarithm = op.saved
    y = op.output(y)
    wide = astype(y, compute_dtype(y.dtype), copy=False)
    if logarithm:
        return t - reduce_sum(exp(wide) * t, axis, keepdims=True)
    moved: Tensor = wide * (t - reduce_sum(wide * t, axis, keepdims=True)) * scale
    return moved


def _swapped(x: Array, axis: int) -> Array:
    """Return x with an axis and the last one exchanged: x itself where it is the last."""
    return x if axis == x.ndim - 1 else x.swapaxes(axis, -1)


def _forward_numpy(
    x: Array, scale: float, mask: Array | None, causal: bool, logarithm: bool
) -> Array:
    if not x.size:
        return np.empty_like(x)
    masked = mask is not None or causal
    wide = _scores(upcast(x), scale, mask, causal)
    y = np.empty(x.shape, wide.dtype)
    width = x.shape[-1]
    rows, out_rows = wide.reshape(-1, width), y.reshape(-1, width)

    def run(piece: slice) -> None:
        out = out_rows[piece]
        peak = rows[piece].max(-1, keepdims=True)
        if masked:
            peak[peak == -np.inf] = 0  # all is masked: all exponentials become 0
        np.subtract(rows[piece], peak, out=out)
        if logarithm:
            out -= np.log(np.exp(out).sum(-1, keepdims=True))
        else:
            np.exp(out, out=out)
            total = out.sum(-1, keepdims=True)
            if masked:
                total[total == 0] = 1
            out /= total

    backend.parallel_blocks(run, len(rows), max(1, backend.BLOCK // width))
    return y.astype(x.dtype, copy=False)


def _scores(x: Array, scale: float, mask: Array | None, causal: bool) -> Array:
    """Return scale * x + mask, -inf where excluded."""
    if scale != 1:
        x = x * x.dtype.type(scale)
    if mask is not None:
        x = np.where(mask, x, -np.inf) if mask.dtype == np.bool_ else x + mask.astype(x.dtype)
    if causal:
        queries, keys = x.shape[-2:]
        x = np.where(np.tri(queries, keys, keys - queries, dtype=bool), x, -np.inf)
    return x


def _backward_numpy(dy: Array, y: Array, scale: float, logarithm: bool) -> Array:
    if not dy.size:
        return dy
    wide_dy, wide_y = upcast(dy), upcast(y)
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
            if scale != 1:
                out *= scale

    backend.parallel_blocks(run, len(dy_rows), max(1, backend.BLOCK // width))
    return dx
