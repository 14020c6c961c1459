"""What programs that train do alike: the folder of a run, and what to say when it was stopped."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from tensorgrad.train.loop import Outcome

_log = logging.getLogger(__name__)


def free_folder(name: str) -> Path:
    """Return the first of the folders NAME-1, NAME-2, ... that does not exist."""
    number = 1
    while Path(f"{name}-{number}").exists():
        number += 1
    return Path(f"{name}-{number}")


def report_stop(outcome: Outcome, steps: int, folder: Path, ranks: int = 1) -> None:
    """Say after how many of the steps the run in a folder was stopped, and how to go on with it."""
    launcher = f"mpirun -n {ranks} " if ranks > 1 else ""
    _log.info(
        "stopped after step %d of %d; to go on: %spython %s --resume %s",
        *(outcome.step, steps, launcher, sys.argv[0], folder),
    )
