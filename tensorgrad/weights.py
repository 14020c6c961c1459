"""Named arrays in safetensors files, on the CPU or from and to a GPU."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tensorgrad.backend import Array, contiguous, to_numpy
from tensorgrad.errors import CheckpointError
from tensorgrad.files import sync_folder


def save_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays to a safetensors file; the file under `path` is replaced once all is written.

    Args:
        path: the file; its folder must exist.
        arrays: any shape, any dtype that safetensors knows, on any device.
        metadata: text for the file's header.
    Raises:
        CheckpointError: the file cannot be written (a full disk); one that was there is unchanged.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}.tmp")
    host = {name: contiguous(to_numpy(array)) for name, array in arrays.items()}
    try:
        save_file(host, temporary, dict(metadata or {}))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"save: cannot write {path}: {error}; what was there before is unchanged"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def load_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return every array of a safetensors file.

    Raises:
        CheckpointError: the file is missing, truncated or no safetensors file.
    """
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the text in the header of a safetensors file; see `load_arrays`."""
    with _opened(path) as file:
        return file.metadata() or {}


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    if not Path(path).is_file():
        raise CheckpointError(f"load: {path} does not exist, expected a safetensors file")
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"load: {path} is damaged or no safetensors file: {error}") from error
