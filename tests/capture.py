"""A step captured into a CUDA graph, for tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tensorgrad import backend


class Capture:
    """Runs `step` once, captures it once, and launches it when called.

    Attributes:
        result: what `step` returned while it was captured; a launch writes into its arrays.
    """

    def __init__(self, step: Callable[[], Any]) -> None:
        cupy = backend.cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.pool = cupy.cuda.MemoryPool()  # of its own: what the graph uses must not be reused
        cupy.cuda.runtime.deviceSynchronize()
        with ExitStack() as stack:
            stack.enter_context(cupy.cuda.using_allocator(self.pool.malloc))
            stack.enter_context(self.stream)
            step()
            self.stream.begin_capture()
            try:
                self.result = step()
            finally:
                self.graph = self.stream.end_capture()
        self.stream.synchronize()

    def __call__(self) -> None:
        backend.cupy.cuda.runtime.deviceSynchronize()
        self.graph.launch(self.stream)
        self.stream.synchronize()
