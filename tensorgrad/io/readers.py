"""Readers of untrusted files: JSON objects and .npy arrays.

An invalid file raises a DataError that names it and what was expected, before memory is allocated
for the size that it claims. weights.py reads safetensors files, data/text.py text.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import mmap
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np

from tensorgrad.core.errors import DataError
from tensorgrad.startup.distribution import install

JSON_BYTES = 1 << 23  # read in some seconds, whatever they are
VOCABULARY_BYTES = 1 << 26  # 64 MB: some published tokenizer.json have 30
JSON_DEPTH = 64
JSON_LINE_BYTES = 1 << 20
_HOLLOW = 1 << 28  # bytes of a file that may be a hole
_LONGEST_LINE = 1 << 26  # the longest line of a log, damaged ones too
_LINES = 5000  # between calls of progress
_NO_WAIT, _NO_LINK = getattr(os, "O_NONBLOCK", 0), getattr(os, "O_NOFOLLOW", 0)
_IS_LINK = (errno.ELOOP, errno.EMLINK)  # errors of O_NOFOLLOW, the latter on FreeBSD


def needed(module: str, problem: str, extra: str) -> Any:
    """Return a module of a package that not every installation has.

    Args:
        module: its name.
        problem: the start of the error: what needs it.
        extra: the extra of pyproject.toml that has it.
    Raises:
        DataError: it is not installed, or cannot be imported.
    """
    name = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{problem} needs the {name} package: {install(extra)}") from error
    except Exception as error:  # an environment variable of the package may be anything
        raise DataError(
            f"{problem} needs the {name} package, which cannot be imported: "
            f"{type(error).__name__}: {error!s:.300}"
        ) from error


def open_regular(
    path: str | os.PathLike[str], mode: str = "rb", *, links: bool = False
) -> BinaryIO:
    """Open a regular file, without blocking on a FIFO; every file of a run is opened here.

    A run may be untrusted: a link in its folder, symbolic or hard, could lead to any file
    of the user, whose content would be shown or changed.

    Args:
        path: the file.
        mode: as of `open`, binary.
        links: whether the path may be a symbolic link: of files that the user names, and of
            published models, whose cache consists of links.
    Raises:
        DataError: it is a symbolic link, a FIFO or a device, its name has a NUL, it has more than
            256 MB and is mostly a hole, or the mode may change it and it has a second name (a hard
            link).
        OSError: it is missing, a directory, or may not be opened.
    """
    name = os.fspath(path)

    def opened(_: str, flags: int) -> int:
        descriptor = os.open(path, flags | _NO_WAIT | (0 if links else _NO_LINK), 0o666)
        try:
            status = os.fstat(descriptor)
            wrong = ""
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
            if not stat.S_ISREG(status.st_mode):
                wrong = "is a FIFO or a device, expected a regular file"
            elif mode == "rb" and not status.st_size and not _is_readable(descriptor):
                wrong = "is of the system and has no content now, expected a regular file"
            elif _is_hollow(descriptor, status):
                wrong = (
                    f"has {status.st_size:,} bytes, of which {512 * status.st_blocks:,} are on "
                    "disk, expected a file without large holes: it is damaged, or made to take long"
                )
            elif mode != "rb" and status.st_nlink > 1:
                wrong = "has a second name (a hard link), expected one: writing would change both"
            if wrong:
                raise DataError(f"read: {name} {wrong}")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    try:
        return cast(BinaryIO, open(path, mode, opener=opened))
    except DataError:
        raise
    except ValueError as error:  # a NUL in the name
        raise DataError(f"read: {name!r:.300} is not the name of a file: {error}") from error
    except OSError as error:
        if not links and error.errno in _IS_LINK:
            _refuse_link(Path(path))
        raise


def _is_readable(descriptor: int) -> bool:
    """Whether a file without a size can be read: those of the system may have to be waited for."""
    try:
        os.read(descriptor, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError:
        return False
    return True


def _is_hollow(descriptor: int, status: os.stat_result) -> bool:
    """Whether a large file is mostly a hole, which takes no disk and reads as zeros."""
    if status.st_size < _HOLLOW or not hasattr(os, "SEEK_HOLE"):
        return False
    if 512 * status.st_blocks > status.st_size // 16:
        return False
    try:  # some file systems do not count blocks
        return os.lseek(descriptor, 0, os.SEEK_HOLE) < status.st_size
    except OSError:
        return False
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)


def _refuse_link(path: Path) -> None:
    """Raise DataError for a symbolic link, unless it leads to itself."""
    try:
        is_device = not stat.S_ISREG(path.stat().st_mode) and not path.is_dir()
    except FileNotFoundError:
        is_device = False
    except OSError:
        return
    if is_device:
        raise DataError(f"read: {path} is a FIFO or a device, expected a regular file")
    no_link(path)


def no_link(path: Path) -> Path:
    """Return the path of a file or folder of a run that another function opens.

    Raises:
        DataError: it is a symbolic link.
    """
    if os.path.islink(path):
        raise DataError(
            f"read: {path} is a symbolic link, expected a file or folder: a link in the folder of "
            "a run is not followed"
        )
    return path


def read_bytes(path: str | os.PathLike[str], limit: int, *, links: bool = False) -> bytes:
    """Return the content of a regular file; see `open_regular`.

    Raises:
        DataError: it has more than `limit` bytes, or is not a regular file.
        OSError: it is missing or cannot be read.
    """
    with open_regular(path, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise DataError(
                f"read: {os.fspath(path)} has {size:,} bytes, expected at most {limit:,}"
            )
        data = file.read(size + 1)
    if len(data) > size:
        raise DataError(f"read: {os.fspath(path)} has no size, or grew while it was read")
    return data


def read_json(
    path: str | os.PathLike[str],
    limit: int = JSON_BYTES,
    long_integers: bool = False,
    *,
    links: bool = False,
) -> dict[str, Any]:
    """Return the object in a JSON file; see `parse_json`.

    Args:
        path: the file, in UTF-8.
        limit: its largest size in bytes.
        long_integers: see `parse_json`.
        links: see `open_regular`.
    Raises:
        DataError: it is not such a file.
        OSError: it is missing or cannot be read.
    """
    data = read_bytes(path, limit, links=links)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"read: {os.fspath(path)} cannot be read as JSON: {error}") from error
    return parse_json(text, os.fspath(path), long_integers, limit)


def parse_json(
    text: str, name: str, long_integers: bool = False, limit: int = JSON_BYTES
) -> dict[str, Any]:
    """Return a JSON object that can be printed, compared and written again.

    Numbers are finite floats or integers of at most 64 bits, keys are unique, text can be encoded
    in UTF-8, and values are nested at most JSON_DEPTH deep.

    Args:
        text: the JSON.
        name: of its file, for errors.
        long_integers: whether integers of more than 18 digits become floats: some programs write
            10^30 for "no limit".
        limit: the largest number of characters.
    Raises:
        DataError: the text is not such an object.
    """
    if len(text) > limit:
        raise DataError(
            f"read: {name} has {len(text):,} characters of JSON, expected at most {limit:,}"
        )
    try:
        value = json.loads(
            text,
            parse_int=_number if long_integers else _integer,
            parse_float=_float,
            parse_constant=_float,
            object_pairs_hook=_object,
        )
        _check_depth(value)
        if "\\u" in text:  # an escape may be half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        _refuse(name, f"it is nested more than {JSON_DEPTH} deep")
    except UnicodeEncodeError:
        _refuse(name, "text in it has half of a surrogate pair")
    except ValueError as error:
        _refuse(name, str(error))
    if not isinstance(value, dict):
        raise DataError(f"read: {name} holds a {type(value).__name__}, expected a mapping")
    return value


def read_json_lines(
    path: str | os.PathLike[str], progress: Callable[[int, int], object] | None = None
) -> Iterator[dict[str, Any] | None]:
    """Yield the objects in a file with one on each line, and None for each damaged line.

    A line is damaged if it is not an object in JSON or has more than JSON_LINE_BYTES. A last line
    without its end is being written, or was cut short by a kill: it is skipped, and not damaged.
    This is fast, as such files are long, so values are checked less than by `parse_json`: NaN and
    infinity become None, but 1e999 is infinity, and text may have halves of surrogate pairs.

    Args:
        path: of the file.
        progress: called at times with the bytes read and the bytes of the file.
    Raises:
        DataError: it is a FIFO or a device, or as for `log_lines`.
        OSError: it is missing or cannot be read.
    """
    is_rest = False  # whether it is the rest of a line that is too long
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        for number, line in enumerate(log_lines(file)):
            if progress is not None and number % _LINES == 0:
                progress(file.tell(), size)
            ends = line.endswith(b"\n")
            if ends:
                yield None if is_rest else _object_on(line)
            is_rest = not ends


def log_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a log; one of more than JSON_LINE_BYTES in pieces.

    Raises:
        DataError: a line has more than 64 MB. A hole may be a terabyte, and takes no disk.
    """
    length = 0
    for piece in iter(partial(file.readline, JSON_LINE_BYTES), b""):
        length += len(piece)
        if length > _LONGEST_LINE:
            raise DataError(
                f"read: {file.name} has a line of more than {_LONGEST_LINE:,} bytes, expected "
                "those of a log"
            )
        yield piece
        if piece.endswith(b"\n"):
            length = 0


_LINE_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


def json_object(line: str) -> dict[str, Any] | None:
    """Return the JSON object on a line, or None where there is none; see `read_json_lines`."""
    line = line.strip()
    try:
        value, end = _LINE_DECODER.raw_decode(line)
    except (ValueError, RecursionError):
        return None
    return value if end == len(line) and isinstance(value, dict) else None


def _object_on(line: bytes) -> dict[str, Any] | None:
    try:
        return json_object(line.decode())
    except UnicodeDecodeError:
        return None


def map_array(path: str | os.PathLike[str]) -> np.ndarray[Any, Any]:
    """Map a .npy file into memory.

    Args:
        path: a file of format version 1.0, with numbers or booleans of any shape, or a link to it.
    Returns:
        The array, read-only.
    Raises:
        DataError: it is not such a file, or its length does not match its header.
        OSError: it is missing or cannot be read.
    """
    name = os.fspath(path)
    with open_regular(path, links=True) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"its format version is {version}, expected (1, 0)")
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
        except OSError:
            raise
        except Exception as error:  # NumPy evaluates the header, which can raise almost anything
            reason = str(error) or type(error).__name__
            raise DataError(f"read: {name} is not a .npy file: {reason:.200}") from error
        if dtype.kind not in "biufc" or min(shape, default=0) < 0:
            raise DataError(f"read: {name} has dtype {dtype} and shape {shape}, expected numbers")
        offset, count = file.tell(), math.prod(shape)
        expected = offset + count * dtype.itemsize
        if size != expected:
            raise DataError(
                f"read: {name} has {size:,} bytes, expected {expected:,} for the {count:,} "
                "elements of its header; the file is damaged"
            )
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        array = np.frombuffer(mapped, dtype, count, offset)
        return array.reshape(shape, order="F" if fortran_order else "C")
    except ValueError as error:  # an empty array with an axis too long, or with too many axes
        raise DataError(f"read: {name} has shape {shape}: {error}") from error


def _integer(text: str) -> int:
    # Checked first: int() takes long for many digits, and refuses more than 4,300.
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"the number {text:.24}... has {len(text)} digits, expected 64 bits")
    return int(text)


def _number(text: str) -> float:
    return _float(text) if len(text) > 18 else int(text)


def _float(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"it has the number {text:.24}, expected finite ones")
    return float(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, count),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r:.80} is there {count} times, expected once")
    return found


def _check_depth(value: Any) -> None:
    """Raise RecursionError where a value is nested too deep; checks level by level."""
    level = [value]
    for _ in range(JSON_DEPTH):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise RecursionError


def _refuse(name: str, reason: str) -> NoReturn:
    raise DataError(f"read: {name} cannot be read as JSON: {reason}") from None
