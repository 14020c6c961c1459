"""Numbers and code in documents; `python -m tests.results` renders them.

A block is a pair of comments. What stands between them is rendered from a file that `tensorgrad
bench` has written into docs/results, by a function of tests/figures.py, or from the source:

    <!-- table overhead/overhead.json where dtype=float32 show op; forward_us:.2f = forward -->
    <!-- value overhead/overhead.json where op=add show forward_us:.2f -->1.20<!-- end -->
    <!-- source overhead/overhead.json -->
    <!-- code presets -->
    <!-- excerpt tensorgrad/core/record.py from if mode.grad_enabled: to return Tensor(outputs) -->

A column is NAME, NAME/NUMBER (divided by it), then `:FORMAT` of Python, then ` = TITLE`. Conditions
are joined by `and`. For `excerpt` see tests/excerpts.py. Tests: tests/test_results.py.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorgrad.bench.provenance import exists
from tensorgrad.bench.sweep import ERROR
from tensorgrad.io.readers import read_json
from tests import figures
from tests.excerpts import excerpt
from tests.source_tree import ROOT

RESULTS = ROOT / "docs" / "results"
BLOCK = re.compile(
    r"^```.*?^```$|"  # a block of code is not rendered
    r"(<!-- (table|value|source|code|excerpt) (\S+?)"
    r"(?: where (.+?))?(?: show (.+?))?(?: from (.+?))?(?: to (.+?))? -->)"
    r".*?(<!-- end -->)",
    re.DOTALL | re.MULTILINE,
)
WORD = re.compile("[a-z]{4,}")
CODE = re.compile(r"^    .*$|`[^`\n]*`", re.MULTILINE)
SPEED = re.compile(r"\d[\d.,]*\s(?:ms|us|[GT]B/s|TFLOP/s|tokens/s|mJ|MHz)(?!\w)")
COLUMN = re.compile(r"([\w-]+)(?:/([\d.]+))?(?::(\S+))?(?: =(.*))?")
Row = Mapping[str, Any]


def documents() -> list[Path]:
    """Return the documents that may have blocks."""
    pages = sorted(ROOT.glob("docs/**/*.md"))
    return [ROOT / "README.md", *(page for page in pages if RESULTS not in page.parents)]


def rendered(text: str, folder: Path = RESULTS) -> str:
    """Return a document with its blocks rendered.

    Raises:
        ValueError: a block has no rows, a column that its file lacks, rows of several commits,
            several values, the name of no function, or lines that its file lacks.
    """

    def block(match: re.Match[str]) -> str:
        begin, kind, name, where, show, first, last, end = match.groups()
        if begin is None:
            return match[0]
        if kind == "code":
            return f"{begin}\n\n{from_code(name)}\n{end}"
        if kind == "excerpt":
            return f"{begin}\n\n{excerpt(ROOT / name, first or '', last or '')}\n\n{end}"
        rows = chosen(list(read_json(folder / name)["rows"]), where or "", name)
        if kind == "source":
            return f"{begin}{source(rows)}{end}"
        columns = [COLUMN.fullmatch(part.strip()) for part in (show or "").split(";")]
        if not all(columns):
            raise ValueError(f"{name}: got the columns {show!r}, expected NAME:FORMAT = TITLE; ...")
        cells = [[cell(row, column, name) for column in columns if column] for row in rows]
        if kind == "value":
            if len({line[0] for line in cells}) > 1:
                raise ValueError(f"{name}: where {where}: got several values, expected one")
            return f"{begin}{cells[0][0]}{end}"
        titles = [column[1] if column[4] is None else column[4].strip()
                  for column in columns if column]  # fmt: skip
        lines = [titles, ["---"] * len(titles), *cells]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{begin}\n\n{table}\n\n{end}"

    return BLOCK.sub(block, text)


def from_code(name: str) -> str:
    """Return the table that a function makes.

    Raises:
        ValueError: there is no such function.
    """
    function = getattr(figures, name, None)
    if function is None:
        raise ValueError(f"code: got {name}, expected a function of tests/figures.py")
    return str(function())


def without_source(text: str) -> list[str]:
    """Return the headers of a document's tables of numbers that no result file renders."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", BLOCK.sub("", text + "\n"), re.MULTILINE):
        header, _, *lines = [line.strip("|").split("|") for line in table.splitlines()] + [[]]
        cells = [cell.strip() for line in lines for cell in line[1:] if cell.strip()]
        numbers = [cell for cell in cells if re.search(r"\d", cell) and not WORD.search(cell)]
        if cells and len(numbers) >= len(cells) / 2:
            found.append("|".join(header).strip())
    return found


def speeds_without_source(text: str) -> list[str]:
    """Return the times and rates of a document, outside of code, that nothing renders."""
    return SPEED.findall(CODE.sub("", BLOCK.sub("", text)))


def chosen(rows: Sequence[Row], where: str, name: str) -> list[Row]:
    """Return the rows that meet all conditions."""
    conditions = [part.strip().partition("=") for part in where.split(" and ") if part]
    found = [row for row in rows if all(str(row[key]) == value for key, _, value in conditions)]
    if not found:
        raise ValueError(f"{name}: no row where {where}")
    if len({(row["commit"], row["device"]) for row in found}) > 1:
        raise ValueError(f"{name}: got rows of several commits or devices, expected one")
    return found


def cell(row: Row, column: re.Match[str], name: str) -> str:
    """Return a value as a document shows it; nothing where it was not measured."""
    key, divisor, form, _ = column.groups()
    if key not in row:
        raise ValueError(f"{name}: got the column {key}, expected one of {', '.join(row)}")
    value = row[key]
    if value is None:
        return ""
    if divisor:
        value /= float(divisor)
    return format(value, form or "") if not isinstance(value, str) else value


def source(rows: Sequence[Row]) -> str:
    """Return where rows come from."""
    row = rows[0]
    place = "" if row["device"] == "cpu" else f", {row['device']}"
    return f"{row['date']}, commit {row['commit']}{place}, {row['versions']}"


def problems(folder: Path = RESULTS) -> Iterator[str]:
    """Yield what is wrong with result files: an unknown commit, a change by hand, a second one."""
    known: dict[tuple[object, ...], str] = {}
    for path in sorted(folder.rglob("*.json")):
        table, name = read_json(path), str(path.relative_to(folder))
        if not path.with_suffix(".csv").exists():
            yield f"{name}: there is no CSV beside it: it is not of `tensorgrad bench`"
            continue
        with path.with_suffix(".csv").open(newline="", encoding="utf-8") as file:
            written = [tuple(row.items()) for row in csv.DictReader(file)]
        for row in table["rows"]:
            case = {key: row[key] for key in (*table["parameters"], "device")}
            words = ", ".join(f"{key} {value}" for key, value in case.items())
            if row["status"] == ERROR:  # out of memory is a result
                yield f"{name}: {words}: {row['status']}"
            if not exists(row["commit"] or ""):
                yield f"{name}: {words}: there is no commit {row['commit']}"
            if not any(_same(row, dict(line)) for line in written):
                yield f"{name}: {words}: the CSV beside it has another row"
            key = (table["name"], *case.items())
            if key in known:
                yield f"{name}: {words}: {known[key]} has this case too"
            known[key] = name


def _same(row: Row, line: Mapping[str, str]) -> bool:
    """Whether a row of a JSON file is a line of its CSV."""

    def text(value: Any) -> str:
        return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

    same = (line[key] == text(value) or (line[key] == "nan" and value is None)
            for key, value in row.items())  # fmt: skip
    return row.keys() == line.keys() and all(same)


if __name__ == "__main__":
    for page in documents():
        before = page.read_text(encoding="utf-8")
        if (after := rendered(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
