"""Launches that are prepared once and then repeated: what remains is the driver's own time.

A function that launches kernels takes a `Launch`: `now` to do it at once, or `Launches().add` to
keep it for later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.kernels.loader import Kernel

Sizes = tuple[int, ...]  # of a grid or a block, up to three
Launch = Callable[[Kernel, Sizes, Sizes, Sequence[Any], int], None]


def now(kernel: Kernel, grid: Sizes, block: Sizes, arguments: Sequence[Any], shared: int) -> None:
    """Launch a kernel on the current stream."""
    kernel(grid, block, tuple(arguments), shared)


class Launches:
    """Kernels with their arguments, in order. What they are to change lies on the GPU."""

    def __init__(self) -> None:
        self._prepared: list[tuple[Any, ...]] = []
        self._kept: list[Any] = []  # the memory that addresses point to
        self._calls: list[tuple[Any, ...]] = []
        self._stream = -1

    def add(
        self, kernel: Kernel, grid: Sizes, block: Sizes, arguments: Sequence[Any], shared: int
    ) -> None:
        """Keep a launch.

        Args:
            kernel: from `loader.load`.
            grid, block: 1 to 3 sizes.
            arguments: arrays on the GPU, NumPy scalars, or NumPy arrays of one struct.
            shared: bytes of dynamic shared memory.
        """
        values = [_bytes_of(argument) for argument in arguments]
        starts = np.cumsum([0, *(len(value) for value in values)])
        memory = np.frombuffer(b"".join(values), np.uint8).copy()
        pointers = (memory.ctypes.data + starts[:-1]).astype(np.uintp)
        self._kept.append((kernel, tuple(arguments), memory, pointers))
        sizes = (*grid, 1, 1)[:3] + (*block, 1, 1)[:3]
        self._prepared.append(((kernel.ptr, *sizes, shared), pointers.ctypes.data))
        self._stream = -1

    def run(self) -> None:
        """Launch all of them on the current stream."""
        cuda = backend.cupy.cuda
        stream = cuda.get_current_stream().ptr
        if stream != self._stream:
            self._calls = [(*start, stream, pointers, 0) for start, pointers in self._prepared]
            self._stream = stream
        launch = cuda.driver.launchKernel
        for call in self._calls:
            launch(*call)


def _bytes_of(argument: Any) -> bytes:
    """Return what a kernel gets, filled up to a multiple of 8 bytes."""
    if isinstance(argument, np.generic | np.ndarray):
        value = argument.tobytes()
    else:
        value = np.uintp(argument.data.ptr).tobytes()
    return value + bytes(-len(value) % 8)
