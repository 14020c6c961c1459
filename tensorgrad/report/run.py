"""A run as its folder describes it: settings, metrics, times, samples, environment, diff.

Only config.json or metrics.jsonl must be there. Older runs lack other files, a run that is still
training has a last line without its end, and a disk or a kill damages lines: what can be read is
used, and `Run.notes` says what could not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from tensorgrad.core.errors import DataError, TensorgradError
from tensorgrad.curvature.record import FILE as CURVATURE
from tensorgrad.curvature.record import Curvature, read_curvature
from tensorgrad.io.files import is_locked
from tensorgrad.io.readers import open_regular, read_json, read_json_lines
from tensorgrad.train.config import FILE, is_published, renamed
from tensorgrad.train.curves import Column
from tensorgrad.train.folder import LOCK
from tensorgrad.train.log import KNOWN
from tensorgrad.train.run import FACTS

Record = dict[str, Any]
_Read = TypeVar("_Read")

DIFF_BYTES = 1 << 20  # that are read of uncommitted.diff
_KEYS = 200  # keys of a log that are read: a chart or a column each
_NAME = 200  # characters of a key
_ENTRIES = 2000  # entries of an object that are read, such as the packages
_LARGEST_STEP = 2**53  # that a page can show exactly
_LONG = 10_000_000  # bytes of a file whose reading takes a noticeable time

Progress = Callable[[str, int, int], object]  # called with a file's path, bytes read, all bytes


_EMPTY = Column(np.empty(0, np.int64), np.empty(0, np.float64))


@dataclass(frozen=True)
class Log:
    """A file of JSON lines with numbers: metrics.jsonl, times.jsonl.

    Attributes:
        columns: the values under each key but "step".
        last_step: the largest of any line; 0 without lines.
        damaged: the number of damaged lines.
        omitted: the number of keys besides the first ones, or too long, which have no column.
    """

    columns: dict[str, Column]
    last_step: int = 0
    damaged: int = 0
    omitted: int = 0

    def __getitem__(self, key: str) -> Column:
        """Return the values under a key: an empty column where no line has it."""
        return self.columns.get(key, _EMPTY)


_NO_LOG = Log({})


@dataclass(frozen=True)
class Run:
    """The contents of the folder of a run.

    Attributes:
        folder: the folder of the run.
        config: config.json; empty where it is missing.
        facts: facts.json; empty where it is missing, as in runs of earlier versions.
        metrics, times: metrics.jsonl and times.jsonl.
        samples: the records of samples.jsonl.
        environment: environment.json.
        diff: uncommitted.diff, at most DIFF_BYTES of it.
        curvature: curvature.json; None where it is missing.
        is_training: whether a process trains in the folder now.
        notes: what could not be read, a sentence each.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.report import Run, read_run
        >>> Path("gpt2-1").mkdir(exist_ok=True)
        >>> _ = Path("gpt2-1/config.json").write_text('{"lr": 0.1, "width": null}')
        >>> _ = Path("gpt2-1/facts.json").write_text('{"width": 768}')
        >>> run: Run = read_run("gpt2-1")
        >>> run.name, run.resolved
        ('gpt2-1', {'lr': 0.1, 'width': 768})
    """

    folder: Path
    config: Record
    facts: Record
    metrics: Log
    times: Log
    samples: Sequence[Record]
    environment: Record
    diff: str
    curvature: Curvature | None
    is_training: bool
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name or str(self.folder)

    @property
    def resolved(self) -> Record:
        """The settings, with the sizes of the preset and other values where they are None."""
        return {
            name: self.facts.get(name) if value is None else value
            for name, value in self.config.items()
        }

    @property
    def measures(self) -> list[str]:
        """The names of what evaluations measured besides the loss, such as the accuracy."""
        return [key for key in self.metrics.columns if key not in KNOWN]


def read_run(folder: str | os.PathLike[str], progress: Progress | None = None) -> Run:
    """Read the folder of a run.

    Args:
        folder: the folder, with config.json or metrics.jsonl.
        progress: called while a long log is read with its path, the bytes read, and all its bytes.

    Returns:
        The contents; `notes` says which files could not be read.

    Raises:
        DataError: it is not the folder of a run.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.report import read_run
        >>> Path("gpt2-2").mkdir(exist_ok=True)
        >>> _ = Path("gpt2-2/metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\\n')
        >>> read_run("gpt2-2").metrics["loss"].values.tolist()
        [2.5]
    """
    folder = Path(folder)
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"report: {folder} {reason}, expected the folder of a run")
    if not any((folder / name).exists() for name in (FILE, "metrics.jsonl")):
        _refuse(folder)
    notes: list[str] = []

    def read(name: str, reader: Callable[[Path], _Read], missing: _Read) -> _Read:
        try:
            return reader(folder / name)
        except FileNotFoundError:
            return missing
        except (OSError, TensorgradError) as error:
            reason = getattr(error, "strerror", None) or error
            notes.append(f"{name} cannot be read: {reason}")
            return missing

    logs = {
        name: read(name, lambda path: to_log(records(path, progress)), _NO_LOG)
        for name in ("metrics.jsonl", "times.jsonl")
    }
    nothing: list[Record | None] = []
    samples = read("samples.jsonl", lambda path: _samples(records(path, progress)), nothing)

    def entries(name: str) -> Record:
        found, omitted = _first(read(name, read_json, {}))
        if omitted:
            notes.append(f"{name}: {omitted:,} more entries are omitted")
        return found

    settings = renamed(entries(FILE))
    if is_published(settings):
        raise DataError(
            f"report: {folder} has a published model, expected the folder of a run: {FILE} has its "
            "sizes and not the settings of a run"
        )
    for name, log in logs.items():
        if log.omitted:
            notes.append(f"{name}: values under {log.omitted:,} more names are omitted")
    damaged = {name: log.damaged for name, log in logs.items()}
    for name, count in {**damaged, "samples.jsonl": samples.count(None)}.items():
        if count:
            notes.append(f"{name}: skipped {count:,} damaged line{'s' * (count > 1)}")
    return Run(
        folder=folder,
        config=settings,
        facts=entries(FACTS),
        metrics=logs["metrics.jsonl"],
        times=logs["times.jsonl"],
        samples=[sample for sample in samples if sample is not None],
        environment=entries("environment.json"),
        diff=read("uncommitted.diff", _read_diff, ""),
        curvature=read(CURVATURE, read_curvature, None),
        is_training=is_locked(folder / LOCK),
        notes=tuple(notes),
    )


def _samples(records: Iterable[Record | None]) -> list[Record | None]:
    """Return what a page shows of samples."""
    keys = ("step", "prompt", "text")
    return [
        None if record is None else {key: record[key] for key in keys if key in record}
        for record in records
    ]


def _first(values: Record) -> tuple[Record, int]:
    """Return the first entries of an object and of those in it, and how many are omitted."""
    omitted = max(0, len(values) - _ENTRIES)
    found = dict(islice(values.items(), _ENTRIES))
    for key, value in found.items():
        if isinstance(value, dict) and len(value) > _ENTRIES:
            found[key] = dict(islice(value.items(), _ENTRIES))
            omitted += len(value) - _ENTRIES
    return found, omitted


def _refuse(folder: Path) -> NoReturn:
    inside = sorted(path.parent.name for path in folder.glob(f"*/{FILE}"))
    hint = f"; it has the runs {', '.join(inside[:5])}" if inside else ""
    raise DataError(
        f"report: {folder} has no {FILE} and no metrics.jsonl, expected the folder of a run{hint}"
    )


def records(path: Path, progress: Progress | None = None) -> Iterator[Record | None]:
    """Yield the records of a file of JSON lines, objects with a step; None for a damaged line.

    Args:
        path: the file.
        progress: as for `read_run`.
    Raises:
        DataError: the path is not a regular file.
        OSError: the file is missing or cannot be read.
    """
    if progress is None or path.stat().st_size < _LONG:
        lines = read_json_lines(path)
    else:
        lines = read_json_lines(path, partial(progress, str(path)))
    for found in lines:
        yield found if found is not None and _has_step(found) else None


def _has_step(record: Record) -> bool:
    step = record.get("step")
    return type(step) is int and 0 <= step < _LARGEST_STEP


def to_log(records: Iterable[Record | None]) -> Log:
    """Return the numbers of records by key; of lines with equal steps the last one counts."""
    found: dict[str, tuple[list[int], list[Any]]] = {}
    omitted: set[str] = set()
    damaged = 0
    for record in records:
        if record is None:
            damaged += 1
            continue
        step = record["step"]
        for key, value in record.items():
            if key not in found:
                if (len(found) >= _KEYS or len(key) > _NAME) and key not in KNOWN:
                    omitted.add(key)
                    continue
                found[key] = [], []
            steps, values = found[key]
            steps.append(step)
            values.append(value)
    steps, _ = found.pop("step", ([], []))
    columns = {key: _column(*pair) for key, pair in found.items()}
    return Log(columns, max(steps, default=0), damaged, len(omitted))


def _column(steps: list[int], values: list[Any]) -> Column:
    if not set(map(type, values)) <= {float}:
        values = [number(value) for value in values]
    places, numbers = np.array(steps, np.int64), np.array(values, np.float64)
    numbers[~np.isfinite(numbers)] = np.nan
    if (np.diff(places) <= 0).any():
        places, last = np.unique(places[::-1], return_index=True)
        numbers = numbers[::-1][last]
    return Column(places, numbers)


def number(value: Any) -> float:
    """Return a number of a record; NaN for null, and for what is not a finite number."""
    if type(value) not in (int, float):
        return math.nan
    try:
        value = float(value)
    except OverflowError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _read_diff(path: Path) -> str:
    with open_regular(path) as file:
        return file.read(DIFF_BYTES).decode(errors="replace")
