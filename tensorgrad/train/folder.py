"""The folder of a run: that it can be written, and that one process at a time trains in it."""

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
    """Let no other process train in a folder while the block runs, or until this one ends.

    Raises:
        CheckpointError: another process does.
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
    """Take the folder of a run before any work: make it, try to write in it, and hold it.

    One that the block leaves empty is removed again.

    Args:
        folder: created if missing.
        is_main: of the ranks that train together one takes it.
    Raises:
        ArgumentError: it cannot be written to.
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
