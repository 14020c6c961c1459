"""Rotary position embedding: launches rotary.cu, by vectors of 16 bytes where they fit."""

from __future__ import annotations

import math
from typing import NamedTuple

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import c_name, compute_dtype
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.structs import number

_HEADS = 4  # heads of a thread, the kernel's constant


class Rotation(NamedTuple):
    """Checked arguments of `rotary`; on the GPU, angles in the layout of the kernel."""

    cos: Array
    sin: Array
    heads: int
    interleaved: bool


def angles(cos: Array, x: Array, heads: int) -> Array:
    """Return (rows, 1 or heads, D / 2), contiguous, so that row r of x takes row r % rows."""
    leading, own = x.shape[:-2], cos.shape[:-2]
    while own and own[0] == 1:
        own = own[1:]
    shared = cos.ndim < 2 or cos.shape[-2] == 1
    cos = cos.reshape(*own, *cos.shape[-2:])
    if own != leading[len(leading) - len(own) :]:
        own = leading
    shape = (1 if shared else heads, x.shape[-1] // 2)
    cos = backend.cupy.broadcast_to(cos, (*own, *shape)).reshape(math.prod(own), *shape)
    return backend.contiguous(cos).astype(compute_dtype(x.dtype), copy=False)


def turn(x: Array, rotation: Rotation, direction: int, out: Array | None = None) -> Array:
    """Return x with the first heads rotated by `angles`, or back with direction -1.

    Args:
        out: None for a new array, or x, contiguous, whose other heads are then not touched.
    """
    x, (cos, sin, heads, interleaved) = backend.contiguous(x), rotation
    y = backend.empty_like(x) if out is None else out
    all_heads, width = x.shape[-2:]
    written = all_heads if out is None else heads
    if not x.size or not written:
        return y
    rows, half = x.size // (all_heads * width), width // 2
    pairs = 16 // x.itemsize
    if half % pairs or any(a.data.ptr % 16 for a in (x, cos, sin)):
        pairs = 1
    across = min(256, -(-written // _HEADS) * (half // pairs))
    block = (across, 256 // across)
    load("rotary.cu", f"rotary_turn<{c_name(x.dtype)}, {pairs}>")(
        (-(-rows // block[1]),),
        block,
        (y, x, cos, sin, number("i8", rows), number("i4", all_heads), number("i4", written),
         number("i4", half), number("i4", heads), number("i8", max(1, cos.shape[0])),
         number("i4", cos.shape[1]), number("i4", interleaved), number("i4", direction)),
    )  # fmt: skip
    return y
