"""Launches of kernels/decode.cu: at once, or prepared for a step of generation.

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
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.prepared import Launch
from tensorgrad.ops.attention_rule import ALL

_FILE = "decode.cu"
_NULL = np.uintp(0)
_PART, _TOGETHER, _THREADS = 8, 4, 128  # as in the kernel
_BLOCKS = 512  # of attention that shall be under way, where the keys are that many
_MOST_SPLITS = 128
_STRIDES = np.dtype([(name, "i8") for name in ("sequence", "head", "key")])
GELU = {"": 0, "tanh": 1, "none": 2}  # as in struct Finish


def supports(like: Array, width: int) -> bool:
    """Whether the kernels do this dtype and heads of this width."""
    return like.dtype in (float32, float16, bfloat16) and width <= 32 * _PART


class Room:
    """What blocks of attention leave for the one that joins them; one serves all layers.

    Args:
        qkv, keys, window: as for `attend`.
    """

    def __init__(self, qkv: Array, keys: Array, window: int | None) -> None:
        batch, kv_heads, steps, width = keys.shape
        heads = qkv.shape[1] // width - 2 * kv_heads
        self.lanes = 1 << max(0, -(-width // _PART) - 1).bit_length()  # that share a key
        self.group = 1 if heads == kv_heads else 4  # query heads that share loads
        self.across = kv_heads * -(-heads // kv_heads // self.group)
        at_once = _THREADS // self.lanes * _TOGETHER
        seen = steps if window is None else min(steps, window)
        wanted = max(1, _BLOCKS // (batch * self.across))
        self.splits = min(-(-seen // at_once), wanted, _MOST_SPLITS)
        shape = (batch * heads * self.splits * (width + 2),)
        self.partials = backend.empty(shape, float32, like=qkv)
        self.arrived = backend.cupy.zeros(batch * self.across, np.uint32)


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
    """Do as `decode.attend`."""
    batch, kv_heads, _, width = keys.shape
    heads = qkv.shape[1] // width - 2 * kv_heads
    readable = width % _PART == 0 and all(
        array.data.ptr % 16 == 0 and all(s * array.itemsize % 16 == 0 for s in _strides(array))
        for array in (keys, values)
    )
    cosines, sines = (_NULL, _NULL) if angles is None else angles
    launch(
        load(_FILE, f"decode_attention<{c_name(qkv.dtype)}, {room.group}>"),
        (room.splits, room.across, batch),
        (_THREADS,),
        (y, keys, values, qkv, room.partials, room.arrived, lengths, cosines, sines,
         np.array([_strides(keys)], _STRIDES), np.array([_strides(values)], _STRIDES),
         *map(np.int32, (heads, kv_heads, width, room.lanes, ALL if window is None else window,
                         interleaved, readable)),
         np.float32(1 / (math.sqrt(width) * math.log(2)))),
        4 * (room.group * width + _THREADS // 32 * room.group * (width + 2)),
    )  # fmt: skip


def embed(
    launch: Launch, y: Array, table: Array, positions: Array | None, latest: Array, lengths: Array
) -> None:
    """Write the rows of the newest tokens, with those of their positions where these are given."""
    rows, width = y.shape
    shift = _NULL if positions is None else positions
    arguments = (y, table, shift, latest, lengths, np.int32(width))
    launch(load(_FILE, f"decode_embed<{c_name(y.dtype)}>"), (rows,), (256,), arguments, 0)


def norm(
    launch: Launch, y: Array, x: Array, weight: Array, bias: Array | None, eps: float, centre: bool
) -> None:
    """Write layer_norm of the rows of x or, without `centre`, rms_norm."""
    rows, width = x.shape
    arguments = (y, x, weight, _NULL if bias is None else bias)
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
    to = (_NULL, y) if y.dtype != x.dtype else (y, _NULL)
    others = tuple(_NULL if array is None else array for array in (bias, gate, residual))
    sizes = map(np.int32, (rows, width, columns, GELU[gelu]))
    arguments: tuple[Any, ...] = (*to, x, weight, *others, *sizes)
    name = c_name(x.dtype)
    if x.itemsize > 2 or width % 8 or any(a.data.ptr % 16 for a in (x, weight)):
        kernel = load(_FILE, f"decode_product_plain<{name}>")
        launch(kernel, (-(-columns // 8), -(-rows // 8)), (256,), arguments, 0)
        return
    tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4
    warps = 16 if width >= 2048 else 8
    launch(
        load(_FILE, f"decode_product<{name}, {tiles}>"),
        (-(-columns // 16), -(-rows // (8 * tiles))),
        (32 * warps,),
        arguments,
        512 * tiles * warps,
    )


def _strides(array: Array) -> tuple[int, ...]:
    """Return the strides of (B, heads, steps) in elements."""
    return tuple(stride // array.itemsize for stride in array.strides[:3])
