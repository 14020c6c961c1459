"""Sweeps: measure each case of a list, and keep every finished row on disk.

    sweep = Sweep("squares", [{"n": 1}, {"n": 2}], measure, results=("ms",), draw=draw)
    found = run_sweep(sweep, Path("out"), device="cpu", version="1")

A finished case is a line of out/squares.csv, written at once. The next start with the same folder
and the same commit skips it. At the end, and after Ctrl-C, the rows of these cases are in
squares.md, in squares.json and in pictures too. A case without enough memory is a row that says so,
and an error in one case does not end the others.
Tests: tests/bench/test_sweep.py.
"""

from __future__ import annotations

import csv
import io
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tensorgrad.bench.memory import is_out_of_memory, release
from tensorgrad.bench.pictures import save
from tensorgrad.bench.provenance import COLUMNS, provenance
from tensorgrad.core.errors import ArgumentError, CommError, DataError
from tensorgrad.io import tables
from tensorgrad.io.files import finite, locked, make_folder, named_in_errors, write_json
from tensorgrad.kernels.gpu import GpuMonitor, clock_and_watts
from tensorgrad.parallel.comm.collectives import Comm

OK, OUT_OF_MEMORY, ERROR = "ok", "out of memory", "error"
_ALWAYS = ("clock_mhz", "watts", "status", "message", "device", "version", *COLUMNS)
_IDENTITY = ("device", "commit")  # with which a case is another one
_TEXTS = ("message", "device", "version", *COLUMNS)  # a commit may look like a number
_LONGEST = 300  # characters of a message
_ATTEMPTS = 3  # attempts at an exchange after a case
_WHOLE_FROM = 999.95  # numbers from here on have no decimals in the Markdown; it rounds to 1,000

Row = dict[str, Any]
Case = Mapping[str, Any]
Progress = Callable[[int, int, Case | None], object]


@dataclass(frozen=True)
class Sweep:
    """A command of `tensorgrad bench`: its cases, how to measure them, and its table.

    Attributes:
        name: of its files.
        cases: a value for each parameter, `dtype` among them; the first columns of the table. Cases
            with equal values are the same case.
        measure: returns the results of a case.
        results: the columns that are measured; a row may lack some.
        draw: returns figures of matplotlib by what is appended to the name ("" for the first),
            from rows with the status "ok".
        device: of the results: "cpu", "cuda" or "cuda:N".
        derive: adds to a new row what follows from it and the rows before.
        hidden: columns that only the CSV and the JSON have.
        percents: results in percent, which the Markdown gives with two decimals.
        problem: returns what is wrong with a row, "" for nothing.
    """

    name: str
    cases: Sequence[Case]
    measure: Callable[[Case], Row]
    results: tuple[str, ...]
    draw: Callable[[Sequence[Row]], Mapping[str, Any]] = lambda rows: {}
    device: str = "cpu"
    derive: Callable[[Row, Sequence[Row]], Row] = lambda row, before: row
    hidden: tuple[str, ...] = ()
    percents: tuple[str, ...] = ()
    problem: Callable[[Row], str] = lambda row: ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the values of a case."""
        return tuple(self.cases[0])

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of the CSV."""
        return (*self.parameters, *self.results, *_ALWAYS)


def like(row: Row, rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Return the measured rows that have the same values in some columns."""
    same = (*names, *_IDENTITY)
    return [
        other
        for other in rows
        if other["status"] == OK
        and all(_text(other.get(name, "")) == _text(row.get(name)) for name in same)
    ]


def together(by: str, measure: Callable[[Case], Mapping[Any, Row]]) -> Callable[[Case], Row]:
    """Return what measures cases that differ in one parameter alone at once, for the first of them.

    Args:
        by: the parameter.
        measure: returns the rows of all its values, given the others of a case.
    """
    rows = lru_cache(1)(lambda same: measure(dict(same)))
    return lambda case: rows(tuple(item for item in case.items() if item[0] != by))[case[by]]


@dataclass
class SweepResult:
    """The results of a sweep.

    Attributes:
        rows: of the cases, those that are finished, with numbers where the text is one.
        skipped: the number of cases that were there before.
        failed: the number of cases with the status "error".
        paths: the files.
        pictures: whether there are any: matplotlib is installed.
    """

    rows: list[Row] = field(default_factory=list)
    skipped: int = 0
    failed: int = 0
    paths: list[Path] = field(default_factory=list)
    pictures: bool = True


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    device: str,
    version: str,
    comm: Comm | None = None,
    progress: Progress = lambda done, total, case: None,
    monitor: GpuMonitor | None = None,
) -> SweepResult:
    """Measure the cases that the folder has no row of.

    All ranks call it with the same cases; rank 0 writes. A case that ended in an error before is
    measured again.

    Args:
        sweep: the cases, and how to measure one. What that returns on rank 0 counts.
        folder: for the files; created where it is missing.
        device: its name, for the rows; rows of other devices, and of other commits, are other
            cases.
        version: of the library, for the rows.
        comm: the ranks; default: this process alone.
        progress: called on rank 0 before each case with the number of cases done, that of all to
            do, and the case; at the end with None.
        monitor: of this rank's GPU. A row has the means of its clock and power on rank 0 over all
            that `measure` did, unless `measure` returns its own.
    Raises:
        ArgumentError: there are no cases, the file has other columns, or another process writes to
            the folder.
        DataError: the file is not a CSV in UTF-8.
        OSError: it cannot be read or written.
    """
    cases = sweep.cases
    if not cases:
        raise ArgumentError(f"{sweep.name}: got no cases, expected at least one")
    comm = Comm() if comm is None else comm
    monitor = GpuMonitor(None) if monitor is None else monitor
    facts = {"device": device, "version": version, **provenance()}
    with ExitStack() as stack:
        table = None
        todo: list[int] = []
        if comm.rank == 0:
            stack.enter_context(_only_writer(folder))
            table = _RowFile(sweep, folder)
            todo = [i for i, case in enumerate(cases) if not table.of([{**case, **facts}])]
        todo = comm.broadcast_object(todo)
        try:
            for done, i in enumerate(todo):
                if table is not None:
                    progress(done, len(todo), cases[i])
                row = {**cases[i], **_outcome(sweep.measure, cases[i], comm, monitor), **facts}
                if table is not None:
                    table.add(row)
            if table is not None:
                progress(len(todo), len(todo), None)
        finally:
            found = SweepResult() if table is None else table.finish(facts)
    found.skipped = len(cases) - len(todo)
    return found


def _only_writer(folder: Path) -> ExitStack:
    """Create the folder and hold its lock."""
    make_folder(folder)
    stack = ExitStack()
    try:
        stack.enter_context(locked(folder / ".lock", wait=False))
    except BlockingIOError as error:
        raise ArgumentError(
            f"--out: {folder} is in use ({error.strerror}), expected another folder"
        ) from error
    return stack


def _outcome(measure: Callable[[Case], Row], case: Case, comm: Comm, monitor: GpuMonitor) -> Row:
    """Return the results of a case, or why there are none; memory is free again after that."""
    row: Row
    caused = True  # False: only the failure of another rank
    monitor.take()
    try:
        row = {"status": OK, "message": "", **measure(case)}
        row = clock_and_watts(monitor.take()) | row
    except Exception as error:
        status = OUT_OF_MEMORY if is_out_of_memory(error) else ERROR
        row = {"status": status, "message": _in_a_line(error)}
        caused = not isinstance(error, CommError)
        traceback.clear_frames(error.__traceback__)  # which hold arrays
    release()
    found = _of_all_ranks(comm, [row["status"], row["message"], caused])
    failures = [(rank, *failure) for rank, failure in enumerate(found) if failure[0] != OK]
    for rank, status, message, _ in sorted(failures, key=lambda each: not each[3])[:1]:
        words = message if rank == comm.rank else f"rank {rank}: {message}"
        row = {"status": status, "message": words}
    return row


def _of_all_ranks(comm: Comm, value: list[Any]) -> list[Any]:
    """Return the values of all ranks.

    Where a case fails on one rank alone, its next call is this one, and that of another rank is one
    of the case. Both are errors; the other rank comes here then.
    """
    for _ in range(_ATTEMPTS - 1):
        with suppress(CommError):
            return comm.all_gather_objects(value)
    return comm.all_gather_objects(value)


def _in_a_line(error: BaseException) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _LONGEST else words[: _LONGEST - 3] + "..."


class _RowFile:
    """The rows of a sweep in memory and in its CSV file."""

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        self._sweep, self._path = sweep, folder / f"{sweep.name}.csv"
        text = self._path.read_bytes() if self._path.exists() else b""
        lines = _parse(sweep, self._path, text)
        self._rows = [row for row in lines if row["status"] != ERROR]
        kept = tables.to_csv([sweep.columns, *(list(row.values()) for row in self._rows)])
        if text != kept.encode():  # new, an error to measure again, or a line that was not finished
            tables.write_text(self._path, kept)

    def of(self, cases: Sequence[Row]) -> list[dict[str, str]]:
        """Return the rows of some cases, in the order of the file."""
        names = (*self._sweep.parameters, *_IDENTITY)
        wanted = {tuple(_text(case[name]) for name in names) for case in cases}
        return [row for row in self._rows if tuple(row[name] for name in names) in wanted]

    def add(self, row: Row) -> None:
        """Append a row to the file."""
        row = self._sweep.derive(row, [_numbers(row) for row in self._rows])
        unknown = set(row) - set(self._sweep.columns)
        if unknown:
            raise ArgumentError(
                f"{self._sweep.name}: got results {sorted(unknown)}, expected some of "
                f"{', '.join(self._sweep.results)}"
            )
        words = {name: _text(row.get(name)) for name in self._sweep.columns}
        self._rows.append(words)
        with named_in_errors(self._path), self._path.open("a", encoding="utf-8", newline="") as f:
            f.write(tables.to_csv([list(words.values())]))
            f.flush()
            os.fsync(f.fileno())

    def finish(self, facts: Row) -> SweepResult:
        """Write the rows of these cases in Markdown, as JSON and as pictures."""
        sweep, path = self._sweep, self._path
        rows = [_numbers(row) for row in self.of([{**case, **facts} for case in sweep.cases])]
        found = SweepResult(rows, paths=[path, path.with_suffix(".md"), path.with_suffix(".json")])
        tables.write_text(found.paths[1], to_markdown(sweep, rows))
        table = {"name": sweep.name, "parameters": sweep.parameters}
        write_json(found.paths[2], table | {"rows": [_for_json(row) for row in rows]}, 1)
        found.failed = sum(row["status"] == ERROR for row in rows)
        measured = [row for row in rows if row["status"] == OK]
        try:
            figures = sweep.draw(measured) if measured else {}
        except ImportError:
            found.pictures, figures = False, {}
        for suffix, figure in figures.items():
            found.paths.append(path.with_name(f"{sweep.name}{suffix}.png"))
            save(figure, found.paths[-1])
        return found


def to_markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Return the rows as a table; parameters with one value are in a line above it.

    A line below says where they come from.

    Args:
        sweep: the table.
        rows: as of `SweepResult`.
    """
    if not rows:
        return "no rows\n"
    shown = [name for name in sweep.columns if name not in (*sweep.hidden, "version", *COLUMNS)]
    same = [
        name
        for name in (*sweep.parameters, "device")
        if len(rows) > 1 and len({str(row[name]) for row in rows}) == 1
    ]
    absent = [name for name in shown if all(row[name] == "" for row in rows)]
    if all(row["status"] == OK for row in rows):
        absent.append("status")
    columns = [name for name in shown if name not in (*same, *absent)]
    cells = ([_shown(row[name], name in sweep.percents) for name in columns] for row in rows)
    about = ", ".join(f"{name} {_shown(rows[0][name])}" for name in same if rows[0][name] != "")
    sources = "".join(f"{words}\n" for words in dict.fromkeys(map(_source, rows)) if words)
    parts = (f"{about}\n" if about else "", tables.to_markdown(columns, cells), sources)
    return "\n".join(filter(None, parts))


def _source(row: Row) -> str:
    """Return where a row comes from, such as "2026-11-26, commit 1a2b3c, tensorgrad 1.0"."""
    names = {"date": "", "commit": "commit ", "version": "tensorgrad ", "versions": ""}
    return ", ".join(f"{word}{row[name]}" for name, word in names.items() if row[name] != "")


def _parse(sweep: Sweep, path: Path, text: bytes) -> list[dict[str, str]]:
    """Return the complete rows of a CSV of this sweep."""
    complete = text[: text.rfind(b"\n") + 1]
    if not complete:
        return []
    try:
        header, *lines = csv.reader(io.StringIO(complete.decode()), strict=True)
    except (csv.Error, ValueError) as error:
        problem = "not in UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise DataError(f"{path}: {problem}, expected a CSV of an earlier sweep") from error
    if tuple(header) != sweep.columns:
        raise ArgumentError(
            f"--out: {path} has the columns {', '.join(header)}, expected "
            f"{', '.join(sweep.columns)}; choose another folder"
        )
    rows = [dict(zip(header, line, strict=True)) for line in lines if len(line) == len(header)]
    return [row for row in rows if row["status"] in (OK, OUT_OF_MEMORY, ERROR)]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _shown(value: Any, is_percent: bool = False) -> str:
    """Return a value as in the Markdown: `1,234,567`, `1,235`, `12.35`, `3e-05`; percent `4.20`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if is_percent:
        return f"{value:z,.2f}"  # z: no -0.00
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= _WHOLE_FROM else f"{value:.4g}"


def _numbers(row: Mapping[str, str]) -> Row:
    """Return the row with numbers and truth values where the text is one."""
    return {name: text if name in _TEXTS else _number(text) for name, text in row.items()}


def _for_json(row: Row) -> Row:
    """Return a row; None for what is not a finite number or was not measured."""
    return {name: None if value == "" else value for name, value in finite(row).items()}


def _number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
