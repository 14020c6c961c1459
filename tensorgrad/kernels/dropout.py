"""Dropout with a bias before and a residual after it, or of SwiGLU.

Launches dropout.cu and swiglu_dropout.cu.
"""

from __future__ import annotations

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


def swiglu(kernel: str, mask: KeepMask, *arrays: Array) -> list[Array]:
    """Return the results of a kernel of swiglu_dropout.cu for arrays of one shape and dtype.

    "swiglu_dropout" takes gate and up and returns mask / keep * silu(gate) * up, of which
    silu(gate) * up is rounded before it is scaled, as it is where it is stored. With dy before
    them, "swiglu_dropout_backward" returns the gradients of gate and up.
    """
    first, *others = map(_aligned, arrays)
    results = [backend.empty(first.shape, first.dtype, like=first) for _ in others]
    if first.size:
        load("swiglu_dropout.cu", f"{kernel}<{c_name(first.dtype)}>")(
            (-(-first.size // _BLOCK),),
            (256,),
            (*results, first, *others, number("i8", first.size), *_arguments(mask)),
        )
    return results


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
