"""Documents are written in short sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.source_tree import ROOT

LONG = 35  # words
NOT_PROSE = re.compile(
    r"^(`{3,})[^\n]*\n.*?^\1\s*$"  # code
    r"|<!-- (?:code|excerpt|source|table|figure) .*?<!-- end -->|<!--.*?-->",
    re.DOTALL | re.MULTILINE,
)
PARAGRAPHS = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)|\n(?=#)")
END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`(*\[])|(?<=[.!?])\s+(?=b?float16\b|git\b)")


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


def sentences(text: str) -> list[str]:
    """Return the sentences of a document, code and formulas as one word."""
    found = []
    for paragraph in PARAGRAPHS.split(NOT_PROSE.sub("", text)):
        line = paragraph.strip()
        if line and line[0] not in "#|>" and not paragraph.lstrip("\n").startswith("    "):
            line = re.sub(r"`[^`]*`|\$[^$]+\$", "CODE", re.sub(r"\]\([^)]*\)", "]", line))
            found += END.split(re.sub(r"\s+", " ", line))
    return found


def is_long(sentence: str) -> bool:
    return len(sentence.split()) > LONG


def test_few_sentences_are_long() -> None:
    found = [(path, s) for path in documents() for s in sentences(path.read_text(encoding="utf-8"))]
    long = [f"{path.relative_to(ROOT)}: {s}" for path, s in found if is_long(s)]
    assert len(long) < 0.02 * len(found), "\n".join(long)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("A sentence. " + "Another `one with code` ends here.", 2),
        ("A [link](file.md#x. Y) of a sentence.", 1),
        ("Before\n\n```python\nx = 1. + Y\n```\n\nAfter", 2),
        ("# Heading. With dot\n\n| a. B | c. D |", 0),
        ("- an item\n- another", 2),
        ("It ends.\n\n    a command. Not a sentence\n", 1),
    ],
)
def test_sentences_are_found(text: str, count: int) -> None:
    assert len(sentences(text)) == count


def test_a_long_sentence_is_counted() -> None:
    assert is_long("word " * 36 + "end.")
    assert not is_long(sentences("A short one. " + "Word " * 34 + "end.")[1])
