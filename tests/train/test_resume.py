"""Killed at random moments and resumed: the result is that of a run that was left alone."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensorgrad.train.checkpoint import list_checkpoints, load_checkpoint
from tests.source_tree import ROOT

KILLS = 20
LONGEST_LIFE = 0.2  # seconds
OPTIONS = ["--steps", "400", "--checkpoint-every", "4", "--evaluate-every", "30", "--no-plot"]


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """Start a run, or go on with one, and wait until it trains."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.train.tiny_run", str(folder), *OPTIONS, *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def end_of(folder: Path) -> dict[str, bytes]:
    """Return the loss curve and all files of the last checkpoint."""
    last = list_checkpoints(folder / "checkpoints")[0]
    assert load_checkpoint(last).step == 400
    files = [folder / "metrics.jsonl", *last.iterdir()]
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.slow
def test_killed_and_resumed_twenty_times(tmp_path: Path) -> None:
    undisturbed = start(tmp_path / "undisturbed")
    moments = random.Random(0)
    kills, rounds, resumed_at = 0, 0, set()
    while kills < KILLS:  # a fast machine may finish before the last kill, and begins again
        rounds += 1
        folder = tmp_path / f"killed-{rounds}"
        while True:
            process = start(folder, "--resume")
            if kills < KILLS:
                time.sleep(moments.uniform(0, LONGEST_LIFE))
                process.kill()
            output, errors = process.communicate(timeout=120)
            if process.returncode == 0:
                break
            assert process.returncode == -9, errors
            kills += 1
            resumed_at |= {path.name for path in list_checkpoints(folder / "checkpoints")[:1]}
        assert output == "finished\n"
        if rounds == 1:
            assert undisturbed.communicate(timeout=120)[0] == "finished\n"
        assert end_of(folder) == end_of(tmp_path / "undisturbed")
    assert len(resumed_at) > KILLS / 4  # it was killed while it got on
