"""The log of a run: metrics.jsonl, and a plot of the losses."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tensorgrad.errors import DataError
from tensorgrad.files import named_in_errors, replacing, sync_folder, to_json
from tensorgrad.readers import open_regular, parse_json

Record = Mapping[str, Any]

_LONGEST = 1 << 20  # bytes of a line
_NOT_OTHERS = {"step", "loss", "validation_loss", "lr", "gradient_norm"}


class MetricsLog:
    """metrics.jsonl: one JSON object a line, in the order of steps.

    It has only values that a second run with the same settings would measure again: no times. A
    resumed run first removes the lines after its checkpoint, so the file ends up equal to that of
    an uninterrupted run.
    """

    def __init__(self, path: Path, step: int) -> None:
        """Open the file to append; remove lines after `step`, and a last line cut short by a kill.

        Args:
            path: the file, created if missing.
            step: of the checkpoint that the run resumes from; -1 for a new run.
        Raises:
            DataError: the path is not a regular file, or cannot be read.
            OSError: the file cannot be written.
        """
        with named_in_errors(path):
            is_new = not os.path.lexists(path)
            if not is_new:
                os.truncate(path, _length_until(path, step))
            self._file = path.open("x" if is_new else "a", encoding="utf-8")
            if is_new:
                sync_folder(path.parent)  # or checkpoints could outlive it when power fails

    def write(self, record: Record) -> None:
        """Append a record with the key "step"."""
        with named_in_errors(self._file.name):
            self._file.write(to_json(record) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Sync the file to the disk."""
        with named_in_errors(self._file.name):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with named_in_errors(self._file.name):
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl without lines that were cut short or damaged.

    Raises:
        DataError: the file cannot be read.
    """
    with _opened(path) as file:
        return [record for line in _lines(file) if (record := _parsed(line)) is not None]


def plot_losses(records: Sequence[Record], path: Path) -> bool:
    """Draw training and validation loss over steps into a PNG, and beside them other measures.

    Whatever else an evaluation measured, such as the accuracy, has an axis of its own.

    Returns:
        False where matplotlib is not installed: nothing was drawn.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for key, width in (("loss", 0.7), ("validation_loss", 2.0)):
        points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), linewidth=width, label=key.replace("_", " "))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.grid(alpha=0.3)
    others = dict.fromkeys(key for r in records for key in r if key not in _NOT_OTHERS)
    lines = list(axes.lines)
    if others:
        right = axes.twinx()
        right.set_ylabel(", ".join(others))
        for number, key in enumerate(others, len(lines)):
            points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
            color, name = f"C{number}", key.replace("_", " ")
            lines += right.plot(*zip(*points, strict=True), color=color, marker="o", label=name)
    if lines:
        figure.legend(handles=lines, loc="outside upper center", ncols=len(lines))
    with replacing(path) as file:
        FigureCanvasAgg(figure).print_png(file)
    return True


def _length_until(path: Path, step: int) -> int:
    """Return the length in bytes of the lines up to `step`, with damaged ones in between."""
    length = end = 0
    with _opened(path) as file:
        for line in _lines(file):
            end += len(line)
            record = _parsed(line)
            if record is not None:
                if record["step"] > step:
                    break
                length = end
    return length


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the record on a line; None if it was cut short or damaged."""
    try:
        record = parse_json(line.decode(), "a line")
    except ValueError:
        return None
    numbers = all(value is None or type(value) in (int, float) for value in record.values())
    whole = numbers and type(record.get("step")) is int and line.endswith(b"\n")
    return record if whole else None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise DataError(f"read_metrics: cannot read {path}: {error.strerror}") from error


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines; a line too long for a record is yielded in pieces, which are not records."""
    return iter(partial(file.readline, _LONGEST), b"")
