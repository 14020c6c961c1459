from __future__ import annotations

import io
import logging
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tensorgrad.train import progress
from tensorgrad.train.progress import ProgressBar, StageProgress
from tensorgrad.train.times import Clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    with ProgressBar(100_000, 4, 600_000, Clock()) as shown:
        clock[0] += 2.0
        shown.update(6, 2.5, 1e-3, 0.75)
        bar: Any = shown._bar
        assert (bar.n, bar.initial, bar.unit, bar.leave) == (6, 4, "step", True)
    text = terminal.getvalue()
    for part in ("6/100000", "loss 2.500", "600k tokens/s", "lr 1.0e-03", "gradient 0.75"):
        assert part in text
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with ProgressBar(10, 0, 0, Clock()) as shown:
        shown.update(6, 2.5, 1e-3, 0.75)
    assert "6/10" in terminal.getvalue()
    assert "tokens/s" not in terminal.getvalue()


def test_elsewhere_there_are_lines_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    timer = Clock()
    with caplog.at_level(logging.INFO), ProgressBar(100, 0, 1000, timer) as shown:
        for step in range(1, 51):
            clock[0] += 1.0
            shown.update(step, 2.5, 1e-3, 0.75)
        assert shown.tokens_per_second == pytest.approx(1000)
        with timer.paused():
            clock[0] += 25.0
        assert shown.tokens_per_second == pytest.approx(1000)
    assert [record.getMessage() for record in caplog.records][-1] == (
        "step 50/100  loss 2.500  lr 1.0e-03  gradient 0.75  1,000 tokens/s  00:50 left"
    )
    assert len(caplog.records) == 5
    with caplog.at_level(logging.INFO), ProgressBar(30, 10, 0, Clock()) as shown:
        clock[0] += 20.0
        shown.update(20, 2.5, 1e-3, 0.75)
    assert caplog.messages[-1] == ("step 20/30  loss 2.500  lr 1.0e-03  gradient 0.75  00:20 left")


def test_the_last_step_has_a_line_always(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), ProgressBar(2, 0, 1, Clock()) as shown:
        shown.update(1, 1.0, 1.0, 1.0)
        shown.update(2, 1.0, 1.0, 1.0)
    assert [record.getMessage()[:8] for record in caplog.records] == ["step 2/2"]


def test_other_ranks_show_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with caplog.at_level(logging.INFO), ProgressBar(2, 0, 1, Clock(), shown=False) as hidden:
        hidden.update(2, 1.0, 1.0, 1.0)
        assert hidden.tokens_per_second > 0
        with StageProgress("reading", shown=False) as stages:
            stages("one", 1, 2)
    assert terminal.getvalue() == ""
    assert caplog.records == []


def test_a_notebook_shows_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import tqdm.auto

    kernel: Any = SimpleNamespace(config={"IPKernelApp": {}})
    ipython: Any = SimpleNamespace(get_ipython=lambda: kernel)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert progress._bar_class() is tqdm.auto.tqdm
    kernel.config = {"TerminalIPythonApp": {}}
    assert progress._bar_class() is None
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert progress._bar_class() is tqdm.tqdm
    ipython.get_ipython = lambda: None
    assert progress._bar_class() is tqdm.tqdm


def test_a_bar_in_a_notebook_counts_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_is_notebook", lambda: True)
    with ProgressBar(10, 4, 1000, Clock()) as shown:
        shown.update(10, 2.5, 1e-3, 0.75)
    assert "10/10" in stream.getvalue()


def test_stages_are_lines_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with caplog.at_level(logging.INFO), StageProgress("reading") as shown:
        for stage in ("one", "two"):
            for done in range(0, 100, 10):
                shown(stage, done, 80)
                clock[0] += 4
    lines = [record.getMessage() for record in caplog.records]
    of_one = ["reading: one", "reading: one 38%", "reading: one 75%", "reading: one 100%"]
    assert lines == [*of_one, *(line.replace("one", "two") for line in of_one)]
    caplog.clear()
    with caplog.at_level(logging.INFO), StageProgress("reading") as shown:
        for done in (0, 5):
            shown("one", done, 0)  # an unknown number
            clock[0] += 10
    assert caplog.messages == ["reading: one", "reading: one"]


def test_stages_are_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with StageProgress("reading") as shown:
        shown("times.jsonl", 5000, 10_000)
        first: Any = shown._bar
        assert (first.n, first.total) == (5000, 10_000)
        assert (first.leave, first.unit, first.unit_scale) == (False, "B", True)
        shown("times.jsonl", 7000, 0)
        assert (shown._bar, first.n, first.total) == (first, 7000, None)
        shown("metrics.jsonl", 3, 10)
        assert shown._bar is not first
    assert "times.jsonl" in terminal.getvalue()


def test_a_terminal_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for lines, is_terminal in ((0, False), (1, True)):
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True, fileno=lambda: 2))
        size = os.terminal_size((80, lines))
        monkeypatch.setattr(os, "get_terminal_size", lambda _, size=size: size)
        assert progress._is_terminal() is is_terminal
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert progress._is_terminal() is False
