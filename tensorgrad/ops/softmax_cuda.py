"""Launches of kernels/softmax.cu."""

from __future__ import annotations

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import c_name, float64
from tensorgrad.kernels.loader import load
from tensorgrad.ops.rows_cuda import Layout, aligned, held


def forward(x: Array, logarithm: bool) -> Array:
    """Return softmax or log_softmax of the last axis."""
    x = backend.contiguous(x)
    y = backend.empty_like(x)
    if not x.size:
        return y
    width = x.shape[-1]
    rows = x.size // width
    layout = _held(x, y)
    if layout is not None:
        load("softmax.cu", f"softmax_forward_rows<{c_name(x.dtype)}, {layout.vectors}>")(
            layout.grid(rows),
            layout.block,
            (y, x, np.int64(rows), np.int32(width), np.bool_(logarithm)),
        )
    else:
        load("softmax.cu", f"softmax_forward_loop<{c_name(x.dtype)}>")(
            (rows,), _block(x), (y, x, np.int32(width), np.bool_(logarithm))
        )
    return y


def backward(dy: Array, y: Array, logarithm: bool) -> Array:
    """Return dx of the last axis."""
    dy, y = backend.contiguous(dy), backend.contiguous(y)
    dx = backend.empty_like(dy)
    if not dx.size:
        return dx
    width = dx.shape[-1]
    rows = dx.size // width
    layout = _held(dx, dy, y)
    if layout is not None:
        load("softmax.cu", f"softmax_backward_rows<{c_name(y.dtype)}, {layout.vectors}>")(
            layout.grid(rows),
            layout.block,
            (dx, dy, y, np.int64(rows), np.int32(width), np.bool_(logarithm)),
        )
    else:
        load("softmax.cu", f"softmax_backward_loop<{c_name(y.dtype)}>")(
            (rows,), _block(dx), (dx, dy, y, np.int32(width), np.bool_(logarithm))
        )
    return dx


def _held(*arrays: Array) -> Layout | None:
    """Return how rows are held in registers; None where they have to be gone through twice."""
    first = arrays[0]
    width = first.shape[-1]
    if first.dtype == float64 or not aligned(width, *arrays):
        return None
    return held(width * first.itemsize, (1, 2, 4), lanes=32, threads=64, most=256)


def _block(x: Array) -> tuple[int]:
    """Return threads for one row: whole warps, about four vectors each."""
    return (min(512, max(32, -(-x.shape[-1] * x.itemsize // 2048) * 32)),)
