"""Memory of a benchmark: its peak, what is free, and an error where it is not enough.

Tests: tests/bench/test_memory.py.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorgrad.core import backend
from tensorgrad.core.backend import free_bytes
from tensorgrad.profile.memory import Allocator, allocator_of

_WORDS = ("out of memory", "outofmemory", "memoryallocation", "alloc_failed")


class PeakMemory:
    """The most memory that arrays used in a `peak_memory` block, beyond what they used before.

    Attributes:
        bytes: since the block began, or since `reset`; while the block runs and after it.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator: Allocator | None = allocator
        self._most = 0

    @property
    def bytes(self) -> int:
        """The peak in bytes."""
        if self._allocator is not None:
            self._most = max(self._most, self._allocator.read()[1])
        return self._most

    def reset(self) -> None:
        """Forget the peak so far; what is in use counts on."""
        _ = self.bytes
        self._most = 0

    def end(self) -> None:
        """Keep the value."""
        self._most, self._allocator = self.bytes, None


class TorchAllocator(Allocator):
    """Memory of PyTorch's tensors on a GPU.

    Args:
        cuda: `torch.cuda`.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda, self._base = cuda, 0

    def start(self) -> None:
        """Begin to count."""
        self._cuda.reset_peak_memory_stats()
        self._base = self._cuda.memory_allocated()

    def read(self) -> tuple[int, int]:
        """Return the bytes allocated since the start, and the most since the last read."""
        used, most = self._cuda.memory_allocated(), self._cuda.max_memory_allocated()
        self._cuda.reset_peak_memory_stats()
        return used - self._base, most - self._base

    def stop(self) -> None:
        """Count no more."""


@contextmanager
def peak_memory(device: str, torch: Any = None) -> Iterator[PeakMemory]:
    """Follow the memory of arrays on a device; NumPy's also cost time while they are followed.

    On a GPU it is what CuPy's pool hands out, not what it keeps for later.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        torch: PyTorch, whose memory on a GPU is followed instead; None: ours.
    """
    release()
    theirs = torch is not None and device != "cpu"
    allocator = TorchAllocator(torch.cuda) if theirs else allocator_of(device)
    allocator.start()
    peak = PeakMemory(allocator)
    try:
        yield peak
    finally:
        peak.end()
        allocator.stop()


def release() -> None:
    """Free the memory that earlier measurements left to garbage collection and to memory pools."""
    gc.collect()
    if backend.gpu_count():
        backend.cupy.get_default_memory_pool().free_all_blocks()
        backend.cupy.get_default_pinned_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_fits(size: float, device: str) -> None:
    """Raise MemoryError where arrays of this many bytes surely do not fit."""
    free = free_bytes(device)
    if free is not None and size > free:
        raise MemoryError(f"needs at least {size / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the host or of a GPU is not enough."""
    words = f"{type(error).__name__} {error}".lower()
    return isinstance(error, MemoryError) or any(word in words for word in _WORDS)
