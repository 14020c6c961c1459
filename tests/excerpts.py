"""Excerpts of the source in documents: `<!-- excerpt PATH from FIRST to LAST -->`.

An excerpt begins at the only line of the file that has the text FIRST. It ends at the next line
that has the text LAST, or without one at the end of the block that the first line opens. So it
follows the code without marks in it. `python -m tests.results` renders it; tests:
tests/test_excerpts.py.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

LANGUAGES = {".py": "py", ".cu": "cuda", ".cuh": "cuda"}  # ```python blocks would be run
LENGTHS = range(8, 31)  # lines


def excerpt(path: Path, first: str, last: str = "") -> str:
    """Return some lines of a file as a block of Markdown.

    Args:
        path: of Python or CUDA.
        first: text of the first line, which no other line has.
        last: text of the last line; "": the end of the block that the first line opens.

    Raises:
        ValueError: the file has no such lines, or they are too many or too few.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    starts = [number for number, line in enumerate(lines) if first in line]
    if len(starts) != 1:
        raise ValueError(f"{path.name}: {len(starts)} lines have {first!r}, expected one")
    (start,) = starts
    end = _end_of_block(lines, start) if not last else next(
        (number for number in range(start + 1, len(lines)) if last in lines[number]), None
    )  # fmt: skip
    if end is None:
        raise ValueError(f"{path.name}: no line after {first!r} has {last!r}, expected one")
    if (count := end + 1 - start) not in LENGTHS:
        raise ValueError(f"{path.name}: the excerpt from {first!r} has {count} lines, expected "
                         f"{LENGTHS.start} to {LENGTHS.stop - 1}")  # fmt: skip
    code = textwrap.dedent("\n".join(lines[start : end + 1]))
    return f"```{LANGUAGES[path.suffix]}\n{code}\n```"


def _end_of_block(lines: list[str], start: int) -> int:
    """Return the last line of a block: more indented lines follow the first, then its bracket."""
    indent, end = _indent(lines[start]), start
    for number in range(start + 1, len(lines)):
        line = lines[number]
        if line.strip() and _indent(line) <= indent:
            if not line.lstrip().startswith((")", "}")):
                break
            end = number
            if line.lstrip().startswith("}"):
                break
        elif line.strip():
            end = number
    return end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
