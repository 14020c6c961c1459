from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_train_on_ranks import options, run_train, same_run, train_alone

pytestmark = pytest.mark.mpi
STAGES = ["--pp", 2, "--micro-batches", 4]

__all__ = ["options"]  # a fixture


def test_a_run_resumes_with_another_number_of_stages(options: list[str], tmp_path: Path) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "run"
    train_alone(*options, "--micro-batches", 4, "--out", alone)
    result = run_train(2, [*options, *STAGES, "--out", folder, "--stop-after", 5])
    assert "stopped after step 5 of 20" in result.stderr
    saved = json.loads((folder / "config.json").read_text())
    assert saved == json.loads((alone / "config.json").read_text()) | {"out": str(folder)}
    more = ["--pp", 1, "--parallel", "zero1", "--stop-after", 3]
    result = run_train(2, ["--resume", folder, *more])
    assert "stopped after step 8 of 20" in result.stderr
    result = run_train(2, ["--resume", folder, "--pp", 2, "--pipeline-schedule", "gpipe"])
    assert result.stdout.count("def ") == 1  # the sample, once
    same_run(folder, alone)
