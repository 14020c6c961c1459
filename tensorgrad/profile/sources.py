"""Measuring the kernels of a GPU: CUPTI, or CUDA events around ops where it is not installed.

A source is told the number of each range that begins and ends. Neither waits for the GPU before
the end. Tests: tests/profile/test_sources.py, with fakes, and tests/profile/test_gpu.py.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from tensorgrad.core import backend
from tensorgrad.core.errors import DeviceError
from tensorgrad.profile.recording import Kernel
from tensorgrad.startup.distribution import cuda_extra, install

_BUFFER = 8 << 20  # bytes of CUPTI's records; it asks for another when one is full


class TimeSource:
    """A source of measured kernels; the base class is a CPU, which has none."""

    name = "host"

    def start(self) -> None:
        """Begin to measure."""

    def begin(self, number: int, holds: bool) -> None:
        """Note that a range begins in this thread; `holds`: its own time is not of interest."""

    def end(self, number: int, keep: bool) -> None:
        """Note that the range that began last in this thread ends; or that it never counted."""

    def stop(self) -> list[Kernel]:
        """Wait for the GPU and return what it ran."""
        return []


def choose(kind: str | None) -> TimeSource:
    """Return CUPTI on a GPU where it is installed, else CUDA events; on the CPU neither.

    Args:
        kind: "host", "cupti" or "events"; None chooses.
    Raises:
        DeviceError: what is asked for is not available here.
    """
    if kind == "host" or (kind is None and backend.gpu_count() == 0):
        return TimeSource()
    if backend.gpu_count() == 0:
        raise DeviceError(f"Profiler: source is {kind!r}, but no GPU was found; expected 'host'")
    cupti = None if kind == "events" else _cupti()
    if kind == "cupti" and cupti is None:
        raise DeviceError(
            "Profiler: source is 'cupti', but cupti-python cannot be imported; run "
            f"{install(cuda_extra())}, or pass source='events'"
        )
    cuda = backend.cupy.cuda
    return EventSource(cuda) if cupti is None else CuptiSource(cupti, cuda)


def _cupti() -> Any:
    """Return the module of cupti-python, or None."""
    try:
        from cupti import cupti
    except Exception:  # it may find no driver that it knows
        return None
    return cupti


class CuptiSource(TimeSource):
    """Every kernel, copy and fill with its own times, from CUPTI's activity records.

    CUPTI gives each launch a correlation id, and notes which external id was on top of the
    thread's stack then: the number of the innermost range.

    Args:
        cupti: the module of cupti-python.
        cuda: `cupy.cuda`.
    """

    name = "cupti"

    def __init__(self, cupti: Any, cuda: Any) -> None:
        self._cupti, self._cuda = cupti, cuda
        kinds = cupti.ActivityKind
        self._measured = {kinds.CONCURRENT_KERNEL, kinds.KERNEL, kinds.MEMCPY, kinds.MEMSET}
        self._kinds = [
            *(kinds.EXTERNAL_CORRELATION, kinds.DRIVER, kinds.RUNTIME),
            *(kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET),
        ]
        self._custom = cupti.ExternalCorrelationKind.CUSTOM0
        self._found: list[tuple[str, int, int, int, int, int]] = []
        self._ranges: dict[int, int] = {}  # by correlation id

    def start(self) -> None:
        """Enable the records."""
        cupti = self._cupti
        self._offset = _clock_offset(cupti.get_timestamp)
        cupti.activity_register_callbacks(lambda: (_BUFFER, 0), self._read)
        for kind in self._kinds:
            cupti.activity_enable(kind)

    def begin(self, number: int, holds: bool) -> None:
        """Push the number."""
        self._cupti.activity_push_external_correlation_id(self._custom, number)

    def end(self, number: int, keep: bool) -> None:
        """Pop it."""
        self._cupti.activity_pop_external_correlation_id(self._custom)

    def stop(self) -> list[Kernel]:
        """Wait for the GPU, collect all records and disable them."""
        self._cuda.runtime.deviceSynchronize()
        self._cupti.activity_flush_all(1)
        for kind in self._kinds:
            self._cupti.activity_disable(kind)
        names = {name: _demangled(name) for name, *_ in self._found}
        offset = self._offset
        kernels = [
            Kernel(
                *(names[name], start - offset, end - offset, stream, device),
                self._ranges.get(correlation, -1),
            )
            for name, start, end, stream, device, correlation in self._found
        ]
        return sorted(kernels, key=lambda kernel: kernel.start)

    def _read(self, records: list[Any]) -> None:
        """Keep what matters of a buffer of records: CUPTI uses its memory again."""
        kinds = self._cupti.ActivityKind
        for record in records:
            if record.kind == kinds.EXTERNAL_CORRELATION:
                self._ranges[int(record.correlation_id)] = int(record.external_id)
            elif record.kind in self._measured:
                name = {kinds.MEMCPY: "memcpy", kinds.MEMSET: "memset"}.get(record.kind, "")
                place = int(record.stream_id), int(record.device_id), int(record.correlation_id)
                times = int(record.start), int(record.end)
                self._found.append((name or str(record.name), *times, *place))


def _clock_offset(clock: Callable[[], int]) -> int:
    """Return how far a clock in ns is ahead of `time.perf_counter_ns`."""

    def measured() -> tuple[int, int]:
        """Return how long a reading took, and the offset in its middle."""
        before = time.perf_counter_ns()
        there = int(clock())
        took = time.perf_counter_ns() - before
        return took, there - before - took // 2

    return min(measured() for _ in range(10))[1]


def _demangled(name: str) -> str:
    """Return the name of a kernel in C++, where the C++ library is there to demangle it."""
    if not name.startswith("_Z"):
        return name
    status = ctypes.c_int()
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
        free = ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return name
    demangle.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    text = demangle(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    found = ctypes.string_at(text).decode()
    free(text)
    return found


class _OpenEvents(threading.local):
    """The events before the open ranges of a thread; None for a range without."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


class EventSource(TimeSource):
    """The time of an op on its stream, between CUDA events before and after it.

    An op with several kernels is one entry, with the gaps between them. Events come from a pool;
    those that the GPU has passed are read and returned whenever a step ends.

    Args:
        cuda: `cupy.cuda`.
    """

    name = "events"

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._pool: list[Any] = []
        self._open = _OpenEvents()
        self._waiting: list[tuple[int, Any, Any, int]] = []
        self._kernels: list[Kernel] = []

    def start(self) -> None:
        """Record the event that all times are counted from."""
        self._cuda.runtime.deviceSynchronize()
        self._first = self._cuda.Event()
        self._first.record()
        self._first.synchronize()
        self._zero = time.perf_counter_ns()
        self._device = int(self._cuda.Device().id)

    def begin(self, number: int, holds: bool) -> None:
        """Record an event; none for a range that holds others, and none while a graph captures."""
        stream = self._cuda.get_current_stream()
        event = None if holds or stream.is_capturing() else self._event(stream)
        self._open.stack.append(event)

    def end(self, number: int, keep: bool) -> None:
        """Record the event after the range."""
        before = self._open.stack.pop()
        if before is None:
            if not self._open.stack:
                self._collect()
        elif not keep:
            self._pool.append(before)
        else:
            stream = self._cuda.get_current_stream()
            self._waiting.append((number, before, self._event(stream), int(stream.ptr)))

    def stop(self) -> list[Kernel]:
        """Wait for the GPU and read the remaining events."""
        self._cuda.runtime.deviceSynchronize()
        self._collect()
        return sorted(self._kernels, key=lambda kernel: kernel.start)

    def _event(self, stream: Any) -> Any:
        event = self._pool.pop() if self._pool else self._cuda.Event()
        event.record(stream)
        return event

    def _collect(self) -> None:
        """Read the events that the GPU has passed, and return them to the pool."""
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            number, before, after, stream = entry
            if not after.done:
                self._waiting.append(entry)
                continue
            start, end = (
                self._zero + round(1e6 * self._cuda.get_elapsed_time(self._first, event))
                for event in (before, after)
            )
            self._kernels.append(Kernel("", start, end, stream, self._device, number))
            self._pool += (before, after)
