"""The field's words: phrases that a reader would not search for are not used.

Each pattern stands for a term of its own; `ALLOWED` holds what they find in another sense.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.source_tree import ROOT

# pattern -> what to say instead
WORDS = {
    r"\bthe copy engine\b": "TMA (copy engines are the DMA units)",
    r"\bshares of (a|the) product\b": "stream-K, split-K",
    r"\b(give|take)_registers\b": "setmaxnreg increase, decrease",
    r"\bturned (array|matrix|operand|tensor)|\bturning loader\b": "transposed",
    r"\bidle[ _]share\b": "bubble fraction",
    r"\b(next_|latest_)?tick\b": "version counter",
    r"\btables? of (tokens|positions)\b": "token embedding, position embedding",
    r"\bgains\b": "norm weights",
    r"\bnormal_share\b|\b(?!negative_slope\b)\w+_slope\b|\bslope of\b": "normal CDF, derivative",
    r"\"(both|either|differ|inverted)\(|\b(either|differ|inverted)\(": "logical_and, logical_or",
    r"\bspared\b|\brows kept\b": "keep mask, keep probability",
    r"\bmade by rules\b": "synthetic",
    r"\b(goes|go|went|going) on\b|\bbegins? anew\b|\bends itself\b": "resumes, restarts, exits",
    r"\bleaves with status\b": "exits with status",
    r"\b(leaves?|left|leaving) out\b": "skips, omits",
    r"\bshares? of\b": "fraction of",
    r"\brooms? for\b": "buffers for, capacity",
    r"\bfor ever\b": "deadlocks, hangs",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\blooks? at the loss\b": "logs",
    r"\bthe one who\b|\bwho changes the source\b": "to, for development",
    r"\bshall\b|\b(is|are) to be [a-z]+(ed|en)\b": "must, should",
    r"(?<!here\s)\b(is|are|was|were) no (?!longer\b|more\b|less\b|other\b)[a-z]+": "is not a",
    r"\bso many\b": "N, the given number of",
    r"\bwhat is late\b|\ball of it\b|\beach of its parts\b": "name it",
}
ALLOWED: set[str] = set()  # lines, without the white space around them
SUFFIXES = {".py", ".cu", ".cuh", ".md", ".toml", ".slurm"}
FOLDERS = ("tensorgrad", "models", "parallel", "examples", "tests", "docs")


def texts() -> list[Path]:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")]
    inside = [p for p in files if p.suffix in SUFFIXES or p.name == "Makefile"]
    links = {ROOT / "tensorgrad" / "models", ROOT / "tensorgrad" / "parallel"}
    return [p for p in inside if p != Path(__file__).resolve() and not links & set(p.parents)]


def found(pattern: str, text: str) -> list[tuple[int, str]]:
    """Return the lines that hold a phrase, which may run over the end of a line."""
    return [
        (text.count("\n", 0, match.start()) + 1, match[0])
        for match in re.finditer(pattern.replace(" ", r"(?:\s|\n *(?:#|//)? ?)+"), text)
    ]


@pytest.mark.parametrize("pattern", WORDS)
def test_no_private_words(pattern: str) -> None:
    wrong = []
    for path in texts():
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        wrong += [
            f"{path.relative_to(ROOT)}:{line}: {phrase!r}, say {WORDS[pattern]}"
            for line, phrase in found(pattern, text)
            if lines[line - 1].strip() not in ALLOWED
        ]
    assert wrong == []


def test_phrases_are_found() -> None:
    assert found(r"\bshares? of\b", "a\n# share\n# of x") == [(2, "share\n# of")]
    assert found(next(p for p in WORDS if "here" in p), "it is no tensor; there is no GPU")
    assert len(texts()) > 300
