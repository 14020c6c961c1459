"""What a published architecture is: how it names its settings and stores its weights.

gpt2_weights.py and llama_weights.py describe the architectures, pretrained.py reads and writes
their folders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensorgrad.backend import Shape
from tensorgrad.errors import CheckpointError

__all__ = ["Architecture", "PublishedSettings", "StoredArray"]

_REQUIRED = object()


class StoredArray(NamedTuple):
    """An array of a published model, and the rows of our parameter that it is.

    Attributes:
        theirs: its name, without the prefix.
        ours: the name of the parameter.
        shape: of theirs.
        start: the first of the rows.
        transposed: whether theirs is (in, out).
    """

    theirs: str
    ours: str
    shape: Shape
    start: int = 0
    transposed: bool = False

    @property
    def rows(self) -> slice:
        """The rows of the parameter."""
        return slice(self.start, self.start + self.shape[-1 if self.transposed else 0])


@dataclass(frozen=True)
class Architecture:
    """A published architecture.

    Attributes:
        name: as in `architectures` of config.json.
        model_type: as in config.json.
        model: our class.
        config: the class of its sizes.
        prefix: before the names of all arrays but the head's; some files lack it.
        tokens: the name of the token embedding, without the prefix.
        ignored: names, without the prefix, of arrays that files may have and we do not need.
        read: makes our sizes from theirs.
        write: makes the entries of a config.json from our sizes.
        stored: yields the arrays.
    """

    name: str
    model_type: str
    model: Any
    config: Any
    prefix: str
    tokens: str
    ignored: re.Pattern[str]
    read: Callable[[PublishedSettings], Any]
    write: Callable[[Any], dict[str, Any]]
    stored: Callable[[Any], Iterator[StoredArray]]


class PublishedSettings:
    """The entries of a config.json; those of another type or value raise an error that names them.

    Args:
        values: the entries.
        name: of the file, for errors.
    """

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values, self.name = values, name

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return an integer, or the default where the entry is missing or null."""
        return self._typed(key, (int,), "an integer", default)

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a number, or the default where the entry is missing or null."""
        return self._typed(key, (int, float), "a number", default)

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean, or the default where the entry is missing or null."""
        found: bool = self._typed(key, (bool,), "true or false", default)
        return found

    def part(self, key: str) -> PublishedSettings | None:
        """Return the entries of a mapping; None where it is missing or null."""
        values = self._typed(key, (dict,), "a mapping", None)
        return None if values is None else PublishedSettings(values, f"{self.name}: {key}")

    def only(self, expected: Mapping[str, Any]) -> None:
        """Fail where an entry has another value than the one that is supported."""
        for key, value in expected.items():
            if self.values.get(key, value) != value:
                self.refuse(key, f"{value!r}")

    def refuse(self, key: str, expected: str) -> None:
        """Fail for an entry."""
        raise CheckpointError(
            f"from_pretrained: {self.name}: {key} is {self.values.get(key)!r:.80}, expected "
            f"{expected}"
        )

    def _typed(self, key: str, types: tuple[type, ...], expected: str, default: Any) -> Any:
        found = self.values.get(key)
        if found is None and default is not _REQUIRED:
            return default
        if type(found) not in types:
            self.refuse(key, expected)
        return found
