from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from examples import train_gpt2
from tensorgrad import backend
from tensorgrad.files import locked
from tensorgrad.parallel.merge import merge
from tensorgrad.train.checkpoint import load_latest
from tensorgrad.train.log import read_metrics
from tensorgrad.weights import load_arrays
from tests.processes import started
from tests.ranks import descendants, mpirun, run_each, run_ranks
from tests.source_tree import ROOT

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PROGRAM = ROOT / "examples" / "train_gpt2_dp.py"
MODEL = "--layers 2 --heads 2 --width 32 --context 32 --vocab 300 --batch 8"
MODE: dict[int, list[object]] = {2: ["--parallel", "zero3"], 4: ["--bucket-mb", 0.02]}
SHORT = "--steps 20 --warmup 4 --evaluate-every 10 --checkpoint-every 8 --evaluation-batches 3"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("text")
    lines = [f"def add_{i}(a, b):\n    return a + b + {i * i}\n\n" for i in range(400)]
    (folder / "text.txt").write_text("<|endoftext|>".join(lines))
    places = ["--data", str(folder / "text.txt"), "--cache", str(folder / "cache")]
    rest = "--device cpu --no-plot --sample 8 --sample-every 7"
    return [*places, *MODEL.split(), *SHORT.split(), *rest.split()]


@pytest.fixture(scope="module")
def alone(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_alone(*options, "--out", folder)
    return folder


def train_alone(*options: object) -> None:
    """Train in one process with one thread, as ranks have: two round otherwise on some CPUs."""
    run_ranks(ROOT / "examples" / "train_gpt2.py", 1, options)


def same_run(found: Path, expected: Path) -> None:
    """Compare losses, norms and the vector of all parameters of two runs to 1e-6 relative."""
    for record, other in zip(
        read_metrics(found / "metrics.jsonl"), read_metrics(expected / "metrics.jsonl"), strict=True
    ):
        assert record == pytest.approx(other, rel=1e-6, abs=0)
    ours, others = (load_latest(folder / "checkpoints") for folder in (found, expected))
    assert ours is not None
    assert others is not None
    assert ours.step == others.step == 20
    parameters = others.arrays("model")
    differences, sizes = [], []
    merge(ours, found / "model.safetensors")  # each rank may have written a part
    for name, array in load_arrays(found / "model.safetensors").items():
        a, b = array.astype("float64"), parameters[name].astype("float64")
        if name.endswith("qkv.bias"):
            # A bias of all keys alike changes no attention: its gradient is rounding alone, which
            # Adam scales up to steps that differ.
            a, b = np.delete(a.reshape(3, -1), 1, 0), np.delete(b.reshape(3, -1), 1, 0)
        differences.append(np.linalg.norm(a - b))
        sizes.append(np.linalg.norm(b))
        # A bias began at 0 and is no more than its few steps, so rounding counts for more.
        assert differences[-1] <= 5e-6 * sizes[-1], name
    assert np.linalg.norm(differences) <= 1e-6 * np.linalg.norm(sizes)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_take_the_steps_of_one_process(
    ranks: int, options: list[str], alone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    result = run_ranks(PROGRAM, ranks, [*options, "--out", folder, *MODE[ranks]])
    same_run(folder, alone)
    assert result.stdout.count("def ") == 1  # the sample, once
    assert len(re.findall(r"step 20/20  validation_loss", result.stderr)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    saved = json.loads((folder / "config.json").read_text())
    assert saved == json.loads((alone / "config.json").read_text()) | {"out": str(folder)}


@pytest.mark.gpu
@pytest.mark.skipif(backend.gpu_count() < 2, reason="needs two GPUs")
def test_two_gpus_take_the_steps_of_one(options: list[str], tmp_path: Path) -> None:
    on_gpus = [*options, "--device", "cuda"]
    assert train_gpt2.main([*on_gpus, "--out", str(tmp_path / "one")]) == 0
    run_ranks(PROGRAM, 2, [*on_gpus, "--out", tmp_path / "two"])
    same_run(tmp_path / "two", tmp_path / "one")


def test_a_run_resumes_with_another_number_of_ranks(
    options: list[str], alone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run_ranks(PROGRAM, 4, [*options, "--out", folder, "--stop-after", 5, "--parallel", "zero3"])
    with locked(folder / ".lock", wait=False):
        result = run_ranks(PROGRAM, 2, ["--resume", folder], check=False)
        assert result.returncode == 1
        assert result.stderr.count("another process trains in") == 1
        assert "Traceback" not in result.stderr
    more = ["--parallel", "naive", "--micro-batches", 2]
    result = run_ranks(PROGRAM, 2, ["--resume", folder, "--stop-after", 8, *more])
    assert "resuming from step 5 of 20" in result.stderr
    train_alone("--resume", folder, "--stop-after", 100, "--micro-batches", 1)
    same_run(folder, alone)


def is_rank(process: int) -> bool:
    ps = ["ps", "-ww", "-o", "args=", "-p", str(process)]
    words = subprocess.run(ps, capture_output=True, text=True, check=True).stdout.split()
    return words[:2] == [sys.executable, str(PROGRAM)]


@pytest.mark.parametrize(("place", "number"), [(0, signal.SIGINT), (-1, signal.SIGHUP)])
def test_an_interrupt_stops_all_ranks_at_one_step(
    place: int, number: signal.Signals, options: list[str], tmp_path: Path
) -> None:
    """Whether the launcher gets it or one rank."""
    launcher = mpirun()
    assert launcher is not None
    folder = tmp_path / "run"
    endless = [*options, "--out", str(folder), "--steps", "100000"]
    command = [*launcher, "-n", "2", sys.executable, str(PROGRAM), *endless]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        end = time.monotonic() + 120
        while not list(folder.glob("checkpoints/step-*")):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, "no checkpoint after 120 s"
            time.sleep(0.05)
        ranks = [pid for pid in descendants(process.pid) if is_rank(pid)]
        assert len(ranks) == 2
        os.kill([process.pid, *ranks][place], number)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, out
    found = load_latest(folder / "checkpoints")
    assert found is not None
    again = rf"to resume: mpirun -n 2 python {PROGRAM} --resume {folder}"
    stopped = re.search(rf"stopped after step (\d+) of 100000; {again}", out)
    assert stopped is not None, out
    assert found.step == int(stopped[1])
    assert "Traceback" not in out


def test_wrong_options_are_reported_once(options: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    both = ["--parallel", "zero3", "--bucket-mb", 2]
    words, warmup, none, bucket, batch, width = run_each(
        PROGRAM,
        2,
        [
            ["--lr", "much"],
            ["--steps", 9, "--warmup", 9],
            [*options, "--parallel", "none"],
            [*options, *both, "--out", tmp_path / "none"],
            [*options, "--batch", 7],
            [*options, "--width", 33, "--out", folder],
        ],
        tmp_path,
    )
    for result in (words, warmup, none, bucket, batch, width):
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
    assert words.stderr.count("--lr: got 'much', expected a number") == 1
    assert warmup.stderr.count("--warmup: got 9, expected less than --steps, 9") == 1
    assert none.stderr.count("--parallel: got none with 2 ranks, expected one") == 1
    assert bucket.stderr.count("--bucket-mb: got 2.0 with --parallel zero3, expected none") == 1
    assert batch.stderr == "--batch: got 7, expected a multiple of the 2 data parallel ranks\n"
    message = "--width: got 33, expected a multiple of --heads, 2\n"
    assert width.stderr.count(message) == 1
    assert "of 2: " not in width.stderr.replace(message, "")
