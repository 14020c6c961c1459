"""Files of settings for `--config`: JSON, TOML or YAML, with plain values by name.

Such a file may be untrusted. It has texts, numbers, true or false, null, and lists of
these; each name once; no tags, which make objects in YAML, and no aliases, by which a few lines
become a billion values. Tests: tests/train/test_settings_file.py.
"""

from __future__ import annotations

import importlib
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorgrad.core.errors import ArgumentError, DataError
from tensorgrad.io.readers import parse_json, read_bytes

__all__ = ["read_settings"]

_BYTES = 1 << 16
_SURROGATE = re.compile("[\ud800-\udfff]")
_LONGEST = 1000  # values of a list
_DOTS = 5000


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a file by name.

    Args:
        path: the file, whose name ends in .json, .toml, .yaml or .yml; at most 64 KiB.

    Returns:
        Plain values by name, as in the file.

    Raises:
        ArgumentError: the file cannot be read, or has something else than settings.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.train.settings_file import read_settings
        >>> _ = Path("settings.json").write_text('{"steps": 100, "lr": 0.001}')
        >>> read_settings(Path("settings.json"))
        {'steps': 100, 'lr': 0.001}
    """
    parse = _PARSERS.get(path.suffix)
    if parse is None:
        raise ArgumentError(f"--config: got {path}, expected a file in {', '.join(_PARSERS)}")
    try:
        text = read_bytes(path, _BYTES, links=True).decode("utf-8-sig")
        found = parse(text)
        if not isinstance(found, dict):
            raise DataError(f"got a {type(found).__name__}, expected settings by name")
        for name, value in found.items():
            _check(name, value)
        if "config" in found:
            raise DataError("it has the setting config, expected it on the command line alone")
    except RecursionError as error:
        raise ArgumentError(f"--config: cannot read {path}: it is nested too deep") from error
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ArgumentError(f"--config: cannot read {path}: {reason:.500}") from error
    return found


def _check(name: Any, value: Any) -> None:
    """Raise DataError where a setting is not plain."""
    if not isinstance(name, str):
        raise DataError(f"it has the name {name!r:.80}, expected a text")
    values = value if isinstance(value, list) else [value]
    if len(values) > _LONGEST:
        raise DataError(f"{name:.80} has {len(values):,} values, expected at most {_LONGEST:,}")
    for one in values:
        if one is not None and not isinstance(one, bool | int | float | str):
            raise DataError(
                f"{name:.80} is {one!r:.80}, expected a text, a number, true or false, or a list "
                "of these"
            )
        if isinstance(one, float) and not math.isfinite(one):
            raise DataError(f"{name:.80} is {one}, expected a finite number")
        if isinstance(one, int) and not -(2**63) <= one < 2**64:
            raise DataError(f"{name:.80} has {one.bit_length()} bits, expected 64 at most")
        if isinstance(one, str) and ("\0" in one or _SURROGATE.search(one)):
            raise DataError(f"{name:.80} is {one!r:.80}, expected text without NUL, in UTF-8")


def _yaml(text: str) -> Any:
    """Parse YAML without aliases, in which each name is there once.

    Raises:
        DataError: it is something else.
    """
    yaml = importlib.import_module("yaml")

    class Loader(yaml.SafeLoader):  # type: ignore[misc,name-defined]  # the package has no types
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                line = self.get_event().start_mark.line + 1
                raise DataError(f"line {line} has an alias, expected the value")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = set()
            for key, _ in node.value:
                name = key.value if isinstance(key, yaml.ScalarNode) else None
                line = key.start_mark.line + 1
                if name is None or key.tag != "tag:yaml.org,2002:str":
                    raise DataError(f"line {line} has the name {name!r:.80}, expected a text")
                if name in names:
                    raise DataError(f"line {line} has {name!r:.80} a second time, expected it once")
                names.add(name)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise DataError(str(error)) from error


def _toml(text: str) -> Any:
    """Parse TOML.

    Raises:
        DataError: it has dotted names whose parts take memory with the square of their number.
    """
    if text.count(".") > _DOTS:
        raise DataError(f"it has {text.count('.'):,} dots, expected at most {_DOTS:,}")
    return tomllib.loads(text)


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".json": lambda text: parse_json(text, "it"),
    ".toml": _toml,
    ".yaml": _yaml,
    ".yml": _yaml,
}
