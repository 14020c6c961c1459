"""Additions to rows by index: launches indexing.cu.

A radix sort orders the indices, so that the rows of one index are added in order, by windows of 32
of them. A second kernel joins the sums of an index that spans windows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import c_name, compute_dtype, int32, int64, uint32
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.structs import NULL

_WINDOW = 32  # the kernels' constant
_SORT_THREADS = 1024  # the kernels' constant
_SORT_BLOCKS = 128  # at most, as each reads the counts of all
_DIGIT_BITS = 8
_WIDEST = 65535 * 32  # columns of a launch: at most 65535 blocks, some as wide as a warp


def add_rows_cuda(total: Array, rows: Array, values: Array) -> None:
    """Compute total[rows[i]] += values[i] for every i, in order.

    Args:
        total: (n, C), C-contiguous, float32 or float64.
        rows: (m,) integers; what is not in 0 to n - 1 is skipped.
        values: (m, C), any float dtype.
    """
    height, width = total.shape
    if not values.size or not height:
        return
    if width > _WIDEST:
        for start in range(0, width, _WIDEST):
            piece = slice(start, start + _WIDEST)
            part = backend.contiguous(total[:, piece])
            add_rows_cuda(part, rows, values[:, piece])
            total[:, piece] = part
        return
    if compute_dtype(values.dtype) != total.dtype:
        values = values.astype(total.dtype)
    values = backend.contiguous(values)
    keys, order = _sorted(rows, height)
    windows = -(-keys.size // _WINDOW)
    heads, tails = (backend.empty((windows, width), total.dtype, like=total) for _ in range(2))
    vector = 16 // values.itemsize
    if width % vector or values.data.ptr % 16 or total.data.ptr % 16:
        vector = 1
    sizes = (np.uint32(keys.size), np.uint32(height), np.int32(width))
    columns = width // vector
    threads = min(256, -(-columns // 32) * 32)
    load("indexing.cu", f"add_rows_window<{c_name(values.dtype)}, {vector}>")(
        (windows, -(-columns // threads)),
        (threads,),
        (total, heads, tails, keys, order, values, *sizes),
    )
    vector = 1 if vector == 1 else 16 // total.itemsize
    load("indexing.cu", f"add_rows_join<{c_name(total.dtype)}, {vector}>")(
        (windows, -(-width // (32 * vector))), (32, 8), (total, heads, tails, keys, *sizes)
    )


def _sorted(rows: Array, height: int) -> tuple[Array, Array]:
    """Return the row numbers in ascending order (others as `height`) and where each was."""
    rows = backend.contiguous(rows)
    if rows.dtype not in (int32, int64):
        rows = rows.astype(int64)
    size = rows.size
    chunk = -(-size // (_SORT_BLOCKS * _SORT_THREADS)) * _SORT_THREADS
    blocks = -(-size // chunk)
    counts, *buffers = (
        backend.empty((n,), uint32, like=rows) for n in (blocks << _DIGIT_BITS, *[size] * 4)
    )
    keys: Array = rows
    order: Any = NULL
    for turn, shift in enumerate(range(0, max(1, height.bit_length()), _DIGIT_BITS)):
        name = c_name(keys.dtype)
        settings = (np.uint32(size), np.uint32(chunk), np.uint32(height), np.int32(shift))
        load("indexing.cu", f"sort_count<{name}>")(
            (blocks,), (_SORT_THREADS,), (counts, keys, *settings)
        )
        sorted_keys, sorted_order = buffers[turn % 2 * 2 : turn % 2 * 2 + 2]
        load("indexing.cu", f"sort_scatter<{name}>")(
            (blocks,), (_SORT_THREADS,), (sorted_keys, sorted_order, keys, order, counts, *settings)
        )
        keys, order = sorted_keys, sorted_order
    return keys, order
