from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.bench.matrix import (
    MatrixBench,
    matrix_cases,
    matrix_sweep,
    parallel_cases,
    table,
    with_scaling,
)
from tensorgrad.bench.sweep import Row, run_sweep
from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2Config
from tensorgrad.models.transformer_lm import TransformerLMConfig
from tensorgrad.parallel.comm.collectives import Comm
from tests.source_tree import ROOT

TINY = TransformerLMConfig(64, 8, 2, 2, 2, 16, 24)
CASE: dict[str, Any] = {
    "batch": 2, "dtype": "float32", "steps": 1, "epoch_tokens": 1000, "windows": 1,
    "micro_batches": 1, "bucket_mb": None, "compiled": False, "captured": False,
}  # fmt: skip
PEAKS = """
from tensorgrad.bench.matrix import MatrixBench, matrix_cases
from tensorgrad.parallel.comm.collectives import Comm
from tests.bench.test_matrix import CASE, TINY

(case,) = matrix_cases(TINY, CASE, 1, ["flash"], ["none"])
bench = MatrixBench(TINY, Comm(), "cpu")
print(*(bench(case)["peak_mb"] for _ in range(2)))
"""


def test_the_defaults_are_the_published_setting() -> None:
    sweep = next(matrix_sweep(comm=Comm(), peer=False, device="cpu"))
    found = {name: sweep.cases[0][name] for name in ("layers", "width", "heads", "context")}
    assert found == {"layers": 24, "width": 512, "heads": 16, "context": 256}
    found = {name: sweep.cases[0][name] for name in ("vocab", "hidden", "batch")}
    assert found == {"vocab": 10_000, "hidden": 4096, "batch": 8}


def test_one_rank_measures_kernels_alone(tmp_path: Path) -> None:
    cases = matrix_cases(TINY, CASE, 1)
    assert [case["attention"] for case in cases] == ["unfused", "fused-softmax", "flash"]
    sweep = table("matrix", cases, MatrixBench(TINY, Comm(), "cpu"), "cpu")
    found = run_sweep(sweep, tmp_path, device="cpu", version="1")
    for row in found.rows:
        assert (row["status"], row["parallel"], row["scaling"]) == ("ok", "none", "")
        assert row["tokens_per_second"] == pytest.approx(2 * 8 / row["ms"] * 1e3, rel=1e-3)
        assert row["epoch_s"] == pytest.approx(1000 / row["tokens_per_second"], rel=1e-3)
    assert (tmp_path / "matrix.png").is_file()


@pytest.mark.parametrize(
    ("mode", "sequences"),
    [("none", 2), ("zero3", 6), ("pytorch-ddp", 6), ("gpipe", 2), ("tensor", 2)],
)
def test_ranks_with_batches_of_their_own_multiply_the_tokens(
    mode: str, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = MatrixBench(TINY, Comm(), "cpu")
    measured = "_peer" if mode.startswith("pytorch") else "_ours"
    monkeypatch.setattr(bench, measured, lambda case, timer: {"ms": 500.0})
    row = bench({**CASE, "parallel": mode, "ranks": 1 if mode == "none" else 3})
    assert row["tokens_per_second"] == sequences * 8 / 0.5
    assert row["epoch_s"] == 1000 / row["tokens_per_second"]


def test_cases_of_ranks_and_of_the_peer() -> None:
    cases = matrix_cases(TINY, CASE, 2, ["flash"], ["zero3", "none"], peer=True)
    assert [(case["parallel"], case["ranks"]) for case in cases] == [
        *(("none", 1), ("zero3", 2), ("pytorch", 1), ("pytorch-ddp", 2))
    ]


def test_schedules_that_do_not_fit_are_left_out() -> None:
    wide = {**CASE, "micro_batches": 2}
    modes = ["gpipe", "interleaved"]
    shallow = matrix_cases(TINY, wide, 2, ["flash"], modes)  # of 2 layers
    assert [case["parallel"] for case in shallow] == ["gpipe"]
    deep = TransformerLMConfig(64, 8, 4, 2, 2, 16)
    assert len(matrix_cases(deep, wide, 2, ["flash"], modes)) == 2
    odd = matrix_cases(deep, CASE, 2, ["flash"], modes)
    assert [case["parallel"] for case in odd] == ["gpipe"]
    with pytest.raises(ArgumentError, match="got one rank"):
        parallel_cases(TINY, CASE, 1, ["zero"])


def test_memory_is_planned_where_there_are_formulas() -> None:
    config = GPT2Config(64, 8, 2, 2, 16)
    bench = MatrixBench(config, Comm(), "cpu")

    def planned(attention: str, parallel: str, model: str = "gpt2") -> float | None:
        (case,) = matrix_cases(config, CASE, 1, [attention], ["none"])
        return bench._planned_mb({**case, "parallel": parallel, "model": model})

    assert planned("flash", "none") is not None
    assert planned("flash", "overlap") is not None
    for case in (("flash", "naive"), ("flash", "flat"), ("unfused", "none")):
        assert planned(*case) is None
    assert planned("flash", "none", "transformer-lm") is None


def test_scaling_and_overhead_are_against_one_gpu() -> None:
    sizes = {name: 1 for name in matrix_cases(TINY, CASE, 1)[0]}
    alone: Row = {
        **sizes, "attention": "flash", "world": 2, "status": "ok", "device": "cpu",
        "tokens_per_second": 100.0, "peak_mb": 50.0,
    }  # fmt: skip
    row = {**alone, "ranks": 2, "tokens_per_second": 190.0, "peak_mb": 55.0}
    found = with_scaling(row, [{**alone, "attention": "unfused"}, alone])
    assert found["scaling"] == pytest.approx(95)
    assert found["memory_overhead"] == pytest.approx(10)
    assert "scaling" not in with_scaling(row, [{**alone, "attention": "unfused"}])
    assert "scaling" not in with_scaling({**row, "status": "error"}, [alone])
    assert "scaling" not in with_scaling(alone, [alone])
    for mode, other, result in (
        ("overlap", "naive", "speed_up"),
        ("1f1b", "model-parallel", "speed_up"),
        ("tensor", "none", "speed_up"),
        ("pytorch-ddp", "overlap", "ratio"),
    ):
        before = [{**row, "parallel": other, "ms": 9.0}, {**row, "parallel": "zero", "ms": 1.0}]
        found = with_scaling({**row, "parallel": mode, "ms": 6.0}, before)
        assert found[result] == (6 / 9 if result == "ratio" else 9 / 6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": 0}, "--batch: got 0"),
        ({"dtype": "int8"}, "--dtype: got 'int8'"),
        ({"micro_batches": 3}, "expected a divisor of the 2"),
    ],
)
def test_bad_arguments_are_errors(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        matrix_cases(TINY, {**CASE, **changed}, 2)


def test_the_first_case_has_no_more_memory_than_the_next() -> None:
    """The process is new: what it allocates once would else be memory of the mode none."""
    result = subprocess.run(
        [sys.executable, "-c", PEAKS],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    first, second = map(float, result.stdout.split())
    assert first == pytest.approx(second, rel=0.15)
