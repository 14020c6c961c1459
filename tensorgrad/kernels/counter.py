"""The tile counter of persistent kernels.

A block takes the next tile when it is done with one, so that blocks which start late, because a
kernel of NCCL occupies their SM, or have long tiles, take fewer. Each tile counts once
with atomicInc(counter, tiles - 1), so that the counter ends at 0, where it began.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.kernels.capturing import counters

_UINT32 = np.dtype(np.uint32)


def counter(like: Array) -> Array:
    """Return a counter, 0, for a kernel on the current stream that leaves it at 0.

    Kernels on one stream share it, as they run one after the other. Those of a CUDA graph may run
    on another stream, and share one that the graph sets to 0 when it begins.

    Args:
        like: an array on the GPU where the kernel will run.
    """
    stream = backend.cupy.cuda.get_current_stream().ptr
    if backend.cupy.cuda.runtime.streamIsCapturing(stream):
        shared = counters()
        if stream not in shared:
            shared[stream] = backend.empty((1,), _UINT32, like=like)
            shared[stream].data.memset_async(0, _UINT32.itemsize)
        return shared[stream]
    return _of_stream(like.device.id, stream)


@cache
def _of_stream(device: int, stream: int) -> Array:
    return backend.cupy.zeros(1, _UINT32)
