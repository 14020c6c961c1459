from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_train_on_ranks import options, same_run, train_alone
from tests.ranks import run_ranks
from tests.source_tree import ROOT

pytestmark = pytest.mark.mpi
PROGRAM = ROOT / "examples" / "train_gpt2_3d.py"
# A small step: where a gradient is rounding alone (the bias of all keys), Adam makes a step of it,
# and the runs would drift apart by more than the order of sums does.
SIZES = ["--micro-batches", "2", "--vocab-multiple", "4", "--lr", "2e-4"]

__all__ = ["options"]  # a fixture


def test_a_run_resumes_from_mesh_to_mesh(options: list[str], tmp_path: Path) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "run"
    train_alone(*options, *SIZES, "--out", alone)
    first = ["--pp", 2, "--tp", 2, "--stop-after", 5]
    result = run_ranks(PROGRAM, 4, [*options, *SIZES, *first, "--out", folder])
    assert "stopped after step 5 of 20" in result.stderr
    second = ["--dp", 2, "--tp", 2, "--sequence-parallel", "--parallel", "zero1", "--stop-after", 8]
    result = run_ranks(PROGRAM, 4, ["--resume", folder, *second])
    assert "stopped after step 13 of 20" in result.stderr
    result = run_ranks(PROGRAM, 2, ["--resume", folder, "--tp", 2, "--sequence-parallel"])
    assert "def " not in result.stdout  # no sample
    result = run_ranks(PROGRAM, 1, ["--resume", folder])
    assert result.stdout.count("def ") == 1
    same_run(folder, alone)


def test_options_that_do_not_fit_are_one_line(options: list[str], tmp_path: Path) -> None:
    for given, message in (
        (
            ["--chunks", 2],
            "--chunks: got 2 with schedule '1f1b', expected 1; more are for 'interleaved'",
        ),
        (["--pp", 3], "--pp 3: got 2 ranks, expected a multiple of 3 ranks"),
    ):
        result = run_ranks(PROGRAM, 2, [*options, *given, "--out", tmp_path / "run"], check=False)
        assert result.returncode == 1
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr


def test_a_model_that_cannot_be_cut_is_reported_once(options: list[str], tmp_path: Path) -> None:
    sizes = ["--vocab-multiple", 7, "--tp", 2, "--out", tmp_path / "run"]
    result = run_ranks(PROGRAM, 2, [*options, *sizes], check=False)
    assert result.returncode == 1
    message = "tokens has 301 rows, expected a multiple of the 2 ranks"
    assert result.stderr.count(message) == 1, result.stderr
    assert "Traceback" not in result.stderr
