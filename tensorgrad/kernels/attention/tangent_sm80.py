"""The tangent of attention with mma.sync, on compute capability 8.0 and later, and its backward.

Launches attention/tangent_forward_sm80.cu and attention/tangent_backward_sm80.cu. They take all
options that sm80.py takes, with heads up to 128. Arrays have 16 bits or, with the option `tf32`,
are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import c_name, float32
from tensorgrad.kernels.attention.arguments import (
    aligned,
    blocks,
    option_arguments,
    readable,
    tangent_arguments,
    tangent_row_sums,
)
from tensorgrad.kernels.attention.options import Arrays, AttentionOptions, TangentPass, empty_result
from tensorgrad.kernels.attention.sm80 import Tiles, shared_memory, tiles_for
from tensorgrad.kernels.attention.sm80 import supports as attention_supports
from tensorgrad.kernels.device import shared_memory_per_block
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.structs import pointer

_FORWARD, _BACKWARD = "attention/tangent_forward_sm80.cu", "attention/tangent_backward_sm80.cu"
_THREADS = 128
# By head width, padded with zeros: units of 64 rows of a block, and columns of a tile. For 16 bits
# and for TF32.
_FORWARD_TILES: Tiles = (
    {32: (1, 64), 64: (2, 32), 96: (1, 32), 128: (1, 16)},
    {64: (1, 16), 128: (1, 16)},
)
_BACKWARD_TILES: dict[str, Tiles] = {
    "BOTH": ({32: (1, 32), 64: (1, 16)}, {64: (1, 16)}),
    "KEYS": ({96: (1, 32), 128: (1, 16)}, {128: (1, 16)}),
    "VALUES": ({96: (1, 32), 128: (1, 32)}, {128: (1, 16)}),
    "QUERIES": ({32: (1, 32), 64: (1, 32), 96: (1, 32), 128: (1, 16)}, {64: (1, 16), 128: (1, 16)}),
}
# The matrices of which a launch has tiles of rows, and of columns.
_MATRICES = {"BOTH": (4, 3), "KEYS": (4, 3), "VALUES": (2, 3), "QUERIES": (3, 4)}
_ALL_GRADIENTS = 64  # the widest heads of which registers hold the gradients of k, tk, v and tv


def supports(arrays: Arrays, options: AttentionOptions) -> bool:
    """Whether the kernels are for this GPU, for these arrays and these options."""
    q = arrays[0]
    fit = q.shape[3] <= 128 and options.rotation is None and attention_supports(arrays, options)
    return fit and (
        max(_backward_tiles(part, q)[3] for part in _parts(q))
        <= shared_memory_per_block(q.device.id)
    )


def forward(
    arrays: Arrays, y: Array, logsumexp: Array, tangents: Arrays, options: AttentionOptions
) -> tuple[Array, Array]:
    """Return the tangent of the result, and the means; see `tangent.forward`."""
    q, k, v = (readable(array) for array in arrays)
    y, tq, tk, tv = map(_fitting, (y, *tangents))
    ty = empty_result(q, q.dtype)
    means = backend.empty(q.shape[:3], float32, like=q)
    width, units, columns = tiles_for(q, _FORWARD_TILES)
    load(_FORWARD, f"attention_tangent<{c_name(q.dtype)}, {width}, {units}, {columns}>")(
        (blocks(q, 64 * units, options),),
        (_THREADS,),
        (ty, means, y, logsumexp, q, k, v, tq, tk, tv, *option_arguments((q, k, v), ty, options),
         tangent_arguments((tq, tk, tv), y)),
        shared_memory(q, width, 2 * 64 * units, 4 * columns),
    )  # fmt: skip
    return ty, means


def backward(dy: Array, done: TangentPass, gradients: Sequence[Array | None]) -> None:
    """Write the gradients of q, k, v, tq, tk and tv; see `tangent.backward`."""
    q, k, v = (readable(array) for array in done[:3])
    dy = readable(dy.astype(q.dtype, copy=False))
    y, tq, tk, tv, ty = map(_fitting, (done.y, done.tq, done.tk, done.tv, done.ty))
    done = done._replace(q=q, k=k, v=v, y=y, tq=tq, tk=tk, tv=tv, ty=ty)
    options = done.options
    sums = tangent_row_sums(dy, done)
    dq, dk, dv, dtq, dtk, dtv = gradients
    of_keys = (dk, dtk, dv, dtv), (k, tk, v), (q, tq, dy)
    of_queries = (dq, dtq, None, None), (q, tq, dy), (k, tk, v)
    for part in _parts(q):
        results, rows, others = of_queries if part == "QUERIES" else of_keys
        like = next((array for array in results if array is not None), None)
        if like is None:
            continue
        layouts = like, like, like  # all results of a launch have one
        last = (
            *option_arguments((q, k, v), dy, options, layouts),
            tangent_arguments((tq, tk, tv), y, layouts),
        )
        width, units, columns, shared = _backward_tiles(part, q)
        types = f"{c_name(q.dtype)}, {width}, {units}, {columns}, {part}"
        load(_BACKWARD, f"attention_tangent_backward<{types}>")(
            (blocks(rows[0], 64 * units, options, part != "QUERIES"),),
            (_THREADS,),
            (*map(pointer, results), sums, *rows, *others, tv, *last),
            shared,
        )


def _parts(q: Array) -> tuple[str, ...]:
    """Return what the launches of backward compute."""
    return ("BOTH", "QUERIES") if q.shape[3] <= _ALL_GRADIENTS else ("KEYS", "VALUES", "QUERIES")


def _backward_tiles(part: str, q: Array) -> tuple[int, int, int, int]:
    """Return the padded head width, the units of rows, the columns, and the shared memory."""
    width, units, columns = tiles_for(q, _BACKWARD_TILES[part])
    rows_of, columns_of = _MATRICES[part]
    shared = shared_memory(q, width, rows_of * 64 * units, columns_of * columns)
    return width, units, columns, shared


def _fitting(array: Array) -> Array:
    """Return the array, copied unless 16 bytes can be loaded at once wherever a row has them."""
    whole = array.shape[3] * array.itemsize % 16 == 0
    return array if aligned(array) else array.copy() if whole else readable(array)
