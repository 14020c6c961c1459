"""Files that are old and whole or new and whole, whatever happens in between; and JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a new binary file that takes the place of `path` when the block ends.

    The block writes to a temporary file in the same folder. Only when all of it has reached
    the disk is it renamed to `path`. An exception deletes it; a kill leaves it behind as
    `.NAME-*.tmp`; `path` is untouched by either.

    Args:
        path: the file to replace or create; its folder must exist.
    Yields:
        The open temporary file.
    Raises:
        OSError: the disk is full, or the folder is missing or not writable.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}.tmp")
    file = temporary.open("xb", buffering=1 << 20)
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # closing flushes, and fails again on a full disk
            file.close()
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON, in which numbers of NumPy are numbers: options may be some."""
    return json.dumps(value, indent=indent, default=_python_number)


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace by None what JSON has no number for."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _python_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is nothing that JSON can hold")
