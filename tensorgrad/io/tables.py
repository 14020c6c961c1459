"""Tables as text: Markdown and CSV. Tests: tests/io/test_tables.py."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tensorgrad.io.files import replacing


def to_markdown(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """Return a table in Markdown.

    Args:
        head: titles of the columns.
        rows: cells, a text for each column.
        numbers: how many of the last columns are aligned to the right.
    """
    rules = ["---"] * (len(head) - numbers) + ["--:"] * numbers
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rules, *cells))


def to_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Return lines of CSV; cells with a line break of any kind are quoted."""
    lines = []
    for row in rows:
        file = io.StringIO()
        csv.writer(file, lineterminator="\r\n").writerow(row)  # which quotes CR and LF
        lines.append(file.getvalue().removesuffix("\r\n") + "\n")
    return "".join(lines)


def write_text(path: Path, text: str) -> None:
    """Replace a file by text in UTF-8; halves of surrogate pairs become question marks.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8", "replace"))
