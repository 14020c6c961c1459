from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.mpi
MODEL = "--layers 4 --width 128 --heads 4 --context 32 --vocab 100 --batch 4 --micro 4"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_measures_every_part_and_the_plan_is_near(tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "parallel.json"
    options = ["--device", "cpu", *MODEL.split(), "--steps", "1", "--windows", "1"]
    options += ["--sizes", "0.1", "--no-pytorch", "--dtype", dtype]
    printed = run_ranks("examples.bench.parallel", 2, [*options, "--json", out]).stdout
    found = json.loads(out.read_text())
    assert found["ranks"] == 2
    parts = {part: {line["name"]: line for line in lines} for part, lines in found["parts"].items()}
    assert list(parts["all-reduce"]) == ["0.1 MB"]
    assert list(parts["data"]) == ["alone", "naive", "flat", "overlap"]
    assert list(parts["pipeline"]) == ["alone", "model-parallel", "gpipe", "1f1b", "interleaved"]
    assert list(parts["tensor"]) == ["alone", "shared layers", "shared rows"]
    assert list(parts["zero"]) == ["overlap", "ZeRO 1", "ZeRO 2", "ZeRO 3"]
    for part, lines in parts.items():
        for name, line in lines.items():
            assert name in printed
            assert line.get("ms", 1) > 0
            if part == "zero" or "shared" in name:
                near = 0.05 if dtype == "float32" else 0.1  # NumPy multiplies copies in float32
                assert line["peak MB"] == pytest.approx(line["planned MB"], rel=near)
    pipeline = parts["pipeline"]
    assert pipeline["model-parallel"]["speed-up"] == 1
    for name in ("model-parallel", "gpipe", "1f1b", "interleaved"):
        assert pipeline[name]["peak MB"] == pytest.approx(pipeline[name]["planned MB"], rel=0.1)
    assert pipeline["gpipe"]["peak MB"] > pipeline["1f1b"]["peak MB"]
    assert parts["data"]["overlap"]["extra memory"] < 0.02


def test_micro_batches_that_do_not_divide_the_batch_are_said_before_anything_is_measured() -> None:
    given = ["--device", "cpu", "--batch", 4, "--micro", 3]
    result = run_ranks("examples.bench.parallel", 2, given, check=False)
    assert result.returncode == 2
    assert "--micro: got 3, expected a divisor of --batch, 4" in result.stderr
    assert result.stdout == ""
