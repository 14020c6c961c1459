"""Dropout with a bias before and a residual after it, or of SwiGLU.

Launches dropout.cu and swiglu_dropout.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import Dtype, c_name
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.random import Key, keep_threshold
from tensorgrad.kernels.structs import number, pointer

_BLOCK = 256 * 16  # elements of a block of threads


class KeepMask(NamedTuple):
    """The key of the random bits, the keep probability, and the dtype of x."""

    key: Key
    keep: float
    dtype: Dtype


def forward(x: Array, mask: KeepMask, residual: Array | None, bias: Array | None) -> Array:
    """Return residual + mask / keep * (x + bias), rounded once."""
    x, dtype = backend.contiguous(x), mask.dtype if residual is None else residual.dtype
    y = backend.empty(x.shape, dtype, like=x)
    if not x.size:
        return y
    arrays = [None if a is None else backend.contiguous(a) for a in (x, bias, residual)]
    width = x.shape[-1] if bias is not None else 0
    vector = 16 // min(x.itemsize, y.itemsize)
    if width % vector or any(a is not None and a.data.ptr % (vector * a.itemsize) for a in arrays):
        vector = 1
    load("dropout.cu", f"dropout<{c_name(x.dtype)}, {c_name(dtype)}, {vector}>")(
        (-(-x.size // _BLOCK),),
        (256,),
        (y, *map(pointer, arrays), number("i8", x.size), number("u4", width), *_arguments(mask)),
    )
    return y


def swiglu(mask: KeepMask, gate: Array, up: Array) -> Array:
    """Return mask / keep * silu(gate) * up for arrays of one shape and dtype.

    silu(gate) * up is rounded before it is scaled, as it is where it is stored.
    """
    gate, up = _aligned(gate), _aligned(up)
    y = backend.empty(gate.shape, gate.dtype, like=gate)
    _swiglu(f"swiglu_dropout<{c_name(gate.dtype)}>", (y, gate, up), gate.size, *_arguments(mask))
    return y


def swiglu_backward(
    mask: KeepMask | None, dy: Array, gate: Array, up: Array, joined: bool = False
) -> tuple[Array, Array, Array | None]:
    """Return the gradients of gate and up, (..., H), and the array of which they are halves.

    Args:
        mask: of the forward kernel; None where nothing was dropped.
        dy, gate, up: of one shape and dtype.
        joined: let them be halves of one array, (..., 2 H), where the kernel can; otherwise and
            where it cannot, that array is None.
    """
    dy, gate, up = map(_aligned, (dy, gate, up))
    *rows, width = dy.shape
    if joined and width % (16 // dy.itemsize) == 0 and dy.size < 1 << 32:
        both = backend.empty((*rows, 2 * width), dy.dtype, like=dy)
        dgate, dup = both[..., :width], both[..., width:]
    else:
        width, both = 0, None
        dgate, dup = (backend.empty(dy.shape, dy.dtype, like=dy) for _ in range(2))
    name = f"swiglu_backward<{c_name(dy.dtype)}, {str(mask is not None).lower()}>"
    drawn = _arguments(mask or KeepMask(Key(0, 0), 1, dy.dtype))
    _swiglu(name, (dgate, dup, dy, gate, up), dy.size, number("u4", width), *drawn)
    return dgate, dup, both


def _swiglu(kernel: str, arrays: Sequence[Array], size: int, *numbers: Any) -> None:
    if size:
        load("swiglu_dropout.cu", kernel)(
            (-(-size // _BLOCK),), (256,), (*arrays, number("i8", size), *numbers)
        )


def _aligned(array: Array) -> Array:
    """Return an array contiguous and aligned to 16 bytes, a copy where it is not."""
    array = backend.contiguous(array)
    return array.copy() if array.data.ptr % 16 else array


def _arguments(mask: KeepMask) -> tuple[Any, ...]:
    """Return the arguments of a kernel that draws a keep mask and scales by 1 / keep."""
    key, keep, _ = mask
    limit = (keep_threshold(keep) << 16) - 1
    counter = number("u8", key.seed), np.uint64(key.draw), number("u8", key.stream)
    return *counter, pointer(key.offset), number("u4", limit), number("f8", 1 / keep)
