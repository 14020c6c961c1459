"""Atomic replacement of files, durable folders, file locks, and JSON."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tensorgrad.core.errors import ArgumentError, DtypeError
from tensorgrad.io.readers import JSON_BYTES, JSON_DEPTH

if sys.platform != "win32":
    import fcntl

_LONGEST_NAME = 255  # bytes of a file's name
# Errors of file systems that do not support an operation.
_NOT_OFFERED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Replace a file atomically by what the `with` block writes.

    The block writes to a temporary file in the same folder, which is synced to disk and then
    renamed to `path`. An exception deletes it; a killed process leaves it as `.NAME-*.tmp`. In
    both cases `path` does not change.

    Args:
        path: the file to replace or create; its folder must exist.
    Yields:
        The open temporary file, binary.
    Raises:
        OSError: the disk is full, the folder is missing or not writable, or `path` is not that of
            a file, such as /dev/null, which root could replace. `path` is unchanged, unless the
            final `fsync` of the folder failed.
    """
    path = Path(path)
    _check_replaceable(path)
    temporary = temporary_name(path)
    file = temporary.open("xb", buffering=1 << 20)
    try:
        yield file
        with named_in_errors(path):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        try:
            os.replace(temporary, path)
        except OSError as error:  # which names the temporary file
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    except BaseException:
        with contextlib.suppress(OSError):  # closing flushes, and fails again on a full disk
            file.close()
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink()
        raise
    sync_folder(path.parent)


def _check_replaceable(path: Path) -> None:
    """Raise OSError for a path that cannot be that of a file, or leads to something else."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    try:
        status = path.stat()
        is_stream = path.is_symlink() and os.readlink(path).startswith("/proc/")  # /dev/stdout
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from error
    except OSError:  # there is no file yet, or opening the new one says what is wrong
        return
    if is_stream or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        reason = "it is a device, a FIFO, a socket or a stream, expected a file"
        raise OSError(errno.EINVAL, reason, os.fspath(path))


def temporary_name(path: Path) -> Path:
    """Return a new name `.NAME-*.tmp` beside a path, in which a long NAME is cut."""
    return hidden_name(path, f"-{secrets.token_hex(4)}.tmp")


def hidden_name(path: Path, end: str) -> Path:
    """Return `.NAME` and an end beside a path, in which a NAME too long for both is cut."""
    name = os.fsencode(path.name)[: _LONGEST_NAME - len(os.fsencode(end)) - 1]
    return path.with_name(f".{os.fsdecode(name)}{end}")


@contextlib.contextmanager
def named_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file's name to errors of the operating system from calls on an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable, where the file system supports it.

    Raises:
        OSError: the folder cannot be opened or synced.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder that cannot be listed, and any folder on Windows
        return
    with named_in_errors(folder):
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
        finally:
            os.close(descriptor)


def make_folder(folder: str | os.PathLike[str]) -> None:
    """Create a folder and its missing parents, and make their names durable.

    Raises:
        OSError: one of them cannot be created, or is a file.
    """
    folder = Path(folder)
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def delete(path: Path) -> None:
    """Delete a file, or a folder with all that is in it; what cannot be deleted stays.

    A FIFO in the place of a folder is not opened, which would wait for a writer.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Check that a folder is writable by writing a temporary file of 4 KB to disk.

    Raises:
        OSError: the folder is missing or read-only, or the disk is full.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = os.fspath(folder)  # not the temporary file's name
        raise


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], *, wait: bool) -> Iterator[bool]:
    """Hold the lock on a file in the `with` block; the lock ends with its process at the latest.

    Args:
        path: the lock file; created if missing, and kept. Its text names the process that holds
            the lock. It must not be a symbolic link, which could lead to a file of another user.
        wait: whether to wait for another process to release the lock.
    Yields:
        True; False where the file system does not support locks.
    Raises:
        BlockingIOError: another process, which the message names, holds the lock.
        OSError: the file cannot be opened or written.
    """
    with named_in_errors(path):
        descriptor = _lock(path, wait)
    try:
        if descriptor is not None:
            with named_in_errors(path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with named_in_errors(path):
                os.close(descriptor)


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Return whether a process holds the lock on a file, without waiting or writing.

    False where the file is missing or cannot be read, and where locks are not supported.
    """
    if sys.platform == "win32":
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _lock(path: str | os.PathLike[str], wait: bool) -> int | None:
    """Return the descriptor of the locked file; None where locks are not supported."""
    if sys.platform == "win32":
        return None
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            if os.fstat(descriptor).st_nlink > 1:  # the other may be a file of the user
                raise OSError(errno.EMLINK, "it has a second name, a hard link", os.fspath(path))
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise BlockingIOError(error.errno, f"{holder} has the lock", os.fspath(path)) from error
        except FileNotFoundError:  # removed while this process waited
            pass
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NOT_OFFERED:  # some network file systems
                return None
            raise
        os.close(descriptor)


def to_json(
    value: Any, indent: int | None = None, op: str = "to_json", escapes: bool = True
) -> str:
    """Return JSON that `readers.parse_json` reads back as an equal value.

    NumPy's numbers become Python's, tuples lists and mappings dictionaries.

    Args:
        value: what the reader accepts: finite numbers, integers of at most 64 bits, text that fits
            UTF-8, None, lists, and mappings whose keys are text, nested at most JSON_DEPTH deep.
        indent: spaces of a level; None: all on one line.
        op: the start of errors, such as the name of the file.
        escapes: whether other characters than those of ASCII are written as escapes.
    Raises:
        ArgumentError: the reader would refuse a value or read another one.
        DtypeError: a value is of a kind that JSON does not support.
    """
    return json.dumps(_plain(value, op, "", 0), indent=indent, ensure_ascii=escapes)


def write_json(
    path: str | os.PathLike[str], value: Any, indent: int | None = None, limit: int = JSON_BYTES
) -> None:
    """Write a value as a JSON file and a line break, as `replacing` does.

    Args:
        path: the file.
        value, indent: as for `to_json`.
        limit: the largest size in bytes, that of `readers.read_json`.
    Raises:
        ArgumentError, DtypeError: as for `to_json`, or the file would be too large.
        OSError: as for `replacing`.
    """
    name = Path(path).name
    content = (to_json(value, indent, name) + "\n").encode()
    if len(content) > limit:
        raise ArgumentError(
            f"{name}: the content has {len(content):,} bytes, expected at most {limit:,}"
        )
    with replacing(path) as file:
        file.write(content)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace inf and NaN, which JSON does not support, by None; other values stay."""
    return {
        name: None if isinstance(value, float | np.floating) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def shown(value: Any, length: int) -> str:
    """Return the start of the `repr` of a value, for errors."""
    try:
        return repr(value)[:length]
    except ValueError:  # an integer of more than 4,300 digits
        return f"a {type(value).__name__} of very many digits"


def is_utf8(text: str) -> bool:
    """Return whether text can be encoded: half of a surrogate pair cannot.

    Python puts such halves into names of files and arguments that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: Any, op: str, name: str, depth: int) -> Any:
    """Return a value in the types that JSON is read as; raise where the reader would refuse it."""
    expected = ""
    if depth >= JSON_DEPTH:
        raise ArgumentError(
            f"{op}: {name[:80] or 'the value'} is nested more than {JSON_DEPTH} deep, expected less"
        )
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    if isinstance(value, int | np.integer):
        if -(2**63) <= value < 2**64:
            return int(value)
        # Python refuses to print more than 4,300 digits.
        bits = int(value).bit_length()
        value, expected = f"an integer of {bits} bits", "-2^63 to 2^64 - 1"
    elif isinstance(value, float | np.floating):
        if math.isfinite(value) and float(value) == value:
            return float(value)
        expected = "a finite number of at most 64 bits"
    elif isinstance(value, str):
        if is_utf8(value):
            return str.__str__(value)
        value, expected = ascii(value), "text that fits UTF-8"
    elif isinstance(value, list | tuple):
        return [_plain(item, op, f"{name}[{i}]", depth + 1) for i, item in enumerate(value)]
    elif isinstance(value, Mapping):
        return _plain_mapping(value, op, name, depth)
    else:
        raise DtypeError(
            f"{op}: {name or 'the value'} is {shown(value, 80)}; JSON does not support a "
            f"{type(value).__name__}"
        )
    raise ArgumentError(f"{op}: {name or 'the value'} is {value!s:.80}, expected {expected}")


def _plain_mapping(value: Mapping[Any, Any], op: str, name: str, depth: int) -> dict[str, Any]:
    plain = {}
    for key, item in value.items():
        if not isinstance(key, str) or not is_utf8(key):
            raise ArgumentError(
                f"{op}: {name or 'the value'} has the key {key!a:.80}, expected text that "
                "fits UTF-8"
            )
        inner = f"{name}.{key:.80}" if name else f"{key:.80}"
        plain[str.__str__(key)] = _plain(item, op, inner, depth + 1)
    return plain
