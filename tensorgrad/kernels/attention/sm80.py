"""Attention on tensor cores of compute capability 8.0 and later, with a positive scale.

Arrays have 16 bits or, with the option `tf32`, are float32.

Launches attention/forward_sm80.cu and attention/backward_sm80.cu. The tiles of each head width fit
the registers, and the 99 kB of shared memory that all these GPUs have; the fastest ones were
measured on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import c_name, float32
from tensorgrad.kernels.attention.arguments import blocks, option_arguments, readable, row_sums
from tensorgrad.kernels.attention.options import Arrays, AttentionOptions, ForwardPass, empty_result
from tensorgrad.kernels.device import capability
from tensorgrad.kernels.loader import load

_FORWARD, _BACKWARD = "attention/forward_sm80.cu", "attention/backward_sm80.cu"
_THREADS = 128
# By head width, padded with zeros: units of 64 rows of a block, and columns of a tile. For 16 bits
# and for TF32, which is not measured yet.
Tiles = tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]
_FORWARD_TILES: Tiles = (
    {32: (2, 64), 64: (2, 64), 96: (2, 32), 128: (2, 32), 256: (1, 32)},
    {64: (2, 32), 128: (2, 16)},
)
_BACKWARD_TF32_TILES = {64: (2, 16), 128: (1, 16)}
_KEYS_TILES: Tiles = (
    {32: (2, 32), 64: (1, 64), 96: (1, 64), 128: (1, 32), 256: (1, 16)},
    _BACKWARD_TF32_TILES,
)
_QUERIES_TILES: Tiles = (
    {32: (2, 32), 64: (2, 32), 96: (2, 32), 128: (2, 16), 256: (1, 16)},
    _BACKWARD_TF32_TILES,
)


def supports(arrays: Arrays, options: AttentionOptions) -> bool:
    """Whether the kernels are for this GPU, for these arrays and these options."""
    q = arrays[0]
    fit = (q.itemsize == 2 or options.tf32) and q.shape[3] <= max(_FORWARD_TILES[q.itemsize != 2])
    return fit and options.scale > 0 and capability(q.device.id) >= 80


def forward(arrays: Arrays, options: AttentionOptions) -> tuple[Array, Array]:
    """Return the result, in the memory order of (B, T, H, D), and the logsumexp."""
    q, k, v = (readable(array) for array in arrays)
    y = empty_result(q, q.dtype)
    logsumexp = backend.empty(q.shape[:3], float32, like=q)
    width, units, columns = tiles_for(q, _FORWARD_TILES)
    load(_FORWARD, f"attention_forward<{c_name(q.dtype)}, {width}, {units}, {columns}>")(
        (blocks(q, 64 * units, options),),
        (_THREADS,),
        (y, logsumexp, q, k, v, *option_arguments((q, k, v), y, options)),
        shared_memory(q, width, 64 * units, 2 * columns),
    )
    return y, logsumexp


def backward(dy: Array, done: ForwardPass, gradients: Sequence[Array]) -> None:
    """Write the gradients, of the dtype of q."""
    q, k, v = (readable(array) for array in done[:3])
    dy = readable(dy.astype(q.dtype, copy=False))
    dq, dk, dv = gradients
    sums = row_sums(dy, done.y, done.logsumexp)
    last = option_arguments((q, k, v), dy, done.options, gradients)
    for of_keys, table, results, rows, others in (
        (True, _KEYS_TILES, (dk, dv), (k, v), (q, dy)),
        (False, _QUERIES_TILES, (dq, dq), (q, dy), (k, v)),
    ):
        width, units, columns = tiles_for(q, table)
        types = f"{c_name(q.dtype)}, {width}, {units}, {columns}, {str(of_keys).lower()}"
        count = blocks(rows[0], 64 * units, done.options, of_keys)
        load(_BACKWARD, f"attention_backward<{types}>")(
            (count, 1 if width <= 128 else 2) if of_keys else (count,),
            (_THREADS,),
            (*results, sums, *rows, *others, *last),
            shared_memory(q, width, 2 * 64 * units, 2 * columns),
        )


def tiles_for(q: Array, tiles: Tiles) -> tuple[int, int, int]:
    """Return the padded head width, the units of rows, and the columns."""
    table = tiles[q.itemsize != 2]
    width = next(width for width in table if width >= q.shape[3])
    return (width, *table[width])


def shared_memory(q: Array, width: int, rows: int, columns: int) -> int:
    """Return the bytes of the tiles of rows, and of two stages of tiles of columns."""
    return (rows + 2 * columns) * (width * int(q.itemsize) + 16)
