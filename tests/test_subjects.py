"""A comment, a docstring and a heading name their subject first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.source_tree import ROOT

# Words that stand for a subject which the reader has to look for.
FIRST = "(?i:of|as|else|what|those|one)"
PYTHON = rf'^\s*#:? +{FIRST}\b|\S  # +{FIRST}\b|^\s*"""{FIRST}\b'
CUDA = rf"^\s*// +{FIRST}\b|\S +// +{FIRST}\b"
PATTERNS = {".py": PYTHON, ".cu": CUDA, ".cuh": CUDA, ".md": rf"^#+ +{FIRST}\b"}
FOLDERS = ("tensorgrad", "models", "parallel", "examples", "tests", "docs")


def texts() -> list[Path]:
    """Return the files with a pattern, through the folders and not through the links."""
    links = {ROOT / "tensorgrad" / "models", ROOT / "tensorgrad" / "parallel"}
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.*"))]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [p for p in files if p.suffix in PATTERNS and not links & set(p.parents)]


def without_subject(text: str, suffix: str) -> list[tuple[int, str]]:
    """Return the lines that begin a comment, docstring or heading without its subject."""
    lines = text.splitlines()
    marks = {".py": "#", ".md": " "}
    found = []
    for number, (before, line) in enumerate(zip(["", *lines], lines, strict=False), 1):
        mark = marks.get(suffix, "//")
        continues = line.lstrip().startswith(mark) and before.lstrip().startswith(mark)
        if not continues and re.search(PATTERNS[suffix], line):
            found.append((number, line.strip()))
    return found


def test_the_subject_comes_first() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in texts()
        for number, line in without_subject(path.read_text(encoding="utf-8"), path.suffix)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("suffix", "line", "is_wrong"),
    [
        (".py", "x = 1  " + "# of a row", True),
        (".py", "x = 1  # width of a row", False),
        (".py", "    # What a row holds.", True),
        (".py", '    """Those that count."""', True),
        (".py", "# A comment that goes\n# of course over two lines.", False),
        (".cu", "int width;   // as in the host's struct", True),
        (".cu", "// One warp takes a row.", True),
        (".md", "## What is counted", True),
        (".md", "## Counted memory", False),
    ],
)
def test_lines_without_a_subject_are_found(suffix: str, line: str, is_wrong: bool) -> None:
    assert bool(without_subject(line, suffix)) == is_wrong
