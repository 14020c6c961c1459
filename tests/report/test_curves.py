from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensorgrad.report.curves import Curve, axes, charts, curve_data, units
from tensorgrad.report.run import read_run
from tensorgrad.train.curves import Column
from tests.report.made_run import make_run, write_lines


def noise(count: int, seed: int = 0) -> Column:
    return Column(np.arange(count), np.random.default_rng(seed).standard_normal(count))


def test_steps_are_placed_on_tokens_and_time(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "loss": 1.0} for step in (1, 12)])
    lines = [{"step": step, "tokens": 100 * step, "elapsed": 2.0 * step} for step in (2, 4, 10)]
    lines[1]["elapsed"] = 1.0  # a clock that was set back
    write_lines(tmp_path / "times.jsonl", lines)
    found = axes(read_run(tmp_path))
    write_lines(
        tmp_path / "times.jsonl", [{"step": 0, "seconds": 5}, {"step": 12, "seconds": 1e8 / 3}]
    )
    assert axes(read_run(tmp_path)) == {"step": [0, 12], "seconds": [5, 33_333_330]}
    assert found == {
        "step": [0, 2, 4, 10, 12],
        "tokens": [0, 200, 400, 1000, 1200],
        "elapsed": [0, 4, 4, 20, 24],
    }


@pytest.mark.parametrize("lines", [[], [{"step": 0, "tokens": 0, "seconds": 0}]])
def test_without_times_there_are_only_steps(tmp_path: Path, lines: list[dict[str, float]]) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    write_lines(tmp_path / "times.jsonl", lines)
    assert axes(read_run(tmp_path)) == {}


def test_a_long_run_has_few_points_on_an_axis(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps=3000))
    found = axes(run)
    assert {len(values) for values in found.values()} == {1001}
    assert found["tokens"][-1] == pytest.approx(3000 * 524_288, rel=1e-6)


def test_times_have_a_readable_unit() -> None:
    assert units([])["seconds"] == ("s", 1)
    assert units([])["tokens"] == ("tokens", None)
    for longest, unit in ((120, "s"), (121, "min"), (7200, "min"), (172_800, "h"), (172_801, "d")):
        assert units([{"seconds": [0, longest]}])["seconds"][0] == unit
    assert units([{"seconds": [0, 1e6]}])["seconds"] == ("d", 86400)
    assert units([{"seconds": [0, 500.0]}, {}])["seconds"] == ("min", 60)
    assert units([{"elapsed": [0, 9000.0]}, {"elapsed": [0, 5.0]}])["elapsed"] == ("h", 3600)


def test_a_run_has_these_charts(tmp_path: Path) -> None:
    found = charts([read_run(make_run(tmp_path / "run"))], [""])
    assert [chart.title for chart in found] == [
        *("Loss", "Learning rate", "Gradient norm", "Throughput", "MFU", "Memory"),
        *("GPU utilization", "GPU power", "GPU clock"),
    ]
    assert [(curve.label, curve.style) for curve in found[0].curves] == [
        ("training", "faint"),
        ("training, mean of 5 points", "line"),
        ("validation", "markers"),
    ]
    assert found[4].curves[0].column.values.max() == pytest.approx(46, abs=1)  # percent
    assert [(chart.unit, len(chart.curves), chart.curves[0].style) for chart in found] == [
        *(("nats", 3, "faint"), ("", 1, "line"), ("before clipping", 2, "faint")),
        *(("tokens/s", 2, "faint"), ("% of the peak FLOP/s", 2, "faint"), ("MB", 2, "line")),
        *(("%", 2, "faint"), ("W", 2, "faint"), ("MHz", 2, "faint")),
    ]
    assert [curve.color for curve in found[0].curves] == [0, 0, 1]
    assert [(c.label, c.style, c.color, c.run) for c in found[5].curves] == [
        *(("in use", "line", 0, 0), ("peak", "line", 1, 0))
    ]


def test_several_runs_have_a_curve_each_in_a_chart(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name)) for name in ("a", "b", "c")]
    score = Column(np.arange(30), np.linspace(0, 1, 30))
    for run in runs[1:]:
        run.metrics.columns["word_accuracy"] = score
    runs[0].metrics.columns["bleu"] = score
    found = {chart.title: chart for chart in charts(runs, ["a", "b", "c"])}
    assert "Bleu" not in found  # only one run has it
    assert [(c.label, c.style, c.color, c.run) for c in found["Word accuracy"].curves] == [
        *(("b", "markers", 1, 1), ("c", "markers", 2, 2))
    ]
    assert [(c.label, c.style, c.color, c.run) for c in found["Loss"].curves[:4]] == [
        *(("a: training", "line", 0, 0), ("a: validation", "markers", 0, 0)),
        *(("b: training", "line", 1, 1), ("b: validation", "markers", 1, 1)),
    ]
    assert [(c.label, c.style, c.color, c.run) for c in found["Memory"].curves[:4]] == [
        *(("a: in use", "line", 0, 0), ("a: peak", "faint", 0, 0)),
        *(("b: in use", "line", 1, 1), ("b: peak", "faint", 1, 1)),
    ]
    assert (found["Loss"].unit, found["Throughput"].unit, found["Memory"].unit) == (
        *("nats, training loss smoothed", "tokens/s, smoothed", "MB"),
    )
    one = charts(runs[:1], [""])[1]
    assert (one.title, one.curves[0].label, one.curves[0].style) == ("Bleu", "bleu", "markers")


@pytest.mark.parametrize(("points", "curves"), [(19, ["line"]), (20, ["faint", "line"])])
def test_only_enough_points_are_smoothed(tmp_path: Path, points: int, curves: list[str]) -> None:
    lines = [{"step": step, "loss": float(step % 2)} for step in range(points)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    (chart,) = charts([read_run(tmp_path)], [""])
    assert [curve.style for curve in chart.curves] == curves


def test_data_has_few_digits_and_no_nan() -> None:
    values = Column(np.arange(4), np.array([1.23456789, np.nan, 524288.0, 1.5e-7]))
    data = curve_data(Curve("x", values, color=9), 10)
    assert data["values"] == [1.2346, None, 524290, 1.5e-07]
    assert (data["color"], data["style"], data["run"]) == (1, "line", 0)
    values = Column(np.arange(2), np.array([1e14, 1e15]))
    assert list(map(type, curve_data(Curve("x", values), 10)["values"])) == [int, float]
    assert len(curve_data(Curve("x", noise(100)), 10)["steps"]) <= 10
