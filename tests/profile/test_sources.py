"""Sources of kernel times, with fakes of CUPTI and of CUDA."""

from __future__ import annotations

import time
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from tensorgrad.core import backend
from tensorgrad.errors import DeviceError
from tensorgrad.profile import sources
from tensorgrad.profile.recording import Kernel
from tensorgrad.profile.sources import CuptiSource, EventSource, choose


class Kinds(IntEnum):
    MEMCPY = 1
    MEMSET = 2
    KERNEL = 3
    DRIVER = 4
    RUNTIME = 5
    CONCURRENT_KERNEL = 10
    EXTERNAL_CORRELATION = 39


class Cupti:
    """Delivers its records when they are flushed, as one buffer."""

    ActivityKind = Kinds
    ExternalCorrelationKind = SimpleNamespace(CUSTOM0=3)
    ahead = 10**15  # ns before perf_counter

    def __init__(self) -> None:
        self.enabled: list[int] = []
        self.stack: list[int] = []
        self.records: list[Any] = []

    def get_timestamp(self) -> int:
        return time.perf_counter_ns() + self.ahead

    def activity_register_callbacks(self, requested: Any, completed: Any) -> None:
        assert requested()[0] > 0
        self.completed = completed

    def activity_enable(self, kind: int) -> None:
        self.enabled.append(kind)

    def activity_disable(self, kind: int) -> None:
        self.enabled.remove(kind)

    def activity_push_external_correlation_id(self, kind: int, number: int) -> None:
        self.stack.append(number)

    def activity_pop_external_correlation_id(self, kind: int) -> int:
        return self.stack.pop()

    def activity_flush_all(self, flag: int) -> None:
        self.completed(self.records)

    def launch(self, name: str, kind: Kinds = Kinds.CONCURRENT_KERNEL) -> None:
        correlation = len(self.records)
        if self.stack:
            self.records.append(
                SimpleNamespace(
                    kind=Kinds.EXTERNAL_CORRELATION,
                    correlation_id=correlation,
                    external_id=self.stack[-1],
                )
            )
        start = self.get_timestamp()
        self.records.append(
            SimpleNamespace(
                kind=kind, correlation_id=correlation, name=name, start=start, end=start + 100,
                stream_id=7, device_id=1,
            )
        )  # fmt: skip


class Event:
    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.time = 0.0
        self.done = False

    def record(self, stream: Any = None) -> None:
        self.time, self.done = time.perf_counter() * 1e3, True

    def synchronize(self) -> None:
        """Do nothing."""


def cuda(capturing: bool = False) -> Any:
    return SimpleNamespace(
        runtime=SimpleNamespace(deviceSynchronize=lambda: None),
        Event=Event,
        Device=lambda: SimpleNamespace(id=0),
        get_current_stream=lambda: SimpleNamespace(ptr=5, is_capturing=lambda: capturing),
        get_elapsed_time=lambda start, end: end.time - start.time,
    )


def test_kernels_of_cupti_have_the_number_of_the_innermost_range() -> None:
    cupti = Cupti()
    source = CuptiSource(cupti, cuda())
    source.start()
    assert Kinds.EXTERNAL_CORRELATION in cupti.enabled
    before = time.perf_counter_ns()
    source.begin(4, True)
    source.begin(5, False)
    cupti.launch("_Z4gemmPfi")
    source.end(5, True)
    cupti.launch("", Kinds.MEMSET)
    source.end(4, True)
    cupti.launch("alone")
    cupti.records.append(SimpleNamespace(kind=Kinds.RUNTIME, correlation_id=0))
    found = source.stop()
    after = time.perf_counter_ns()
    assert [(each.name, each.range) for each in found] == [
        ("gemm(float*, int)", 5), ("memset", 4), ("alone", -1),
    ]  # fmt: skip
    assert all((each.stream, each.device) == (7, 1) for each in found)
    slack = 10**6  # slack of the clocks' comparison
    assert all(before - slack <= each.start < after + slack for each in found)
    assert cupti.enabled == []


def test_events_around_ops_come_from_a_pool() -> None:
    Event.made = 0
    source = EventSource(cuda())
    source.start()
    for step in range(10):
        source.begin(100 * step, True)  # a range that holds others has no events
        source.begin(100 * step + 1, False)
        source.end(100 * step + 1, True)
        source.begin(100 * step + 2, False)
        source.end(100 * step + 2, False)  # never recorded
        source.end(100 * step, True)
    found = source.stop()
    assert [each.range for each in found] == [100 * step + 1 for step in range(10)]
    assert all(isinstance(each, Kernel) and each.end >= each.start for each in found)
    assert Event.made <= 5


def test_events_are_read_once_the_gpu_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Event):
        """An event at 1 ms after the one before."""

        def record(self, stream: Any = None) -> None:
            Event.made += 1
            self.time, self.done = float(Event.made), is_idle

    monkeypatch.setattr(time, "perf_counter_ns", lambda: 5)
    fake, is_idle = cuda(), False
    fake.Event = Late
    Event.made = 0
    source = EventSource(fake)
    source.start()
    source.begin(1, True)
    source.begin(2, False)
    source.end(2, True)
    source.end(1, True)
    assert len(source._waiting) == 1
    for _, before, after, _ in source._waiting:
        before.done = after.done = True
    [kernel] = source.stop()
    first = 1_000_000 * (source._pool[0].time - source._first.time)
    assert kernel == Kernel("", 5 + first, 5 + first + 2_000_000, 5, 0, 2)
    assert source._waiting == []


def test_the_offset_of_a_clock_is_that_of_the_fastest_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = iter([*(0, 100), *(200, 240), *(300, 310), *(50 * n for n in range(8, 22))])
    readings = iter([9, 9, 1308, *[9] * 7])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(moments))
    assert sources._clock_offset(lambda: next(readings)) == 1308 - 300 - 5
    assert next(moments, None) is None  # ten readings


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "gpu_count", lambda: 0)
    for kind in (None, "host"):
        source = choose(kind)
        assert (source.name, source.stop()) == ("host", [])
    for kind in ("events", "cupti"):
        with pytest.raises(DeviceError, match=f"source is '{kind}', but no GPU was found"):
            choose(kind)


def test_no_events_while_a_graph_captures() -> None:
    source = EventSource(cuda(capturing=True))
    source.start()
    source.begin(1, False)
    source.end(1, True)
    assert source.stop() == []


def test_the_source_is_chosen_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "gpu_count", lambda: 1)
    monkeypatch.setattr(backend, "cupy", SimpleNamespace(cuda=cuda()))
    monkeypatch.setattr(sources, "_cupti", lambda: None)
    assert choose(None).name == "events"
    with pytest.raises(DeviceError, match=r"pip install -e \"\.\[cuda13\]\""):
        choose("cupti")
    monkeypatch.setattr(sources, "_cupti", Cupti)
    assert choose(None).name == choose("cupti").name == "cupti"
    assert choose("events").name == "events"
    assert choose("host").name == "host"


def test_names_of_kernels() -> None:
    assert sources._demangled("softmax") == "softmax"
    assert sources._demangled("_Z1fi") == "f(int)"
    assert sources._demangled("_Znot a name") == "_Znot a name"
