"""Dropout with a bias before and a residual after it: launches dropout.cu."""

from __future__ import annotations

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import Dtype, c_name
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.random import Key, keep_threshold
from tensorgrad.kernels.structs import number, pointer


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
    limit = (keep_threshold(keep) << 16) - 1
    load("dropout.cu", f"dropout<{c_name(x.dtype)}, {c_name(dtype)}, {vector}>")(
        (-(-x.size // (256 * 16)),),
        (256,),
        (y, *map(pointer, arrays), number("i8", x.size),
         number("u4", width), number("u8", key.seed), np.uint64(key.draw),
         number("u8", key.stream), pointer(key.offset),
         number("u4", limit), number("f8", 1 / keep)),
    )  # fmt: skip
    return y
