"""Checkpoints of a run: folders that appear whole or not at all, the newest few and the best.

    checkpoints/step-00000500/
        rank-00000.safetensors  the parameters, buffers and state of the optimizer that rank 0
                                writes, all of them in a single process (see shards.py)
        state.json              step, settings, generator, what the checkpoint belongs to, metrics,
                                size and CRC-32 of the other files, and its own CRC-32

A checkpoint is written into a temporary folder, synced to the disk, read back, and renamed; then
older ones are deleted. So a kill or a full disk at any moment leaves all earlier checkpoints
unchanged, and none is deleted for one that cannot be read.

A damaged checkpoint (a file differs from what was written) is skipped for an earlier one. One that
the system fails to read (an I/O error, too many open files) may be intact: that is an error for the
user to look into, and the checkpoint is neither skipped nor deleted.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.core.backend import Array
from tensorgrad.core.errors import (
    ArgumentError,
    CheckpointError,
    DamagedError,
    DataError,
    ShapeError,
)
from tensorgrad.io.files import delete, make_folder, replacing, sync_folder, to_json
from tensorgrad.io.readers import JSON_BYTES, no_link, open_regular, parse_json, read_json
from tensorgrad.io.weights import ArrayFile, save_arrays
from tensorgrad.train.pieces import Stored, open_pieces, read_whole

_log = logging.getLogger(__name__)
_FORMAT = 1
_STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_CHUNK = 1 << 25
_STATE_BYTES = JSON_BYTES // 2  # the rest is for the names of the files
BEST_BY = "validation_loss"
# The entries of a state that `PendingCheckpoint` adds.
RESERVED = ("format", "step", "files", "crc32")
# The errors of a file that is missing or of another kind.
_GONE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

Rest = Callable[[], object]


def no_rest() -> None:
    """Go on at once; see `PendingCheckpoint.write`."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are complete and match their recorded sums.

    Args:
        path: its folder.
        state: the content of state.json: step, settings, metrics and what else the run needs.

    Example:
        >>> from tensorgrad.train import Trainer, TrainSettings, load_latest
        >>> model, settings = tg.nn.Linear(3, 1), TrainSettings(steps=2, device="cpu", plot=False)
        >>> optimizer = settings.optimizer(model.named_parameters())
        >>> loss, rate = lambda x: model(x).mean(), settings.learning_rate
        >>> batches = lambda step: iter([(np.ones((8, 3), "float32"),)] * 2)
        >>> outcome = Trainer(model, optimizer, loss, batches, rate, settings, "runs/1").run()
        >>> checkpoint: tg.train.Checkpoint = load_latest("runs/1/checkpoints")
        >>> checkpoint.step, checkpoint.arrays("model")["weight"].shape
        (2, (1, 3))
    """

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""
        return int(self.state["step"])

    def entry(self, name: str) -> Any:
        """Return an entry of the state.

        Raises:
            CheckpointError: the state has no such entry.
        """
        if name not in self.state:
            raise CheckpointError(f"load: {self.path} has no {name!r}, expected an entry of a run")
        return self.state[name]

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an entry of the state.

        Raises:
            CheckpointError: the state has no such entry, or it is not a mapping.
        """
        return self._mapping(name, self.entry(name), "a mapping")

    def settings(self, name: str) -> Mapping[str, Any]:
        """Return an entry of the state that says what the run was started with; {} if it has none.

        Raises:
            CheckpointError: the entry is not a mapping.
        """
        return self._mapping(name, self.state.get(name, {}), "settings")

    def _mapping(self, name: str, found: Any, expected: str) -> Mapping[str, Any]:
        if not isinstance(found, Mapping):
            raise CheckpointError(
                f"load: {self.path}: {name} is {found!r:.80}, expected {expected}"
            )
        return found

    def pieces(self, stack: ExitStack) -> dict[str, list[Stored]]:
        """Return which pieces of which arrays the files have; `stack` closes the files.

        Returns:
            All pieces of each name, "model/NAME" or "optimizer/STATE/NAME".
        Raises:
            CheckpointError: a file is damaged or does not describe its arrays.
        """
        return open_pieces(self.path, self.entry("files"), stack)

    def arrays(self, name: str) -> dict[str, np.ndarray[Any, Any]]:
        """Return the whole arrays of a group, which one process or any number of ranks have saved.

        Args:
            name: "model" or "optimizer".
        Raises:
            CheckpointError: a file is damaged, or no file has some elements of an array.
        """
        arrays = {}
        with ExitStack() as stack:
            for full_name, stored in self.pieces(stack).items():
                group, _, own_name = full_name.partition("/")
                if group == name:
                    try:
                        arrays[own_name] = read_whole(full_name, stored)
                    except ShapeError as error:
                        raise CheckpointError(f"load: {self.path} is not whole: {error}") from error
        return arrays


class OneWriter:
    """The process that writes a checkpoint alone; several ranks have parallel/checkpoint.py."""

    alone = True
    rank = 0

    def on_all(self, act: Callable[[], Any]) -> list[Any]:
        """Return the results of a function on all ranks that write; an error is one of all."""
        return [act()]

    def on_main(self, act: Callable[[], str]) -> str:
        """Return the result of a function on one rank, on all of them."""
        return act()

    def load_latest(self, folder: Path) -> Checkpoint | None:
        """Open the newest intact checkpoint, the same on all ranks; see the function."""
        return load_latest(folder)


@dataclass(frozen=True)
class Contents:
    """The file that this process writes of a checkpoint.

    Attributes:
        file: its name.
        arrays: by their names in the file.
        header: the metadata of the file.
        numbers: of the optimizer, for the state.
        writers: the ranks that write the checkpoint together.
    """

    file: str
    arrays: Mapping[str, Array]
    header: Mapping[str, str]
    numbers: Mapping[str, Any] | None
    writers: OneWriter


class PendingCheckpoint:
    """A checkpoint that is being written: first `write`, then `finish`, on all ranks that write.

    Args:
        folder: of the checkpoints of a run; created if missing, but not its parent.
        step: the number of optimizer steps done.
        contents: arrays that must not change before `write` has ended.
        state: what `to_json` takes; entries that are RESERVED are replaced.
        keep: 1 or more.
    Attributes:
        is_written: whether all is written, without an error.
    Raises:
        ArgumentError, DtypeError: the state could not be read again.
        CheckpointError: no folder can be made for it; earlier ones are unchanged.
    """

    def __init__(
        self, folder: Path, step: int, contents: Contents, state: Mapping[str, Any], keep: int = 2
    ) -> None:
        numbers = contents.numbers
        self._state = state if numbers is None else {**state, "optimizer": numbers}
        check_state(self._state)
        self._contents, self._writers = contents, contents.writers
        self._step, self._keep = step, keep
        self._files: dict[str, dict[str, int]] = {}
        self._error: Exception | None = None
        self.is_written = False
        self._target = folder / f"step-{step:08d}"
        self._new = folder / f".{self._target.name}-{secrets.token_hex(4)}.tmp"
        self._new = folder / self._writers.on_main(self._begin)
        self._path = self._new / contents.file

    def write(self, rest: Rest = no_rest) -> None:
        """Write the arrays and read them back, in any thread; `finish` raises an error of this.

        Args:
            rest: called after each chunk of 32 MB, to leave the processor to others.
        """
        path, contents = self._path, self._contents
        try:
            # The state has the sum.
            sums = save_arrays(path, contents.arrays, contents.header, with_sum=False, rest=rest)
            _compare(path, sums, rest)
            with ArrayFile(path):
                self._files[path.name] = sums
        except Exception as error:
            self._error = error
        except BaseException:
            self.abandon()
            raise
        del self._contents, contents  # free the memory
        self.is_written = self._error is None

    def finish(self) -> Path:
        """Let the checkpoint appear, and delete older ones; return its folder.

        Raises:
            CheckpointError: it cannot be written (a full disk); earlier ones are unchanged.
        """
        on_main = self._writers.on_main
        try:
            parts = self._writers.on_all(self._written)
            files = {name: sums for part in parts for name, sums in part.items()}
            on_main(lambda: self._appear(files))
        except (OSError, CheckpointError) as error:
            reason = error
            raise CheckpointError(on_main(lambda: str(self._failure(reason)))) from error
        except BaseException:
            self.abandon()
            raise
        on_main(self._settle)
        return self._target

    def abandon(self) -> None:
        """Delete what this process has written; the next checkpoint deletes what is left."""
        for path in (self._path, self._new / _STATE):
            path.unlink(missing_ok=True)
        if self._writers.alone:  # others may still write into it
            shutil.rmtree(self._new, ignore_errors=True)

    def _begin(self) -> str:
        """Make the temporary folder, and return its name; delete left-over ones."""
        new, folder = self._new, self._new.parent
        no_link(folder)  # it could lead to files of the user, which would be deleted as older ones
        try:
            if not folder.is_dir():
                os.stat(folder.parent)  # fails where the folder of the run was removed
                make_folder(folder)
            _delete_leftovers(folder)
            new.mkdir()
        except OSError as error:
            raise self._failure(error) from error
        return new.name

    def _written(self) -> dict[str, dict[str, int]]:
        """Return the sums of this process's files, or raise the error of writing them."""
        if self._error is not None:
            raise self._error
        return self._files

    def _appear(self, files: Mapping[str, Mapping[str, int]]) -> str:
        """Write the state, and rename the folder; a damaged one of this step is replaced."""
        new, target, damaged = self._new, self._target, None
        with replacing(new / _STATE) as file:
            others = {key: value for key, value in self._state.items() if key not in RESERVED}
            content = {"format": _FORMAT, "step": self._step, **others, "files": files}
            file.write(to_json({**content, "crc32": _crc32_of_json(content)}, 1, "save").encode())
        _read_state(new)  # before older ones are deleted
        if target.exists():
            damaged = _doomed(target)
            target.rename(damaged)
        try:
            new.rename(target)
        except OSError:
            if damaged is not None:
                damaged.rename(target)
            raise
        return ""

    def _settle(self) -> str:
        """Sync the folder to the disk, and delete older checkpoints."""
        folder = self._target.parent
        try:
            sync_folder(folder)
        except OSError as error:
            raise CheckpointError(
                f"save: {self._target} is written but may be lost with the power: {error}; nothing "
                "was deleted"
            ) from error
        prune_checkpoints(folder, self._step, self._keep)
        return ""

    def _failure(self, reason: object) -> CheckpointError:
        """Delete the folder; return the error with the reason and what is still there."""
        shutil.rmtree(self._new, ignore_errors=True)
        try:
            others = list_checkpoints(self._target.parent)
        except OSError:
            kept = "earlier ones are unchanged"
        else:
            kept = f"{others[0]} and earlier ones are unchanged" if others else "none is there"
        return CheckpointError(f"save: cannot write {self._target}: {reason}; {kept}")


def save_checkpoint(
    folder: Path, step: int, contents: Contents, state: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write a checkpoint, then delete all but the newest `keep` and the best.

    The best is the one with the lowest `state["metrics"]["validation_loss"]`.

    Args:
        folder, step, contents, state, keep: as for `PendingCheckpoint`.
    Returns:
        The checkpoint's folder.
    Raises:
        ArgumentError, DtypeError: the state could not be read again.
        CheckpointError: it cannot be written (a full disk); earlier ones are unchanged.
    """
    pending = PendingCheckpoint(folder, step, contents, state, keep)
    pending.write()
    return pending.finish()


def check_state(state: Mapping[str, Any]) -> None:
    """Check before any work that the state of a checkpoint could be read again.

    Raises:
        ArgumentError: it is too large, or has a value that `to_json` refuses.
        DtypeError: a value is of a kind that JSON does not support.
    """
    size = len(to_json(state, 1, "save"))
    if size > _STATE_BYTES:
        raise ArgumentError(
            f"save: the state has {size:,} bytes, expected at most {_STATE_BYTES:,}"
        )


def load_checkpoint(path: str | os.PathLike[str], part: int = 0, parts: int = 1) -> Checkpoint:
    """Open a checkpoint after comparing its files with their recorded sums.

    Args:
        path: its folder.
        part, parts: compare files part, part + parts, ...: ranks divide the files among them.

    Returns:
        The checkpoint, whose arrays are not read yet.

    Raises:
        DamagedError: the checkpoint is missing or damaged; the message names the file.
        CheckpointError: the system cannot read it, or it has another format.

    Example:
        >>> from tensorgrad.train import Trainer, TrainSettings, load_checkpoint
        >>> model, settings = tg.nn.Linear(3, 1), TrainSettings(steps=2, device="cpu", plot=False)
        >>> optimizer = settings.optimizer(model.named_parameters())
        >>> loss, rate = lambda x: model(x).mean(), settings.learning_rate
        >>> batches = lambda step: iter([(np.ones((8, 3), "float32"),)] * 2)
        >>> outcome = Trainer(model, optimizer, loss, batches, rate, settings, "runs/2").run()
        >>> load_checkpoint(outcome.checkpoint).arrays("model")["weight"].shape
        (1, 3)
    """
    path = Path(path)
    state = _read_state(path)
    for name, expected in list(state["files"].items())[part::parts]:
        _compare(path / name, expected)
    return Checkpoint(path, state)


def open_state(path: Path) -> Checkpoint:
    """Open a checkpoint by its state alone: its other files may be damaged.

    Raises:
        DamagedError, CheckpointError: as for `load_checkpoint`.
    """
    return Checkpoint(path, _read_state(path))


def _read_state(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint, checked by its own CRC-32; errors as `load_checkpoint`."""
    try:
        state = read_json(path / _STATE)
    except _GONE as error:
        raise DamagedError(f"load: {path} has no {_STATE}, expected a checkpoint") from error
    except OSError as error:
        raise _unreadable(path / _STATE, error) from error
    except DataError as error:
        raise DamagedError(f"load: {path / _STATE} is damaged: {error}") from error
    try:
        version = state["format"]
        if version != _FORMAT:
            raise CheckpointError(f"load: {path} has format {version!r:.40}, expected {_FORMAT}")
        # Old checkpoints have none.
        if state.pop("crc32", None) not in (None, _crc32_of_json(state)):
            raise ValueError("it has another CRC-32 than when it was written")
        step, files = state["step"], state["files"]
        if not isinstance(files, Mapping):
            raise ValueError(f"files is {files!r:.80}, expected a mapping")
        numbers = [step, *(sums[kind] for sums in files.values() for kind in ("bytes", "crc32"))]
        plain = all(Path(name).name == name and "\0" not in name for name in files)  # in here
        if not plain or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(
                f"step is {step!r:.40} and files {files!r:.200}, expected names and whole numbers"
            )
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"load: {path / _STATE} is damaged: {error!r:.200}") from error
    return state


def _compare(file: Path, expected: Mapping[str, int], rest: Rest = no_rest) -> None:
    """Raise DamagedError unless a file matches its recorded sums."""
    try:
        found = no_link(file).stat()
        if not stat.S_ISREG(found.st_mode):
            raise DamagedError(f"load: {file} is not a file")
        if found.st_size != expected["bytes"]:
            raise DamagedError(
                f"load: {file} has {found.st_size:,} bytes, expected {expected['bytes']:,}: it is "
                "damaged"
            )
        if _crc32(file, rest) != expected["crc32"]:
            raise DamagedError(f"load: {file} has another CRC-32 than when it was written")
    except DataError as error:
        raise DamagedError(f"load: {error}") from error
    except _GONE as error:
        raise DamagedError(
            f"load: {file} is missing, expected {expected['bytes']:,} bytes"
        ) from error
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"load: {file} cannot be read: {error.strerror}; it may be whole: try again, or move "
        f"{file.parent} away to resume from an earlier checkpoint"
    )


def load_latest(
    folder: str | os.PathLike[str], load: Callable[[Path], Checkpoint] = load_checkpoint
) -> Checkpoint | None:
    """Open the newest intact checkpoint; warn of each damaged one that is skipped.

    Going back costs only time: the steps since are repeated with the same result.

    Args:
        folder: of the checkpoints of a run.
        load: opens one, or raises DamagedError to skip it.

    Returns:
        The checkpoint; None if the folder has none.

    Raises:
        CheckpointError: all checkpoints are damaged, or the system cannot read one that may be
            intact.
        OSError: the system cannot list the folder.

    Example:
        >>> from tensorgrad.train import Trainer, TrainSettings, load_latest
        >>> model, settings = tg.nn.Linear(3, 1), TrainSettings(steps=2, device="cpu", plot=False)
        >>> optimizer = settings.optimizer(model.named_parameters())
        >>> loss, rate = lambda x: model(x).mean(), settings.learning_rate
        >>> batches = lambda step: iter([(np.ones((8, 3), "float32"),)] * 2)
        >>> outcome = Trainer(model, optimizer, loss, batches, rate, settings, "runs/3").run()
        >>> load_latest("runs/3/checkpoints").step
        2
    """
    folder, reasons = Path(folder), []
    for path in list_checkpoints(folder):
        try:
            found = load(path)
        except DamagedError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            _log.warning("%s; going back to %s", reason, path)
        return found
    if reasons:
        raise CheckpointError(f"load: no checkpoint in {folder} is intact: {'; '.join(reasons)}")
    return None


def run_checkpoint(folder: Path, checkpoint: str) -> Checkpoint:
    """Return a checkpoint of the run in a folder.

    Args:
        folder: of the run.
        checkpoint: "best" by validation loss, or "last".
    Raises:
        CheckpointError: there is none, or none that is intact.
    """
    checkpoints = folder / "checkpoints"
    found = load_latest(checkpoints) if checkpoint == "last" else load_best(checkpoints)
    if found is None:
        raise CheckpointError(f"load: {checkpoints} has no checkpoint, expected one or more")
    return found


def load_best(folder: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint with the lowest validation loss, or the newest where none was measured.

    Args:
        folder: of the checkpoints of a run.

    Returns:
        The checkpoint, whose arrays are not read yet.

    Raises:
        CheckpointError: the folder has no checkpoint, the best is damaged, or the system cannot
            read one.

    Example:
        >>> from tensorgrad.train import Trainer, TrainSettings, load_best
        >>> model, settings = tg.nn.Linear(3, 1), TrainSettings(steps=2, device="cpu", plot=False)
        >>> optimizer = settings.optimizer(model.named_parameters())
        >>> loss, rate = lambda x: model(x).mean(), settings.learning_rate
        >>> batches = lambda step: iter([(np.ones((8, 3), "float32"),)] * 2)
        >>> outcome = Trainer(model, optimizer, loss, batches, rate, settings, "runs/4").run()
        >>> load_best("runs/4/checkpoints").path.name
        'step-00000002'
    """
    path = best_checkpoint(Path(folder))
    if path is None:
        raise CheckpointError(f"load: {folder} has no checkpoint, expected one or more")
    return load_checkpoint(path)


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `load_best` opens; None if there is none.

    Raises:
        CheckpointError: the system cannot read one.
    """
    states, paths = {}, list_checkpoints(folder)
    for path in paths:
        try:
            states[path] = _read_state(path)
        except DamagedError as error:
            _log.warning("%s; skipping it", error)
    return _best(states) or next(iter([*states, *paths]), None)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the newest first, damaged or not; [] if it is missing.

    Raises:
        DataError: the folder, or a checkpoint in it, is a symbolic link.
        OSError: the system cannot list it.
    """
    try:
        with os.scandir(no_link(folder)) as entries:
            found = [no_link(folder / entry.name) for entry in entries if _is_checkpoint(entry)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=step_of, reverse=True)


def _is_checkpoint(entry: os.DirEntry[str]) -> bool:
    return _NAME.fullmatch(entry.name) is not None and entry.is_dir()


def check_same(checkpoint: Checkpoint, name: str, expected: Mapping[str, Any]) -> None:
    """Raise CheckpointError where `state[name]` differs from the expected, naming each key."""
    found = checkpoint.settings(name)
    expected = parse_json(to_json(expected, op=name), name)  # tuples become lists, as in the file
    wrong = [
        f"{key!s:.80} is {found.get(key)!r:.80} there, expected {expected.get(key)!r:.80}"
        for key in dict.fromkeys([*expected, *found])
        if found.get(key) != expected.get(key)
    ]
    if wrong:
        raise CheckpointError(
            f"load: {checkpoint.path} does not match the {name} of this run: "
            f"{'; '.join(wrong):.1000}"
        )


def check_arrays(
    checkpoint: Checkpoint, found: Mapping[str, Array], expected: Mapping[str, Array]
) -> None:
    """Raise CheckpointError where names, shapes or dtypes differ, naming the first few."""
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name:.80} is not expected" for name in found if name not in expected]
    wrong += [
        f"{name} is {_kind(found[name])} there, expected {_kind(expected[name])}"
        for name in expected
        if name in found and _kind(found[name]) != _kind(expected[name])
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"load: {checkpoint.path} was saved from a different model: "
            f"{'; '.join(wrong[:3])}{more}"
        )


def _kind(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, one of `list_checkpoints`."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _crc32(path: Path, rest: Rest = no_rest) -> int:
    total = 0
    with open_regular(path) as file:
        buffer = memoryview(bytearray(min(_CHUNK, os.fstat(file.fileno()).st_size + 1)))
        while size := file.readinto(buffer):  # type: ignore[attr-defined]
            total = zlib.crc32(buffer[:size], total)
            rest()
    return total


def _crc32_of_json(state: Mapping[str, Any]) -> int:
    return zlib.crc32(to_json(state, 1).encode())


def _best(states: Mapping[Path, Mapping[str, Any]]) -> Path | None:
    """Return the checkpoint with the lowest validation loss; the earliest of equals."""
    losses = []
    for path, state in states.items():
        metrics = state.get("metrics")
        loss = metrics.get(BEST_BY) if isinstance(metrics, Mapping) else None
        if isinstance(loss, int | float):
            losses.append((loss, step_of(path), path))
    return min(losses)[2] if losses else None


def prune_checkpoints(folder: Path, step: int, keep: int) -> None:
    """Delete all checkpoints but the newest `keep` up to a step, and the best.

    Checkpoints beyond the step are damaged, or the run would not have gone back: they do not count.
    One that cannot be read may be the best, and stays. A checkpoint that cannot be deleted gives a
    warning, and is tried again at the next checkpoint.

    Args:
        folder: of the checkpoints of a run.
        step: of the newest checkpoint in use.
        keep: 1 or more.
    """
    try:
        _delete_leftovers(folder)
        paths = list_checkpoints(folder)
        states = {}
        for path in paths:
            try:
                states[path] = _read_state(path)
            except CheckpointError as error:
                _log.warning("%s; it is not deleted", error)
        best = _best(states)
        for path in [path for path in paths if step_of(path) <= step][keep:]:
            if path in states and path != best:
                # Renamed first: a folder that is half deleted must not look like a checkpoint.
                doomed = _doomed(path)
                path.rename(doomed)
                delete(doomed)
    except OSError as error:
        _log.warning("older checkpoints could not be deleted: %s", error)


def _delete_leftovers(folder: Path) -> None:
    """Delete half written or half deleted folders of killed processes."""
    for left in folder.glob(".step-*.tmp"):
        delete(left)


def _doomed(path: Path) -> Path:
    """Return the temporary name of a checkpoint to delete, now or by the next process."""
    return path.with_name(f".{path.name}-{secrets.token_hex(4)}.tmp")
