from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tensorgrad.bench.matrix import (
    MATRIX,
    MatrixBench,
    MatrixSettings,
    matrix_cases,
    parallel_cases,
    with_scaling,
)
from tensorgrad.bench.sweep import Row, run_sweep
from tensorgrad.errors import ArgumentError
from tensorgrad.models.transformer_lm import TransformerLMConfig
from tensorgrad.parallel.comm.collectives import Comm
from tests.source_tree import ROOT

TINY = MatrixSettings(TransformerLMConfig(64, 8, 2, 2, 2, 16, 24), 2, "float32", 1, 1000)
PEAKS = """
from tensorgrad.bench.matrix import MatrixBench, MatrixSettings, matrix_cases
from tensorgrad.models.transformer_lm import TransformerLMConfig
from tensorgrad.parallel.comm.collectives import Comm

config = TransformerLMConfig(64, 8, 2, 2, 2, 16, 24)
settings = MatrixSettings(config, 2, "float32", 1, 1000)
bench = MatrixBench(settings, Comm(), "cpu")
(case,) = matrix_cases(settings, 1, ["flash"], ["none"])
print(*(bench(case)["peak_mb"] for _ in range(2)))
"""


def test_the_defaults_are_the_published_setting() -> None:
    config = MatrixSettings().config
    assert (config.layers, config.width, config.heads) == (24, 512, 16)
    assert (config.context, config.vocab_size) == (256, 10_000)
    assert (config.hidden, MatrixSettings().batch) == (4096, 8)


def test_one_rank_measures_kernels_alone(tmp_path: Path) -> None:
    cases = matrix_cases(TINY, 1)
    assert [case["attention"] for case in cases] == ["unfused", "fused-softmax", "flash"]
    measure = MatrixBench(TINY, Comm(), "cpu")
    found = run_sweep(MATRIX, cases, measure, tmp_path, device="cpu", version="1")
    for row in found.rows:
        assert (row["status"], row["parallel"], row["scaling"]) == ("ok", "none", "")
        assert row["tokens_per_second"] == pytest.approx(2 * 8 / row["ms"] * 1e3, rel=1e-3)
        assert row["epoch_s"] == pytest.approx(1000 / row["tokens_per_second"], rel=1e-3)
    assert (tmp_path / "matrix.png").is_file()


def test_cases_of_ranks_and_of_the_peer() -> None:
    cases = matrix_cases(TINY, 2, ["flash"], ["zero3", "none"], peer=True)
    assert [(case["parallel"], case["ranks"]) for case in cases] == [
        *(("none", 1), ("zero3", 2), ("pytorch", 1), ("pytorch-ddp", 2))
    ]


def test_schedules_that_do_not_fit_are_left_out() -> None:
    wide = replace(TINY, micro_batches=2)  # of 2 layers
    modes = ["gpipe", "interleaved"]
    assert [case["parallel"] for case in matrix_cases(wide, 2, ["flash"], modes)] == ["gpipe"]
    deep = replace(wide, config=TransformerLMConfig(64, 8, 4, 2, 2, 16))
    assert len(matrix_cases(deep, 2, ["flash"], modes)) == 2
    odd = replace(deep, micro_batches=1)
    assert [case["parallel"] for case in matrix_cases(odd, 2, ["flash"], modes)] == ["gpipe"]
    with pytest.raises(ArgumentError, match="part is 'speed'"):
        parallel_cases(TINY, 2, ["speed"])
    with pytest.raises(ArgumentError, match="got one rank"):
        parallel_cases(TINY, 1, ["zero"])


def test_scaling_and_overhead_are_against_one_gpu() -> None:
    sizes = {name: 1 for name in MATRIX.parameters}
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


def test_bad_arguments_are_errors() -> None:
    with pytest.raises(ArgumentError, match="kernel is 'fast'"):
        matrix_cases(TINY, 2, ["fast"])
    with pytest.raises(ArgumentError, match="parallel is 'ddp'"):
        matrix_cases(TINY, 2, ["flash"], ["ddp"])
    with pytest.raises(ArgumentError, match="tokens is 0"):
        MatrixSettings(tokens=0)
    with pytest.raises(ArgumentError, match="dtype is 'int8'"):
        MatrixSettings(dtype="int8")


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
