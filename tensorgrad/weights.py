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
from tensorgrad.errors import ArgumentError, CheckpointError, DataError, DtypeError
from tensorgrad.files import sync_folder
from tensorgrad.readers import open_regular


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
        self._path = path
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
        """Return the dtype of an array.

        Raises:
            CheckpointError: NumPy has no such type.
        """
        shape = self.shape(name)
        if not (math.prod(shape) and shape):
            empty: Dtype = _tensor(self._path, self._file, name).dtype
            return empty
        with _named_errors(self._path, name):
            found: Dtype = self._file.get_slice(name)[:1].dtype
        return found

    def read(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return elements `start` to `stop` of an array, 1-D; of 1-D arrays no others are read.

        Raises:
            CheckpointError: the array cannot be read.
        """
        if len(self.shape(name)) == 1 and start < stop:
            with _named_errors(self._path, name):
                part: np.ndarray[Any, Any] = self._file.get_slice(name)[start:stop]
            return part
        return _tensor(self._path, self._file, name).reshape(-1)[start:stop]


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
    with _named_errors(path, name):
        found: np.ndarray[Any, Any] = file.get_tensor(name)
    return found


@contextmanager
def _named_errors(path: str | os.PathLike[str], name: str) -> Iterator[None]:
    """Raise CheckpointError where the file is in order, but NumPy cannot make the array."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        raise CheckpointError(
            f"load: {path}: {name} has a dtype that is not read: {error}"
        ) from error
    except (ValueError, OverflowError, OSError, SafetensorError) as error:
        raise CheckpointError(f"load: {path}: {name} cannot be read: {error}") from error


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open a safetensors file, which is refused if its header promises more than it has."""
    try:
        open_regular(path).close()
        opened = safe_open(path, framework="np")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"load: {path} does not exist, expected a safetensors file"
        ) from error
    except DataError as error:
        raise CheckpointError(f"load: {error}") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"load: {path} is damaged or no safetensors file: {error!s:.300}"
        ) from error
    with opened as file:
        yield file
