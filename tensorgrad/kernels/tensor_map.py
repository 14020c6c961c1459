"""Tensor maps: the layout of an array as TMA, Hopper's tensor memory accelerator, takes it.

Device code: hopper.cuh.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.errors import KernelError
from tensorgrad.kernels.device import driver
from tensorgrad.kernels.structs import by_value

TensorMap = Any  # 128 bytes, from `by_value`
_NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _ZEROS_OUTSIDE = 0, 3, 3, 0
_TYPES = {2: 1, 4: 7}  # by bytes: any 16 bits, float32


def tensor_map(array: Array, box: Shape) -> TensorMap:
    """Return the map of a 16-bit or float32 GPU array for boxes with rows of 128 bytes.

    Args:
        array: any number of axes up to 5, as `fits` says.
        box: lengths along the axes of the array; the last 128 bytes, the others at most 256.

    Raises:
        KernelError: the driver refused.
    """
    return map_memory(array.data.ptr, array.itemsize, array.shape, array.strides, box)


def fits(array: Array) -> bool:
    """Whether TMA can read the array in place: address, rows and strides of 16 bytes."""
    return (
        array.data.ptr % 16 == 0
        and array.strides[-1] == array.itemsize
        and all(
            length == 1 or (stride > 0 and stride % 16 == 0)
            for length, stride in zip(array.shape[:-1], array.strides[:-1], strict=True)
        )
    )


@lru_cache(maxsize=4096)
def map_memory(pointer: int, itemsize: int, shape: Shape, strides: Shape, box: Shape) -> TensorMap:
    """Return the map of memory; `strides` in bytes, the last one being that of an element."""
    buffer = np.empty(192, np.uint8)  # 128 bytes of it, from a multiple of 64 on
    start = -buffer.ctypes.data % 64
    encoded = buffer[start : start + 128]
    rank = len(shape)
    # An axis of length 1 needs a stride that is allowed, whatever it is.
    steps = [step if length > 1 else 16 for length, step in zip(shape, strides, strict=True)]
    error = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(encoded.ctypes.data),
        ctypes.c_int(_TYPES[itemsize]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*reversed(steps[:-1])),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(_NO_INTERLEAVE),
        ctypes.c_int(_SWIZZLE_128),
        ctypes.c_int(_PROMOTE_256),
        ctypes.c_int(_ZEROS_OUTSIDE),
    )
    if error:
        raise KernelError(
            f"tensor_map: got CUDA error {error} for shape {shape}, strides {strides} and box "
            f"{box}, expected a layout that TMA can read"
        )
    return by_value(encoded)
