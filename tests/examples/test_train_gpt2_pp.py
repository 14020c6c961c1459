from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples.test_train_gpt2_dp import options, same_run, train_alone
from tests.ranks import run_each, run_ranks
from tests.source_tree import ROOT

pytestmark = pytest.mark.mpi
PROGRAM = ROOT / "examples" / "train_gpt2_pp.py"

__all__ = ["options"]  # a fixture


def test_a_run_resumes_with_another_number_of_stages(options: list[str], tmp_path: Path) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "run"
    train_alone(*options, "--micro-batches", 4, "--out", alone)
    result = run_ranks(PROGRAM, 2, [*options, "--out", folder, "--stop-after", 5])
    assert "stopped after step 5 of 20" in result.stderr
    saved = json.loads((folder / "config.json").read_text())
    assert saved == json.loads((alone / "config.json").read_text()) | {"out": str(folder)}
    more = ["--pp", 1, "--parallel", "zero1", "--stop-after", 3]
    result = run_ranks(PROGRAM, 2, ["--resume", folder, *more])
    assert "stopped after step 8 of 20" in result.stderr
    result = run_ranks(PROGRAM, 2, ["--resume", folder, "--pipeline-schedule", "gpipe"])
    assert result.stdout.count("def ") == 1  # the sample, once
    same_run(folder, alone)


def test_sizes_that_do_not_fit_are_reported_once(options: list[str], tmp_path: Path) -> None:
    wrong: tuple[tuple[list[object], str], ...] = (
        (["--micro-batches", 3], "--micro-batches: got 3, expected a divisor of the 8 sequences"),
        (
            ["--pipeline-schedule", "interleaved"],
            "the model has 2 layers, expected 4 or more: 2 stages with 2",
        ),
        (["--pp", 1, "--batch", 7], "--batch: got 7, expected a multiple of the 2 data"),
        (
            ["--pipeline-schedule", "gpipe", "--chunks", 2],
            "--chunks: got 2 with schedule 'gpipe', expected 1; more",
        ),
    )
    out = ["--out", tmp_path / "run"]
    runs = [[*options, *given, *out] for given, _ in wrong]
    for result, (_, message) in zip(run_each(PROGRAM, 2, runs, tmp_path), wrong, strict=True):
        assert result.returncode == 1
        assert result.stderr.count(message) == 1, result.stderr
        assert "Traceback" not in result.stderr
