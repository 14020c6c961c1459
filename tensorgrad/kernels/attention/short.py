"""Attention of short sequences: 16 bits, at most 64 queries and keys, heads up to 64 wide.

Launches attention/short.cu with a block for each head of each sequence. Tiles for long sequences
would be mostly empty here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import Dtype, c_name, float32
from tensorgrad.kernels.attention.arguments import aligned, option_arguments
from tensorgrad.kernels.attention.options import Arrays, AttentionOptions, ForwardPass, empty_result
from tensorgrad.kernels.device import capability
from tensorgrad.kernels.loader import Kernel, load
from tensorgrad.kernels.structs import NULL, number

_FILE = "attention/short.cu"
_LONGEST, _WIDEST = 64, 64


def supports(arrays: Arrays, options: AttentionOptions) -> bool:
    """Whether the kernels are for this GPU, for these arrays and this options."""
    q, k, _ = arrays
    heads, queries, width = q.shape[1:]
    return (
        max(queries, k.shape[2]) <= _LONGEST
        and width <= _WIDEST
        and q.itemsize == 2
        and heads == k.shape[1]
        and options.sequences is None
        and options.scale > 0
        and width % 8 == 0
        and all([aligned(array) for array in arrays])
        and capability(q.device.id) >= 80
    )


def rotates(arrays: Arrays, options: AttentionOptions, cos: Array, sin: Array) -> bool:
    """Whether the kernels are for these arrays and rotate them by these angles.

    Those must be the same for all sequences and heads; see `kernels.rotary.angles`.
    """
    q, k, _ = arrays
    length = q.shape[2]
    fits = length == k.shape[2] and all(
        a.shape[:2] == (length, 1) and a.data.ptr % 16 == 0 for a in (cos, sin)
    )
    return fits and supports(arrays, options)


def forward(arrays: Arrays, options: AttentionOptions) -> tuple[Array, Array]:
    """Return the result, in the memory order of (B, T, H, D), and the logsumexp."""
    q, k, _ = arrays
    batch, heads, queries, width = q.shape
    y = empty_result(q, q.dtype)
    logsumexp = backend.empty(q.shape[:3], float32, like=q)
    rotation = options.rotation is not None
    kernel, threads, _ = _kernel(
        "attention_short", q.dtype, max(queries, k.shape[2]), width, rotation, q.device.id
    )
    bias, _, _, sizes, dropout = option_arguments(arrays, y, options)
    last = (bias, *_angles(options), sizes, dropout)
    kernel((batch * heads,), (threads,), (y, logsumexp, *arrays, *last))
    return y, logsumexp


def backward(dy: Array, done: ForwardPass, gradients: Sequence[Array]) -> None:
    """Write the gradients, of the dtype of q; y is not needed."""
    q, k, v, _, logsumexp, options = done
    batch, heads, queries, width = q.shape
    dy = dy.astype(q.dtype, copy=False)
    if not aligned(dy):
        dy = backend.contiguous(dy)
    length, rotation = max(queries, k.shape[2]), options.rotation is not None
    kernel, threads, shared = _kernel(
        "attention_short_backward", q.dtype, length, width, rotation, q.device.id
    )
    bias, _, _, sizes, dropout = option_arguments((q, k, v), dy, options, gradients)
    last = (logsumexp, bias, *_angles(options), sizes, dropout)
    kernel((batch * heads,), (threads,), (*gradients, q, k, v, dy, *last), shared)


def _angles(options: AttentionOptions) -> tuple[Any, ...]:
    """Return the arguments of a kernel that say how it rotates queries and keys."""
    cos, sin, interleaved = options.rotation or (NULL, NULL, False)
    return cos, sin, number("?", interleaved)


@lru_cache(maxsize=1024)
def _kernel(
    name: str, dtype: Dtype, length: int, width: int, rotation: bool, device: int
) -> tuple[Kernel, int, int]:
    """Return a kernel of a device, the threads of a block, and the bytes of backward's tiles."""
    rows, columns = (32 if n <= 32 else 64 for n in (length, width))
    tiles = 4 * rows * (columns + 8) + 2 * rows * (rows + 8)
    flag = "true" if rotation else "false"
    kernel = load(_FILE, f"{name}<{c_name(dtype)}, {columns}, {rows}, {flag}>")
    return kernel, 2 * rows, dtype.itemsize * tiles
