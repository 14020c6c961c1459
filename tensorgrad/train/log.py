"""The logs of a run, one JSON object a line in the order of steps.

metrics.jsonl   losses and evaluations: equal in equal runs
times.jsonl     seconds, speed and memory, which differ from run to run (see times.py)
samples.jsonl   text that the model wrote
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tensorgrad.core.errors import ArgumentError, DataError
from tensorgrad.io.files import named_in_errors, sync_folder, to_json
from tensorgrad.io.readers import JSON_LINE_BYTES, log_lines, open_regular, parse_json

Record = Mapping[str, Any]

# Keys of metrics.jsonl besides further measures of an evaluation, such as the accuracy. The final
# loss is of the whole validation text, the others of a part of it, the same each time.
KNOWN = (
    *("step", "loss", "lr", "gradient_norm", "validation_loss", "validation_tokens"),
    *("final_validation_loss", "final_validation_tokens"),
)

TEXT_CHARACTERS = 40_000  # a prompt's and a sample's in samples.jsonl: both fit on a line


class StepLog:
    """A file with one JSON object a line, each with its "step".

    A resumed run first removes the lines after its checkpoint: metrics.jsonl ends up equal to that
    of an uninterrupted run, and no step is there twice.
    """

    def __init__(self, path: Path, step: int, text: bool = False) -> None:
        """Open the file to append; remove lines after `step`, and a last line cut short by a kill.

        Args:
            path: the file, created if missing.
            step: of the checkpoint that the run resumes from; -1 for a new run.
            text: whether values may be text, as in samples.jsonl; else they are numbers.
        Raises:
            DataError: the path is not a regular file, or is a link.
            OSError: the file cannot be read or written.
        """
        with named_in_errors(path):
            is_new = not os.path.lexists(path)
            self._file = open_regular(path, "xb" if is_new else "r+b")
            self._text = text
            try:
                if is_new:
                    sync_folder(path.parent)  # or checkpoints could outlive it when power fails
                else:
                    self._file.truncate(_length_until(self._file, step, text))
                    self._file.seek(0, os.SEEK_END)
            except BaseException:
                self._file.close()
                raise

    def write(self, record: Record) -> None:
        """Append a record with the key "step".

        Raises:
            ArgumentError, DtypeError: a value is none that the file is read with.
            OSError: the file cannot be written.
        """
        name = Path(self._file.name).name
        line = to_json(record, op=name) + "\n"
        if _parsed(line.encode(), self._text) is None:
            expected = "numbers, text or None" if self._text else "numbers or None"
            raise ArgumentError(
                f"{name}: a line has {line.strip():.200}, expected a step, {expected}, and at most "
                f"{JSON_LINE_BYTES:,} bytes"
            )
        with named_in_errors(self._file.name):
            self._file.write(line.encode())
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
    """Return the records of a metrics.jsonl or times.jsonl: a step, and numbers or None.

    Lines that were cut short or damaged are skipped.

    Raises:
        DataError: the file cannot be read.
    """
    return _records(path, text=False)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the records of a samples.jsonl, as `read_metrics` does: "step", "prompt", "text"."""
    return [record for record in _records(path, text=True) if {"prompt", "text"} <= record.keys()]


def _records(path: Path, text: bool) -> list[dict[str, Any]]:
    with _opened(path) as file:
        return [record for line in log_lines(file) if (record := _parsed(line, text)) is not None]


def _length_until(file: BinaryIO, step: int, text: bool) -> int:
    """Return the length in bytes of the lines up to `step`, with damaged ones in between."""
    length = end = 0
    for line in log_lines(file):
        end += len(line)
        record = _parsed(line, text)
        if record is not None:
            if record["step"] > step:
                break
            length = end
    return length


def _parsed(line: bytes, text: bool) -> dict[str, Any] | None:
    """Return the record on a line; None if it was cut short or damaged."""
    try:
        record = parse_json(line.decode(), "a line")
    except ValueError:
        return None
    kinds = (int, float, str) if text else (int, float)
    simple = all(value is None or type(value) in kinds for value in record.values())
    whole = line.endswith(b"\n") and len(line) <= JSON_LINE_BYTES
    return record if simple and whole and type(record.get("step")) is int else None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise DataError(f"read_metrics: cannot read {path}: {error.strerror}") from error
