from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.cli import main
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError
from tensorgrad.io.files import locked
from tensorgrad.io.weights import load_arrays
from tensorgrad.parallel.merge import merge
from tensorgrad.parallel.program import make_strategy
from tensorgrad.train.checkpoint import load_latest
from tensorgrad.train.language import LanguageSettings
from tensorgrad.train.log import read_metrics
from tensorgrad.train.options import in_options
from tests.parallel.threads import on_ranks
from tests.processes import started
from tests.ranks import descendants, mpirun, run_each, run_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PROGRAM = "tensorgrad"
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
    run_train(1, options)


def run_train(
    ranks: int, options: Sequence[object], check: bool = True
) -> subprocess.CompletedProcess[str]:
    return run_ranks(PROGRAM, ranks, ["train", *options], check=check)


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
    result = run_train(ranks, [*options, "--out", folder, *MODE[ranks]])
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
    assert main(["train", *on_gpus, "--out", str(tmp_path / "one")]) == 0
    run_train(2, [*on_gpus, "--out", tmp_path / "two"])
    same_run(tmp_path / "two", tmp_path / "one")


def test_a_run_resumes_with_another_number_of_ranks(
    options: list[str], alone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run_train(2, [*options, "--out", folder, "--stop-after", 5, "--parallel", "zero3"])
    with locked(folder / ".lock", wait=False):
        result = run_train(2, ["--resume", folder], check=False)
        assert result.returncode == 1
        assert result.stderr.count("another process trains in") == 1
        assert "Traceback" not in result.stderr
    train_alone("--resume", folder, "--stop-after", 100, "--micro-batches", 2)
    same_run(folder, alone)


def is_rank(process: int) -> bool:
    ps = ["ps", "-ww", "-o", "args=", "-p", str(process)]
    words = subprocess.run(ps, capture_output=True, text=True, check=True).stdout.split()
    return words[:4] == [sys.executable, "-m", PROGRAM, "train"]


@pytest.mark.parametrize(("place", "number"), [(0, signal.SIGINT), (-1, signal.SIGHUP)])
def test_an_interrupt_stops_all_ranks_at_one_step(
    place: int, number: signal.Signals, options: list[str], tmp_path: Path
) -> None:
    """Whether the launcher gets it or one rank."""
    launcher = mpirun()
    assert launcher is not None
    folder = tmp_path / "run"
    endless = [*options, "--out", str(folder), "--steps", "100000"]
    command = [*launcher, "-n", "2", sys.executable, "-m", PROGRAM, "train", *endless]
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
    again = rf"to resume: mpirun -n 2 tensorgrad train --resume {folder}"
    stopped = re.search(rf"stopped after step (\d+) of 100000; {again}", out)
    assert stopped is not None, out
    assert found.step == int(stopped[1])
    assert "Traceback" not in out


def test_wrong_options_are_reported_once(options: list[str], tmp_path: Path) -> None:
    """Settings that rank 0 reads, and those that all ranks find wrong."""
    wrong: tuple[tuple[list[object], str], ...] = (
        (["--steps", 9, "--warmup", 9], "--warmup: got 9, expected less than --steps, 9\n"),
        (["--width", 33], "--width: got 33, expected a multiple of --heads, 2\n"),
        (
            ["--pp", 2, "--pipeline-schedule", "interleaved"],
            "--layers: the model has 2 layers, expected 4 or more: 2 stages with 2 parts each\n",
        ),
    )
    out = ["--out", tmp_path / "run"]
    runs = [["train", *options, *given, *out] for given, _ in wrong]
    for result, (_, message) in zip(run_each(PROGRAM, 2, runs, tmp_path), wrong, strict=True):
        assert result.returncode == 1
        assert result.stderr == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parallel": "none"}, "--parallel: got none with 2 ranks, expected one"),
        ({"batch": 7}, "--batch: got 7, expected a multiple of the 2 data parallel ranks"),
        ({"pp": 2, "batch": 7, "micro_batches": 2}, "--micro-batches: got 2, expected a divisor"),
        (
            {"pp": 2, "pipeline_schedule": "gpipe", "chunks": 2},
            "--chunks: got 2 with schedule 'gpipe', expected 1; more",
        ),
    ],
)
def test_what_two_ranks_cannot_share_is_named(given: dict[str, Any], message: str) -> None:
    settings = LanguageSettings(**given)
    with pytest.raises(ArgumentError) as caught, in_options(settings):
        on_ranks(2, partial(make_strategy, settings))
    assert message in str(caught.value)
