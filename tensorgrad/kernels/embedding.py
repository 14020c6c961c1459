"""Embeddings of tokens and positions: launches embedding.cu, by vectors where they fit."""

from __future__ import annotations

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import c_name, int32, int64
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.structs import pointer


def forward(weight: Array, ids: Array, positions: Array | None, starts: Array | None) -> Array:
    """Return weight[ids] + positions, (*ids.shape, C); NaN where an id lies outside.

    Args:
        positions: a row for each step, or with starts all of them.
        starts: (*ids.shape[:-1],), the position of the first step.
    """
    weight, ids = backend.contiguous(weight), backend.contiguous(ids)
    if ids.dtype not in (int32, int64):
        ids = ids.astype(int64)
    vocabulary, width = weight.shape
    y = backend.empty((*ids.shape, width), weight.dtype, like=weight)
    if not y.size:
        return y
    shift = None if positions is None else backend.contiguous(positions)
    vector = 16 // weight.itemsize
    if width % vector or weight.data.ptr % 16 or (shift is not None and shift.data.ptr % 16):
        vector = 1
    steps, reach = 1, 0
    if shift is not None:
        steps, reach = ids.shape[-1], len(shift)
    if starts is not None:
        starts = backend.contiguous(starts.astype(int32, copy=False))
    across = min(256, width // vector)
    block = (across, 256 // across)
    load("embedding.cu", f"embedding_forward<{c_name(weight.dtype)}, {vector}>")(
        (-(-ids.size // block[1]),),
        block,
        (y, weight, ids, pointer(shift), pointer(starts), np.int64(ids.size), np.int64(vocabulary),
         np.int32(width), np.int32(steps), np.int32(reach), np.int32(ids.dtype == int64)),
    )  # fmt: skip
    return y
