"""Programmatic dependent launch: a kernel starts while the one before it still runs.

    overlap.launch(kernel, grid, block, arguments, shared, prefetch=[weight, bias], writes=[y])
    overlap.launch_in_graph(kernel, grid, block, arguments, shared, writes=[y])

A kernel of a decode step runs for 2 us, of which its launch and its first loads are half. Launched
here, on Hopper and later, it starts as soon as all blocks of the kernel before it in the stream
have called `start_next_kernel`, and loads its weights while that one still computes. Graphs that
are captured keep this. Kernels of a training step, which are longer, hide their launch and the
setting up of their barriers in this way, but only in graphs. The rules, for which overlap.cuh has
the functions:

- A kernel waits before it reads or writes memory that other kernels write, except for the arrays
  `prefetch`, which it may read at once, such as weights. They are compared with what the kernels
  that may still run write, and where these are the same memory, the launch is an ordinary one.
- A kernel lets the next one start after it has waited itself. So when a kernel starts, all but the
  one before it have ended. Kernels that leave SMs or shared memory free let it start at
  once: the next one copies its weights while the one before that kernel still runs. They say so by
  `trigger_early`; what was written before them counts as still being written.
- Only arrays in `prefetch` are declared `const __restrict__`: the compiler takes them for constant,
  and may load them before the wait.
- Memory that a kernel reads early is written by kernels that are launched here, or by those that
  never call `start_next_kernel`.

Tests: tests/kernels/test_overlap.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_char, c_int, c_uint, c_void_p
from functools import cache
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.kernels.capturing import is_capturing
from tensorgrad.kernels.device import capability, driver
from tensorgrad.kernels.loader import Kernel
from tensorgrad.kernels.structs import Struct

__all__ = ["launch", "launch_in_graph"]

Sizes = tuple[int, ...]  # sizes of a grid or a block, up to three
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_FIRST_DRIVER = 12030  # that captures such launches
_MOST_WRITTEN = 16  # ranges that are remembered: what calls norms alone would add some in each call

_lock = threading.Lock()
# By device and stream: the memory that kernels write of which the next may not see the end.
_written: dict[tuple[int, int], list[tuple[int, int]]] = {}


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("padding", c_char * 4), ("value", c_int), ("rest", c_char * 60))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y")),
        *(("block_z", c_uint), ("shared", c_uint), ("stream", c_void_p)),
        *(("attributes", c_void_p), ("attribute_count", c_uint)),
    )


def launch(
    kernel: Kernel,
    grid: Sizes,
    block: Sizes,
    arguments: Sequence[Any],
    shared: int = 0,
    *,
    prefetch: Sequence[Array | None] = (),
    writes: Sequence[Array | None] = (),
    trigger_early: bool = False,
) -> None:
    """Launch a kernel on the current stream, so that it may start before the one before it ends.

    Args:
        kernel: a kernel of `loader.load`.
        grid, block: 1 to 3 sizes.
        arguments: arrays on the GPU, NumPy scalars, or results of `structs.by_value`.
        shared: the number of bytes of dynamic shared memory.
        prefetch: the arrays that it reads before it waits.
        writes: the arrays that it writes, if it lets the next kernel start early.
        trigger_early: whether it lets the next kernel start before it has waited itself.

    Example:
        >>> from tensorgrad.kernels.loader import load
        >>> from tensorgrad.kernels.overlap import launch
        >>> offset = tg.zeros(1, "uint64", device="cuda").data  # doctest: +SKIP
        >>> kernel = load("random.cu", "advance_draw")  # doctest: +SKIP
        >>> launch(kernel, (1,), (1,), (offset, np.uint64(3)))  # doctest: +SKIP
        >>> offset  # doctest: +SKIP
        array([3], dtype=uint64)
    """
    cuda = backend.cupy.cuda
    device, stream = cuda.runtime.getDevice(), cuda.get_current_stream().ptr
    ranges = [backend.byte_bounds(array) for array in writes if array is not None]
    with _lock:
        before = _written.get((device, stream), [])
        safe = len(before) < _MOST_WRITTEN and not any(
            begin < end_written and begin_written < end
            for begin, end in (
                backend.byte_bounds(array) for array in prefetch if array is not None
            )
            for begin_written, end_written in before
        )
        overlaps = safe and _is_supported(device)
        if overlaps:
            _launch(kernel, grid, block, arguments, shared, stream)
        else:
            kernel(grid, block, tuple(arguments), shared)
        if ranges:
            kept = before if overlaps and trigger_early else []
            _written[device, stream] = kept + ranges


def launch_in_graph(
    kernel: Kernel,
    grid: Sizes,
    block: Sizes,
    arguments: Sequence[Any],
    shared: int = 0,
    *,
    writes: Sequence[Array | None],
) -> None:
    """Launch a kernel so that it may start early if a graph is being captured, else as usual.

    For kernels of a training step, which read nothing early: `launch` costs Python more, and a
    graph pays that once. They call `start_next_kernel` only where `capturing.is_capturing()`.

    Args:
        kernel, grid, block, arguments, shared, writes: as for `launch`.

    Example:
        >>> from tensorgrad.kernels.loader import load
        >>> from tensorgrad.kernels.overlap import launch_in_graph
        >>> offset = tg.zeros(1, "uint64", device="cuda").data  # doctest: +SKIP
        >>> kernel = load("random.cu", "advance_draw")  # doctest: +SKIP
        >>> arguments = offset, np.uint64(3)  # doctest: +SKIP
        >>> launch_in_graph(kernel, (1,), (1,), arguments, writes=[offset])  # doctest: +SKIP
        >>> offset  # doctest: +SKIP
        array([3], dtype=uint64)
    """
    if is_capturing():
        launch(kernel, grid, block, arguments, shared, writes=writes)
    else:
        kernel(grid, block, tuple(arguments), shared)


@cache
def _is_supported(device: int) -> bool:
    version = backend.cupy.cuda.runtime.driverGetVersion()
    return capability(device) >= 90 and version >= _FIRST_DRIVER


def _launch(
    kernel: Kernel, grid: Sizes, block: Sizes, arguments: Sequence[Any], shared: int, stream: int
) -> None:
    """Launch with the attribute, which CuPy does not offer."""
    values = [_bytes_of(argument) for argument in arguments]
    starts = np.cumsum([0, *(len(value) for value in values[:-1])])
    memory = np.frombuffer(b"".join(values), np.uint8).copy()
    addresses = (memory.ctypes.data + starts).astype(np.uintp)
    attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1)
    sizes = (*grid, 1, 1)[:3] + (*block, 1, 1)[:3]
    config = _LaunchConfig(*sizes, shared, stream, ctypes.addressof(attribute), 1)
    error = driver().cuLaunchKernelEx(
        ctypes.byref(config), c_void_p(kernel.ptr), c_void_p(addresses.ctypes.data), None
    )
    if error:
        raise backend.cupy.cuda.driver.CUDADriverError(error)


def _bytes_of(argument: Any) -> bytes:
    """Return the bytes of an argument, padded to a multiple of 8."""
    if not isinstance(argument, np.generic | Struct) and not backend.is_array(argument):
        argument = argument.value  # the value of `by_value`
    if isinstance(argument, Struct):
        value = bytes(argument)
    elif isinstance(argument, np.generic) or backend.is_numpy(argument):
        value = argument.tobytes()
    else:
        value = np.uintp(argument.data.ptr).tobytes()
    return value + bytes(-len(value) % 8)
