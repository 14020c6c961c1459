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


def test_data_has_few_digits_and_no_nan() -> None:
    values = Column(np.arange(4), np.array([1.23456789, np.nan, 524288.0, 1.5e-7]))
    data = curve_data(Curve("x", values, color=9), 10)
    assert data["values"] == [1.2346, None, 524290, 1.5e-07]
    assert data["color"] == 1
