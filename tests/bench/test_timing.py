"""How calls are timed: in turns, and under load."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad.bench import timing
from tensorgrad.bench.timing import in_turns, random_array, under_load
from tensorgrad.core import backend


def test_turns_go_there_and_back() -> None:
    called: list[str] = []

    def measure(name: str) -> float:
        called.append(name)
        return len(called)

    assert in_turns([partial(measure, name) for name in "abc"], 3) == [6, 5, 4]
    assert "".join(called) == "abccbaabc"
    assert in_turns([], 2) == []


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the rounds of a call; each takes 2 ms of a clock that nothing else moves."""
    found: list[int] = []
    clock = SimpleNamespace(perf_counter=lambda: 2e-3 * len(found))
    monkeypatch.setattr(timing, "time", clock)
    return found


def test_a_call_is_repeated_for_the_seconds_given(
    rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(timing, "synchronize", lambda device: waits.append(len(rounds)))
    assert under_load(rounds.append, 0.099) == pytest.approx(2)
    assert rounds == [0, 1, *range(50)]  # a call to warm up, another to see how long it takes
    assert waits == [1, 2, *range(7, 53, 5)]  # then every 10 ms


def test_a_call_without_seconds_runs_for_one_wait(
    rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    assert under_load(rounds.append, 0) == pytest.approx(2)
    assert rounds == [0, 1, *range(5)]


@pytest.mark.parametrize(("length", "turns"), [(1, 5), (50, 3), (200, 1)])
def test_a_cpu_is_timed_for_a_third_of_a_second(length: int, turns: int, rounds: list[int]) -> None:
    numbers: list[int] = []

    def slow(number: int) -> None:
        numbers.append(number)
        rounds.extend([0] * length)

    short, long = timing.compare_on("cpu", rounds.append, slow)
    assert (short, long) == pytest.approx((2, 2 * length))
    assert numbers == [0] + [1] * (1 + turns)  # a call to warm up, another to time
    assert timing.milliseconds_on("cpu", rounds.append) == pytest.approx(2)


def test_seconds_of_calls_and_of_phases(rounds: list[int]) -> None:
    assert timing.seconds_of(lambda: rounds.append(0), "cpu", 3) == pytest.approx(6e-3)
    assert timing.seconds_of(lambda: rounds.append(0), "cpu") == pytest.approx(2e-3)
    assert timing.host_seconds(lambda: rounds.append(0), "cpu") == pytest.approx(2e-3)

    def forward() -> list[int]:
        rounds.append(0)
        return [0, 0]  # two calls in backward

    seconds = timing.phases("cpu", forward, rounds.extend, lambda: rounds.extend([0] * 3))
    assert seconds == pytest.approx([2e-3, 4e-3, 6e-3])


def test_windows_take_turns(rounds: list[int]) -> None:
    steps = {"short": lambda: rounds.append(1), "long": lambda: rounds.extend([2, 2, 2])}
    times = timing.windows_in_turns(steps, "cpu", 2, {"short": 2, "long": 1})
    assert rounds == [1, 1, 2, 2, 2] * 2
    assert {name: timed["ms"] for name, timed in times.items()} == pytest.approx(
        {"short": 2, "long": 6}
    )


def test_random_numbers_are_those_of_their_seed() -> None:
    x = random_array((2, 3), "float16", 5, "cpu")
    expected = np.random.default_rng(5).standard_normal((2, 3), np.float32).astype("float16")
    np.testing.assert_array_equal(x, expected, strict=True)
    first = np.random.default_rng(0).standard_normal(2, np.float32)
    np.testing.assert_array_equal(random_array((2,), device="cpu"), first, strict=True)


@pytest.mark.gpu
def test_under_load_a_gpu_is_timed_until_it_has_finished() -> None:
    a = random_array((4096, 4096), "float32")
    events: list[Any] = []

    def call(number: int) -> None:
        if number == 0:  # to warm up, and the first one that counts
            events[:] = [_event()]
        _ = a @ a
        events.append(_event())

    found = under_load(call, 0.5)
    on_gpu = backend.cupy.cuda.get_elapsed_time(events[0], events[-1]) / (len(events) - 1)
    assert 0.7 * on_gpu < found < 1.5 * on_gpu  # other processes on the GPU slow both down


def _event() -> Any:
    event = backend.cupy.cuda.Event()
    event.record()
    return event
