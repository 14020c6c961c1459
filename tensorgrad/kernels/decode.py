"""The kernels of a decode step: launches decode.cu and attention/decode.cu, now or later.

Each function takes a `Launch` (see `prepared`) and the array to write to. A launch depends on
shapes and addresses alone, so it can be repeated when the contents of the arrays have changed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import bfloat16, c_name, float16, float32
from tensorgrad.kernels.attention.options import ALL
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.prepared import Launch
from tensorgrad.kernels.rows import power_of_two
from tensorgrad.kernels.structs import NULL, DecodeAttentionArguments, pointer

_FILE, _ATTENTION = "decode.cu", "attention/decode.cu"
_PART, _TOGETHER, _THREADS, _LEAST = 8, 4, 128, 3  # as in the kernels
_PROCESSORS = 132  # of an H200; results do not depend on the chip
GELU = {"": 0, "tanh": 1, "none": 2}  # as in struct DecodeEpilogue


def supports(like: Array, width: int) -> bool:
    """Whether the kernels do this dtype and heads of this width."""
    return like.dtype in (float32, float16, bfloat16) and width <= 32 * _PART


class AttentionWorkspace:
    """How attention is split among blocks (split-K), and buffers for their partial results.

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
        self.lanes = power_of_two(max(1, -(-width // _PART)))  # of a key
        self.plain = not self.aligned or qkv.itemsize > 2 or width > 128
        # Query heads of a block, keys that it loads at a time, blocks that fill a multiprocessor.
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
    """Return the least number of splits that keeps nearly as many blocks busy as any other."""

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
    workspace: AttentionWorkspace,
    window: int | None,
    angles: tuple[Array, Array] | None,
    interleaved: bool,
) -> None:
    """Do as `decode.attend`. All but keys and values are contiguous."""
    batch, kv_heads, _, width = keys.shape
    heads = qkv.shape[1] // width - 2 * kv_heads
    name = c_name(qkv.dtype)
    cosines, sines = (NULL, NULL) if angles is None else angles
    sizes = DecodeAttentionArguments(
        _strides(keys), _strides(values), heads, kv_heads, width, ALL if window is None else window,
        interleaved, 1 / (math.sqrt(width) * math.log(2)),
    )  # fmt: skip
    arguments: tuple[Any, ...] = (
        y, keys, values, qkv, workspace.parts, workspace.sums, workspace.arrived, lengths, cosines,
        sines, sizes,
    )  # fmt: skip
    grid = workspace.splits, workspace.across, batch
    kernel = f"decode_attention<{name}, {-(-width // 64)}>"
    if workspace.plain:
        kernel = f"decode_attention_plain<{name}>"
        arguments = (*arguments, np.int32(workspace.lanes), np.int32(workspace.aligned))
    launch(load(_ATTENTION, kernel), grid, (_THREADS,), arguments, 0)


def embed(
    launch: Launch, y: Array, weight: Array, positions: Array | None, latest: Array, lengths: Array
) -> None:
    """Write the embeddings of the latest tokens, plus those of their positions unless None."""
    rows, width = y.shape
    arguments = (y, weight, pointer(positions), latest, lengths, np.int32(width))
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
    """Write f(x W^T + bias) + residual, where f is GELU, a product with silu(gate), or nothing.

    Args:
        launch: see `prepared`.
        y: (rows, columns), contiguous; dtype of x, or float32 for sums that are not rounded. It may
            be the residual.
        x: (rows, width), contiguous.
        weight: (columns or more, width), contiguous, dtype of x.
        bias: (columns,), dtype of x.
        gelu: a key of GELU.
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
