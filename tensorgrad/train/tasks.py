"""The tasks that `tensorgrad train` knows by name, and those of the user's files.

Tests: tests/train/test_task.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tensorgrad.core.errors import ArgumentError
from tensorgrad.train.task import Task
from tensorgrad.train.user_file import class_in, is_file

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
        return class_in(name, Task, option)
    if name not in TASKS:
        expected = f"{', '.join(TASKS)}, or a Python file that defines a task"
        raise ArgumentError(f"{option}: got {name}, expected one of {expected}")
    module, kind = TASKS[name]
    return getattr(import_module(module), kind)
