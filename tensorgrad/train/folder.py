"""Folders to write to: new or empty, writable, and only one process at a time trains in one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from tensorgrad.core.errors import ArgumentError, CheckpointError
from tensorgrad.io.files import check_writable, locked, make_folder
from tensorgrad.train import config
from tensorgrad.train.checkpoint import list_checkpoints

LOCK = ".lock"

_held: set[Path] = set()  # by this process


def check_new_folder(
    folder: Path,
    option: str = "--out",
    *,
    resumable: bool = False,
    is_own: Callable[[Path], bool] = lambda path: False,
) -> None:
    """Check before any work that a command may write into a folder: it is new or empty.

    Nothing is created. Names that begin with a dot do not count.

    Args:
        folder: to write to.
        option: that gave it, for errors.
        resumable: whether the command resumes a run, for the advice.
        is_own: whether a file is one that the command continues.
    Raises:
        ArgumentError: it holds a run or other files, is not a folder, or cannot be written to.
    """
    if folder.is_dir():
        names = sorted(p.name for p in folder.iterdir() if p.name[0] != "." and not is_own(p))
        weights = any(name.endswith(".safetensors") for name in names)  # an exported model
        if "metrics.jsonl" in names or (config.FILE in names and not weights):
            advice = f"; to {_continuation(folder)}: --resume {folder}" if resumable else ""
            raise ArgumentError(f"{option}: {folder} holds a run, expected a new folder{advice}")
        if names:
            more = ", ..." if len(names) > 3 else ""
            raise ArgumentError(
                f"{option}: {folder} holds files ({', '.join(names[:3])}{more}), expected a new "
                "folder or an empty one"
            )
    elif os.path.lexists(folder):
        raise ArgumentError(f"{option}: {folder} is a file, expected a new folder or an empty one")
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        make_folder(folder)
        check_writable(folder)
    except OSError as error:
        raise ArgumentError(
            f"{option}: cannot write to {folder}: {error.strerror}, expected a folder that can be "
            "written to"
        ) from error
    finally:
        with suppress(OSError):
            for path in missing:
                path.rmdir()


def free_folder(name: str) -> Path:
    """Return the first of the folders NAME-1, NAME-2, ... that does not exist."""
    paths = (Path(f"{name}-{number}") for number in count(1))
    return next(path for path in paths if not path.exists())


def _continuation(folder: Path) -> str:
    """Return what --resume does with the run in a folder."""
    if list_checkpoints(folder / "checkpoints"):
        return "resume it"
    return "start it at step 0, as it has no checkpoint"


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
def run_folder(
    folder: Path, is_main: bool = True, settings: config.Dataclass | None = None
) -> Iterator[None]:
    """Create the folder of a run before any work, check that it is writable, and lock it.

    A folder that has nothing else after the block is removed.

    Args:
        folder: created if missing.
        is_main: whether to do so: one of the ranks that train together does.
        settings: of a new run; config.json has them from the start, so that a run that is killed
            while it reads its data can be resumed. None: the folder has a config.json.
    Raises:
        ArgumentError: the folder is not writable, or config.json could not be read again.
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
            unused = [LOCK] if settings is None else [LOCK, config.FILE]
            stack.callback(_remove_if_only, folder, unused)
            if settings is not None:
                config.save(settings, folder)
        yield


def _remove_if_only(folder: Path, names: Sequence[str]) -> None:
    """Remove a folder that has these files alone."""
    with suppress(OSError):
        files = list(folder.iterdir())
        if {path.name for path in files} <= set(names):
            for path in files:
                path.unlink()
            folder.rmdir()
