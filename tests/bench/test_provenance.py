"""Rows name the commit of the code and whether files differ from it."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

import pytest

from tensorgrad.bench import provenance


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A package in a checkout of its own."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return package


def test_a_commit_is_named_and_changes_are_marked(code: Path) -> None:
    name = git(code, "rev-parse", "HEAD")[:12]
    provenance.commit.cache_clear()
    assert provenance.commit(code) == name
    assert provenance.exists(name, code)
    assert not provenance.exists("0123456789ab", code)
    assert not provenance.exists(f"{name}+changes", code)
    assert not provenance.exists("", code)
    (code.parent / "docs" / "results.md").write_text("of a result")  # is not of the code
    (code / "new.py").write_text("")  # is not known to git
    provenance.commit.cache_clear()
    assert provenance.commit(code) == name
    (code / "__init__.py").write_text("x = 1")
    provenance.commit.cache_clear()
    assert provenance.commit(code) == f"{name}+changes"


def test_code_outside_of_a_checkout_has_no_commit(code: Path) -> None:
    """An installed package may be in a folder of another project's checkout."""
    other = code.parent / "installed"
    other.mkdir()
    (other / "__init__.py").write_text("")
    assert provenance.commit(other) == ""
    assert provenance.commit(Path("/nowhere")) == ""


def test_date_and_versions_are_texts() -> None:
    found = provenance.provenance()
    assert tuple(found) == provenance.COLUMNS
    datetime.date.fromisoformat(found["date"])
    assert "numpy " in found["versions"]
    assert " threads" in found["versions"]
