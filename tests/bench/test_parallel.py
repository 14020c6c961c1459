"""`tensorgrad bench parallel` measures every part on ranks of a CPU, and the plan is near."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorgrad.bench.matrix import PEERS
from tensorgrad.io.readers import read_json
from tests.ranks import run_each, run_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
MODEL = "--layers 4 --width 128 --heads 4 --context 32 --vocab 100 --batch 4 --micro-batches 4"
SMALL = """--layers 2 --width 32 --heads 2 --context 16 --vocab 100 --batch 4 --steps 1
    --windows 1"""


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


@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [(2, ["tp2", "pp2"]), pytest.param(4, ["tp2xdp2", "pp2xdp2"], marks=pytest.mark.nightly)],
)
def test_meshes_are_beside_one_rank_and_their_plan(
    ranks: int, meshes: list[str], tmp_path: Path
) -> None:
    options = ["mesh", "--meshes", *meshes, "--device", "cpu", *SMALL.split()]
    wrong = ["bench", "parallel", *options, "--micro-batches", 3, "--out", tmp_path / "wrong"]
    command = ["bench", "parallel", *options, "--micro-batches", 2, "--out", tmp_path / "out"]
    refused, _ = run_each("tensorgrad", ranks, [wrong, command], tmp_path)
    assert refused.returncode == 1
    assert "--micro-batches: got 3, expected a divisor of the 4" in refused.stderr
    assert not (tmp_path / "wrong").exists()  # before anything is measured
    rows = read_json(tmp_path / "out" / "parallel.json")["rows"]
    assert [(row["parallel"], row["status"]) for row in rows] == [
        (name, "ok") for name in ("none", *meshes)
    ]
    for row in rows:
        sequences = 4 if row["parallel"] == "none" or ranks == 2 else 8
        assert row["tokens_per_second"] == pytest.approx(sequences * 16e3 / row["ms"], rel=1e-3)
        assert row["planned_mb"] == pytest.approx(row["peak_mb"] / row["planned_ratio"], rel=1e-3)
        assert row["planned_ms"] is None  # the plan is for GPUs
    assert [row["bubble"] for row in rows] == [None, None, pytest.approx(100 / 3, rel=1e-3)]


@pytest.mark.nightly
def test_peers_train_on_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    modes = ["--modes", "none", "overlap", "zero3", "pytorch", "pytorch-ddp", "pytorch-fsdp"]
    options = ["--device", "cpu", *SMALL.split(), "--out", tmp_path / "out"]
    run_ranks("tensorgrad", 2, ["bench", "parallel", "data", "zero", *modes, *options])
    rows = read_json(tmp_path / "out" / "parallel.json")["rows"]
    found = {row["parallel"]: row for row in rows}
    assert list(found) == ["none", "overlap", "pytorch", "pytorch-ddp", "zero3", "pytorch-fsdp"]
    for peer, ours in PEERS.items():
        ratio = found[peer]["ms"] / found[ours]["ms"]
        assert found[peer]["ratio"] == pytest.approx(ratio, rel=1e-3)
        assert (found[peer]["scaling"] is None) == (peer == "pytorch")
