"""Attention of one new token a sequence against its cache: launches decode.cu."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import bfloat16, c_name, float16, float32
from tensorgrad.kernels import overlap
from tensorgrad.kernels.attention.options import ALL
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.rows import power_of_two
from tensorgrad.kernels.structs import NULL, DecodeAttentionArguments, by_value

_FILE = "attention/decode.cu"
_PART, _TOGETHER, _THREADS, _LEAST = 8, 4, 128, 3  # the kernels' constants; threads of four warps
_SHORT = 1024  # keys: of caches that eight warps take
_PROCESSORS = 132  # SMs of an H200; results do not depend on the chip


def supports(like: Array, width: int) -> bool:
    """Whether the kernels do this dtype and heads of this width."""
    return like.dtype in (float32, float16, bfloat16) and width <= 32 * _PART


def forward(
    y: Array,
    qkv: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    window: int | None,
    angles: tuple[Array, Array] | None,
    interleaved: bool,
    arrived: Array | None,
) -> None:
    """Do as `attend`, into y. All but keys and values are contiguous.

    Args:
        arrived: counters, uint32 (B * H or more), all 0 before and after; None makes new ones.
    """
    batch, kv_heads, steps, width = keys.shape
    heads = qkv.shape[1] // width - 2 * kv_heads
    if arrived is None:
        arrived = backend.cupy.zeros(batch * heads, np.uint32)
    aligned = width % _PART == 0 and all(
        array.data.ptr % 16 == 0 and all(s * array.itemsize % 16 == 0 for s in _strides(array))
        for array in (keys, values)
    )
    plain = not aligned or qkv.itemsize > 2 or width > 128
    seen = steps if window is None else min(steps, window)
    split = _split(batch, heads, kv_heads, seen, width, plain)
    parts = backend.empty((batch * heads * split.splits, width), float32, like=qkv)
    sums = backend.empty((len(parts), 2), float32, like=qkv)
    cosines, sines = (NULL, NULL) if angles is None else angles
    sizes = DecodeAttentionArguments(
        _strides(keys), _strides(values), heads, kv_heads, width, ALL if window is None else window,
        interleaved, 1 / (math.sqrt(width) * math.log(2)),
    )  # fmt: skip
    arguments: tuple[Any, ...] = (
        y, keys, values, qkv, parts, sums, arrived, lengths, cosines, sines, by_value(sizes),
    )  # fmt: skip
    name = c_name(qkv.dtype)
    kernel = f"decode_attention<{name}, {-(-width // 64)}, {split.warps}>"
    if plain:
        kernel = f"decode_attention_plain<{name}>"
        arguments = (*arguments, np.int32(split.lanes), np.int32(aligned))
    overlap.launch(
        load(_FILE, kernel), (split.splits, split.across, batch), (32 * split.warps,), arguments,
        prefetch=(*(angles or ()), lengths, keys, values), writes=(y, keys, values),
        trigger_early=True,
    )  # fmt: skip


class _GridOfSplits(NamedTuple):
    """How attention is split among blocks (split-K).

    The grid, threads that share a key in the plain kernel, and warps of a block.
    """

    splits: int
    across: int
    lanes: int
    warps: int


@lru_cache(maxsize=1024)
def _split(
    batch: int, heads: int, kv_heads: int, seen: int, width: int, plain: bool
) -> _GridOfSplits:
    """Return the split for caches of which `seen` keys may be attended to."""
    lanes = power_of_two(max(1, -(-width // _PART)))
    # Query heads of a block, keys that it loads at a time, blocks that fill an SM.
    most, step, busy = (8, 128, 4) if width <= 64 else (8, 64, 2)
    if plain:
        most, step, busy = 4, _THREADS // lanes * _TOGETHER, 3
    across = kv_heads * -(-heads // kv_heads // most)
    warps = 4
    if not plain and seen <= _SHORT and batch * across <= _PROCESSORS:
        warps, step, busy = 8, 2 * step, 1
    splits = _splits(batch * across, -(-seen // (_LEAST * step)), _PROCESSORS * busy)
    return _GridOfSplits(splits, across, lanes, warps)


def _splits(pairs: int, most: int, blocks: int) -> int:
    """Return the least number of splits that keeps nearly as many blocks busy as any other."""

    def busy(splits: int) -> float:
        turns = pairs * splits / blocks
        return turns / math.ceil(turns)

    best = max(map(busy, range(1, most + 1)))
    return next(splits for splits in range(1, most + 1) if busy(splits) >= 0.95 * best)


def _strides(array: Array) -> tuple[int, ...]:
    """Return the strides of (B, heads, steps) in elements."""
    return tuple(stride // array.itemsize for stride in array.strides[:3])
