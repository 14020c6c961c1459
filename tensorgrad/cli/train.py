"""`tensorgrad train`: a GPT-2, a translation model or a classifier of sentences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cyclopts import App

from tensorgrad.command import printable
from tensorgrad.parallel.comm.launch import launched_ranks
from tensorgrad.parallel.train_gpt2 import ParallelSettings, memory_explained, train_on_ranks
from tensorgrad.report import write_report
from tensorgrad.train import gpt2, sentiment, translation
from tensorgrad.train.command_line import STYLE, training_command
from tensorgrad.train.device import choose_device
from tensorgrad.train.loop import Outcome
from tensorgrad.train.progress import StageProgress
from tensorgrad.train.ranks import OneProcess
from tensorgrad.train.settings import TrainSettings

_Settings = TypeVar("_Settings", bound=TrainSettings)
_Read = Callable[[], tuple[_Settings, Path, bool]]


def _train_gpt2(read: _Read[ParallelSettings]) -> int:
    """Train a GPT-2 on text, in one process or on the ranks that mpirun starts."""
    if launched_ranks() > 1:
        return train_on_ranks(ParallelSettings, read, _end)
    settings, folder, resuming = read()
    settings.check_one_process("tensorgrad train")
    settings, device = choose_device(settings)
    with memory_explained(settings):
        outcome, sample = gpt2.train(settings, folder, resuming, device, OneProcess())
    if outcome.finished:
        _end(settings, folder, sample)
    return outcome.status


def _end(settings: TrainSettings, folder: Path, sample: str | None) -> None:
    """Show a sample of the model's text, and write the report."""
    if sample is not None:
        print(printable(sample))
    if settings.report:
        with StageProgress("reading") as progress:
            write_report(folder, progress=progress)


def _alone(
    train: Callable[[_Settings, Path, bool, str], Outcome],
) -> Callable[[_Read[_Settings]], int]:
    """Return a program that trains in one process; it returns the exit status."""

    def program(read: _Read[_Settings]) -> int:
        settings, folder, resuming = read()
        settings, device = choose_device(settings)
        outcome = train(settings, folder, resuming, device)
        if outcome.finished:
            _end(settings, folder, None)
        return outcome.status

    return program


train_gpt2 = training_command(ParallelSettings, _train_gpt2)
train = App(
    name="train",
    help="Train a model; without the name of a task, a GPT-2.",
    default_command=train_gpt2,
    version_flags=(),
    **STYLE,
)
train.command(train_gpt2, name="gpt2", help="Train a GPT-2 on text, on one or several ranks.")
train.command(
    training_command(translation.TranslationSettings, _alone(translation.train)),
    name="translation",
    help="Train a translation model on pairs of sentences, and measure BLEU.",
)
train.command(
    training_command(sentiment.SentimentSettings, _alone(sentiment.train)),
    name="sentiment",
    help="Train a classifier of positive and negative sentences.",
)
