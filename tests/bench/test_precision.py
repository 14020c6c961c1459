from __future__ import annotations

import math
from pathlib import Path

import pytest

from tensorgrad.bench.precision import KINDS, draw_accumulation, precision_sweep, with_difference
from tensorgrad.bench.sweep import run_sweep


def test_narrow_sums_stop_growing_and_wide_ones_do_not(device: str) -> None:
    [run] = precision_sweep(parts=("accumulation",), counts=(10_000,), device=device)
    found = {case["sum"]: run.measure(case) for case in run.cases}
    # half a unit in the last place of 32 in float16 and of 4 in bfloat16 is more than 0.01
    assert found["float16"]["total"] == 32
    assert found["bfloat16"]["total"] == 4
    assert found["float32"]["relative_error"] < 1e-4
    for name in ("float16 into float32", "bfloat16 into float32", "tensorgrad.sum of float16"):
        assert found[name]["relative_error"] < 2e-3
    rows = [{"sum": name, "count": 1, **row} for name, row in found.items()]
    assert {row["exact"] for row in rows} == {100}
    assert found["float16"]["relative_error"] == 0.68
    rows[0]["relative_error"] = 0.0
    [axes] = draw_accumulation(rows)[""].axes
    heights = {line.get_label(): line.get_ydata()[0] for line in axes.lines}
    assert heights == {row["sum"]: row["relative_error"] or 1e-8 for row in rows}
    assert axes.get_ylabel() == "relative error (drawn as 1e-08 where smaller)"


def test_the_default_cases() -> None:
    accumulation, dtypes, losses = precision_sweep(device="cpu")
    assert [case["count"] for case in accumulation.cases[:4]] == [100, 1000, 10_000, 100_000]
    dtypes_of = {case["sum"]: case["dtype"] for case in accumulation.cases}
    assert dtypes_of == {
        "float32": "float32", "float16": "float16", "bfloat16": "bfloat16",
        "float16 into float32": "float16", "bfloat16 into float32": "bfloat16",
        "tensorgrad.sum of float16": "float16", "tensorgrad.sum of bfloat16": "bfloat16",
    }  # fmt: skip
    assert [case["dtype"] for case in dtypes.cases] == list(KINDS)
    assert losses.cases == [{**case, "steps": 300, "seed": 0} for case in dtypes.cases]


def test_dtypes_under_autocast(device: str) -> None:
    [run] = precision_sweep(parts=("dtypes",), device=device)
    found = {case["dtype"]: run.measure(case) for case in run.cases}
    assert set(found["float32"].values()) == {"float32"}
    cast = found["bfloat16"]
    narrow = {"linear_output", "attention_output", "logits"}
    assert {name for name, dtype in cast.items() if dtype == "bfloat16"} == narrow
    assert found["float16"]["logits"] == "float16"
    whole = found["bfloat16-parameters"]
    assert {name for name, dtype in whole.items() if dtype == "float32"} == {
        *("loss", "gradients", "optimizer_state")
    }


def test_loss_curves_of_each_precision(device: str, tmp_path: Path) -> None:
    [run] = precision_sweep(parts=("losses",), steps=12, device=device)
    found = run_sweep(run, tmp_path, device=device, version="1")
    assert [row["status"] for row in found.rows] == ["ok"] * 5
    for row in found.rows:
        assert len(row["losses"].split()) == 12
        assert row["final_loss"] < row["first_loss"] == pytest.approx(math.log(64), abs=0.1)
        losses = [float(word) for word in row["losses"].split()]
        assert (losses[0], losses[-1]) == pytest.approx(
            (row["first_loss"], row["final_loss"]), rel=1e-4
        )
    assert all(abs(row["above_float32"]) < 0.1 for row in found.rows[1:])
    more = found.rows[1]["final_loss"] - found.rows[0]["final_loss"]
    assert found.rows[1]["above_float32"] == pytest.approx(more, abs=1e-5)
    assert found.rows[0]["above_float32"] == ""
    assert "losses" not in (tmp_path / "precision-losses.md").read_text()
    assert (tmp_path / "precision-losses.png").is_file()


def test_without_float32_there_is_no_difference() -> None:
    row = {"dtype": "bfloat16", "steps": 1, "seed": 0, "device": "cpu", "status": "ok"}
    assert with_difference(row, []) == row
    failed = {**row, "status": "error"}
    assert with_difference(failed, []) == failed
