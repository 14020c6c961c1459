"""Ranks killed at random moments, and runs that resume with another number of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tensorgrad.io.weights import load_arrays
from tensorgrad.parallel.merge import merge, open_checkpoint
from tensorgrad.train.checkpoint import list_checkpoints
from tensorgrad.train.log import read_metrics
from tensorgrad.train.strategy import OneProcess
from tests.processes import started, wait_for, wait_until
from tests.ranks import mpirun, run_ranks
from tests.source_tree import ROOT
from tests.train.tiny_run import make_trainer

pytestmark = pytest.mark.mpi
PROGRAM = "tests.parallel.sharded_run"
MOST_SAVED = 4  # checkpoints that are written before a kill
LONGEST = 0.05  # seconds between the last of them and the kill
STEPS, EVERY = 48, 2
OPTIONS = [
    *("--steps", str(STEPS), "--checkpoint-every", str(EVERY)),
    *("--evaluate-every", "30", "--no-plot", "--background-checkpoints"),
]


@contextlib.contextmanager
def training(folder: Path, stage: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start or resume a run on two ranks, wait until they train, and yield their processes."""
    launcher = mpirun()
    assert launcher is not None
    command = [*launcher, "-n", "2", sys.executable, "-m", PROGRAM, str(folder), str(stage)]
    with started(
        [*command, "--resume", *OPTIONS],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        ready, *pids = process.stdout.readline().split() or [""]
        assert ready == "ready", wait_for(process, 60)[1]
        yield process, [int(pid) for pid in pids]


def end_of(folder: Path) -> dict[str, bytes]:
    """Return the loss curve and all files of the last checkpoint."""
    last = list_checkpoints(folder / "checkpoints")[0]
    files = [folder / "metrics.jsonl", *last.iterdir()]
    return {path.name: path.read_bytes() for path in files}


def last_step(folder: Path) -> int:
    """Return the step of the last checkpoint, 0 without any."""
    names = [path.name for path in list_checkpoints(folder / "checkpoints")]
    return int(names[0].removeprefix("step-")) if names else 0


def has_saved(folder: Path, step: int) -> bool:
    return last_step(folder) >= step


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_killed_and_resumed(most: int, tmp_path: Path) -> None:
    stage = 3
    run_ranks(PROGRAM, 2, [tmp_path / "undisturbed", stage, *OPTIONS])
    expected = end_of(tmp_path / "undisturbed")
    moments = random.Random(0)
    kills, rounds, resumed_at = 0, 0, set[int]()
    while kills < most:  # a fast machine may finish before the last kill, and begins again
        rounds += 1
        folder = tmp_path / f"killed-{rounds}"
        while True:
            with training(folder, stage) as (process, pids):
                if kills < most:
                    step = last_step(folder) + EVERY * moments.randint(1, MOST_SAVED)
                    wait_until(partial(has_saved, folder, step), process)
                    time.sleep(moments.uniform(0, LONGEST))
                    with contextlib.suppress(ProcessLookupError):  # it may have finished
                        os.kill(moments.choice(pids), signal.SIGKILL)
                output, errors = wait_for(process, 60)
            if process.returncode == 0:
                break
            assert kills < most, errors
            kills += 1
            resumed_at.add(last_step(folder))
        assert output == "finished\n"
        assert end_of(folder) == expected
    assert len(resumed_at) > most / 4  # it was killed while it got on


def test_other_numbers_of_ranks_go_on_with_the_same_training(tmp_path: Path) -> None:
    """Each draws dropout for the same four parts of a batch, so losses are equal but for rounding.

    ZeRO 3 on 4 ranks, ZeRO 1 on 2, then one process: against one process alone.
    """
    short = ["--steps", "24", "--checkpoint-every", "8", "--evaluate-every", "6", "--no-plot"]
    folder, alone = tmp_path / "run", tmp_path / "alone"
    for ranks, stage in ((4, 3), (2, 1)):
        parts = ["--micro-batches", 4 // ranks, "--stop-after", 8]
        run_ranks(PROGRAM, ranks, [folder, stage, "--resume", *short, *parts])
    for place, resumes in ((folder, True), (alone, False)):
        trainer = make_trainer(place, OneProcess(), checkpoint_every=8, micro_batches=4)
        assert not resumes or trainer.resume()
        assert trainer.run().finished
    expected = list(read_metrics(alone / "metrics.jsonl"))
    records = list(read_metrics(folder / "metrics.jsonl"))
    for record, other in zip(records, expected, strict=True):
        assert record == pytest.approx(other, rel=1e-5)
    sharded, whole = (each / "checkpoints" / "step-00000016" for each in (folder, alone))
    assert (sharded / "rank-00001.safetensors").exists()
    assert (folder / "checkpoints" / "step-00000024" / "rank-00000.safetensors").exists()
    merge(open_checkpoint(sharded), tmp_path / "model.safetensors")
    arrays = open_checkpoint(whole).arrays("model")
    for name, array in load_arrays(tmp_path / "model.safetensors").items():
        desired = arrays.pop(name)
        if name.endswith("qkv.bias"):  # that of keys changes nothing: its gradient is rounding
            array, desired = (np.delete(each.reshape(3, -1), 1, 0) for each in (array, desired))
        np.testing.assert_allclose(array, desired, rtol=1e-3, atol=1e-5)
    assert not arrays
