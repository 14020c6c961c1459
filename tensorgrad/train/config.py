"""Settings of a run: one dataclass gives the command-line options, their help and config.json.

@dataclass(frozen=True)
class Settings:
    steps: int = option(500, "optimizer steps in all", low=1)

The options are read by command_line.py.
"""

from __future__ import annotations

import inspect
import math
import os
import textwrap
import types
from collections.abc import Mapping, Sequence
from dataclasses import Field, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from tensorgrad.core.errors import ArgumentError, CheckpointError
from tensorgrad.io.files import is_utf8, shown, write_json
from tensorgrad.io.readers import read_json

FILE = "config.json"
# The types that a field accepts besides its own, and the names of types in errors.
_FITS = {float: Real, int: Integral}
_RENAMED = {"accumulate": "micro_batches"}  # in files of earlier versions
_TASKS = {"gpt2": "language-model"}
_OPTIONS = {"optimizer_name": "optimizer"}  # whose settings have another name than the option
_SOURCES = ("data", "also")  # options that a resumed run reads
_NAMED_SOURCES = ("stdlib", "phrases", "reviews")
_CHARACTERS = 1 << 16  # characters of a text
_NAMES = {
    float: "a number",
    int: "an integer",
    str: "a text",
    bool: "True or False",
    tuple: "a list of names",
}

# Subjects of settings, in the help and in reports; the rest is OTHER.
GROUPS = {
    "Data": (
        *("data", "also", "source", "target", "lowercase", "text_column", "label_column"),
        *("tokenizer", "tokens", "vocab", "vectors", "at_least", "validation", "held_out", "cache"),
    ),
    "Model": (
        *("task", "preset", "model", "init_from", "download", "revision", "layers", "heads"),
        *("width", "context", "hidden", "vocab_multiple", "tied", "prefix", "attention"),
        *("dropout", "attention_dropout", "activation_dropout", "word_dropout"),
    ),
    "Optimization": (
        *("steps", "epochs", "batch", "micro_batches", "lr", "warmup", "schedule", "lr_end"),
        *("decay_fraction", "optimizer_name", "weight_decay", "beta1", "beta2", "momentum", "clip"),
        *("label_smoothing", "average", "patience", "seed", "nan"),
    ),
    "Precision and devices": (
        *("dtype", "grad_dtype", "device", "capture", "recompute", "recompute_norms"),
        *("parallel", "bucket_mb", "dp", "pp", "tp", "pipeline_schedule", "chunks"),
        "sequence_parallel",
    ),
}
OTHER = "Evaluation and output"


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class ProgramSettings(Dataclass, Protocol):
    """The settings of a program that `read_command_line` reads."""

    @property
    def folder(self) -> Path:
        """The folder of a new run."""

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options that were given, and those that follow from them.

        Raises:
            ArgumentError: two of them contradict each other.
        """


_Settings = TypeVar("_Settings", bound=Dataclass)
_ProgramSettings = TypeVar("_ProgramSettings", bound=ProgramSettings)


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] | None = None,
    free: bool = False,
    grows: bool = False,
    by_ranks: bool = False,
    path: bool = False,
    saved: bool = True,
    shown: str = "",
    refused: str = "",
    by: tuple[str, Mapping[str, Any]] | None = None,
    known_by: str = "",
) -> Any:
    """Declare a field of a settings dataclass.

    Args:
        default: its value if the option is not given.
        help: one line, with the unit.
        low, high: the smallest and the largest value allowed.
        choices: the only values allowed; of a tuple, the only names.
        free: whether a resumed run may change it, because no weight and no loss depends on it, or
            because checkpoints have a digest of the content.
        grows: whether a resumed run may raise it, which adds steps and changes none.
        by_ranks: whether a resumed run may change it if the number of ranks that share a batch
            changes.
        path: whether it may name a file or a folder, which config.json then has with an absolute
            path: a run may be resumed from another working directory.
        saved: whether config.json keeps it. A field that it does not keep is free, and must be
            given at each start of a run, such as the number of pipeline stages.
        shown: the default in --help, if not the value.
        refused: why the command line refuses it and --help omits it, such as a setting that the
            program computes from other options.
        by: the name of another setting, and the default for each of its values that this option
            is for; with others it must not be given. `default` is then None.
        known_by: of a folder that is written to, the pattern of a file that it has. config.json may
            be untrusted: a folder of it without such a file is not used, the default is.

    Returns:
        A `dataclasses.field`.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Settings(tg.train.TrainSettings):
        ...     bits: int = tg.train.option(8, "bits of a number", low=1)
        >>> try:
        ...     Settings(bits=0)
        ... except tg.errors.ArgumentError as error:
        ...     print(error)
        --bits: got 0, expected 1 or more
    """
    saved = saved and not refused
    if by is not None and not shown:
        shown = ", ".join(f"{value} with {names}" for value, names in _by_value(by[1]).items())
    metadata = {
        "help": help, "low": low, "high": high, "choices": choices, "free": free or not saved,
        "grows": grows, "by_ranks": by_ranks, "path": path,
        "saved": saved, "shown": shown, "refused": refused, "by": by, "known_by": known_by,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def documented(settings: type[_Settings]) -> type[_Settings]:
    """Complete the docstring of a settings class by `Args`, from the help of its options."""
    if settings.__doc__ is not None:  # python -OO removes docstrings
        lines = []
        for f in fields(settings):
            default = f.metadata["shown"]
            text = f"{f.name}: {f.metadata['help']}{f'; default: {default}' if default else ''}"
            lines += textwrap.wrap(text, 92, initial_indent=" " * 4, subsequent_indent=" " * 8)
        first, _, rest = inspect.cleandoc(settings.__doc__).partition("\n\n")
        settings.__doc__ = "\n".join([first, "", "Args:", *lines, "", rest])
    return settings


def _by_value(defaults: Mapping[str, Any]) -> dict[Any, str]:
    """Return which names have a value, as a list to read, for each of the values."""
    found: dict[Any, list[str]] = {}
    for name, value in defaults.items():
        found.setdefault(value, []).append(name)
    return {value: " and ".join(names) for value, names in found.items()}


def default_of(f: Field[Any], settings: Mapping[str, Any]) -> Any:
    """Return the default of a setting beside others, which are by name."""
    by = f.metadata.get("by")
    if by is None:
        return f.default
    chosen = settings.get(by[0])
    return by[1].get(chosen, f.default) if isinstance(chosen, str) else f.default


def check(settings: Dataclass) -> None:
    """Raise ArgumentError for a setting that is out of its range.

    Lists of JSON become tuples, numbers of other types those of Python, and defaults that depend on
    other settings their values: config.json and checkpoints hold what passes here.
    """
    hints = get_type_hints(type(settings))
    for f in fields(settings):
        value, low, high = getattr(settings, f.name), f.metadata["low"], f.metadata["high"]
        choices, kind = f.metadata["choices"], _kind(hints[f.name])
        if value is None and (kind is not hints[f.name] or f.metadata["by"]):
            continue
        if kind is tuple and isinstance(value, list):
            value = tuple(value)
            object.__setattr__(settings, f.name, value)
        if kind is tuple and isinstance(value, tuple):
            wrong = [item for item in value if not _is_one_of(item, choices)]
            if not wrong:
                continue
            value, expected = wrong[0], f"names of {', '.join(choices)}"
        elif choices is not None and not _is_one_of(value, choices):
            expected = f"one of {', '.join(choices)}"
        elif not isinstance(value, _FITS.get(kind, kind)) or (
            isinstance(value, bool) and kind is not bool
        ):
            expected = kind_name(kind)
        elif isinstance(value, str) and "\0" in value:
            expected = "a text without NUL"
        elif kind is float and not _is_finite(value):
            expected = "a finite number"
        elif kind is int and abs(int(value)) >= 2**63:
            expected = "less than 2^63"
        elif low is not None and value < low:
            expected = f"{low:g} or more"
        elif high is not None and value > high:
            expected = f"{high:g} or less"
        elif kind is str and not is_utf8(value):
            expected = "text that fits UTF-8"
        elif kind is str and len(value) > _CHARACTERS:
            expected = f"at most {_CHARACTERS:,} characters"
        else:
            if kind in _FITS:
                object.__setattr__(settings, f.name, kind(value))
            continue
        raise ArgumentError(f"{flag(f)}: got {shown(value, 200)}, expected {expected}")
    for f in fields(settings):
        if f.metadata["by"]:
            _complete(settings, f, *f.metadata["by"])


def _complete(settings: Dataclass, f: Field[Any], other: str, defaults: Mapping[str, Any]) -> None:
    """Give a setting its default by another one; raise ArgumentError where it is not for that."""
    value, chosen = getattr(settings, f.name), getattr(settings, other)
    if value is None:
        object.__setattr__(settings, f.name, defaults.get(chosen))
    elif chosen not in defaults:
        name = option_name(other)
        raise ArgumentError(
            f"{flag(f)}: got {value} with {name} {chosen}, expected none: it is for {name} "
            f"{' or '.join(defaults)}"
        )


def _is_one_of(value: Any, choices: Sequence[str]) -> bool:
    return isinstance(value, str) and value in choices


def _is_finite(value: Real) -> bool:
    """Whether a number is a finite float: 10**400 is an integer and none."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def save(settings: Dataclass, folder: Path) -> None:
    """Write config.json into the folder of a run."""
    kept = {f.name: getattr(settings, f.name) for f in fields(settings) if f.metadata["saved"]}
    for f in fields(settings):
        if f.metadata["path"] and _is_path(kept[f.name]) and os.path.exists(kept[f.name]):
            kept[f.name] = str(Path(kept[f.name]).absolute())
    write_json(folder / FILE, kept, 2)


def renamed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a config.json, which may be of an earlier version, by their names."""
    names = {_RENAMED.get(name, name): value for name, value in saved.items()}
    if isinstance(names.get("task"), str):
        names["task"] = _TASKS.get(names["task"], names["task"])
    return names


def is_published(saved: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a model in the layout of Hugging Face transformers.

    A run has a file of the same name, with its settings.
    """
    return "model_type" in saved or "architectures" in saved


def load(settings: type[_Settings], folder: Path, file: str = "") -> _Settings:
    """Return the settings that a run was started with.

    Args:
        settings: the dataclass.
        folder: of the run.
        file: the Python file of the model that the command names, which takes the place of the one
            that the run names: a file is executed only where the user says so.
    Raises:
        ArgumentError: the model is of a Python file, and `file` is not given.
        CheckpointError: config.json is missing, or of other settings.
    """
    path = folder / FILE
    known_by = {f.name: f.metadata["known_by"] for f in fields(settings)}
    try:
        found = read_json(path)
        if isinstance(found, dict):
            if is_published(found):
                raise ValueError(
                    "it has the sizes of a published model, expected the settings of a run; "
                    "--init-from trains such a model"
                )
            found = renamed(found)
            expected = {f.name: f.default for f in fields(settings)}.get("task")
            if found.get("task", expected) != expected:
                raise ValueError(f"task is {found['task']!r:.80}, expected {expected!r}")
            if str(found.get("model")).endswith(".py"):
                found["model"] = _named_file(found["model"], file)
            found = {k: v for k, v in found.items() if not _is_strange(v, known_by.get(k, ""))}
        return settings(**found)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"resume: {folder} has no {FILE}, expected the folder of a run"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"resume: {path} cannot be used: {error}") from error


def _is_strange(folder: Any, known_by: str) -> bool:
    """Whether a folder of a config.json has no file by which it is known; see `option`."""
    return bool(known_by) and isinstance(folder, str) and not any(Path(folder).glob(known_by))


def _named_file(saved: str, file: str) -> str:
    """Return the Python file that the command names, for the one that a run names."""
    if not file:
        raise ValueError(
            f"its model is of a Python file, which is executed: name it with --model {saved}"
        )
    return file


def resume(saved: _Settings, given: Mapping[str, Any], folder: Path) -> _Settings:
    """Return the saved settings, changed by the options given.

    Raises:
        ArgumentError: an option contradicts the run.
    """
    wrong = contradictions(saved, vars(saved), given)
    if wrong:
        raise ArgumentError(
            f"resume: {folder} was started with other settings: {'; '.join(wrong)}. "
            "Omit these options to resume, or start a new run"
        )
    settings = replace(saved, **given)
    for f in fields(settings):
        path = getattr(settings, f.name)
        if f.name in _SOURCES and _is_path(path) and not os.path.exists(path):
            raise ArgumentError(
                f"{flag(f)}: {path} does not exist; expected the same content as before: if it "
                f"was moved, name its new place with {flag(f)}"
            )
    return settings


def _is_path(source: Any) -> bool:
    """Whether the value of an option with `path` names a file or a folder."""
    return bool(source) and not source.startswith("hf:") and source not in _NAMED_SOURCES


def contradictions(
    settings: Dataclass, before: Mapping[str, Any], now: Mapping[str, Any], same_ranks: bool = False
) -> list[str]:
    """Return the settings that a resumed run must not change but has.

    Args:
        settings: a dataclass whose fields say what may change (see `option`).
        before, now: settings by name; a name that one of them lacks is not compared.
        same_ranks: whether the same number of ranks as before shares a batch.
    Returns:
        A text for each of them.
    """
    wrong = []
    for f in fields(settings):
        if f.name not in before or f.name not in now or f.metadata["free"]:
            continue
        old, new, expected = before[f.name], now[f.name], ""
        if new == old or (f.metadata["by_ranks"] and not same_ranks):
            continue
        if f.metadata["path"] and Path(str(old)).name == Path(str(new)).name:
            continue  # config.json has the absolute path, a checkpoint what was typed
        if f.metadata["grows"]:
            if isinstance(old, int) and new > old:
                continue
            expected = f", expected {old!r:.80} or more"
        elif f.metadata["by_ranks"]:
            expected = f", expected {old!r:.80} with the same number of ranks"
        wrong.append(f"{flag(f)} is {old!r:.80} there, got {new!r:.80}{expected}")
    return wrong


def kind_name(kind: Any) -> str:
    """Return what errors call a type, such as "an integer"."""
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _kind(hint: Any) -> Any:
    """Return the type of a field: int for `int | None`, tuple for `tuple[str, ...]`."""
    if get_origin(hint) in (types.UnionType, Union):
        (hint,) = (member for member in get_args(hint) if member is not type(None))
    return get_origin(hint) or hint


def flag(field: Field[Any]) -> str:
    """Return the name of a setting's option on the command line."""
    return option_name(field.name)


def option_name(setting: str) -> str:
    """Return the name of an option on the command line, by the name of its setting."""
    return "--" + _OPTIONS.get(setting, setting).replace("_", "-")
