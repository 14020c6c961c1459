"""The folder of a run: it must be writable, and only one process at a time trains in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.files import check_writable, locked, make_folder

LOCK = ".lock"

_held: set[Path] = set()  # by this process


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Lock a folder against training by other processes while the block runs.

    Raises:
        CheckpointError: another process holds the lock.
        OSError: the lock cannot be made.
    """
    place = folder.resolve()
    if place in _held:
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(place / LOCK, wait=False))
        except BlockingIOError as error:
            raise CheckpointError(
                f"train: another process trains in {folder}: {error.strerror}; wait for it, or "
                "choose another --out"
            ) from error
        _held.add(place)
        stack.callback(_held.discard, place)
        yield


@contextmanager
def run_folder(folder: Path, is_main: bool = True) -> Iterator[None]:
    """Create the folder of a run before any work, check that it is writable, and lock it.

    A folder that is still empty after the block is removed.

    Args:
        folder: created if missing.
        is_main: whether to do so: one of the ranks that train together does.
    Raises:
        ArgumentError: the folder is not writable.
        CheckpointError: another process trains in it.
    """
    with ExitStack() as stack:
        if is_main:
            try:
                make_folder(folder)
                check_writable(folder)
                stack.enter_context(hold(folder))
            except OSError as error:
                raise ArgumentError(
                    f"train: cannot write to {folder}: {error.strerror} ({error.filename}), "
                    "expected a folder that can be written to"
                ) from error
            stack.callback(_remove_if_empty, folder)
        yield


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            folder.rmdir()
