"""Named arrays in safetensors files, on the CPU or from and to a GPU."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tensorgrad.backend import Array, Shape, contiguous, to_numpy
from tensorgrad.dtypes import Dtype
from tensorgrad.errors import ArgumentError, CheckpointError, DtypeError
from tensorgrad.files import sync_folder

__all__ = [
    "ArrayFile",
    "load_arrays",
    "load_metadata",
    "save_arrays",
]


def save_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays to a safetensors file; the file under `path` is replaced once all is written.

    Args:
        path: the file; its folder must exist.
        arrays: any shape, any dtype that safetensors knows and `load_arrays` reads, on any device.
        metadata: text for the file's header.
    Raises:
        ArgumentError: a name is no text, or one that no file can be read with.
        DtypeError: a dtype is one that `load_arrays` does not read.
        CheckpointError: the file cannot be written (a full disk); one that was there is unchanged.
    """
    _check_names(arrays, {} if metadata is None else metadata)
    path = Path(path)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}.tmp")
    host = {name: contiguous(to_numpy(array)) for name, array in arrays.items()}
    for name, array in host.items():
        if str(array.dtype).startswith("float8"):
            raise DtypeError(
                f"save: {name} has dtype {array.dtype}, expected one of 16 bits or more"
            )
    try:
        temporary.touch(exist_ok=False)
        usual = temporary.stat().st_mode
        # An empty header in a file without arrays would be written in a form that cannot be read.
        save_file(host, temporary, dict(metadata) if metadata else None)
        temporary.chmod(usual)  # safetensors makes a file that its owner alone can read
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
        return {name: _tensor(path, file, name) for name in file.keys()}  # noqa: SIM118  no dict


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the text in the header of a safetensors file; see `load_arrays`."""
    with _opened(path) as file:
        return file.metadata() or {}


class ArrayFile:
    """A safetensors file from which single arrays, and parts of them, are read; a context manager.

    Args:
        path: the file.
    Attributes:
        names: of its arrays.
        metadata: the text in its header.
    Raises:
        CheckpointError: the file is missing, truncated or no safetensors file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with ExitStack() as stack:
            self._file = stack.enter_context(_opened(path))
            self.names: list[str] = list(self._file.keys())
            self.metadata: dict[str, str] = self._file.metadata() or {}
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shape(self, name: str) -> Shape:
        """Return the shape of an array."""
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> Dtype:
        """Return the dtype of an array."""
        shape = self.shape(name)
        one = self._file.get_slice(name)[:1] if math.prod(shape) and shape else None
        found: Dtype = (self._file.get_tensor(name) if one is None else one).dtype
        return found

    def read(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return elements `start` to `stop` of an array, 1-D; of 1-D arrays no others are read."""
        if len(self.shape(name)) == 1 and start < stop:
            part: np.ndarray[Any, Any] = self._file.get_slice(name)[start:stop]
        else:
            part = self._file.get_tensor(name).reshape(-1)[start:stop]
        return part


def _check_names(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Raise ArgumentError where a header could not be written, or not be read again."""
    for text in (*arrays, *metadata, *metadata.values()):
        if not isinstance(text, str):
            raise ArgumentError(f"save: got {text!r} as a name or metadata, expected text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(f"save: got {text!r}, expected text that fits UTF-8") from error
    if "__metadata__" in arrays:
        raise ArgumentError("save: arrays has '__metadata__', expected any other name")


def _tensor(path: str | os.PathLike[str], file: Any, name: str) -> np.ndarray[Any, Any]:
    try:
        found: np.ndarray[Any, Any] = file.get_tensor(name)
    except AttributeError as error:  # the file is in order, but NumPy has no such type
        raise CheckpointError(
            f"load: {path}: {name} has a dtype that is not read: {error}"
        ) from error
    return found


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    if not Path(path).is_file():
        raise CheckpointError(f"load: {path} does not exist, expected a safetensors file")
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"load: {path} is damaged or no safetensors file: {error}") from error
