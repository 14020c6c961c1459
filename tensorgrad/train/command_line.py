"""The command line of a program that trains: an option for each setting, and files of settings.

    settings, folder, resuming = read_command_line(Settings, __doc__)

Cyclopts reads the options: types, choices, help, suggestions for misspelt names, shell completion.
`--config FILE` takes settings from a file, which options on the command line override.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

from cyclopts import App, Group, Parameter
from cyclopts.config import ConfigFromFile, Dict, Json, Toml, Yaml
from cyclopts.exceptions import CycloptsError

from tensorgrad.errors import ArgumentError
from tensorgrad.train import config
from tensorgrad.train.config import ProgramSettings, flag

_READERS: dict[str, type[ConfigFromFile]] = {
    ".json": Json, ".toml": Toml, ".yaml": Yaml, ".yml": Yaml,
}  # fmt: skip
_FILE = "settings from this file: .json, .yaml or .toml; options given here override them"
_RESUME = "resume the run in this folder"

# What all command lines have in common. Of an option that is repeated the last counts, so that a
# script can add options of its caller.
STYLE: dict[str, Any] = {
    "config": lambda *found: read_config(*found),
    "default_parameter": Parameter(allow_repeating=True, negative_iterable=()),
    "suppress_keyboard_interrupt": False,
}

_GROUPS = {name: Group(name, sort_key=n) for n, name in enumerate((*config.GROUPS, config.OTHER))}

_Settings = TypeVar("_Settings", bound=ProgramSettings)


def read_command_line(
    settings: type[_Settings], description: str | None, arguments: Sequence[str] | None = None
) -> tuple[_Settings, Path, bool]:
    """Return the settings, the folder of the run, and whether it is one to resume.

    Args:
        settings: the dataclass.
        description: of the program; the first line is for --help.
        arguments: of the command; default: those of this process.
    Raises:
        ArgumentError: an option is unknown or of the wrong type, a setting is out of its range,
            the folder holds a run already, or an option contradicts another option or the run to
            resume.
        CheckpointError: the folder to resume holds no run.
        SystemExit: after --help.
    """
    found: list[tuple[_Settings, Path, bool]] = []
    program = training_command(settings, lambda read: found.append(read()))
    program.__doc__ = (description or "").partition("\n")[0]
    run_app(App(default_command=program, version_flags=(), **STYLE), arguments)
    if not found:
        raise SystemExit(0)
    return found[0]


def run_app(app: App, arguments: Sequence[str] | None = None) -> Any:
    """Run a command line; return what the command returns, None after --help.

    Raises:
        ArgumentError: an option or a value is wrong.
    """
    try:
        return app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise ArgumentError(str(error)) from error


def training_command(
    settings: type[_Settings], run: Callable[[Callable[[], tuple[_Settings, Path, bool]]], Any]
) -> Callable[..., Any]:
    """Return a function whose keyword arguments are the settings, for an App.

    Args:
        settings: the dataclass.
        run: called with a function that returns what `choose_run` does.
    """

    return options_command(settings, lambda given: run(lambda: choose_run(settings, given)))


def options_command(
    settings: type[Any], run: Callable[[dict[str, Any]], Any]
) -> Callable[..., Any]:
    """Return a function whose keyword arguments are the settings, --resume and --config.

    Args:
        settings: the dataclass.
        run: called with what was given on the command line and in the file, by name.
    """

    def program(**given: Any) -> Any:
        given.pop("config", None)
        return run(given)

    options = [_parameter(f, hint) for f, hint in _hinted(settings)]
    for name, text in (("resume", _RESUME), ("config", _FILE)):
        about = Annotated[Path | None, Parameter(help=text)]
        kind = inspect.Parameter.KEYWORD_ONLY
        options.append(inspect.Parameter(name, kind, default=None, annotation=about))
    program.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return program


def choose_run(settings: type[_Settings], given: Mapping[str, Any]) -> tuple[_Settings, Path, bool]:
    """Return the settings of a run, its folder, and whether it is one to resume.

    Args:
        settings: the dataclass.
        given: the settings that were given, by name; "resume": the folder of a run to resume.
    Raises:
        ArgumentError, CheckpointError: as for `read_command_line`.
    """
    given = dict(given)
    for f in fields(settings):
        if f.name in given and f.metadata["refused"]:
            raise ArgumentError(
                f"{flag(f)}: got {given[f.name]!r}, expected none: {f.metadata['refused']}"
            )
    if given.get("resume") is not None:
        folder = Path(given.pop("resume"))
        out = Path(given.pop("out", folder))
        if out != folder:
            raise ArgumentError(
                f"--out: got {out} with --resume {folder}, expected none: a run keeps its folder"
            )
        return config.resume(config.load(settings, folder), given, folder), folder, True
    given.pop("resume", None)
    chosen = settings(**settings.complete(given))
    folder = chosen.folder
    if (folder / config.FILE).exists():
        raise ArgumentError(
            f"--out: {folder} holds a run, expected a new folder; to resume it: --resume {folder}"
        )
    return chosen, folder, False


def read_config(app: App, commands: tuple[str, ...], arguments: Any) -> None:
    """Add the settings of the file that --config names, where the command line gives none.

    Raises:
        ArgumentError: the file cannot be read, or its name ends otherwise than expected.
    """
    given = next((each for each in arguments if each.name == "--config"), None)
    if given is None or not given.tokens:
        return
    path = Path(given.tokens[0].value)
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise ArgumentError(f"--config: got {path}, expected a file in {', '.join(_READERS)}")
    try:
        found: Any = reader(path, must_exist=True, search_parents=False).config
    except (OSError, ValueError, CycloptsError) as error:
        raise ArgumentError(f"--config: cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ArgumentError(
            f"--config: cannot read {path}: got a {kind}, expected settings by name"
        )
    for command in reversed(commands):  # so that no setting is taken for a command of its name
        found = {command: found}
    Dict(found, source=str(path))(app, commands, arguments)


def _hinted(settings: type[Any]) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(settings)
    return [(f, hints[f.name]) for f in fields(settings)]


def _parameter(f: Field[Any], hint: Any) -> inspect.Parameter:
    """Return the parameter of a setting."""
    choices, shown = f.metadata["choices"], f.metadata["shown"]
    group = next((name for name, names in config.GROUPS.items() if f.name in names), config.OTHER)
    about = Parameter(
        name=flag(f),
        group=_GROUPS[group],
        help=f.metadata["help"],
        show=not f.metadata["refused"] and len(choices or "many") > 1,
        show_default=(lambda _: shown) if shown else f.default not in (None, "", ()),
        consume_multiple=get_origin(hint) is tuple,
    )
    if choices:
        one: Any = Literal[tuple(choices)]
        hint = tuple.__class_getitem__((one, ...)) if get_origin(hint) is tuple else one
    annotation = Annotated[hint, about]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(f.name, kind, default=f.default, annotation=annotation)
