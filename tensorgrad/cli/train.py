"""`tensorgrad train`: a language model, a translation model, a classifier, or a task of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cyclopts import App

from tensorgrad.core.errors import ArgumentError
from tensorgrad.io.command import printable
from tensorgrad.parallel.program import run_task
from tensorgrad.report import write_report
from tensorgrad.train.command_line import STYLE, choose_run, options_command
from tensorgrad.train.progress import StageProgress
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.task import Task
from tensorgrad.train.tasks import task_class

# The commands, with the task of each and the options that it gives.
COMMANDS: dict[str, tuple[str, dict[str, str], str]] = {
    "language-model": ("language-model", {}, "Train a language model on text, as without a name."),
    "gpt2": ("language-model", {"model": "gpt2"}, "Train a GPT-2 on text."),
    "transformer-lm": (
        "language-model",
        {"model": "transformer-lm"},
        "Train a TransformerLM, a Llama-style model, on text.",
    ),
    "translation": (
        "translation",
        {},
        "Train a translation model on pairs of sentences, and measure BLEU.",
    ),
    "sentiment": ("sentiment", {}, "Train a classifier of positive and negative sentences."),
}


def _end(settings: TrainSettings, folder: Path, sample: str | None) -> None:
    """Show a sample of the model's text, and write the report."""
    if sample is not None:
        print(printable(sample))
    if settings.report:
        with StageProgress("reading") as progress:
            write_report(folder, progress=progress)


def _command(task: type[Task], chosen: Mapping[str, str], words: str) -> Callable[..., Any]:
    """Return the function of a command, whose keyword arguments are the options of the task.

    Args:
        task: its class.
        chosen: options that the name of the command gives.
        words: of the command, to say how to start ranks.
    """

    def program(given: dict[str, Any]) -> int:
        for name, value in chosen.items():
            if (given.get(name) or value) != value:
                raise ArgumentError(f"--{name}: got {given[name]} with {words}, expected none")
            given[name] = value
        return run_task(task, lambda: choose_run(task.Settings, given), _end, words)

    command = options_command(task.Settings, program)
    command.runs_on_ranks = True  # type: ignore[attr-defined]
    return command


def file_app(path: str) -> App:
    """Return the program of the task that a Python file defines."""
    task, words = task_class(path), f"tensorgrad train {path}"
    command = _command(task, {}, words)
    command.__doc__ = (task.__doc__ or "").partition("\n")[0]
    return App(words, default_command=command, version_flags=(), **STYLE)


train = App(
    name="train",
    help="Train a model; without the name of a task, a language model.",
    default_command=_command(task_class("language-model"), {}, "tensorgrad train"),
    version_flags=(),
    **STYLE,
)
for _name, (_task, _chosen, _help) in COMMANDS.items():
    _words = f"tensorgrad train {_name}"
    train.command(_command(task_class(_task), _chosen, _words), name=_name, help=_help)
