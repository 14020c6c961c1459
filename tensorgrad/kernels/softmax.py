"""softmax and log_softmax: launches softmax.cu.

Rows of aligned vectors that registers hold have a group of threads each; other short rows share
a tile of shared memory, and long ones are staged in it, as much of them as fits.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import c_name, compute_dtype, float64
from tensorgrad.core.errors import ShapeError
from tensorgrad.kernels.device import resident_blocks, shared_memory_per_block
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.rows import RowLayout, aligned, in_registers, power_of_two
from tensorgrad.kernels.structs import ScoreArguments, address, by_value

Arguments = tuple[Any, ...]
_SHORT = 2048  # elements of a row: 256 threads with 8 each
_TILE_BYTES = 8192  # bytes of an array that a block copies, about
_KINDS = {"none": 0, "bool": 1, "own": 2, "wide": 3}  # kinds of masks, see kernels/scores.cuh


def forward(x: Array, scale: float, mask: Array | None, causal: bool, logarithm: bool) -> Array:
    """Return softmax of x * scale + mask, or log_softmax, of the last axis.

    Args:
        x: any layout.
        scale: of x.
        mask: in the shape of x, with any strides; bool or a float.
        causal: as in `softmax`.
        logarithm: whether log_softmax is wanted.
    """
    scores, mask = _scores(x, scale, mask, causal)  # a converted mask lives till the end
    x = _rows(x)
    y = backend.empty_like(x)
    if not x.size:
        return y
    arrays, options = (y, x, *_sizes(x)), (scores, np.bool_(logarithm))
    masked = ", true" if causal or mask is not None else ", false"
    _launch("forward", masked, _held(512, x, y), 1, arrays, options)
    return y


def backward(dy: Array, y: Array, scale: float, logarithm: bool) -> Array:
    """Return dx of the last axis."""
    dy, y = _rows(dy), _rows(y)
    dx = backend.empty_like(dy)
    if not dx.size:
        return dx
    arrays, options = (dx, dy, y, *_sizes(dx)), (np.float64(scale), np.bool_(logarithm))
    _launch("backward", "", _held(256, dx, dy, y), 2, arrays, options)
    return dx


def _rows(x: Array) -> Array:
    """Return x contiguous and, where its rows are long, aligned to 16 bytes."""
    x = backend.contiguous(x)
    return x.copy() if x.data.ptr % 16 and x.ndim and x.shape[-1] > _SHORT else x


def _held(most: int, *arrays: Array) -> RowLayout | None:
    """Return how at most `most` threads hold a row in registers, or None."""
    first = arrays[0]
    width = first.shape[-1]
    if first.dtype == float64 or not aligned(width, *arrays):
        return None
    size = width * first.itemsize
    vectors = 4 if size > 48 else 2 if size > 16 else 1  # loads in flight of a thread
    return in_registers(size, (vectors,), lanes=32, threads=64, most=most)


def _sizes(x: Array) -> tuple[Any, Any]:
    width = x.shape[-1]
    return np.int64(x.size // width), np.int32(width)


def _launch(
    name: str, flag: str, layout: RowLayout | None, reads: int, arrays: Arguments,
    options: Arguments,
) -> None:  # fmt: skip
    """Choose and launch a kernel that reads `reads` arrays; `flag` ends its template arguments."""
    y = arrays[0]
    types = c_name(y.dtype)
    if layout is not None:
        kernel = load("softmax.cu", f"softmax_{name}_rows<{types}, {layout.vectors}{flag}>")
        kernel(layout.grid(y.size // y.shape[-1]), layout.block, (*arrays, *options))
    elif y.shape[-1] <= _SHORT:
        kernel = load("softmax.cu", f"softmax_{name}_short<{types}{flag}>")
        _launch_short(kernel, reads, arrays, options)
    else:
        kernel = load("softmax.cu", f"softmax_{name}_staged<{types}{flag}>")
        _launch_staged(kernel, reads, arrays, options)


def _launch_short(kernel: Any, reads: int, arrays: Arguments, options: Arguments) -> None:
    """Launch blocks of 256 threads, each for a tile of rows, with the fewest lanes for a row."""
    y = arrays[0]
    width = y.shape[-1]
    lanes = power_of_two(-(-width // 8))
    groups = 256 // lanes
    rounds = max(1, _TILE_BYTES // (groups * width * y.itemsize))
    whole = 16 // math.gcd(16, width * y.itemsize)  # rows that end at a 16-byte boundary
    deep = -(-groups * rounds // whole) * whole
    kernel(
        (-(-y.size // (width * deep)),),
        (lanes, groups),
        (*arrays, np.int32(deep), *options),
        reads * -(-deep * width * y.itemsize // 16) * 16,
    )


def _launch_staged(kernel: Any, reads: int, arrays: Arguments, options: Arguments) -> None:
    """Launch a persistent grid with shared memory for a row of each array, or all there is."""
    y = arrays[0]
    width = y.shape[-1]
    limit = shared_memory_per_block(y.device.id) - 2048  # the kernel's static one
    vectors = width * y.itemsize // 16
    staged = min(vectors, limit // (16 * reads))
    shared = staged * 16 * reads
    # Two blocks per SM if they fit.
    most = 768 if 2 * shared > limit and y.itemsize < 8 else 384
    threads = min(most, -(-vectors // 128) * 32)
    blocks = min(y.size // width, resident_blocks(kernel, threads, shared, y.device.id))
    kernel((blocks,), (threads,), (*arrays, np.int32(staged), *options), shared)


def _scores(x: Array, scale: float, mask: Array | None, causal: bool) -> tuple[Any, Array | None]:
    """Return the struct ScoreArguments, and the mask that it points to."""
    queries = x.shape[-2] if causal else 0
    if (causal or mask is not None) and x.size // max(1, x.shape[-1]) >= 1 << 32:
        raise ShapeError(f"softmax: x has shape {x.shape}, expected under 2^32 rows with a mask")
    if mask is None or not mask.size:
        return _unmasked(scale, queries), None
    kind = "bool" if mask.dtype == np.bool_ else "own" if mask.dtype == x.dtype else "wide"
    if kind == "wide":
        mask = mask.astype(compute_dtype(x.dtype), copy=False)
    lengths, strides = _collapsed(mask)
    if len(lengths) > 4:
        mask = backend.contiguous(mask)
        lengths, strides = _collapsed(mask)
    lengths, strides = [1] * (4 - len(lengths)) + lengths, [0] * (4 - len(strides)) + strides
    scores = ScoreArguments(
        scale, address(mask), _KINDS[kind], tuple(lengths[1:3]), tuple(strides), queries
    )
    return by_value(scores), mask


@lru_cache
def _unmasked(scale: float, queries: int) -> Any:
    return by_value(ScoreArguments(scale, lengths=(1, 1), queries=queries))


def _collapsed(mask: Array) -> tuple[list[int], list[int]]:
    """Return lengths and strides, in elements, of as few axes as describe it; the last stays."""
    lengths: list[int] = []
    strides: list[int] = []
    axes = list(zip(mask.shape, mask.strides, strict=True))
    for length, stride in axes[:-1]:
        stride //= mask.itemsize
        if length == 1:
            continue
        if not (lengths and strides[-1] == length * stride):
            lengths.append(1)
            strides.append(0)
        lengths[-1] *= length
        strides[-1] = stride
    return [*lengths, axes[-1][0]], [*strides, axes[-1][1] // mask.itemsize]
