"""docs/start/install.md quotes messages as the library and the Makefile have them."""

from __future__ import annotations

import re

import pytest

from tests import figures
from tests.source_tree import ROOT

PAGE = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
OF_THE_SHELL = "mpirun: command not found"


def messages() -> list[str]:
    """Return what the first column of the problems quotes."""
    rows = PAGE.split("\n## Problems and answers\n")[1].split("\n|")[3:]
    quotes = [quote for row in rows for quote in re.findall("`([^`]+)`", row.split(" | ")[0])]
    return [quote for quote in quotes if quote != OF_THE_SHELL]


def sources() -> str:
    """Return the text of the library and of the Makefile."""
    files = [*ROOT.glob("tensorgrad/**/*.py"), *ROOT.glob("parallel/**/*.py"), ROOT / "Makefile"]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def unknown(quotes: list[str], text: str) -> list[str]:
    """Return the parts of quotes, between numbers and dots, that are not in the text."""
    parts = [part.strip() for quote in quotes for part in re.split(r"\.\.\.|\d+|^GPU ", quote)]
    return [part for part in parts if part not in text]


def test_quoted_messages_exist() -> None:
    text, quotes = sources(), messages()
    assert len(quotes) > 12
    assert unknown(quotes, text) == []
    assert unknown(["2 ranks share 1 ducks", "... needs a duck"], text) == ["ducks", "needs a duck"]


def test_every_extra_is_described() -> None:
    assert [row.split("`")[1] for row in figures.extras().splitlines()[2:]] == [
        *figures.project()["optional-dependencies"]
    ]


def test_a_new_extra_needs_a_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "project", lambda: {"optional-dependencies": {"new": []}})
    with pytest.raises(KeyError, match="new"):
        figures.extras()
