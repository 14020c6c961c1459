from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.train import plot
from tensorgrad.train.log import StepLog
from tensorgrad.train.plot import LivePlot, plot_losses
from tests.train.tiny_run import make_trainer

RECORDS: list[dict[str, Any]] = [
    {"step": 0, "validation_loss": 5.0},
    *({"step": step, "loss": 5.0 / step} for step in range(1, 6)),
]


def drawn(records: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    """Return the figure that is drawn."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures, make = [], Figure.add_subplot

    def noted(figure: Any, *place: Any, **options: Any) -> Any:
        figures.append(figure)
        return make(figure, *place, **options)

    monkeypatch.setattr(Figure, "add_subplot", noted)
    assert plot_losses(records, path / "loss.png", "gpt2-1") is True
    return figures[-1]


def test_the_loss_curve_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot_losses(RECORDS, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert plot_losses([], tmp_path / "empty.png", "a run")
    assert plot_losses([{"step": 1, "loss": None}], tmp_path / "empty.png")


def test_a_picture_that_matplotlib_cannot_draw_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bytes:
        raise ValueError("Key backend: 'zzz' is not a valid value")

    monkeypatch.setattr(plot, "_picture", fail)
    assert plot_losses(RECORDS, tmp_path / "loss.png") is False
    assert "loss.png is not drawn: ValueError: Key backend: 'zzz'" in caplog.text
    assert not list(tmp_path.iterdir())


def test_each_measure_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["x" * 100, "x" * 101, *(f"measure{n}" for n in range(30))]
    other = {"step": 5, **{name: float(n) for n, name in enumerate(names)}}
    gap = {"step": 6, "x" * 100: None}
    figure = drawn([*RECORDS, {"step": 3, "x" * 100: 7.0}, other, gap], monkeypatch, tmp_path)
    axes, right = figure.axes
    shown = [names[0], *names[2:21]]
    assert [line.get_label() for line in right.lines] == shown
    assert [line.get_color() for line in right.lines] == [f"C{n}" for n in range(2, 22)]
    assert right.lines[0].get_xdata().tolist() == [3, 5]
    assert right.lines[0].get_ydata().tolist() == [7.0, 0.0]
    assert (right.get_ylabel(), axes.get_xlabel()) == (", ".join(shown), "step")
    training, validation = axes.lines
    assert training.get_ydata().tolist() == [5.0 / step for step in range(1, 6)]
    assert (training.get_color(), validation.get_color()) == ("C0", "C1")
    assert (validation.get_xdata().tolist(), validation.get_ydata().tolist()) == ([0], [5.0])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        *("training loss", "validation loss", *shown)
    ]


def test_a_long_run_is_smoothed_and_thinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0).standard_normal(20_000)
    records: list[dict[str, Any]] = [
        {"step": step, "loss": 3 + value} for step, value in enumerate(noise.tolist(), 1)
    ]
    records[777]["loss"] = 99.0
    figure = drawn([*records, {"step": 9, "validation_loss": 3.0}], monkeypatch, tmp_path)
    (axes,) = figure.axes
    raw, smooth, validation = axes.lines
    assert [line.get_label() for line in axes.lines] == [
        "training loss",
        "training loss, mean of 201 steps",
        "validation loss",
    ]
    assert len(raw.get_xdata()) <= 2400
    assert max(raw.get_ydata()) == 99.0
    assert np.std(smooth.get_ydata()) < 0.5
    assert raw.get_linewidth() < smooth.get_linewidth()
    assert raw.get_alpha() < 1
    assert validation.get_marker() == "o"
    (short,) = drawn(records[:19], monkeypatch, tmp_path).axes[0].lines
    assert short.get_alpha() is None  # nothing is drawn over it
    pale, mean = drawn(records[:20], monkeypatch, tmp_path).axes[0].lines
    assert (pale.get_alpha(), mean.get_alpha(), mean.get_color()) == (0.4, None, "C0")
    assert (axes.get_title(), axes.get_ylabel()) == ("gpt2-1", "loss (nats)")


def test_without_matplotlib_nothing_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot_losses(RECORDS, tmp_path / "loss.png") is False
    with LivePlot(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "", 0.0) as live:
        (tmp_path / "metrics.jsonl").touch()
        live.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_is_drawn_while_it_trains(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log, picture = StepLog(tmp_path / "metrics.jsonl", -1), tmp_path / "loss.png"
    with LivePlot(tmp_path / "metrics.jsonl", picture, "a run", seconds=0.01) as live:
        log.write(RECORDS[1])
        while not picture.exists():
            assert live._thread.is_alive()
            time.sleep(0.001)
        first = picture.read_bytes()
        for record in RECORDS[2:]:
            log.write(record)
        live.finish()
    log.close()
    assert picture.read_bytes() != first
    assert not [each for each in threading.enumerate() if each.name == "loss.png"]


def test_a_run_without_a_thread_is_drawn_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    drawn: list[str] = []
    monkeypatch.setattr(plot, "plot_losses", lambda records, path, title: drawn.append(title))
    (tmp_path / "metrics.jsonl").touch()
    live = LivePlot(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "a run")
    monkeypatch.setattr(live._thread, "start", fail)
    with live as entered:
        assert entered is live
        live.finish()
    assert drawn == ["a run"]


def test_plots_take_a_small_fraction_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, pauses = [0.0], []
    live = LivePlot(tmp_path, tmp_path, "", seconds=30.0)

    class Ended:
        def wait(self, seconds: float) -> bool:
            pauses.append(seconds)
            return len(pauses) > 3

    def draw(*_: object) -> bool:
        clock[0] += len(pauses)
        return True

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(live, "_ended", Ended())
    monkeypatch.setattr(live, "_draw", draw)
    live._draw_often()
    assert pauses == [30.0, 200.0, 400.0, 600.0]


def test_a_plot_that_fails_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = LivePlot(tmp_path / "missing.jsonl", tmp_path / "loss.png", "", seconds=0.0)
    with live:
        live._thread.join()
    assert "loss.png is not drawn any more" in caplog.text


def test_a_run_leaves_its_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = []
    monkeypatch.setattr(plot, "plot_losses", lambda records, path, title: titles.append(title))
    make_trainer(tmp_path / "a run", plot=True, steps=5).run()
    assert titles == ["a run"]
