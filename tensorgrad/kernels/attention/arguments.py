"""Arguments of attention's kernels: the structs of attention/arguments.cuh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import c_name, compute_dtype
from tensorgrad.kernels.attention.options import ALL, Arrays, AttentionOptions
from tensorgrad.kernels.loader import NULL, by_value, load, pointer

_STRIDES = np.dtype([(name, "i8") for name in ("batch", "head", "row")])
_PROBLEM = np.dtype(
    [
        (name, "i4")
        for name in ("heads", "kv_heads", "queries", "keys", "width", "before", "after",
                     "sequences", "aligned", "by_head")
    ]
    + [(name, "f4") for name in ("slope", "inverse", "spared")]
    + [("padding", "i4"), ("scale", "f8"), ("kept", "f8")]
    + [(name, _STRIDES) for name in ("q", "k", "v", "y", "dq", "dk", "dv", "sums")]
    + [("bias", "i8", (4,))]
)  # fmt: skip
_DROPOUT = np.dtype(
    [(name, "u8") for name in ("seed", "draw", "stream", "offset")] + [("threshold", "i8")]
)


def readable(array: Array) -> Array:
    """Return the array with the elements of its last axis beside each other."""
    beside = array.shape[3] == 1 or array.strides[3] == array.itemsize
    return array if beside else backend.contiguous(array)


def problem(
    arrays: Arrays, y: Array, options: AttentionOptions, gradients: Sequence[Array] = ()
) -> Any:
    """Return the struct Problem; y is the result or its gradient."""
    q, k, v = arrays
    batch, heads, queries, width = q.shape
    keys, sums = k.shape[2], (heads * queries, queries, 1)
    if options.sequences is not None:
        batch, sums = len(options.sequences.q_starts) - 1, (0, queries, 1)
        queries, keys = options.sequences.longest
    everything = (q, k, v, y, *gradients)
    even = width * q.itemsize % 16 == 0 and all(map(_aligned, everything))
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
        by_head, *factors, 0, options.scale, 1 - options.dropout, *strides, sums, bias,
    )  # fmt: skip


def rest(options: AttentionOptions) -> tuple[Any, Any, Any]:
    """Return the bias and the starts of the sequences, null where there are none."""
    bias = pointer(options.bias)
    if options.sequences is None:
        return bias, NULL, NULL
    return bias, options.sequences.q_starts, options.sequences.k_starts


def dropout(options: AttentionOptions) -> Any:
    """Return the struct Dropout."""
    if options.key is None:
        return _no_dropout()
    seed, draw, stream, offset = options.key
    pointer = 0 if offset is None else offset.data.ptr
    threshold = round((1 - options.dropout) * 2**16)  # as fill_keep rounds it
    return by_value(np.array([(seed, draw, stream, pointer, threshold)], _DROPOUT))


def blocks(rows: Array, size: int, options: AttentionOptions, keys: bool = False) -> int:
    """Return how many blocks of so many queries, or keys, all heads of all sequences have."""
    batch, heads, length, _ = rows.shape
    if options.sequences is not None:
        batch, length = len(options.sequences.q_starts) - 1, options.sequences.longest[keys]
    return int(-(-length // size) * batch * heads)


def sums(dy: Array, y: Array, logsumexp: Array) -> Array:
    """Return what backward needs of each query, (B, H, Tq, 2)."""
    batch, heads, queries, width = y.shape
    result = backend.empty((*logsumexp.shape, 2), compute_dtype(y.dtype), like=y)
    aligned = width * y.itemsize % 16 == 0 and _aligned(y) and _aligned(dy)
    load("attention/simple.cu", f"attention_backward_rows<{c_name(y.dtype)}>")(
        (-(-batch * heads * queries // 32),),
        (256,),
        (result, y, dy, logsumexp, _struct_strides(_strides(y)), _struct_strides(_strides(dy)),
         *map(np.int32, (batch, heads, queries, width, aligned))),
    )  # fmt: skip
    return result


def aligned(array: Array) -> bool:
    """Whether rows start at multiples of 16 bytes and their elements are beside each other."""
    return array.strides[3] == array.itemsize and _aligned(array)


def _aligned(array: Array) -> bool:
    """Whether all rows start at multiples of 16 bytes."""
    return array.data.ptr % 16 == 0 and not any(
        stride * array.itemsize % 16 for stride in _strides(array)
    )


def _strides(array: Array) -> tuple[int, ...]:
    """Return the strides of (B, H, T) in elements; 0 where there is but one index."""
    size = array.itemsize
    return tuple(
        stride // size if length > 1 else 0
        for length, stride in zip(array.shape[:3], array.strides[:3], strict=True)
    )


@lru_cache(maxsize=1024)
def _struct(*fields: Any) -> Any:
    return by_value(np.array([fields], _PROBLEM))


@lru_cache(maxsize=1024)
def _struct_strides(strides: tuple[int, ...]) -> Any:
    return by_value(np.array([strides], _STRIDES))


@cache
def _no_dropout() -> Any:
    return by_value(np.array([(0, 0, 0, 0, -1)], _DROPOUT))
