from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tensorgrad.bench import attention as attention_bench
from tensorgrad.bench import options, sweep
from tensorgrad.cli import main
from tests.ranks import run_ranks

SIZES = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "8", "--vocab", "64"]
ATTENTION = ["bench", "attention", "--lengths", "16", "32", "--widths", "8", "--heads", "1"]
HERE = ["--device", "cpu", "--out", "found"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "save", lambda figure, path: path.touch())  # tests/bench draws


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_attention_prints_a_table_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = attention_bench.measure_attention
    seen: list[sweep.Case] = []

    def stopped(case: sweep.Case, device: str) -> sweep.Row:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(case)
        return measure(case, device)

    monkeypatch.setattr(attention_bench, "measure_attention", stopped)
    assert main([*ATTENTION, *HERE]) == 130
    assert len(rows(tmp_path / "found/attention.csv")) == 2
    monkeypatch.setattr(attention_bench, "measure_attention", measure)
    assert main([*ATTENTION, *HERE]) == 0
    out = capsys.readouterr().out
    assert "| kernel        | length |" in out
    assert "2 of 6 rows were in found before" in out
    assert "in found: attention.csv, attention.md, attention.json, attention.png" in out


def test_model_and_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["bench", "model", "--sizes", "small", "xl", *SIZES, "--batch", "2", "--steps", "1"]
    assert main([*model, "--precision", "float32", "--warmup", "0", *HERE]) == 0
    assert [row["size"] for row in rows(tmp_path / "found/model.csv")] == ["small", "xl"]
    parts = ["--parts", "accumulation", "dtypes", "--counts", "10"]
    assert main(["bench", "precision", *parts, *HERE]) == 0
    assert "precision-dtypes.md" in capsys.readouterr().out


def test_errors_in_a_case_are_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(case: sweep.Case, device: str) -> sweep.Row:
        raise ValueError("broken")

    monkeypatch.setattr(attention_bench, "measure_attention", broken)
    assert main([*ATTENTION, *HERE]) == 1
    assert "bench attention: 6 of 6 cases failed" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--kernels", "fast"], "fast"),
        (
            ["attention", "--lengths", "0", "--device", "cpu"],
            "--lengths: got 0, expected 1 or more",
        ),
        (["attention", "--device", "cuda:77"], "device: got 'cuda:77'"),
        (["model", "--heads", "7", "--device", "cpu"], "expected a multiple of --heads, 7"),
        (["comm", "--device", "cpu"], "got one rank, expected several"),
        (["comm", "--device", "cpu", "--backends", "nccl"], "got nccl without a GPU"),
        (["buckets", "--device", "cpu"], "got one rank, expected several"),
        (["precision", "--steps", "0", "--device", "cpu"], "--steps: got 0"),
        (["speed"], "speed: unknown command, expected one of attention"),
        (["attention", "--length", "3"], "did you mean --lengths?"),
    ],
)
def test_errors_are_one_line_and_leave_no_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arguments: list[str], message: str
) -> None:
    assert main(["bench", *arguments]) == 1
    assert message in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    assert main([*ATTENTION, "--peer", *HERE]) == 1
    assert "PyTorch is not installed; run `pip install torch`" in caplog.text


@pytest.mark.mpi
def test_two_ranks_measure_modes_collectives_and_buckets(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import sys\nfrom tensorgrad.cli import main\nfrom tensorgrad.bench import sweep\n"
        "sweep.save = lambda figure, path: path.touch()\n"
        f"here = ['--device', 'cpu', '--out', {str(tmp_path / 'found')!r}]\n"
        f"sizes = {[*SIZES, '--batch', '2', '--steps', '1']!r}\n"
        "for command in (['matrix', '--no-peer', '--kernels', 'flash', '--hidden', '24', *sizes],\n"
        "                ['comm', '--sizes', '0.01', '0.1'],\n"
        "                ['buckets', '--sizes', '0.001', '1', *sizes]):\n"
        "    assert main(['bench', *command, *here]) == 0\n"
    )
    run_ranks(script, 2)
    found = {row["parallel"]: row for row in rows(tmp_path / "found/matrix.csv")}
    assert list(found) == ["none", "naive", "flat", "overlap", "zero1", "zero2", "zero3"]
    for mode, row in found.items():
        assert (row["status"], row["scaling"] == "") == ("ok", mode == "none")
    for row in rows(tmp_path / "found/comm.csv"):
        assert float(row["algorithm_gbps"]) == float(row["bus_gbps"]) > 0  # 2 (n - 1) / n is 1
    small, large = rows(tmp_path / "found/buckets.csv")
    assert int(small["buckets"]) > int(large["buckets"]) >= 2
    assert small["best_mb"] == large["best_mb"]
    assert float(small["formula_ms"]) > 0


@pytest.mark.mpi
def test_ranks_exit_at_once_where_rank_0_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    (tmp_path / "found/comm.csv").write_text("a,b\n")
    given = ["bench", "comm", "--sizes", "0.01", "--device", "cpu", "--out", tmp_path / "found"]
    result = run_ranks("tensorgrad", 2, given, check=False, timeout=60)
    assert result.returncode == 1
    assert result.stderr.count("has the columns a, b") == 1
    alone = run_ranks("tensorgrad", 2, ["bench", "attention"], check=False, timeout=60)
    assert alone.returncode == 1
    assert "bench attention: got 2 ranks, expected one process" in alone.stderr
