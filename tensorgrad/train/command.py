"""A training run as a command: what programs do alike around what they train."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

from tensorgrad.errors import CheckpointError, TensorgradError
from tensorgrad.train.log import read_metrics
from tensorgrad.train.loop import Outcome, Trainer

MENDABLE = (TensorgradError, OSError, UnicodeError, KeyboardInterrupt)  # by a user

_log = logging.getLogger(__name__)
_Arguments = ParamSpec("_Arguments")


def command(program: Callable[_Arguments, object]) -> Callable[_Arguments, int]:
    """Make a program a command, which shows messages and returns an exit status.

    0, or 1 after an error that a user can mend, shown as one line, or 130 after a second Ctrl-C.
    """

    @wraps(program)
    def run(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> int:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        try:
            program(*arguments, **options)
        except MENDABLE as error:
            status, line = status_and_line(error)
            _log.error("%s", line)
            return status
        return 0

    return run


def status_and_line(error: BaseException) -> tuple[int, str]:
    """Return with which exit status and line a program ends that an error has stopped."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped at once; --resume goes on from the newest checkpoint, if there is one"
    return 1, str(error)


def free_folder(name: str) -> Path:
    """Return the first of the folders NAME-1, NAME-2, ... that does not exist."""
    number = 1
    while Path(f"{name}-{number}").exists():
        number += 1
    return Path(f"{name}-{number}")


def resume_run(trainer: Trainer) -> None:
    """Resume a run from its newest checkpoint; one that has trained nothing starts at step 0.

    Raises:
        CheckpointError: it has trained but has no checkpoint, or none that can be used.
    """
    if trainer.resume():
        return
    metrics = trainer.folder / "metrics.jsonl"
    try:
        metrics.stat()
    except FileNotFoundError:
        records = []
    else:
        records = read_metrics(metrics)
    done = max((record["step"] for record in records), default=0)
    if done > 0:
        raise CheckpointError(
            f"resume: {trainer.folder} came to step {done} but has no checkpoint: it was stopped "
            "before its first one, or they were removed. To train anew, choose another --out"
        )
    _log.info("%s has trained nothing yet: starting at step 0", trainer.folder)


def report_stop(outcome: Outcome, steps: int, folder: Path, ranks: int = 1) -> None:
    """Say after how many of the steps the run in a folder was stopped, and how to go on with it."""
    launcher = f"mpirun -n {ranks} " if ranks > 1 else ""
    _log.info(
        "stopped after step %d of %d; to go on: %spython %s --resume %s",
        *(outcome.step, steps, launcher, sys.argv[0], folder),
    )
