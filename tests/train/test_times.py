from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensorgrad.core import backend
from tensorgrad.kernels.gpu import GpuMonitor
from tensorgrad.models.gpt2 import PRESETS
from tensorgrad.train import times
from tensorgrad.train.log import read_metrics
from tensorgrad.train.times import Clock, TimesLog, Work
from tests.train.tiny_run import make_trainer


class Timer:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    monkeypatch.setattr(times, "memory", lambda on_gpu: {"peak_memory_mb": 1.0})
    return Timer(monkeypatch)


def opened(path: Path, step: int, clock: Clock, work: Work | None = None) -> TimesLog:
    return TimesLog(path, step, clock, work or Work(100), "cpu", GpuMonitor(None))


def test_there_is_a_line_a_second_and_the_last(tmp_path: Path, timer: Timer) -> None:
    clock, path = Clock(), tmp_path / "times.jsonl"
    log = opened(path, 0, clock)
    for step in range(1, 19):
        timer.now += 0.125
        with clock.paused():
            timer.now += 0.125 if step > 16 else 0
        log.update(step)
    assert log.update(18, at_once=True) is not None
    assert log.update(18, at_once=True) is None
    log.close()
    records = read_metrics(path)
    assert [record["step"] for record in records] == [8, 16, 18]
    assert [record["seconds"] for record in records] == [1, 2, 2.25]
    assert [record["elapsed"] for record in records] == [1, 2, 2.5]
    assert [record["tokens"] for record in records] == [800, 1600, 1800]
    assert [record["tokens_per_second"] for record in records] == [800] * 3
    assert set(records[0]) == {
        *("step", "seconds", "elapsed", "tokens", "tokens_per_second", "peak_memory_mb")
    }


def test_a_resumed_run_adds_to_the_times_of_its_checkpoint(tmp_path: Path, timer: Timer) -> None:
    path = tmp_path / "times.jsonl"
    log = opened(path, 0, Clock())
    for step in (4, 8, 12):
        timer.now += 2
        log.update(step)
    log.close()
    timer.now += 1000  # stopped
    log = opened(path, 8, Clock())
    timer.now += 1
    log.update(10)
    log.close()
    records = read_metrics(path)
    assert [record["step"] for record in records] == [4, 8, 10]
    assert [record["seconds"] for record in records] == [2, 4, 5]
    assert [record["elapsed"] for record in records] == [2, 4, 5]
    assert records[-1]["tokens_per_second"] == pytest.approx(200)


@pytest.mark.parametrize("content", ["", "{", '{"step": 3}\n', '{"step": 3, "seconds": null}\n'])
def test_a_damaged_or_older_run_starts_at_zero(tmp_path: Path, timer: Timer, content: str) -> None:
    path = tmp_path / "times.jsonl"
    path.write_text(content)
    log = opened(path, 5, Clock(), Work())
    timer.now += 2.00004  # it has four decimals
    values = log.update(7)
    log.close()
    assert values == {"seconds": 2, "elapsed": 2, "peak_memory_mb": 1}


def test_epochs_are_counted_where_there_are_some(tmp_path: Path, timer: Timer) -> None:
    log = opened(tmp_path / "times.jsonl", 0, Clock(), Work(steps_per_epoch=8))
    timer.now += 2
    values = log.update(10)
    log.close()
    assert values is not None
    assert values["epoch"] == 1.25


def test_the_utilization_follows_from_the_speed(tmp_path: Path, timer: Timer) -> None:
    flops = PRESETS["gpt2-124M"].training_flops()
    log = opened(tmp_path / "times.jsonl", 0, Clock(), Work(1000, flops, 100 * 1000 * flops))
    timer.now += 2
    values = log.update(50)
    log.close()
    assert values is not None
    assert values["mfu"] == 0.25


def test_a_run_on_the_cpu_has_no_utilization(tmp_path: Path) -> None:
    make_trainer(tmp_path).run()
    records = read_metrics(tmp_path / "times.jsonl")
    assert {record["step"] for record in records} >= {5, 10, 15, 20, 24}  # at checkpoints
    for record in records:
        assert record["tokens"] == record["step"] * 32
        assert 0 < record["seconds"] <= record["elapsed"]
        assert "mfu" not in record
        assert record["peak_memory_mb"] > 10


def test_times_continue_where_a_run_resumes(tmp_path: Path) -> None:
    for stop_after in (7, 7, None):
        trainer = make_trainer(tmp_path, stop_after=stop_after)
        trainer.resume()
        trainer.run()
    records = read_metrics(tmp_path / "times.jsonl")
    assert {record["step"] for record in records} >= {5, 7, 10, 14, 15, 20, 24}
    for name in ("step", "seconds", "elapsed", "tokens"):
        values = [record[name] for record in records]
        assert values == sorted(values)


def test_what_a_gpu_adds(tmp_path: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    Timer(monkeypatch)
    pool = SimpleNamespace(used_bytes=lambda: 3_000_000, total_bytes=lambda: 5_000_000)
    cupy: Any = SimpleNamespace(get_default_memory_pool=lambda: pool)
    monkeypatch.setattr(backend, "cupy", cupy)
    monitor = GpuMonitor(None)
    monkeypatch.setattr(monitor, "take", lambda: {"watts": 500.0})
    log = TimesLog(tmp_path / "times.jsonl", 0, Clock(), Work(), "cuda:0", monitor)
    values = log.update(1, at_once=True)
    log.close()
    assert values is not None
    assert (values["memory_mb"], values["peak_memory_mb"], values["watts"]) == (3, 5, 500)


def test_the_peak_is_that_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "gpu_index", lambda device: 0)
    monkeypatch.setattr(times, "name_of", lambda index: "NVIDIA H200")
    assert times.peak_of("cuda:0", "bfloat16-parameters", 4) == 4 * 989e12
    assert times.peak_of("cuda:0", "float32", 1) == 67e12
    assert times.peak_of("cpu", "float32", 1) is None
    monkeypatch.setattr(times, "name_of", lambda index: "an unknown GPU")
    assert times.peak_of("cuda:0", "float16", 1) is None


def test_windows_reports_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert times.memory(on_gpu=False) == {}


@pytest.mark.gpu
def test_a_run_on_a_gpu_has_memory(tmp_path: Path) -> None:
    log = TimesLog(tmp_path / "times.jsonl", 0, Clock(), Work(), "cuda:0", GpuMonitor(None))
    array = backend.cupy.zeros(1_000_000, "float32")
    values = log.update(1, at_once=True)
    log.close()
    assert values is not None
    assert array.nbytes / 1e6 <= values["memory_mb"] <= values["peak_memory_mb"]
