"""Dropout with a bias before and a residual after it, or of SwiGLU.

Launches dropout.cu and swiglu_dropout.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import Dtype, c_name
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.random import Key, keep_threshold
from tensorgrad.kernels.structs import number, pointer

_BLOCK = 256 * 16  # elements of a block of threads


def forward(
    x: Array, key: Key, keep: float, dtype: Dtype, residual: Array | None, bias: Array | None
) -> Array:
    """Return residual + mask / keep * (x + bias), rounded to `dtype` once."""
    x = backend.contiguous(x)
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
        (y, *map(pointer, arrays), number("i8", x.size), number("u4", width), *_mask(key, keep)),
    )
    return y


def swiglu(gate: Array, up: Array, key: Key, keep: float) -> Array:
    """Return mask / keep * silu(gate) * up for arrays of one shape and dtype.

    silu(gate) * up is rounded before it is scaled, as it is where it is stored.
    """
    (y,) = _launch_swiglu("swiglu_dropout", (gate, up), 1, key, keep)
    return y


def swiglu_backward(
    dy: Array, gate: Array, up: Array, key: Key, keep: float
) -> tuple[Array, Array]:
    """Return the gradients of gate and up; dy has their shape and dtype."""
    dgate, dup = _launch_swiglu("swiglu_dropout_backward", (dy, gate, up), 2, key, keep)
    return dgate, dup


def _launch_swiglu(
    kernel: str, arrays: Sequence[Array], count: int, key: Key, keep: float
) -> list[Array]:
    """Return the `count` results of a kernel of swiglu_dropout.cu, like the arrays."""
    arrays = [_aligned(array) for array in arrays]
    first = arrays[0]
    results = [backend.empty(first.shape, first.dtype, like=first) for _ in range(count)]
    if first.size:
        load("swiglu_dropout.cu", f"{kernel}<{c_name(first.dtype)}>")(
            (-(-first.size // _BLOCK),),
            (256,),
            (*results, *arrays, number("i8", first.size), *_mask(key, keep)),
        )
    return results


def _aligned(array: Array) -> Array:
    """Return an array contiguous and aligned to 16 bytes, a copy where it is not."""
    array = backend.contiguous(array)
    return array.copy() if array.data.ptr % 16 else array


def _mask(key: Key, keep: float) -> tuple[Any, ...]:
    """Return the arguments of a kernel that draws a keep mask and scales by 1 / keep."""
    limit = (keep_threshold(keep) << 16) - 1
    counter = number("u8", key.seed), np.uint64(key.draw), number("u8", key.stream)
    return *counter, pointer(key.offset), number("u4", limit), number("f8", 1 / keep)
