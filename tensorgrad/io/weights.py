"""Reading and writing named arrays in safetensors files."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from tensorgrad.core.backend import Array, Shape, contiguous, to_numpy
from tensorgrad.core.dtypes import Dtype
from tensorgrad.core.errors import (
    ArgumentError,
    CheckpointError,
    DamagedError,
    DataError,
    DtypeError,
)
from tensorgrad.io.files import is_utf8, named_in_errors, replacing
from tensorgrad.io.readers import JSON_BYTES, open_regular

_SUM = "crc32"  # the header entry with the checksum of the rest of the file
_METADATA = "__metadata__"  # the entry of a header with text
# The format's limit is 100 MB, whose entries take the library gigabytes and half a minute.
_HEADER_BYTES = JSON_BYTES
_CHUNK = 1 << 25  # bytes: after each the writer waits for the GIL
# The format's names of dtypes.
_CODES = {
    "bool": "BOOL", "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16", "int32": "I32",
    "uint32": "U32", "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip

__all__ = ["ArrayFile", "load_arrays", "load_metadata", "save_arrays"]


def save_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    *,
    with_sum: bool = True,
    rest: Callable[[], object] = lambda: None,
) -> dict[str, int]:
    """Write arrays to a safetensors file, which is replaced atomically.

    The GIL is free while a chunk is written, so other threads run.

    Args:
        path: the file; its folder must exist.
        arrays: any shape, any dtype that safetensors and `load_arrays` support, on any device.
        metadata: text for the file's header.
        with_sum: whether the header gets a CRC-32 of the file, which `load_arrays` verifies; not
            needed where another file has one.
        rest: called after each chunk of 32 MB, to leave the processor to others.

    Returns:
        "bytes" and "crc32" of the file.

    Raises:
        ArgumentError: a name or metadata is not text that the format can store.
        DtypeError: `load_arrays` does not support a dtype.
        CheckpointError: the file cannot be written (a full disk); an existing one is unchanged,
            unless only the name of the new one may be lost with the power.

    Example:
        >>> from tensorgrad.io import load_arrays, save_arrays
        >>> _ = save_arrays("weights.safetensors", {"scale": np.array([1.5, 2.5])})
        >>> load_arrays("weights.safetensors")["scale"]
        array([1.5, 2.5])
    """
    header = dict(metadata or {})
    check_savable(arrays, header)
    # Larger elements first, so that all are aligned in a mapped file.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    host = {name: _little_endian(to_numpy(arrays[name])) for name in names}
    if with_sum:
        header[_SUM] = _sum_of(host, header)
    size = crc = 0
    try:
        with replacing(path) as file, named_in_errors(path):
            contents = memoryview(_header(host, header)), *map(_bytes, host.values())
            for content in contents:
                for start in range(0, len(content), _CHUNK):
                    chunk = content[start : start + _CHUNK]
                    file.write(chunk)
                    size, crc = size + len(chunk), zlib.crc32(chunk, crc)
                    rest()
    except OSError as error:
        raise CheckpointError(f"save: cannot write {os.fspath(path)}: {error}") from error
    return {"bytes": size, "crc32": crc}


def load_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return all arrays of a safetensors file, and verify its CRC-32 where the header has one.

    Args:
        path: the file.

    Returns:
        NumPy arrays by name.

    Raises:
        DamagedError: the file is truncated, not a safetensors file, or has another CRC-32.
        CheckpointError: it is missing or cannot be read.

    Example:
        >>> from tensorgrad.io import load_arrays, save_arrays
        >>> _ = save_arrays("weights.safetensors", {"scale": np.array([1.5, 2.5])})
        >>> load_arrays("weights.safetensors")
        {'scale': array([1.5, 2.5])}
    """
    with ArrayFile(path) as file:
        arrays = {name: file.read(name) for name in file.names}
        expected = file.sum
    if expected is not None and expected != _sum_of(arrays, file.metadata):
        raise DamagedError(f"load: {path} has another CRC-32 than when it was written")
    return arrays


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file; the CRC-32 is not verified.

    Args:
        path: the file.

    Returns:
        Text by name.

    Raises:
        DamagedError: the file is truncated or not a safetensors file.
        CheckpointError: it is missing or cannot be read.

    Example:
        >>> from tensorgrad.io import load_metadata, save_arrays
        >>> _ = save_arrays("weights.safetensors", {"scale": np.ones(2)}, {"step": "100"})
        >>> load_metadata("weights.safetensors")
        {'step': '100'}
    """
    with ArrayFile(path) as file:
        return file.metadata


class ArrayFile:
    """A safetensors file to read single arrays, or parts of them, from; a context manager.

    Args:
        path: the file.

    Attributes:
        names: the names of its arrays.
        metadata: the text in its header.
        sum: the CRC-32 in its header, or None.

    Raises:
        DamagedError: the file is truncated or not a safetensors file.
        CheckpointError: it is missing or cannot be read.

    Example:
        >>> from tensorgrad.io import ArrayFile, save_arrays
        >>> _ = save_arrays("weights.safetensors", {"scale": np.arange(1000.0)})
        >>> with ArrayFile("weights.safetensors") as file:
        ...     file.shape("scale"), file.read("scale", 3, 5)
        ((1000,), array([3., 4.]))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._file = path, _open(path)
        self.names: list[str] = list(self._file.keys())
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.sum: str | None = self.metadata.pop(_SUM, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    def shape(self, name: str) -> Shape:
        """Return the shape of an array."""
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> Dtype:
        """Return the dtype of an array.

        Raises:
            CheckpointError: NumPy does not have the dtype.
        """
        shape = self.shape(name)
        found: Dtype = self._tensor(name, slice(1) if shape and 0 not in shape else None).dtype
        return found

    def read(
        self, name: str, start: int | None = None, stop: int | None = None
    ) -> np.ndarray[Any, Any]:
        """Return an array, or 1-D its elements `start` to `stop`.

        Only the rows that have these are read.

        Raises:
            CheckpointError: the array cannot be read.
        """
        if start is None or stop is None:
            return self._tensor(name)
        shape = self.shape(name)
        if not shape or start >= stop:
            return self._tensor(name).reshape(-1)[start:stop]
        row = math.prod(shape[1:])
        first, last = start // row, -(-stop // row)
        rows = self._tensor(name, slice(first, last))
        return rows.reshape(-1)[start - first * row : stop - first * row]

    def _tensor(self, name: str, part: slice | None = None) -> np.ndarray[Any, Any]:
        """Return an array, or a part along its first axis; errors name both."""
        found: np.ndarray[Any, Any]
        problem = f"load: {self._path}: {name}"
        try:
            file = self._file
            found = file.get_tensor(name) if part is None else file.get_slice(name)[part]
            return found
        except (AttributeError, TypeError) as error:
            raise CheckpointError(f"{problem} has an unsupported dtype: {error}") from error
        except (OSError, MemoryError) as error:  # the file itself may be intact
            raise CheckpointError(f"{problem} cannot be read: {error}") from error
        except (ValueError, OverflowError, SafetensorError) as error:
            raise DamagedError(f"{problem} is damaged: {error!s:.300}") from error


def check_savable(arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> None:
    """Raise the error of `save_arrays` where arrays or their names could not be read again.

    Raises:
        ArgumentError, DtypeError, CheckpointError: as for `save_arrays`.
    """
    metadata = metadata or {}
    for text in (*arrays, *metadata, *metadata.values()):
        if not isinstance(text, str) or not is_utf8(text):
            raise ArgumentError(
                f"save: got {text!r} as a name or metadata, expected text that fits UTF-8"
            )
    if _METADATA in arrays:
        raise ArgumentError("save: arrays has '__metadata__', expected any other name")
    for name, array in arrays.items():
        if str(array.dtype).startswith("float8"):
            raise DtypeError(
                f"save: {name} has dtype {array.dtype}, expected one of 16 bits or more"
            )
        if array.dtype.name not in _CODES:
            raise CheckpointError(
                f"save: {name} has dtype {array.dtype}, expected one of {', '.join(_CODES)}"
            )


def _header(arrays: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]) -> bytes:
    """Return the start of a file: the length of the header, and names, dtypes, shapes, places."""
    # The format's library cannot read its own file of no arrays and an empty header.
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name, array in arrays.items():
        place = [start, start := start + array.nbytes]
        code = _CODES[array.dtype.name]
        entries[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": place}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_BYTES:
        raise ArgumentError(
            f"save: names and metadata have {len(text):,} bytes, expected at most {_HEADER_BYTES:,}"
        )
    return len(text).to_bytes(8, "little") + text


def _little_endian(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array as files have it: contiguous, the lowest byte first."""
    found: np.ndarray[Any, Any] = contiguous(
        array.astype(array.dtype.newbyteorder("<"), copy=False)
    )
    return found


def _bytes(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _sum_of(arrays: Mapping[str, np.ndarray[Any, Any]], header: Mapping[str, str]) -> str:
    """Return the CRC-32 of names, dtypes, shapes and elements, and of the header's text."""
    total = zlib.crc32(repr(sorted(header.items())).encode())
    for name, array in sorted(arrays.items()):
        total = zlib.crc32(f"{name} {array.dtype.name} {array.shape}".encode(), total)
        total = zlib.crc32(_bytes(_little_endian(array)), total)
    return f"{total:08x}"


def _open(path: str | os.PathLike[str]) -> Any:
    """Open a safetensors file; the library checks that its length matches its header."""
    try:
        with open_regular(path, links=True) as start:  # its errors give the reason
            length = int.from_bytes(start.read(8), "little")
            if length > _HEADER_BYTES:
                raise DamagedError(
                    f"load: {path} has a header of {length:,} bytes, expected at most "
                    f"{_HEADER_BYTES:,}: it is damaged or not a safetensors file"
                )
            # By its descriptor, as another file may have the name by now, a FIFO for instance.
            own = f"/proc/self/fd/{start.fileno()}"
            file: Any = safe_open(own if os.path.exists(own) else path, framework="np")
            return file.__enter__()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"load: {path} does not exist, expected a safetensors file"
        ) from error
    except DataError as error:
        raise CheckpointError(f"load: {error}") from error
    except (OSError, MemoryError) as error:  # the file itself may be intact
        raise CheckpointError(f"load: {path} cannot be read: {error}") from error
    except SafetensorError as error:
        raise DamagedError(
            f"load: {path} is damaged or not a safetensors file: {error!s:.300}"
        ) from error
