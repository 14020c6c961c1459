"""The program `tensorgrad`: one command for each thing to do with the library.

Each command is a typed function in a module of its name, whose docstring is its help. Modules are
imported when their command is used.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cyclopts import App
from cyclopts.exceptions import CycloptsError

from tensorgrad.startup import distribution  # noqa: F401  first: whether the files are this project's

# isort: split
from tensorgrad import __version__
from tensorgrad.core.errors import TensorgradError
from tensorgrad.io.command import command
from tensorgrad.parallel.comm.launch import launched_ranks
from tensorgrad.train.command_line import STYLE, explained, run_app

# The commands, with the first line of their help, so that --help imports none of them.
COMMANDS = {
    "info": "Show devices, drivers, versions and what is missing.",
    "train": "Train a language model, a translation model, a classifier, or a task of your own.",
    "prepare": "Train a tokenizer and write the tokens of a text.",
    "generate": "Generate text with a trained or published language model.",
    "export": "Write a trained model as a folder that Hugging Face transformers loads.",
    "evaluate": "Measure a trained model on its validation data.",
    "translate": "Translate text with a trained translation model.",
    "classify": "Classify sentences with a trained classifier.",
    "compare": "Show what differs between runs in settings, environment and result.",
    "report": "Write one HTML page about a run: curves, samples, settings, environment.",
    "curvature": "Measure eigenvalues and spectral density of the loss at a run's checkpoints.",
    "bench": "Measure kernels, steps, models, generation, parallel modes and precision, and peers.",
    "profile": "Show where the time and the memory of a training step go.",
    "plan": "Plan the training of a GPT-2 on many GPUs: memory, traffic and time.",
}
app = App(
    name="tensorgrad",
    help="Train, run, measure and compare language models with tensorgrad.",
    version=__version__,
    **STYLE,
)
app.register_install_completion_command(help="Install completion of commands for this shell.")
for _name, _help in COMMANDS.items():
    app.command(f"tensorgrad.cli.{_name}:{_name}", name=_name, help=_help)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the program; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if launched_ranks() > 1:
        return _on_ranks(given)
    return run_app(*_program(given)) or 0


def _program(given: list[str]) -> tuple[App, list[str]]:
    """Return the command line that reads words, and the words: a task's file is a program."""
    if given[:1] == ["train"] and given[1:] and given[1].endswith(".py"):
        from tensorgrad.cli.train import file_app

        return file_app(given[1]), given[2:]
    return app, given


def _on_ranks(given: list[str]) -> int:
    """Run a command on several ranks; rank 0 reports a wrong command line for all."""
    from tensorgrad.parallel.comm.mpi_nccl import world

    comm = world()
    wrong: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            if any(flag in given for flag in ("--help", "-h", "--version")) or not given:
                run_app(*_program(given))
                wrong = {"status": 0}
            else:
                program, words = _program(given)
                chosen, *_ = program.parse_args(words, exit_on_error=False, print_error=False)
                _check_ranks(" ".join(program.parse_commands(words)[0]), chosen, comm.size)
        except (CycloptsError, TensorgradError) as error:
            text = explained(error) if isinstance(error, CycloptsError) else error
            logging.error("%s", text)
            wrong = {"status": 1}
    wrong = comm.broadcast_object(wrong)
    return int(wrong["status"]) if wrong else run_app(*_program(given)) or 0


def _check_ranks(name: str, chosen: Callable[..., Any], ranks: int) -> None:
    """Raise TensorgradError where a command is for one process, as it would run on each rank."""
    if not getattr(chosen, "runs_on_ranks", False):
        raise TensorgradError(
            f"{name}: got {ranks} ranks, expected one process: start it without mpirun"
        )
