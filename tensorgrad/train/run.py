"""What training programs share: naming a new run, resuming one, and reporting that it stopped."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from tensorgrad.files import write_json
from tensorgrad.train.checkpoint import best_checkpoint, list_checkpoints, step_of
from tensorgrad.train.loop import Outcome, Trainer

_log = logging.getLogger(__name__)


FACTS = "facts.json"


def save_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write facts.json, for reports: what the settings of a run leave open, and what follows.

    Args:
        folder: of the run.
        facts: values of settings that are None, by name, such as {"layers": 2}, and other numbers,
            such as the parameters of the model and the tokens of the text.
    """
    write_json(folder / FACTS, facts, 2)


def resume_run(trainer: Trainer) -> None:
    """Resume a run from its newest checkpoint; a run without a checkpoint starts at step 0.

    Raises:
        CheckpointError: the run has checkpoints, but none that can be used.
    """
    if not trainer.resume():
        _log.warning("%s has no checkpoint: starting at step 0", trainer.folder)


def without_checkpoint(folder: Path, step: int) -> str:
    """Return what to say of the best step of a run: nothing where it has a checkpoint.

    Evaluations may be more frequent than checkpoints.
    """
    checkpoints = folder / "checkpoints"
    best = best_checkpoint(checkpoints)
    if best is None or any(step_of(path) == step for path in list_checkpoints(checkpoints)):
        return ""
    return f", which has no checkpoint: the best one is of step {step_of(best):,}"


def report_stop(outcome: Outcome, steps: int, folder: Path, ranks: int = 1, file: str = "") -> None:
    """Log the step at which the run in a folder stopped, and the command that resumes it.

    Args:
        outcome: of the run.
        steps: in all.
        folder: of the run.
        ranks: the number of processes.
        file: the Python file of the model, for one that a user has defined.
    """
    launcher = f"mpirun -n {ranks} " if ranks > 1 else ""
    program = Path(sys.argv[0])
    ours = "tensorgrad" in (program.name, program.parent.name)  # installed, or -m tensorgrad
    words = takewhile(lambda word: not word.startswith("-"), sys.argv[1:])
    command = " ".join(("tensorgrad", *words)) if ours else f"python {program}"
    model = f" --model {file}" if file else ""
    _log.info(
        "stopped after step %d of %d; to resume: %s%s --resume %s%s",
        *(outcome.step, steps, launcher, command, folder, model),
    )
