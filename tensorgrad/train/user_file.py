"""Models and tasks that a user defines in a Python file.

The file is executed, so a command does so only where its own options name the file. What
config.json of a run names is never executed (see `config.load`). Tests:
tests/train/test_task.py.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.errors import ArgumentError
from tensorgrad.files import shown
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.models.presets import MODELS

NUMBERS = int, float, np.number


def wrong_return(op: str, name: str, found: Any, expected: str) -> ArgumentError:
    """Return the error for what a function of the user has returned."""
    return ArgumentError(f"{op}: {name} returned {shown(found, 80)}, expected {expected}")


def called(op: str, name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Return what a function of the user returns.

    Raises:
        ArgumentError: it does not take these arguments. What it raises itself is raised as it is.
    """
    try:
        return function(*arguments)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise
        raise ArgumentError(f"{op}: {name} got {len(arguments)} arguments: {error}") from error


def all_texts(values: Iterable[Any]) -> bool:
    """Whether all values are texts."""
    return all(isinstance(value, str) for value in values)


def model_class(name: str) -> Any:
    """Return the class of a model.

    Args:
        name: one of MODELS, or the path of a Python file that defines one model.
    Raises:
        ArgumentError: there is no such model.
    """
    if name in MODELS:
        return MODELS[name]
    if not is_file(name):
        expected = f"{', '.join(MODELS)}, or a Python file that defines a model"
        raise ArgumentError(f"--model: got {name}, expected one of {expected}")
    found = class_in(name, LanguageModel, "--model")
    if not inspect.isclass(getattr(found, "Config", None)):
        raise ArgumentError(
            f"--model: {found.__name__} of {name} has no Config, expected the dataclass of its "
            "sizes as a class attribute"
        )
    return found


def is_file(name: str) -> bool:
    """Whether a name is that of a Python file, and not of something in the library."""
    return name.endswith(".py")


def class_in(path: str, base: type[Any], option: str) -> Any:
    """Return the class that a Python file defines; the file is executed once a process.

    Args:
        path: of the file.
        base: of the class.
        option: that named the file, for errors.
    Raises:
        ArgumentError: the file does not exist, cannot be executed, or defines none or several.
    """
    file = Path(path).absolute()
    if not file.is_file():
        raise ArgumentError(f"{option}: {path} does not exist, expected a Python file")
    name = f"tensorgrad_user_{file.stem}_{abs(hash(str(file)))}"
    module = sys.modules.get(name)
    if module is None:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ArgumentError(
                f"{option}: {path} fails with {type(error).__name__}: {error}"
            ) from error
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, base) and value.__module__ == name
    ]
    if len(found) != 1:
        names = ", ".join(each.__name__ for each in found) or "none"
        raise ArgumentError(
            f"{option}: {path} defines {names}, expected one subclass of {base.__name__}"
        )
    return found[0]
