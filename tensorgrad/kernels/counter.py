"""The count by which blocks of a kernel take tiles as they go.

A block that has done its tile takes the next one of all: those that start late, because a kernel of
NCCL keeps their multiprocessor, or have long tiles, take fewer. Each tile that is worked on counts
once with atomicInc(counter, tiles - 1), so that the count ends where it began, at 0.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array

_UINT32 = np.dtype(np.uint32)


def counter(like: Array) -> Array:
    """Return an unsigned int, 0, for a kernel on the current stream that leaves it so.

    Kernels on one stream follow each other and share it. What is captured into a CUDA graph may run
    on another stream, and has its own.

    Args:
        like: an array on the GPU where the kernel will run.
    """
    stream = backend.cupy.cuda.get_current_stream().ptr
    if backend.cupy.cuda.runtime.streamIsCapturing(stream):
        own = backend.empty((1,), _UINT32, like=like)
        own.data.memset_async(0, own.nbytes)
        return own
    return _of_stream(like.device.id, stream)


@cache
def _of_stream(device: int, stream: int) -> Array:
    return backend.cupy.zeros(1, _UINT32)
