"""The tangent of attention on Hopper with wgmma and TMA, and its backward.

Launches attention/tangent_sm90.cu for heads up to 128, which TMA pads with zeros to 64 or 128.
Bias, dropout and sequences of unequal length are left to `tangent_sm80`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import float32
from tensorgrad.kernels.attention.arguments import tangent_row_sums
from tensorgrad.kernels.attention.options import Arrays, AttentionOptions, TangentPass, empty_result
from tensorgrad.kernels.attention.sm90 import SHARED, boxes, launches_of, readable, strides_argument
from tensorgrad.kernels.counter import counter
from tensorgrad.kernels.device import capability
from tensorgrad.kernels.structs import NULL, number, pointer

_FILE = "attention/tangent_sm90.cu"
_STATISTICS = 32  # queries whose statistics lie together: the columns of a tile of queries
# By what a launch computes and head width: warpgroups of 64 rows in a block, columns of a tile.
_TILES = {
    "TANGENT": {64: (3, 64), 128: (2, 64)},
    "QUERIES": {64: (2, 64), 128: (2, 32)},
    "BOTH": {64: (2, 32)},
    "KEYS": {128: (2, 32)},
    "VALUES": {128: (2, 32)},
}


def supports(arrays: Arrays, options: AttentionOptions) -> bool:
    """Whether the kernels are for this GPU, for these arrays and these options."""
    q = arrays[0]
    plain = options.bias is None and options.key is None and options.sequences is None
    fit = q.itemsize == 2 and q.shape[3] % 8 == 0 and 32 < q.shape[3] <= 128
    fit = fit and plain and options.scale > 0 and options.rotation is None
    return fit and capability(q.device.id) == 90


def forward(
    arrays: Arrays, y: Array, logsumexp: Array, tangents: Arrays, options: AttentionOptions
) -> tuple[Array, Array]:
    """Return the tangent of the result, and the means; see `tangent.forward`."""
    q, k, v = [readable(array) for array in arrays]
    tq, tk, tv = [readable(array) for array in tangents]
    y = readable(y)
    ty = empty_result(q, q.dtype)
    means = backend.empty(q.shape[:3], float32, like=q)
    statistics = means, y, logsumexp, NULL
    _launch("TANGENT", (ty, None, None, None), statistics, (q, tq, q), (k, tk, v), tv, options)
    return ty, means


def backward(dy: Array, done: TangentPass, gradients: Sequence[Array | None]) -> None:
    """Write the gradients of q, k, v, tq, tk and tv; see `tangent.backward`."""
    q, k, v, tq, tk, tv = [readable(array) for array in (*done[:3], *done[5:8])]
    dy = readable(dy.astype(q.dtype, copy=False))
    y, ty = readable(done.y), readable(done.ty)
    sums = tangent_row_sums(dy, done._replace(y=y, ty=ty), _STATISTICS)
    statistics = NULL, dy, NULL, sums
    dq, dk, dv, dtq, dtk, dtv = gradients
    of_keys = (dk, dtk, dv, dtv), statistics, (k, tk, v), (q, tq, dy), tv, done.options
    for part in ("BOTH",) if q.shape[3] <= 64 else ("KEYS", "VALUES"):
        _launch(part, *of_keys)
    of_queries = (dq, dtq, None, None), statistics, (q, tq, dy), (k, tk, v), tv, done.options
    _launch("QUERIES", *of_queries)


def _launch(
    part: str, results: Sequence[Array | None], statistics: tuple[Any, ...], rows: Arrays,
    columns: Arrays, tv: Array, options: AttentionOptions,
) -> None:  # fmt: skip
    """Launch a kernel with a persistent grid: a block for each SM or tile.

    Args:
        part: what it computes.
        results: the gradients, or the tangent; all of one layout; None: not wanted.
        statistics: the means, y or an array of its shape, the logsumexp, and the row sums.
        rows, columns: q, tq and dy, or k, tk and v.
        tv: beside v.
        options: of the attention.
    """
    like = next((array for array in results if array is not None), None)
    if like is None:
        return
    of_keys = part not in ("TANGENT", "QUERIES")
    q, k = (columns[0], rows[0]) if of_keys else (rows[0], columns[0])
    width = 64 if q.shape[3] <= 64 else 128
    kernel, grid, block, count, struct = launches_of(q, k, options).launch(
        _FILE, "attention_tangent_tiles", width, *_TILES[part][width], part, of_keys=of_keys,
        matrices=3 if of_keys else 4,
    )  # fmt: skip
    pitch = 0 if statistics[3] is NULL else statistics[3].shape[2] // 4
    kernel(
        grid,
        block,
        (*map(pointer, results), *statistics, counter(q), *map(boxes, rows),
         *(boxes(array, count) for array in columns), boxes(tv, 64 if of_keys else count),
         struct, number("i4", pitch), strides_argument(statistics[1]), strides_argument(like)),
        SHARED,
    )  # fmt: skip
