"""Killed at random moments and resumed: the result is that of a run that was left alone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tensorgrad.train.checkpoint import list_checkpoints, load_checkpoint
from tests.processes import started, wait_for, wait_until

CHAINS = 2  # runs that are killed at the same time, with checkpoints in the background or not
MOST_SAVED = 4  # checkpoints that are written before a kill
LONGEST = 0.05  # seconds between the last of them and the kill
STEPS, EVERY = 120, 4
OPTIONS = [
    *("--steps", str(STEPS), "--checkpoint-every", str(EVERY)),
    *("--evaluate-every", "30", "--no-plot"),
]


@contextmanager
def training(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Start or resume a run, and wait until it trains."""
    with started(
        [sys.executable, "-m", "tests.train.tiny_run", str(folder), *OPTIONS, *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", wait_for(process, 120)[1]
        yield process


def end_of(folder: Path) -> dict[str, object]:
    """Return the loss curve and the last checkpoint, without the settings."""
    last = load_checkpoint(list_checkpoints(folder / "checkpoints")[0])
    assert last.step == STEPS
    del last.state["settings"]
    files = [folder / "metrics.jsonl", *last.path.glob("*.safetensors")]
    return {"state": last.state, **{path.name: path.read_bytes() for path in files}}


def last_step(folder: Path) -> int:
    """Return the step of the last checkpoint, 0 where there is none."""
    names = [path.name for path in list_checkpoints(folder / "checkpoints")]
    return int(names[0].removeprefix("step-")) if names else 0


def has_saved(folder: Path, step: int) -> bool:
    return last_step(folder) >= step


def kill_and_resume(folder: Path, most: int, *more: str) -> list[Path]:
    """Kill a run at random moments and resume it each time; return the runs that finished.

    A fast machine may finish before the last kill, and begins again.
    """
    moments = random.Random(folder.name)
    kills, finished, resumed_at = 0, list[Path](), set[int]()
    while kills < most:
        run = folder / f"{len(finished)}"
        while True:
            with training(run, "--resume", *more) as process:
                if kills < most:
                    step = last_step(run) + EVERY * moments.randint(0, MOST_SAVED)
                    wait_until(partial(has_saved, run, step), process)
                    time.sleep(moments.uniform(0, LONGEST))
                    process.kill()
                output, errors = wait_for(process, 120)
            if process.returncode == 0:
                break
            assert process.returncode == -9, errors
            kills += 1
            resumed_at.add(last_step(run))
        assert output == "finished\n"
        finished.append(run)
    assert len(resumed_at) > most / 4  # it was killed while it got on
    return finished


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, pytest.param(20, marks=pytest.mark.nightly)])
def test_killed_and_resumed(kills: int, tmp_path: Path) -> None:
    with training(tmp_path / "undisturbed") as undisturbed, ThreadPoolExecutor(CHAINS) as pool:
        chains = list(
            pool.map(
                kill_and_resume,
                [tmp_path / "waits", tmp_path / "goes-on"],
                [kills // CHAINS] * CHAINS,
                ["--no-report", "--background-checkpoints"],
            )
        )
        assert wait_for(undisturbed, 120)[0] == "finished\n"
    expected = end_of(tmp_path / "undisturbed")
    assert all(end_of(run) == expected for chain in chains for run in chain)
