"""Atomic replacement of files, durable folders, file locks, and JSON."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

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
        OSError: the disk is full, or the folder is missing or not writable. `path` is unchanged,
            unless the final `fsync` of the folder failed.
    """
    path = Path(path)
    temporary = temporary_name(path)
    file = temporary.open("xb", buffering=1 << 20)
    try:
        yield file
        with named_in_errors(path):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # closing flushes, and fails again on a full disk
            file.close()
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink()
        raise
    sync_folder(path.parent)


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


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON; NumPy's numbers become Python's."""
    return json.dumps(value, indent=indent, default=_python_number)


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = None) -> None:
    """Write a value as a JSON file and a line break, as `replacing` does."""
    with replacing(path) as file:
        file.write((to_json(value, indent) + "\n").encode())


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace inf and NaN, which JSON does not support, by None; a text stays."""
    return {
        name: value if value is None or isinstance(value, str) or math.isfinite(value) else None
        for name, value in values.items()
    }


def _python_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"JSON does not support a {type(value).__name__}")
