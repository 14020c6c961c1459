"""Killed at random moments and resumed: the result is that of a run that was left alone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tensorgrad.train.checkpoint import list_checkpoints, load_checkpoint
from tests.processes import wait_for
from tests.source_tree import ROOT

KILLS = 20
CHAINS = 2  # runs that are killed at the same time: most of it is starting again
LONGEST_LIFE = 0.2  # seconds; longer where the machine is so busy that runs die before they save
STEPS = 200
OPTIONS = ["--steps", str(STEPS), "--checkpoint-every", "4", "--evaluate-every", "30", "--no-plot"]


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """Start a run, or go on with one, and wait until it trains."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.train.tiny_run", str(folder), *OPTIONS, *more],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", wait_for(process, 120)[1]
    return process


def end_of(folder: Path) -> dict[str, bytes]:
    """Return the loss curve and all files of the last checkpoint."""
    last = list_checkpoints(folder / "checkpoints")[0]
    assert load_checkpoint(last).step == STEPS
    files = [folder / "metrics.jsonl", *last.iterdir()]
    return {path.name: path.read_bytes() for path in files}


def kill_and_resume(folder: Path) -> list[Path]:
    """Kill a run at random moments and go on with it each time; return the runs that came to end.

    A fast machine may finish before the last kill, and begins again.
    """
    moments = random.Random(folder.name)
    kills, finished, resumed_at, longest = 0, list[Path](), set[str](), LONGEST_LIFE
    while kills < KILLS // CHAINS:
        run = folder / f"{len(finished)}"
        while True:
            process = start(run, "--resume")
            if kills < KILLS // CHAINS:
                time.sleep(moments.uniform(0, longest))
                process.kill()
            output, errors = wait_for(process, 120)
            if process.returncode == 0:
                break
            assert process.returncode == -9, errors
            kills += 1
            saved = {path.name for path in list_checkpoints(run / "checkpoints")[:1]}
            longest *= 1 if saved - resumed_at else 1.5
            resumed_at |= saved
        assert output == "finished\n"
        finished.append(run)
    assert len(resumed_at) > KILLS / CHAINS / 4  # it was killed while it got on
    return finished


@pytest.mark.slow
def test_killed_and_resumed_twenty_times(tmp_path: Path) -> None:
    with start(tmp_path / "undisturbed") as undisturbed, ThreadPoolExecutor(CHAINS) as pool:
        chains = list(pool.map(kill_and_resume, [tmp_path / f"chain-{i}" for i in range(CHAINS)]))
        assert wait_for(undisturbed, 120)[0] == "finished\n"
    expected = end_of(tmp_path / "undisturbed")
    assert all(end_of(run) == expected for chain in chains for run in chain)
