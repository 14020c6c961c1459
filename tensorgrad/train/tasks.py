"""The tasks that `tensorgrad train` knows by name, and those of the user's files.

Tests: tests/train/test_task.py.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from tensorgrad.core.errors import ArgumentError
from tensorgrad.io.files import shown
from tensorgrad.io.readers import read_json
from tensorgrad.train import config
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.task import Task
from tensorgrad.train.user_file import check_method, class_in, is_file

# The module and the class of each, which are loaded when they are used.
TASKS = {
    "language-model": ("tensorgrad.train.language", "LanguageModeling"),
    "translation": ("tensorgrad.train.translation", "Translation"),
    "sentiment": ("tensorgrad.train.sentiment", "Sentiment"),
}


def task_class(name: str, option: str = "TASK") -> Any:
    """Return the class of a task.

    Args:
        name: one of TASKS, or the path of a Python file that defines one task.
        option: that named the task, for errors.
    Raises:
        ArgumentError: there is no such task.
    """
    if is_file(name):
        return _checked(class_in(name, Task, option), option)
    if name not in TASKS:
        expected = f"{', '.join(TASKS)}, or a Python file that defines a task"
        raise ArgumentError(f"{option}: got {name}, expected one of {expected}")
    module, kind = TASKS[name]
    return getattr(import_module(module), kind)


def task_of_run(folder: Path, task: str | None = None, model_file: str = "") -> tuple[Any, Any]:
    """Return the class of the task of a run, and the settings that the run was started with.

    Args:
        folder: of the run, with config.json.
        task: the Python file of the task, for one that a user has defined: it is executed.
        model_file: the same of the model.
    Raises:
        ArgumentError: the task or the model is of a Python file, which is not given.
        CheckpointError: config.json is of other settings.
    """
    found = config.renamed(read_json(folder / config.FILE))
    name = str(found.get("task", "language-model"))
    if task is None and name not in TASKS:
        raise ArgumentError(
            f"--task: got none, expected the Python file of the run's task {name!r:.80}, which "
            "is executed"
        )
    kind = task_class(name if task is None else task, "--task")
    return kind, config.load(kind.Settings, folder, model_file)


def _checked(task: type[Task], option: str) -> type[Task]:
    """Return the task of a user; raise ArgumentError where its class cannot be one."""
    settings = task.Settings
    if not (isinstance(settings, type) and issubclass(settings, TrainSettings)):
        raise ArgumentError(
            f"{option}: Settings of {task.__name__} is {shown(settings, 80)}, expected a dataclass "
            "that derives from TrainSettings"
        )
    plain = [f.name for f in fields(settings) if "help" not in f.metadata]
    if plain:
        raise ArgumentError(
            f"{option}: {settings.__name__} has {plain[0]!r} without a help, expected "
            f"`{plain[0]}: TYPE = option(DEFAULT, HELP)`"
        )
    for name, method in vars(Task).items():
        if inspect.isfunction(method) or isinstance(method, classmethod):
            _check_method(getattr(Task, name), getattr(task, name), f"{option}: {name}")
    return task


def _check_method(ours: Any, theirs: Any, what: str) -> None:
    """Raise ArgumentError unless a method takes what that of Task does."""
    expected = inspect.signature(ours)
    if not callable(theirs):
        raise ArgumentError(f"{what} is {shown(theirs, 80)}, expected a method{expected}")
    kinds = {parameter.kind for parameter in expected.parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL not in kinds:  # a parameter for the arrays of a batch
        check_method(theirs, expected.parameters, what)
