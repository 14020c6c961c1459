"""Names that another library has too: differences of signatures, and the page that lists them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

REQUIRED = object()
# Where our names are, and those of the other library.
Places = Sequence[tuple[str, Any, Any]]


class Argument(NamedTuple):
    """An argument of a signature."""

    name: str
    default: Any
    positional: bool

    def __str__(self) -> str:
        if self.default is REQUIRED:
            return self.name
        shown = getattr(self.default, "__name__", repr(self.default))
        if isinstance(self.default, np.dtype):
            shown = str(self.default)
        return f"{self.name}={shown}"


def arguments(f: Any) -> list[Argument]:
    """Return the arguments of a function, without those that take any others.

    Raises:
        ValueError, TypeError: Python does not know the signature.
    """
    skipped = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [
        Argument(
            p.name, REQUIRED if p.default is p.empty else p.default, p.kind is not p.KEYWORD_ONLY
        )
        for p in inspect.signature(f).parameters.values()
        if p.kind not in skipped and p.name != "self"
    ]


def quoted(cell: str) -> list[str]:
    """Return what is in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def same_name(name: str) -> str:
    return name


@dataclass
class Peer:
    """A library to compare with.

    Attributes:
        page: document that lists what differs.
        places: prefix of names, our module or class, theirs; a name counts where it is found first.
        signature: returns their arguments by name and function; None where they are not known.
        ignored: their arguments that do not count as places.
        short: prefixes that do not make another name.
        renamed: returns how they spell a name of ours.
    """

    page: Path
    places: Places
    signature: Callable[[str, Any], list[Argument] | None]
    ignored: frozenset[str]
    short: tuple[str, ...] = ("",)
    renamed: Callable[[str], str] = same_name

    def table(self, heading: str) -> list[list[str]]:
        """Return the cells of the first table under a heading of the page."""
        text = self.page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
        lines = text.split("\n## ")[0].splitlines()
        rows = [line for line in lines if line.startswith("|")][2:]
        return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]

    @cached_property
    def words(self) -> Mapping[str, set[str]]:
        """Their words for each argument of ours."""
        rows = self.table("Other words for an argument")
        return {quoted(ours)[0]: set(quoted(theirs)) for ours, theirs in rows}

    def pairs(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the full name, our function and theirs, of each name that both have."""
        seen: set[str] = set()
        for prefix, ours, theirs in self.places:
            names = getattr(ours, "__all__", None) or [n for n in dir(ours) if n[0] != "_"]
            for name in names:
                f, peer = getattr(ours, name), getattr(theirs, self.renamed(name), None)
                short = name if prefix in self.short else prefix + name
                if callable(f) and callable(peer) and short not in seen:
                    seen.add(short)
                    yield prefix + name, f, peer

    def signatures(self) -> Iterator[tuple[str, list[Argument], list[Argument]]]:
        """Yield the name, our arguments and theirs, of each name whose signatures are known."""
        for name, f, peer in self.pairs():
            theirs = self.signature(name, peer)
            if theirs is None:
                continue
            theirs = [a for a in theirs if a.name not in self.ignored]
            if name.startswith("Tensor.") and theirs and theirs[0].name in ("self", "input"):
                theirs = theirs[1:]
            # `dim` is there to raise an error
            yield name, [a for a in arguments(f) if a.name != "dim"], theirs

    def differences(self) -> dict[str, tuple[str, str]]:
        """Return by name what differs, as the page has it."""
        found = {name: self.difference(*both) for name, *both in self.signatures()}
        return {name: differs for name, differs in found.items() if differs is not None}

    def same_word(self, ours: str, theirs: str) -> bool:
        return ours == theirs or theirs in self.words.get(ours, ())

    def difference(self, ours: list[Argument], theirs: list[Argument]) -> tuple[str, str] | None:
        """Return what differs in both signatures; None for what programs do not see."""
        differing: list[tuple[str, str]] = []
        for place, argument in enumerate(ours):
            peers = [peer for peer in theirs if self.same_word(argument.name, peer.name)]
            exact = [peer for peer in peers if peer.name == argument.name]
            beside = [peer for peer in theirs[place : place + 1] if peer in peers]
            for peer in (exact or beside or peers)[:1]:
                if argument.default is not peer.default and argument.default != peer.default:
                    differing.append((f"`{argument}`", f"`{peer}`"))
        places = ([a for a in signature if a.positional] for signature in (ours, theirs))
        for number, (argument, peer) in enumerate(zip(*places, strict=False), 1):
            if not self.same_word(argument.name, peer.name):
                differing.append((f"argument {number} is `{argument.name}`", f"`{peer.name}`"))
                break
        if not differing:
            return None
        return ", ".join(a for a, _ in differing), ", ".join(b for _, b in differing)

    def lacking(self) -> dict[str, set[str]]:
        """Return by argument the names that take it there and not here."""
        found: dict[str, set[str]] = {}
        for name, ours, theirs in self.signatures():
            for peer in theirs:
                if not any(self.same_word(argument.name, peer.name) for argument in ours):
                    found.setdefault(peer.name, set()).add(name)
        return found

    def page_rows(self) -> dict[str, tuple[str, str]]:
        """Return the rows of the page, of names whose signatures are known in this version."""
        known = {name for name, _, _ in self.signatures()}
        rows = {
            name: (ours, theirs)
            for names, ours, theirs, _ in self.table("Defaults and order of arguments")
            for name in quoted(names)
        }
        return {name: row for name, row in rows.items() if name in known}

    def print_missing_rows(self) -> None:
        """Print the rows that the page lacks, without reasons."""
        rows, differences = self.page_rows(), self.differences()
        for name, row in differences.items():
            if rows.get(name) != row:
                print(f"| `{name}` | {row[0]} | {row[1]} |  |")
        print(rows.keys() - differences.keys(), "differ no longer")
