"""The command line of a program that trains: an option for each setting, and files of settings.

    settings, folder, resuming = read_command_line(Settings, __doc__)

Cyclopts reads the options: types, choices, help, suggestions for misspelt names, shell completion.
`--config FILE` takes settings from a file, which options on the command line override.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from cyclopts import App, ArgumentCollection, Group, Parameter
from cyclopts.config import Dict
from cyclopts.exceptions import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from tensorgrad.core.errors import ArgumentError
from tensorgrad.train import config
from tensorgrad.train.config import ProgramSettings, flag
from tensorgrad.train.folder import check_new_folder
from tensorgrad.train.options import PATHS, in_options, suggest
from tensorgrad.train.settings_file import read_settings
from tensorgrad.train.user_file import is_file

_FILE = "settings from this file: .json, .yaml or .toml; options given here override them"
_RESUME = "resume the run in this folder"

# Settings of all command lines. The last counts of an option that is repeated, so that a
# script can add options of its caller.
STYLE: dict[str, Any] = {
    "config": (lambda *found: read_config(*found), lambda *found: check_values(*found)),
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
    app = App(f"python {sys.argv[0]}", default_command=program, version_flags=(), **STYLE)
    run_app(app, arguments)
    if not found:
        raise SystemExit(0)
    return found[0]


def run_app(app: App, arguments: Sequence[str] | None = None) -> Any:
    """Run a command line; return what the command returns, None after --help.

    Raises:
        ArgumentError: an option or a value is wrong.
        TensorgradError: what the command raises, in the words of its options.
    """
    try:
        program, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise ArgumentError(explained(error)) from error
    with in_options(_values(bound)):
        return program(*bound.args, **bound.kwargs)


def _values(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return the values of a command by option; positional arguments have names in capitals."""
    bound = copy(bound)
    bound.arguments = dict(bound.arguments)
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if is_dataclass(value):
            found |= {flag(f): getattr(value, f.name) for f in fields(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found |= {f"--{item.replace('_', '-')}": value[item] for item in value}
        elif kind is inspect.Parameter.KEYWORD_ONLY:
            found[f"--{name.replace('_', '-')}"] = value
        else:
            found[name.upper()] = value
    return found


def explained(error: CycloptsError) -> str:
    """Return a wrong command line in one line: what was typed, what is expected, what was meant."""
    chain, app = error.command_chain or (), error.app
    program = " ".join(("tensorgrad", *chain)) if chain or app is None else app.name[0]
    if isinstance(error, UnknownOptionError):
        word = _option_of(error.token.keyword or error.token.value)
        names = [
            name
            for argument in error.argument_collection
            if argument.show
            for name in argument.names
        ]
        place = "" if error.token.source == "cli" else f" in {error.token.source}"
        more = suggest(word, names) or f"; see `{program} --help`"
        return f"{word}: unknown option{place}{more}"
    if isinstance(error, UnusedCliTokensError | UnknownCommandError) and error.unused_tokens:
        return _unexpected(error, program)
    if isinstance(error, CoercionError) and error.token is not None:
        return _wrong_value(error)
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.keyword or error.argument.name
        return f"{name}: got none, expected a value; see `{program} --help`"
    return str(error)


def _option_of(word: str) -> str:
    """Return the option of a setting, which a file of settings names as in [steps]."""
    setting = re.fullmatch(r"\[(\w+)\]", word)
    return f"--{setting[1].replace('_', '-')}" if setting else word


def _unexpected(error: CycloptsError, program: str) -> str:
    """Return the line about a word that is neither a command nor an option's value."""
    (word, *_), app = error.unused_tokens or [""], error.app
    commands = [name for name in app or () if not name.startswith("-")] if app else []
    meant = suggest(word, commands)
    options = app.assemble_argument_collection() if app and app.default_command else ()
    data = next((option.name for option in options if option.name == "--data"), "")
    if not meant and data and (Path(word).exists() or not commands or Path(word).suffix):
        meant = f"; did you mean {data} {word}?"
    if commands:
        return f"{word}: unknown command" + (meant or f", expected one of {', '.join(commands)}")
    return f"{word}: unexpected argument" + (meant or f"; see `{program} --help`")


def _wrong_value(error: CoercionError) -> str:
    """Return the line about a value of the wrong type, or none of the choices."""
    token, kind, argument = error.token, error.target_type, error.argument
    assert token is not None
    name = argument.name if argument else token.keyword
    place = "" if token.source in ("", "cli") else f" in {token.source}"
    if get_origin(kind) is Literal:
        choices = [str(member) for member in get_args(kind)]
        expected = f"one of {', '.join(choices)}{suggest(token.value, choices)}"
    else:
        expected = config.kind_name(kind)
    return f"{name}: got {token.value!r:.200}{place}, expected {expected}"


def check_values(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Check values that would be read as others: a fraction, which is rounded, and an empty path.

    Raises:
        ArgumentError: an integer is a fraction, or a path is empty.
    """
    for argument in arguments:
        hints = (argument.hint, *get_args(argument.hint))
        for token in argument.tokens:
            name, typed = argument.name, token.source == "cli"
            if int in hints and _is_fraction(token.value):
                raise ArgumentError(f"{name}: got {token.value}, expected an integer")
            if typed and not token.value and (Path in hints or name in PATHS):
                raise ArgumentError(f"{name}: got '', expected the name of a file or a folder")


def _is_fraction(text: str) -> bool:
    try:
        return not float(text).is_integer()
    except (ValueError, OverflowError):
        return False  # refused when it is read


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
        saved = config.load(settings, folder, str(given.get("model") or ""))
        return config.resume(saved, given, folder), folder, True
    given.pop("resume", None)
    chosen = settings(**settings.complete(given))
    folder = chosen.folder
    check_new_folder(folder, resumable=True)
    return chosen, folder, False


def read_config(app: App, commands: tuple[str, ...], arguments: Any) -> None:
    """Add the settings of the file that --config names, where the command line gives none.

    Raises:
        ArgumentError: see `read_settings`.
    """
    given = next((argument for argument in arguments if argument.name == "--config"), None)
    if given is None or not given.tokens:
        return
    path = Path(given.tokens[0].value)
    settings = config.renamed(read_settings(path))
    model = str(settings.get("model"))
    if is_file(model) and not any(
        argument.name == "--model" and argument.tokens for argument in arguments
    ):
        raise ArgumentError(
            f"--config: the model of {path} is a Python file, which is executed: name it with "
            f"--model {model}"
        )
    names = {name: config.option_name(name)[2:].replace("-", "_") for name in settings}
    found: dict[str, Any] = {names[name]: value for name, value in settings.items()}
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
