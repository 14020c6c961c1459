"""`tensorgrad bench parallel` measures every part on ranks of a CPU, and the plan is near."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorgrad.io.readers import read_json
from tests.ranks import run_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
MODEL = "--layers 4 --width 128 --heads 4 --context 32 --vocab 100 --batch 4 --micro-batches 4"


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_it_measures_every_part_and_the_plan_is_near(tmp_path: Path, dtype: str) -> None:
    options = ["--device", "cpu", *MODEL.split(), "--steps", "1", "--windows", "1", "--no-peer"]
    command = ["bench", "parallel", *options, "--dtype", dtype, "--out", tmp_path / "out"]
    printed = run_ranks("tensorgrad", 2, command).stdout
    rows = read_json(tmp_path / "out" / "parallel.json")["rows"]
    found = {(row["parallel"], row["micro_batches"]): row for row in rows}
    assert list(found) == [
        *(("none", 1), ("naive", 1), ("flat", 1), ("overlap", 1), ("none", 4)),
        *(("model-parallel", 4), ("gpipe", 4), ("1f1b", 4), ("interleaved", 4)),
        *(("tensor", 1), ("tensor-sequence", 1), ("zero1", 1), ("zero2", 1), ("zero3", 1)),
    ]
    for (mode, micro_batches), row in found.items():
        assert mode in printed
        assert row["status"] == "ok"
        ranks = 1 if mode == "none" else 2
        shared = micro_batches > 1 or mode.startswith("tensor")
        tokens = 4 * 32 * (1 if shared else ranks)
        assert row["tokens_per_second"] == pytest.approx(1e3 * tokens / row["ms"], rel=1e-3)
        if mode.startswith(("zero", "tensor")) or mode == "overlap":
            near = 0.05 if dtype == "float32" else 0.1  # NumPy multiplies copies in float32
            assert row["planned_ratio"] == pytest.approx(1, rel=near), mode
        elif micro_batches > 1 and mode != "none":
            assert row["planned_ratio"] == pytest.approx(1, rel=0.1), mode
            assert 0 <= row["idle"] <= row["most_idle"] <= 100
    assert found["model-parallel", 4]["bubble"] == 50
    assert found["gpipe", 4]["bubble"] == pytest.approx(100 / 5)
    assert found["gpipe", 4]["peak_mb"] > found["1f1b", 4]["peak_mb"]
    assert found["overlap", 1]["memory_overhead"] < 2
    slow, fast = found["naive", 1]["ms"], found["overlap", 1]["ms"]
    assert found["overlap", 1]["speed_up"] == pytest.approx(slow / fast, rel=1e-3)
    assert found["naive", 1]["speed_up"] is None


def test_micro_batches_that_do_not_divide_the_batch_are_said_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    given = ["--device", "cpu", "--batch", 4, "--micro-batches", 3, "--out", tmp_path / "out"]
    result = run_ranks("tensorgrad", 2, ["bench", "parallel", *given], check=False)
    assert result.returncode == 1
    assert "--micro-batches: got 3, expected a divisor of the 4" in result.stderr
    assert not (tmp_path / "out").exists()
