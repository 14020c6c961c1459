"""Differences between runs in settings, environment and result: tables, CSV, a page of curves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorgrad.core.errors import ArgumentError
from tensorgrad.io import tables
from tensorgrad.report.curves import charts
from tensorgrad.report.document import (
    counted,
    curves_section,
    document,
    escaped,
    section,
    shortened,
    table,
)
from tensorgrad.report.result import BEST, Result, label_of, result_of, text_of
from tensorgrad.report.run import Progress, Run, read_run
from tensorgrad.report.settings import value_text

MISSING = "-"
_NOT_COMPARED = ("out", "command")  # every run has its own
_SAME_KIND = 0.75  # fraction of all settings that runs of one program have in common
_CURVE_POINTS = 75_000  # points of all curves of a page
_POINTS = 3000  # points of a curve
_VALUE = 200  # characters
# Characters that begin a formula of a spreadsheet.
_FORMULAS = (*"=+-@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_CONTROLS = tuple("\t\r\n\0")
_WIDEST = 32  # characters of a column on a terminal


@dataclass(frozen=True)
class ComparedRow:
    """A value of each run.

    Attributes:
        name: the name of the value.
        texts: one for each run; MISSING where it has none.
        best: the numbers of the runs with the best value; empty where there is no better.
    """

    name: str
    texts: tuple[str, ...]
    best: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Comparison:
    """The differences between runs.

    Attributes:
        names: the names of the runs.
        sections: rows by heading: the settings that differ, the facts of the environment that
            differ where a run has an environment.json, and all results.
        notes: sentences about what is not compared or could not be read.
        runs: the runs, in the order of names.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.report import Comparison, compare
        >>> for name, lr in ("a", 0.1), ("b", 0.2):
        ...     Path(name).mkdir(exist_ok=True)
        ...     _ = Path(name, "config.json").write_text(f'{{"lr": {lr}}}')
        >>> comparison: Comparison = compare(["a", "b"])
        >>> comparison.names, comparison.sections["Configuration"][0].texts
        (('a', 'b'), ('0.1', '0.2'))
    """

    names: tuple[str, ...]
    sections: Mapping[str, Sequence[ComparedRow]]
    notes: tuple[str, ...]
    runs: tuple[Run, ...]


def compare(
    folders: Sequence[str | os.PathLike[str]], progress: Progress | None = None
) -> Comparison:
    """Compare the runs in two or more folders.

    Settings that only some runs have are compared if the runs share most others: runs of different
    programs are compared in what all of them have.

    Args:
        folders: the folders of the runs.
        progress: as for `read_run`.

    Returns:
        The differences, for `to_text`, `to_markdown`, `to_csv` and `to_page`.

    Raises:
        ArgumentError: there are fewer than two folders, or one is given twice.
        DataError: one is not the folder of a run.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.report import compare
        >>> for name, losses in ("a", (2.5, 2.0)), ("b", (2.5, 1.5)):
        ...     Path(name).mkdir(exist_ok=True)
        ...     lines = [f'{{"step": {n}, "loss": {loss}}}\\n' for n, loss in enumerate(losses, 1)]
        ...     _ = Path(name, "metrics.jsonl").write_text("".join(lines))
        >>> [row.texts for row in compare(["a", "b"]).sections["Result"] if "loss" in row.name]
        [('2.2500', '2.0000')]
    """
    if len(folders) < 2:
        raise ArgumentError(f"compare: got {len(folders)} run, expected two or more")
    for place, folder in enumerate(folders):
        if os.path.realpath(folder) in map(os.path.realpath, folders[:place]):
            raise ArgumentError(f"compare: {folder} is given twice, expected different runs")
    runs = tuple(read_run(folder, progress) for folder in folders)
    names = _names(runs)
    settings, skipped = _differences([run.resolved for run in runs])
    environment, _ = _differences([_flat(run.environment) for run in runs])
    notes = [f"{n}: {note}" for n, run in zip(names, runs, strict=True) for note in run.notes]
    if skipped:
        count = counted(skipped, "setting")
        notes.append(f"not compared, since not all of these runs have them: {count}")
    sections = {"Configuration": settings, "Result": _results(runs, not skipped)}
    unknown = [name for name, run in zip(names, runs, strict=True) if not run.environment]
    if len(unknown) < len(runs):
        sections = {"Configuration": settings, "Environment": environment, **sections}
        notes += [f"{name}: no environment.json to compare" for name in unknown]
    return Comparison(names, sections, tuple(notes), runs)


def _names(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the names of the folders, or where two are equal the paths."""
    names = [run.name for run in runs]
    return tuple(run.name if names.count(run.name) == 1 else os.fspath(run.folder) for run in runs)


def _differences(facts: Sequence[Mapping[str, Any]]) -> tuple[list[ComparedRow], int]:
    """Return rows of what differs, and how many keys are skipped since not all have them."""
    known = [fact for fact in facts if fact]  # a run without the file has nothing to compare
    every = [key for key in dict.fromkeys(k for fact in known for k in fact)]
    every = [key for key in every if key not in _NOT_COMPARED]
    shared = [key for key in every if all(key in fact for fact in known)]
    compared = every if len(shared) >= _SAME_KIND * len(every) else shared
    rows = []
    for key in compared:
        texts = tuple(value_text(fact[key]) if key in fact else MISSING for fact in facts)
        if len({json.dumps(fact.get(key), sort_keys=True) for fact in known}) > 1 or any(
            key not in fact for fact in known
        ):
            rows.append(ComparedRow(key, texts))
    return rows, len(every) - len(compared)


def _flat(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of nested objects by a key such as "packages.numpy"."""
    found: dict[str, Any] = {}
    for key, value in environment.items():
        if isinstance(value, dict):
            found.update({f"{key}.{inner}": item for inner, item in value.items()})
        else:
            found[key] = value
    return found


def _results(runs: Sequence[Run], are_same_kind: bool) -> list[ComparedRow]:
    results = [result_of(run) for run in runs]
    rows = [ComparedRow("Status", tuple(result.status for result in results))]
    for name in dict.fromkeys(name for result in results for name in result.values):
        values = [result.values.get(name) for result in results]
        texts = tuple(MISSING if value is None else text_of(name, value) for value in values)
        best = _best(name, values, texts) if are_same_kind else frozenset()
        rows.append(ComparedRow(label_of(name), texts, best))
    return rows


def _best(name: str, values: Sequence[float | None], texts: Sequence[str]) -> frozenset[int]:
    """Return which of the values show the best; none where all show the same."""
    known = [value for value in values if value is not None]
    if name not in BEST or len({text for text in texts if text != MISSING}) < 2:
        return frozenset()
    best = texts[values.index(min(known) if BEST[name] == "low" else max(known))]
    return frozenset(place for place, text in enumerate(texts) if text == best)


def to_text(comparison: Comparison, width: int = 100) -> str:
    """Return the tables for a terminal; `*` follows the best value.

    Runs that do not fit beside each other follow in further tables.

    Args:
        comparison: the result of `compare`.
        width: the width of the terminal in columns.

    Returns:
        Lines of text without control characters.

    Example:
        >>> from tensorgrad.report import Comparison, to_text
        >>> from tensorgrad.report.comparison import ComparedRow
        >>> loss = ComparedRow("Loss", ("2.1", "1.9"), best=frozenset({1}))
        >>> print(to_text(Comparison(("a", "b"), {"Result": [loss]}, (), ())))
                a    b
        Result
          Loss  2.1  1.9 *
        <BLANKLINE>
    """
    grid = _grid(comparison)
    widths = [min(_WIDEST, max(map(len, column))) for column in zip(*grid, strict=True)]
    first = max(len(line[0]) for line in grid) + 2
    groups: list[list[int]] = []
    used = width
    for number in range(1, len(widths)):
        own = widths[number] + 2
        if first + used + own > width:
            groups.append([])
            used = 0
        groups[-1].append(number)
        used += own
    lines = []
    for group in groups:
        for line in grid:
            cells = (_cut(line[n], widths[n]).ljust(widths[n]) for n in group)
            lines.append(f"{line[0].ljust(first)}{'  '.join(cells)}".rstrip())
        lines.append("")
    lines += [f"note: {_printable(note)}" for note in comparison.notes]
    return "\n".join(lines) + "\n"


def _grid(comparison: Comparison) -> list[list[str]]:
    """Return the cells on a terminal: a column of names, and one for each run."""
    grid, empty = [["", *comparison.names]], [""] * len(comparison.names)
    for title, rows in comparison.sections.items():
        grid.append([title, *empty])
        for row in rows:
            marked = (text + " *" * (n in row.best) for n, text in enumerate(row.texts))
            grid.append([f"  {row.name}", *marked])
        if not rows:
            grid.append(["  no differences", *empty])
    return [[_printable(cell) for cell in line] for line in grid]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _printable(text: str) -> str:
    """Return text without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def to_markdown(comparison: Comparison) -> str:
    """Return the tables as Markdown; the best values are bold.

    Args:
        comparison: the result of `compare`.

    Returns:
        A table for each section, and the notes.

    Example:
        >>> from tensorgrad.report import Comparison, to_markdown
        >>> from tensorgrad.report.comparison import ComparedRow
        >>> loss = ComparedRow("Loss", ("2.1", "1.9"), best=frozenset({1}))
        >>> print(to_markdown(Comparison(("a", "b"), {"Result": [loss]}, (), ())))
        | Result | a | b |
        | --- | --- | --- |
        | Loss | 2.1 | **1.9** |
    """
    parts, empty = [], [""] * len(comparison.names)
    for title, rows in comparison.sections.items():
        cells = [
            [
                _escaped(row.name),
                *(_escaped(text, n in row.best) for n, text in enumerate(row.texts)),
            ]
            for row in rows
        ]
        head = map(_escaped, (title, *comparison.names))
        parts.append(tables.to_markdown(list(head), cells or [["no differences", *empty]]))
    return "\n".join([*parts, *(f"{_escaped(note)}\n" for note in comparison.notes)])


def _escaped(text: str, bold: bool = False) -> str:
    """Return text that Markdown shows as it stands; a table escapes `|` itself."""
    safe = escaped(_printable(shortened(text, _VALUE)))
    safe = "".join(f"\\{c}" if c in "\\`*_[]" else c for c in safe)
    return f"**{safe}**" if bold else safe


def to_csv(comparison: Comparison) -> str:
    """Return a line for each run with all settings, facts of the environment, and results.

    Columns are called config.lr, environment.gpu, result.validation_loss; numbers have all digits.
    An apostrophe precedes texts that a spreadsheet would take for formulas, such as "=1+1".

    Args:
        comparison: the result of `compare`.

    Returns:
        CSV with a line of column names.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.report import compare, to_csv
        >>> for name, lr in ("slow", 0.1), ("fast", 0.2):
        ...     Path(name).mkdir(exist_ok=True)
        ...     _ = Path(name, "config.json").write_text(f'{{"lr": {lr}}}')
        >>> print(to_csv(compare(["slow", "fast"])))
        run,config.lr,result.status,result.step
        slow,0.1,no step logged yet,0
        fast,0.2,no step logged yet,0
        <BLANKLINE>
    """
    lines = [
        {
            "run": _no_formula(name),
            **{f"config.{key}": _csv_cell(value) for key, value in run.resolved.items()},
            **{
                f"environment.{key}": _csv_cell(value)
                for key, value in _flat(run.environment).items()
            },
            **_csv_results(result_of(run)),
        }
        for name, run in zip(comparison.names, comparison.runs, strict=True)
    ]
    keys = list(dict.fromkeys(key for line in lines for key in line))
    columns = ["run"] + [
        key for part in ("config", "environment", "result") for key in keys
        if key.startswith(f"{part}.")
    ]  # fmt: skip
    return tables.to_csv(
        [columns, *([line.get(column, "") for column in columns] for line in lines)]
    )


def _csv_cell(value: Any) -> str:
    return _no_formula(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _no_formula(text: str) -> str:
    """Return an untrusted text that spreadsheets do not run as a formula, after an apostrophe.

    Some drop white space before it, and take full-width signs.
    """
    return f"'{text}" if text[:1] in _CONTROLS or text.lstrip()[:1] in _FORMULAS else text


def _csv_results(result: Result) -> dict[str, Any]:
    values = {f"result.{name}": value for name, value in result.values.items()}
    return {"result.status": _no_formula(result.status), **values, "result.step": result.step}


def to_page(comparison: Comparison) -> str:
    """Return an HTML page with the tables, and the curves of all runs over steps, tokens, time.

    Args:
        comparison: the result of `compare`.

    Returns:
        One document, which opens without a network.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.report import compare, to_page
        >>> for name, lr in ("slow", 0.1), ("fast", 0.2):
        ...     Path(name).mkdir(exist_ok=True)
        ...     _ = Path(name, "config.json").write_text(f'{{"lr": {lr}}}')
        >>> to_page(compare(["slow", "fast"])).splitlines()[0]
        '<!DOCTYPE html>'
    """
    runs = list(comparison.runs)
    drawings = charts(runs, comparison.names)
    curves = max(1, sum(len(chart.curves) for chart in drawings))
    points = max(30, min(_POINTS, _CURVE_POINTS // curves))
    title = f"Comparison of {len(runs)} runs"
    notes = "".join(f'<p class="note">{escaped(note)}</p>\n' for note in comparison.notes)
    drawn, data = curves_section(drawings, runs, points)
    body = (
        f"<header>\n<h1>{escaped(title)}</h1>\n{notes}</header>\n"
        + section("What differs", _html_tables(comparison))
        + drawn
    )
    return document(title, body, data)


def _html_tables(comparison: Comparison) -> str:
    parts = []
    for title, rows in comparison.sections.items():
        if rows:
            cells = [[row.name, *(shortened(text, _VALUE) for text in row.texts)] for row in rows]
            best = [row.best for row in rows]
            parts.append(table(title, ["Name", *comparison.names], cells, best=best))
        else:
            parts.append(f'<p class="quiet">{escaped(title)}: no differences</p>\n')
    return "".join(parts)


# Writers of a file of a comparison, by its ending.
FORMS: dict[str, tuple[Callable[[Comparison], str], tuple[str, ...]]] = {
    "page": (to_page, (".html", ".htm")),
    "csv": (to_csv, (".csv",)),
    "markdown": (to_markdown, (".md", ".markdown")),
}
