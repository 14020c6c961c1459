"""Elements around an array. Tests: tests/ops/test_shape.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from tensorgrad.autograd import record
from tensorgrad.backend import Array, namespace
from tensorgrad.dtypes import compute_dtype, is_float
from tensorgrad.errors import ArgumentError, ShapeError
from tensorgrad.operands import tensor_of
from tensorgrad.ops.indexing import take
from tensorgrad.tensor import Tensor

__all__ = ["pad"]

PadMode = Literal["constant", "edge", "reflect", "symmetric", "wrap"]


def pad(x: Any, pad_width: Any, mode: PadMode = "constant", constant_values: float = 0) -> Tensor:
    """Add elements before and after each axis.

    Args:
        x: any shape and dtype.
        pad_width: n for all sides, (before, after) for all axes, or one such pair for each axis.
        mode: "constant", or "edge", "reflect", "symmetric", "wrap" as in NumPy.
        constant_values: the number to fill with, in mode "constant".

    Raises:
        ArgumentError: a width is negative or no integer, or the mode is unknown.
        ShapeError: pad_width does not fit the number of axes.
    """
    y = tensor_of("pad", "x", x)
    widths = _pad_pairs(pad_width, y.data.ndim)
    if mode == "constant":
        return _pad_constant(y, widths, constant_values)
    if mode not in get_args(PadMode):
        raise ArgumentError(f"pad: mode is {mode!r}, expected one of {get_args(PadMode)}")
    for axis, width in enumerate(widths):
        if width != (0, 0):
            if y.data.shape[axis] == 0:
                raise ShapeError(f"pad: axis {axis} of x is empty, expected elements to {mode}")
            y = take(y, np.pad(np.arange(y.data.shape[axis]), width, mode), axis)
    return y


def _pad_pairs(pad_width: Any, ndim: int) -> list[tuple[int, int]]:
    """Return (before, after) for each axis."""
    try:
        widths = np.asarray(pad_width)
        pairs = np.broadcast_to(widths, (ndim, 2)).tolist()
    except ValueError as error:
        raise ShapeError(
            f"pad: pad_width is {pad_width!r}, expected n, (before, after) or {ndim} such pairs"
        ) from error
    if widths.size and (widths.dtype.kind not in "iu" or (widths < 0).any()):
        raise ArgumentError(f"pad: pad_width is {pad_width!r}, expected integers of 0 or more")
    return [(before, after) for before, after in pairs]


def _pad_constant(x: Tensor, widths: list[tuple[int, int]], value: float) -> Tensor:
    data = x.data
    lengths = [b + n + a for (b, a), n in zip(widths, data.shape, strict=True)]
    inner = tuple([slice(b, b + n) for (b, _), n in zip(widths, data.shape, strict=True)])
    if not is_float(data.dtype) and isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(f"pad: constant_values is {value}, expected a number of {data.dtype}")
    try:
        y = namespace(data).full(lengths, value, compute_dtype(data.dtype))
    except (ValueError, TypeError, OverflowError) as error:
        raise ArgumentError(
            f"pad: constant_values is {value!r}, expected a number of {data.dtype}: {error}"
        ) from error
    y = y.astype(data.dtype, copy=False)
    y[inner] = data
    return record("pad", y, (x,), _pad_backward, (inner,))


def _pad_backward(
    dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]
) -> tuple[Array | None, ...]:
    (inner,) = saved
    return (dy[inner],)
