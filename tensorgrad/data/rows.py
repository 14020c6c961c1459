"""Texts in the rows of tables: JSON lines, Parquet files and Hugging Face data sets.

Tests: tests/data/test_rows.py.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from tensorgrad.core.errors import ArgumentError, DataError
from tensorgrad.data.content import check_unpacked, most_unpacked
from tensorgrad.io.files import is_utf8
from tensorgrad.io.readers import json_object, needed

_CONNECT_SECONDS = 5.0
COLUMN = "text"  # the column of the text in JSON lines and Parquet files


def json_texts(path: Path, lines: Iterable[str], column: str = COLUMN) -> Iterator[str]:
    """Yield the texts of a file with a JSON object on each line.

    Args:
        path: of the file, for errors.
        lines: of the file.
        column: the key of the text.
    Raises:
        DataError: a line is not a JSON object, or lacks a text.
    """
    return _texts(path, column, _json_rows(path, lines))


def parquet_texts(path: Path, column: str = COLUMN) -> Iterator[str]:
    """Yield the texts of a column of a Parquet file, which is read in batches.

    Raises:
        DataError: it cannot be read, has no such column of texts, or pyarrow is not installed.
    """
    return _texts(path, column, _parquet_rows(path, column))


def dataset_texts(name: str, column: str | None) -> Iterator[str]:
    """Return the texts of a Hugging Face data set."""
    data = load_dataset("documents", name, "train", names_split=True)
    column = _text_column(name, data, column)
    batches = data.select_columns([column]).iter(batch_size=1000)
    return (text for batch in batches for text in batch[column] if text)


def load_dataset(op: str, source: str, split: str | None, names_split: bool = False) -> Any:
    """Return one split of a Hugging Face data set, or a mapping of all splits.

    Args:
        op: the name of the caller, for errors.
        source: `hf:NAME[:CONFIG]`.
        split: such as "train"; None: all.
        names_split: whether the source may name another split: `hf:NAME[:CONFIG][:SPLIT]`.
    Raises:
        ArgumentError: the source has a wrong form.
        DataError: the datasets package is missing, or it cannot load this.
    """
    path, *options = source.removeprefix("hf:").split(":")
    if not path or len(options) > 1 + names_split:
        more = ", 'hf:NAME:CONFIG', 'hf:NAME:CONFIG:SPLIT' or 'hf:NAME::SPLIT'"
        forms = "'hf:NAME'" + (more if names_split else " or 'hf:NAME:CONFIG'")
        raise ArgumentError(f"{op}: source has {source!r}, expected {forms}")
    config, named = (*options, "", "")[:2]
    datasets = needed("datasets", f"{op}: source has {source!r}, which", "text")
    offline = not Path(path).exists() and not _reaches_hub()
    try:
        with _offline_mode(datasets) if offline else nullcontext():
            return datasets.load_dataset(path, config or None, split=named or split)
    except Exception as error:  # network, names, formats: the library raises nearly anything
        reason = " ".join(str(error).split())
        if offline:
            reason = f"no network, and it is not in the cache of this machine: {reason}"
        raise DataError(f"{op}: cannot load {source!r}: {reason}") from error


def _reaches_hub() -> bool:
    """Whether the Hugging Face Hub answers, found out in seconds; True behind a proxy."""
    if getproxies():
        return True
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    answers: list[bool] = []

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection((hub.hostname, hub.port or 443), _CONNECT_SECONDS).close()
            answers.append(True)

    # In a thread, as looking up a name has no limit of time.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_SECONDS)
    return bool(answers)


@contextmanager
def _offline_mode(datasets: Any) -> Iterator[None]:
    """Let the datasets package use its cache alone: without a network it retries for a minute."""
    hub: Any = sys.modules.get("huggingface_hub.constants")
    parts = getattr(datasets, "config", None), hub
    switches = [(part, part.HF_HUB_OFFLINE) for part in parts if part is not None]
    try:
        for part, _ in switches:
            part.HF_HUB_OFFLINE = True
        yield
    finally:
        for part, before in switches:
            part.HF_HUB_OFFLINE = before


def _text_column(name: str, data: Any, column: str | None) -> str:
    texts = [
        key
        for key, feature in data.features.items()
        if getattr(feature, "dtype", None) in ("string", "large_string")
    ]
    if column is None:
        column = "text" if "text" in texts or len(texts) != 1 else texts[0]
    if column not in texts:
        raise DataError(
            f"documents: {name!r} has the columns {list(data.features)!r:.200}, of which "
            f"{texts!r:.200} are text; expected {column!r} (choose one by --text-column, in Python "
            "column)"
        )
    return column


def with_newlines(text: str) -> str:
    """Return a text in which LF ends lines."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _texts(path: Path, column: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the text column of rows; one that is null is skipped."""
    for number, row in enumerate(rows, 1):
        if column not in row:
            raise _no_column(path, list(row), column, f"row {number}")
        text = row[column]
        if text is None:
            continue
        if not isinstance(text, str):
            raise DataError(
                f"documents: {path}: row {number} has {column} {text!r:.80}, expected a text"
            )
        if not is_utf8(text):
            raise DataError(
                f"documents: {path}: row {number} has half of a surrogate pair in {column}, "
                "expected text that can be written as UTF-8"
            )
        yield text


def _json_rows(path: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with one on each line."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = json_object(line)
        if row is None:
            raise DataError(
                f"documents: {path}: line {number} is {line[:60]!r}, expected a JSON object"
            )
        yield row


def _parquet_rows(path: Path, column: str) -> Iterator[dict[str, Any]]:
    """Yield the text column of a Parquet file as rows, read in batches."""
    parquet = needed("pyarrow.parquet", f"documents: {path} is a Parquet file, which", "text")
    problems = (OSError, importlib.import_module("pyarrow").ArrowException)
    try:
        metadata = parquet.read_metadata(path)
        names = metadata.schema.to_arrow_schema().names
        if column not in names:
            raise _no_column(path, names, column)
        most, total = most_unpacked(path.stat().st_size), 0
        stated = _column_bytes(metadata, column)
        check_unpacked(path, stated or 0, most)
        # Repeated texts are stored once: read_dictionary keeps them so.
        once = [] if stated is None else [column]
        with parquet.ParquetFile(path, metadata=metadata, read_dictionary=once) as file:
            for batch in file.iter_batches(batch_size=1000, columns=[column]):
                for value in batch.column(0):
                    text = value.as_py()
                    total += len(text) if isinstance(text, str) else 0
                    check_unpacked(path, total, most)
                    yield {column: text}
    except problems as error:
        raise DataError(f"documents: cannot read {path}: {error}") from error


def _column_bytes(metadata: Any, column: str) -> int | None:
    """Return the decompressed bytes of a column, as a Parquet file states them; None: of lists."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    columns = (group.column(i) for group in groups for i in range(group.num_columns))
    stated = [c.total_uncompressed_size for c in columns if c.path_in_schema == column]
    return sum(stated) if stated else None


def _no_column(path: Path, columns: Sequence[str], column: str, place: str = "") -> DataError:
    return DataError(
        f"documents: {path}{place and f': {place}'} has the columns {list(columns)!r:.200}, "
        f"expected {column!r} (choose the one with text by --text-column, in Python column)"
    )
