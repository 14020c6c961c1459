"""Arguments of the attention kernels that take every options; see attention/arguments.cuh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import c_name, compute_dtype, float32
from tensorgrad.kernels.attention.options import ALL, Arrays, AttentionOptions, TangentPass
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.structs import (
    NULL,
    AttentionArguments,
    AttentionDropout,
    AttentionTangentArguments,
    Strides,
    address,
    by_value,
    pointer,
)


def readable(array: Array) -> Array:
    """Return the array, copied unless the elements of its last axis are contiguous."""
    contiguous = array.shape[3] == 1 or array.strides[3] == array.itemsize
    return array if contiguous else backend.contiguous(array)


def option_arguments(
    arrays: Arrays, y: Array, options: AttentionOptions, gradients: Sequence[Array] = ()
) -> tuple[Any, ...]:
    """Return the bias, the starts of sequences in q and in k, the sizes, and dropout.

    Args:
        arrays: q, k, v.
        y: the result or, in backward, its gradient.
        options: of the attention.
        gradients: dq, dk, dv, in backward.
    """
    starts = (NULL, NULL)
    if options.sequences is not None:
        starts = options.sequences.q_starts, options.sequences.k_starts
    return pointer(options.bias), *starts, _sizes(arrays, y, options, gradients), _dropout(options)


def _sizes(arrays: Arrays, y: Array, options: AttentionOptions, gradients: Sequence[Array]) -> Any:
    """Return the struct AttentionArguments."""
    q, k, v = arrays
    batch, heads, queries, width = q.shape
    keys, sums = k.shape[2], (heads * queries, queries, 1)
    if options.sequences is not None:
        batch, sums = len(options.sequences.q_starts) - 1, (0, queries, 1)
        queries, keys = options.sequences.longest
    everything = (q, k, v, y, *gradients)
    even = width * q.itemsize % 16 == 0 and all(map(_aligned_rows, everything))
    strides = [_strides(array) for array in everything] + [(0, 0, 0)] * (3 - len(gradients))
    bias = (0,) * 4
    if options.bias is not None:
        bias = tuple(stride // options.bias.itemsize for stride in options.bias.strides)
    by_head = not (options.after == 0 and options.before == ALL)
    factors = (
        options.scale / math.log(2),
        1 / options.scale if options.scale else 0,
        1 / (1 - options.dropout),
    )
    return _struct(
        heads, k.shape[1], queries, keys, width, options.before, options.after, batch, even,
        by_head, *factors, options.scale, 1 - options.dropout, *strides, sums, bias,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _struct(*fields: Any) -> Any:
    return by_value(AttentionArguments(*fields))


def tangent_arguments(tangents: Arrays, y: Array, gradients: Sequence[Array] = ()) -> Any:
    """Return the struct AttentionTangentArguments.

    Args:
        tangents: of q, k and v.
        y: the result of attention.
        gradients: of the tangents, in backward.
    """
    strides = [_strides(array) for array in (*tangents, y, *gradients)]
    return _tangent_struct(*strides, *[(0, 0, 0)] * (3 - len(gradients)))


@lru_cache(maxsize=1024)
def _tangent_struct(*strides: tuple[int, ...]) -> Any:
    return by_value(AttentionTangentArguments(*strides))


def _dropout(options: AttentionOptions) -> Any:
    """Return the struct AttentionDropout."""
    if options.key is None:
        return _no_dropout()
    seed, draw, stream, offset = options.key
    threshold = round((1 - options.dropout) * 2**16)  # the rounding of fill_keep
    return by_value(AttentionDropout(seed, draw, stream, address(offset), threshold))


@cache
def _no_dropout() -> Any:
    return by_value(AttentionDropout(threshold=-1))


def blocks(rows: Array, size: int, options: AttentionOptions, keys: bool = False) -> int:
    """Return the number of blocks of `size` queries, or keys, of all heads of all sequences."""
    batch, heads, length, _ = rows.shape
    if options.sequences is not None:
        batch, length = len(options.sequences.q_starts) - 1, options.sequences.longest[keys]
    return int(-(-length // size) * batch * heads)


def tangent_row_sums(dy: Array, done: TangentPass, tile: int = 0) -> Array:
    """Return the four numbers of the struct TangentStatistics of each query: (B, H, Tq, 4).

    Args:
        dy: the gradient of the tangent.
        done: the arrays of the forward pass.
        tile: the result is (B, H, Tq / tile, 4, tile), padded; 0: (B, H, Tq, 4).
    """
    batch, heads, queries, width = done.y.shape
    pitch = -(-queries // tile) * tile if tile else queries
    result = backend.empty((batch, heads, 4 * pitch), float32, like=dy)
    arrays = done.y, done.ty, dy
    vectors = width * dy.itemsize % 16 == 0 and all(map(_aligned_rows, arrays))
    kernel = f"attention_tangent_rows<{c_name(dy.dtype)}, {tile}>"
    load("attention/tangent_backward_sm80.cu", kernel)(
        (-(-batch * heads * pitch // 32),),
        (256,),
        (result, *arrays, done.logsumexp, done.means,
         *(strides_argument(_strides(array)) for array in arrays),
         *map(np.int32, (batch, heads, queries, width, vectors, pitch))),
    )  # fmt: skip
    return result


def row_sums(dy: Array, y: Array, logsumexp: Array, base: float = 2) -> Array:
    """Return the logsumexp to a base, and dy . y, of each query: (B, H, Tq, 2)."""
    batch, heads, queries, width = y.shape
    result = backend.empty((*logsumexp.shape, 2), compute_dtype(y.dtype), like=y)
    vectors = width * y.itemsize % 16 == 0 and _aligned_rows(y) and _aligned_rows(dy)
    load("attention/simple.cu", f"attention_backward_rows<{c_name(y.dtype)}>")(
        (-(-batch * heads * queries // 32),),
        (256,),
        (result, y, dy, logsumexp, strides_argument(_strides(y)), strides_argument(_strides(dy)),
         *map(np.int32, (batch, heads, queries, width, vectors)), np.float64(1 / math.log(base))),
    )  # fmt: skip
    return result


@lru_cache(maxsize=1024)
def strides_argument(strides: tuple[int, ...]) -> Any:
    """Return the struct Strides of (batch, head, row), in elements."""
    return by_value(Strides(*strides))


def aligned(array: Array) -> bool:
    """Whether rows start at multiples of 16 bytes and are contiguous."""
    return array.strides[3] == array.itemsize and _aligned_rows(array)


def _aligned_rows(array: Array) -> bool:
    """Whether all rows start at multiples of 16 bytes."""
    return array.data.ptr % 16 == 0 and not any(
        stride * array.itemsize % 16 for stride in _strides(array)
    )


def _strides(array: Array) -> tuple[int, ...]:
    """Return the strides of (B, H, T) in elements; 0 for an axis of length 1."""
    size = array.itemsize
    return tuple(
        stride // size if length > 1 else 0
        for length, stride in zip(array.shape[:3], array.strides[:3], strict=True)
    )
