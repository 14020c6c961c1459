"""The tables of docs/reference: their cells, and files that have the fields which they list.

Tests: tests/test_reference.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.source_tree import ROOT

FOLDER = ROOT / "docs" / "reference"


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """Return the text of a page below a heading."""
    return text_of(name).split(f"\n## {heading}\n")[1].partition("\n## ")[0]


def cells(text: str) -> list[list[str]]:
    """Return the rows of the tables of a text, without their heads."""
    tables = re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def kind(value: Any) -> str:
    """Return the type of a value as JSON names it."""
    kinds = {dict: "mapping", list: "list", str: "text", bool: "bool", int: "integer"}
    return "null" if value is None else kinds.get(type(value), "number")


Field = tuple[str, ...]  # the keys that lead to it; "NAME" stands for any, "[]" for items of a list
SOMETIMES = re.compile(r"(where|of a step|of an evaluation|of the last|on a GPU|in a checkout)\b")


def documented(text: str) -> dict[Field, tuple[set[str], bool]]:
    """Return the types of each field of a table, and whether the field is always there."""
    found: dict[Field, tuple[set[str], bool]] = {}
    for names, types, _, meaning in cells(text):
        kinds = {*types.split(" or "), *(["integer"] if "number" in types else [])}
        for name in quoted(names):
            keys = tuple(name.replace("[]", ".[]").split("."))
            found[keys] = kinds, SOMETIMES.match(meaning) is None
    return found


def fields_of(name: str) -> dict[Field, tuple[set[str], bool]]:
    """Return the fields of a file."""
    return documented(section("file-formats", name))


def compare(found: Any, documented: Mapping[Field, tuple[set[str], bool]]) -> None:
    """Check that a file has the documented fields, with their types, and no others."""
    seen: set[Field] = set()

    def visit(value: Any, field: Field) -> None:
        if field in documented:
            seen.add(field)
            assert kind(value) in documented[field][0], (field, value)
        keys = {other[len(field)] for other in documented if other[: len(field)] == field != other}
        if keys and value is not None:
            items = value.items() if isinstance(value, dict) else (("[]", item) for item in value)
            for key, item in items:
                own = key if key in keys else "NAME"
                assert own in keys, f"{key} is not documented below {field}"
                visit(item, (*field, own))

    visit(found, ())
    lacking = {field for field, (_, always) in documented.items() if always} - seen
    assert not lacking, f"it lacks {lacking}"
