"""Launches of decode.cu and attention/decode.cu: at once, or prepared for a step of generation.

Each function writes its result into an array that is given. All that decides a launch is a shape
or an address, so it can be repeated when what lies there has changed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import bfloat16, c_name, float16, float32
from tensorgrad.kernels.attention.options import ALL
from tensorgrad.kernels.loader import NULL, load, pointer
from tensorgrad.kernels.prepared import Launch

_FILE, _ATTENTION = "decode.cu", "attention/decode.cu"
_PART, _TOGETHER, _THREADS, _LEAST = 8, 4, 128, 3  # as in the kernels
_PROCESSORS = 132  # of an H200; results do not depend on the chip
_STRIDES = [(name, "i8") for name in ("sequence", "head", "key")]
_PROBLEM = np.dtype(
    [("key_at", _STRIDES), ("value_at", _STRIDES)]
    + [(name, "i4") for name in ("heads", "kv_heads", "width", "window", "interleaved")]
    + [("scale", "f4")]
)
GELU = {"": 0, "tanh": 1, "none": 2}  # as in struct Finish


def supports(like: Array, width: int) -> bool:
    """Whether the kernels do this dtype and heads of this width."""
    return like.dtype in (float32, float16, bfloat16) and width <= 32 * _PART


class Room:
    """How blocks share attention, and what they leave for the one that joins them.

    One serves all layers of a model.

    Args:
        qkv, keys, values, window: as for `attend`.
    """

    def __init__(self, qkv: Array, keys: Array, values: Array, window: int | None) -> None:
        batch, kv_heads, steps, width = keys.shape
        heads = qkv.shape[1] // width - 2 * kv_heads
        self.aligned = width % _PART == 0 and all(
            array.data.ptr % 16 == 0 and all(s * array.itemsize % 16 == 0 for s in _strides(array))
            for array in (keys, values)
        )
        self.lanes = 1 << max(0, -(-width // _PART) - 1).bit_length()  # that share a key
        self.plain = not self.aligned or qkv.itemsize > 2 or width > 128
        # Query heads of a block, keys that it has under way, blocks that fill a multiprocessor.
        most, step, busy = (8, 128, 3) if width <= 64 else (8, 64, 2)
        if self.plain:
            most, step, busy = 4, _THREADS // self.lanes * _TOGETHER, 3
        self.across = kv_heads * -(-heads // kv_heads // most)
        seen = steps if window is None else min(steps, window)
        splits = -(-seen // (_LEAST * step))
        self.splits = _splits(batch * self.across, splits, _PROCESSORS * busy)
        parts = batch * heads * self.splits
        self.parts = backend.empty((parts, width), float32, like=qkv)
        self.sums = backend.empty((parts, 2), float32, like=qkv)
        self.arrived = backend.cupy.zeros(batch * self.across, np.uint32)


def _splits(pairs: int, most: int, blocks: int) -> int:
    """Return into how few parts to cut pairs so that most of the time as many as can be run."""

    def busy(splits: int) -> float:
        turns = pairs * splits / blocks
        return turns / math.ceil(turns)

    best = max(map(busy, range(1, most + 1)))
    return next(splits for splits in range(1, most + 1) if busy(splits) >= 0.95 * best)


def attention(
    launch: Launch,
    y: Array,
    qkv: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    room: Room,
    window: int | None,
    angles: tuple[Array, Array] | None,
    interleaved: bool,
) -> None:
    """Do as `decode.attend`. All but keys and values are contiguous."""
    batch, kv_heads, _, width = keys.shape
    heads = qkv.shape[1] // width - 2 * kv_heads
    name = c_name(qkv.dtype)
    cosines, sines = (NULL, NULL) if angles is None else angles
    sizes = heads, kv_heads, width, ALL if window is None else window, interleaved
    scale = 1 / (math.sqrt(width) * math.log(2))
    problem = np.array([(_strides(keys), _strides(values), *sizes, scale)], _PROBLEM)
    arguments = (
        y, keys, values, qkv, room.parts, room.sums, room.arrived, lengths, cosines, sines, problem
    )  # fmt: skip
    grid = room.splits, room.across, batch
    if room.plain:
        plain = (*arguments, np.int32(room.lanes), np.int32(room.aligned))
        kernel = load(_ATTENTION, f"decode_attention_plain<{name}>")
        launch(kernel, grid, (_THREADS,), plain, 0)
    else:
        kernel = load(_ATTENTION, f"decode_attention<{name}, {-(-width // 64)}>")
        launch(kernel, grid, (_THREADS,), arguments, 0)


def embed(
    launch: Launch, y: Array, table: Array, positions: Array | None, latest: Array, lengths: Array
) -> None:
    """Write the rows of the newest tokens, with those of their positions where these are given."""
    rows, width = y.shape
    shift = pointer(positions)
    arguments = (y, table, shift, latest, lengths, np.int32(width))
    launch(load(_FILE, f"decode_embed<{c_name(y.dtype)}>"), (rows,), (256,), arguments, 0)


def norm(
    launch: Launch, y: Array, x: Array, weight: Array, bias: Array | None, eps: float, centre: bool
) -> None:
    """Write layer_norm of the rows of x or, without `centre`, rms_norm."""
    rows, width = x.shape
    arguments = (y, x, weight, pointer(bias))
    sizes = (np.int32(width), np.float32(eps), np.int32(centre))
    kernel = load(_FILE, f"decode_norm<{c_name(x.dtype)}>")
    launch(kernel, (rows,), (256,), (*arguments, *sizes), 0)


def product(
    launch: Launch,
    y: Array,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    gelu: str = "",
    gate: Array | None = None,
    residual: Array | None = None,
) -> None:
    """Write finish(x W^T + bias) + residual, where finish may be GELU or times silu(gate).

    Args:
        launch: what to do with the launch.
        y: (rows, columns), dtype of x, or float32, which then is not rounded. It may be residual.
        x: (rows, width), contiguous, as is all else.
        weight: (columns or more, width), dtype of x.
        bias: (columns,), dtype of x.
        gelu: of GELU.
        gate, residual: (rows, columns), dtype of x.
    """
    rows, width = x.shape
    columns = y.shape[1]
    to = (NULL, y) if y.dtype != x.dtype else (y, NULL)
    others = tuple(pointer(array) for array in (bias, gate, residual))
    sizes = map(np.int32, (rows, width, columns, GELU[gelu]))
    arguments: tuple[Any, ...] = (*to, x, weight, *others, *sizes)
    name = c_name(x.dtype)
    if x.itemsize > 2 or width % 8 or any(a.data.ptr % 16 for a in (x, weight)):
        kernel = load(_FILE, f"decode_product_plain<{name}>")
        launch(kernel, (-(-columns // 8), -(-rows // 8)), (256,), arguments, 0)
        return
    tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4
    bands = 2 if tiles == 4 and columns >= 4096 else 1
    few = columns <= 16 * _PROCESSORS
    warps = 16 if width >= 2048 or (few and width >= 1024) else 8
    launch(
        load(_FILE, f"decode_product<{name}, {tiles}, {bands}>"),
        (-(-columns // (16 * bands)), -(-rows // (8 * tiles))),
        (32 * warps,),
        arguments,
        512 * tiles * bands * warps,
    )


def _strides(array: Array) -> tuple[int, ...]:
    """Return the strides of (B, heads, steps) in elements."""
    return tuple(stride // array.itemsize for stride in array.strides[:3])
