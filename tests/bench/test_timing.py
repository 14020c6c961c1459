"""How calls are timed: in turns, and under load."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tensorgrad.bench import timing
from tensorgrad.bench.timing import in_turns, random_array, under_load


def test_turns_go_there_and_back() -> None:
    called: list[str] = []

    def measure(name: str) -> float:
        called.append(name)
        return len(called)

    assert in_turns([partial(measure, name) for name in "abc"], 3) == [6, 5, 4]
    assert "".join(called) == "abccbaabc"
    assert in_turns([], 2) == []


def test_a_call_is_repeated_for_the_seconds_given(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    rounds: list[int] = []
    monkeypatch.setattr(timing, "synchronize", lambda device: waits.append(len(rounds)))

    def call(number: int) -> None:
        rounds.append(number)
        time.sleep(2e-3)

    start = time.perf_counter()
    ms = under_load(call, 0.1)
    assert time.perf_counter() - start > 0.1
    assert 2 <= ms < 20
    assert rounds[:2] == [0, 1]  # to warm up and to see how long a call takes
    assert rounds[2:] == list(range(len(rounds) - 2))
    assert waits[:2] == [1, 2]
    assert len(waits) - 2 < len(rounds) - 2  # not after each


def test_a_long_call_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    rounds: list[int] = []
    under_load(rounds.append, 0)
    assert rounds[:3] == [0, 1, 0]


@pytest.mark.gpu
def test_under_load_a_gpu_takes_about_as_long_as_else() -> None:
    a = random_array((4096, 4096), "float32")
    once = timing.milliseconds(lambda _: a @ a)
    assert 0.7 * once < under_load(lambda _: a @ a, 0.2) < 2 * once
