"""Launches of kernels/attention/forward_sm80.cu and attention/backward_sm80.cu.

They support all options with a positive scale, on GPUs of compute capability 8.0 and later. Which
tiles serve which widths depends on registers, and on the 99 kB of shared memory that all these GPUs
have; it was measured on an H200.
"""

from __future__ import annotations

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import c_name
from tensorgrad.kernels.attention.arguments import (
    blocks,
    dropout,
    problem,
    readable,
    rest,
    sums,
)
from tensorgrad.kernels.attention.options import Arrays, AttentionOptions, empty_result
from tensorgrad.kernels.device import capability
from tensorgrad.kernels.loader import load

_FORWARD, _BACKWARD = "attention/forward_sm80.cu", "attention/backward_sm80.cu"
_THREADS = 128
# By head width, up to which zeros are added: units of 64 rows a block, and columns met at a time.
_FORWARD_TILES = {32: (2, 64), 64: (2, 64), 96: (2, 32), 128: (2, 32), 256: (1, 32)}
_KEYS_TILES = {32: (2, 32), 64: (1, 64), 96: (1, 64), 128: (1, 32), 256: (1, 16)}
_QUERIES_TILES = {32: (2, 32), 64: (2, 32), 96: (2, 32), 128: (2, 16), 256: (1, 16)}


def supports(arrays: Arrays, options: AttentionOptions) -> bool:
    """Whether the kernels support this GPU, these arrays and these options."""
    q = arrays[0]
    fit = q.itemsize == 2 and q.shape[3] <= max(_FORWARD_TILES) and options.scale > 0
    return fit and capability(q.device.id) >= 80


def forward(arrays: Arrays, options: AttentionOptions) -> tuple[Array, Array]:
    """Return the result, in the memory order of (B, T, H, D), and the logsumexp."""
    q, k, v = (readable(array) for array in arrays)
    y = empty_result(q, q.dtype)
    logsumexp = backend.empty(q.shape[:3], np.dtype(np.float32), like=q)
    width, units, columns = _tiles(_FORWARD_TILES, q)
    load(_FORWARD, f"attention_forward<{c_name(q.dtype)}, {width}, {units}, {columns}>")(
        (blocks(q, 64 * units, options),),
        (_THREADS,),
        (y, logsumexp, q, k, v, *rest(options), problem((q, k, v), y, options), dropout(options)),
        _shared(width, 64 * units, columns),
    )
    return y, logsumexp


def backward(
    dy: Array,
    arrays: Arrays,
    y: Array,
    logsumexp: Array,
    options: AttentionOptions,
    gradients: Arrays,
) -> None:
    """Write the gradients, of the dtype of q."""
    q, k, v = (readable(array) for array in arrays)
    dy = readable(dy.astype(q.dtype, copy=False))
    dq, dk, dv = gradients
    of_queries = sums(dy, y, logsumexp)
    told = (*rest(options), problem((q, k, v), dy, options, gradients), dropout(options))
    width, units, columns = _tiles(_KEYS_TILES, q)
    load(_BACKWARD, f"attention_backward<{c_name(q.dtype)}, {width}, {units}, {columns}, true>")(
        (blocks(k, 64 * units, options, keys=True), 1 if width <= 128 else 2),
        (_THREADS,),
        (dk, dv, of_queries, k, v, q, dy, *told),
        _shared(width, 2 * 64 * units, columns),
    )
    width, units, columns = _tiles(_QUERIES_TILES, q)
    load(_BACKWARD, f"attention_backward<{c_name(q.dtype)}, {width}, {units}, {columns}, false>")(
        (blocks(q, 64 * units, options),),
        (_THREADS,),
        (dq, dq, of_queries, q, dy, k, v, *told),
        _shared(width, 2 * 64 * units, columns),
    )


def _tiles(table: dict[int, tuple[int, int]], q: Array) -> tuple[int, int, int]:
    """Return the width of the tiles, the units of rows, and the columns."""
    width = next(width for width in table if width >= q.shape[3])
    return (width, *table[width])


def _shared(width: int, rows: int, columns: int) -> int:
    """Return the bytes that tiles of so many rows take, and two stages of two tiles of columns."""
    return (rows + 4 * columns) * (width + 8) * 2
