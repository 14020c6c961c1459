"""Properties of a GPU, read from the driver once.

Args:
    device: the number of the GPU, as in "cuda:0".
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from tensorgrad.core import backend


@cache
def driver() -> Any:
    """Return the driver's library, which CuPy has loaded already, for what CuPy does not offer."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def capability(device: int) -> int:
    """Return the compute capability, such as 80 or 90."""
    return int(backend.cupy.cuda.Device(device).compute_capability)


def has_tf32(device: int) -> bool:
    """Whether tensor cores multiply float32 that is rounded to TF32."""
    return capability(device) >= 80


def sm_count(device: int) -> int:
    """Return the number of streaming multiprocessors (SMs)."""
    return _attribute("MultiProcessorCount", device)


def shared_memory_per_block(device: int) -> int:
    """Return the bytes of shared memory that a block may have when it asks for them."""
    return _attribute("MaxSharedMemoryPerBlockOptin", device)


def shared_memory_per_sm(device: int) -> int:
    """Return the bytes of shared memory of a streaming multiprocessor (SM)."""
    return _attribute("MaxSharedMemoryPerMultiprocessor", device)


@cache
def resident_blocks(kernel: Any, threads: int, shared: int, device: int) -> int:
    """Return how many blocks of a kernel the whole GPU holds at once, at least one each.

    Args:
        kernel: from `loader.load`.
        threads: of a block.
        shared: bytes of dynamic shared memory of a block.
        device: see above.
    """
    occupancy = backend.cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
    return sm_count(device) * max(1, int(occupancy(kernel.ptr, threads, shared)))


@cache
def _attribute(name: str, device: int) -> int:
    runtime = backend.cupy.cuda.runtime
    return int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), device))
