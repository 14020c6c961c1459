"""Models and tasks that a user defines in a Python file.

The file is executed, so a command does so only where its own options name the file. What
config.json of a run names is never executed (see `config.load`). Tests:
tests/train/test_task.py.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tensorgrad.core.errors import ArgumentError
from tensorgrad.io.files import shown
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.models.presets import MODELS
from tensorgrad.nn import Module

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
    config = getattr(found, "Config", None)
    if not inspect.isclass(config) or not is_dataclass(config):
        raise ArgumentError(
            f"--model: {found.__name__} of {name} has no Config, expected the dataclass of its "
            "sizes as a class attribute"
        )
    if found.embed is LanguageModel.embed:
        raise ArgumentError(f"--model: {found.__name__} has no `embed`, expected the method")
    check_method(found.__init__, ("self", "config"), f"--model: __init__ of {found.__name__}")
    check_method(found.embed, ("self", "tokens", "cache"), f"--model: embed of {found.__name__}")
    return found


def made(kind: Any, config: Any) -> Any:
    """Return a model of a class, which a user may have defined.

    Raises:
        ArgumentError: it cannot be called with the sizes, or lacks what a LanguageModel has.
    """
    model = called("--model", kind.__name__, kind, (config,))
    numbers, layers = ("vocab_size", "context"), ("tokens", "blocks", "norm")
    for name in (*numbers, *layers):
        found = getattr(model, name, None)
        if not isinstance(found, Module if name in layers else int):
            expected = "a Module" if name in layers else "an integer"
            raise ArgumentError(
                f"--model: {kind.__name__} has {name} = {shown(found, 80)}, expected {expected} "
                "that its __init__ sets"
            )
    return model


def sizes_of(kind: Any, sizes: Mapping[str, Any]) -> Any:
    """Return the Config of a model, which a user may have defined.

    Raises:
        ArgumentError: it lacks a size, or one of its counts is not a number.
    """
    config = called("--model", kind.__name__, partial(kind, **sizes), ())
    for name in ("parameters", "training_flops"):
        found = getattr(config, name, None)
        found = found() if name == "training_flops" and callable(found) else found
        if not isinstance(found, NUMBERS) or not 0 <= found < math.inf:
            raise ArgumentError(
                f"--model: {name} of {kind.__name__} is {shown(found, 80)}, expected a number"
            )
    return config


def check_method(method: Any, expected: Iterable[str], what: str) -> None:
    """Raise ArgumentError unless a method takes these arguments by their place."""
    found = inspect.signature(method)
    try:
        found.bind(*expected)
    except TypeError as error:
        raise ArgumentError(
            f"{what} has the parameters {found}, expected ({', '.join(expected)})"
        ) from error


def is_file(name: str) -> bool:
    """Whether a name is that of a Python file, and not of something in the library."""
    return name.endswith(".py")


def class_in(path: str, base: type[Any], option: str) -> Any:
    """Return the class that a Python file defines; what it holds is executed once a process.

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
    try:
        source = file.read_bytes()
        name = f"tensorgrad_user_{file.stem}_{abs(hash((file, source)))}"
        module = sys.modules.get(name) or _executed(name, file, source)
    except Exception as error:
        raise ArgumentError(
            f"{option}: {path} fails with {type(error).__name__}: {error}"
        ) from error
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, base) and value.__module__ == name
    ]
    if len(found) != 1:
        names = ", ".join(kind.__name__ for kind in found) or "none"
        raise ArgumentError(
            f"{option}: {path} defines {names}, expected one subclass of {base.__name__}"
        )
    return found[0]


def _executed(name: str, file: Path, source: bytes) -> ModuleType:
    """Return the new module of a file's source. No compiled code is kept, which could be older."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(source, str(file), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module
