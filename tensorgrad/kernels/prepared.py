"""Launches that are prepared once and then repeated at the cost of the driver alone.

A function that launches kernels takes a `Launch`: `now` to launch at once, or `Launches().add` to
keep the launch for later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.kernels.loader import Kernel
from tensorgrad.kernels.structs import Struct, by_value

Sizes = tuple[int, ...]  # of a grid or a block, up to three
Launch = Callable[[Kernel, Sizes, Sizes, Sequence[Any], int], None]


def now(kernel: Kernel, grid: Sizes, block: Sizes, arguments: Sequence[Any], shared: int) -> None:
    """Launch a kernel on the current stream."""
    values = [by_value(a) if isinstance(a, Struct) else a for a in arguments]
    kernel(grid, block, tuple(values), shared)


class Launches:
    """Kernels with their arguments, in order."""

    def __init__(self) -> None:
        self._prepared: list[tuple[Any, ...]] = []
        self._kept: list[Any] = []  # keeps the memory of the addresses
        self._calls: list[tuple[Any, ...]] = []
        self._stream = -1

    def add(
        self, kernel: Kernel, grid: Sizes, block: Sizes, arguments: Sequence[Any], shared: int
    ) -> None:
        """Keep a launch.

        Args:
            kernel: from `loader.load`.
            grid, block: 1 to 3 sizes.
            arguments: arrays on the GPU, NumPy scalars, or structs.
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
    """Return the bytes of an argument, padded to a multiple of 8."""
    if isinstance(argument, Struct):
        value = bytes(argument)
    else:
        number = argument if isinstance(argument, np.generic) else np.uintp(argument.data.ptr)
        value = number.tobytes()
    return value + bytes(-len(value) % 8)
