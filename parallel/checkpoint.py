"""Checkpoints that all ranks write together, and that any other number of ranks can load.

    checkpoints/step-00000500/
        rank-00000.safetensors   the pieces that rank 0 writes, 1-D, with what each is of in the
        rank-00001.safetensors   header: full name and shape, box and range (placement.py)
        state.json               step, generator, metrics; size and CRC-32 of the other files

What several ranks hold is written once, each of them taking a share. The folder is made aside and
renamed by rank 0 when all files are on the disk, as for one process (train/checkpoint.py): a kill
at any moment leaves the earlier ones as they were. To load, the ranks share the comparison with
the sums; then each reads, of each file, only what it needs. A checkpoint of one process is read in
the same way, its arrays being pieces too. Tests: tests/parallel/test_checkpoint.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tensorgrad import backend
from tensorgrad.autograd import mark_assigned
from tensorgrad.backend import Array, Shape
from tensorgrad.dtypes import Dtype
from tensorgrad.errors import ArgumentError, CheckpointError, DamagedError, ShapeError
from tensorgrad.nn import Module
from tensorgrad.optim import Optimizer
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.placement import ArrayPiece, Placement, copies, owners
from tensorgrad.readers import parse_json
from tensorgrad.train import checkpoint as files
from tensorgrad.train.checkpoint import Checkpoint
from tensorgrad.train.ranks import Ranks
from tensorgrad.weights import ArrayFile, save_arrays

_PIECES = "pieces"  # the entry of a file's header that says what its arrays are
Held = Sequence[tuple[ArrayPiece, Array]]
Json = Any


class Shards:
    """What the ranks hold of a run, to save it and to load it. All ranks call the same methods.

    Args:
        comm: the ranks.
        held: this rank's pieces, each with the 1-D view of live memory that has its elements.
            Names are those of the checkpoint: "model/NAME" and "optimizer/STATE/NAME". What
            several ranks hold must be equal when it is saved.
    Raises:
        ArgumentError: an array is not as long as its piece, or a name has several full shapes.
    """

    def __init__(self, comm: Comm, held: Held) -> None:
        """Agree on who writes what."""
        for piece, array in held:
            if array.shape != (piece.size,):
                raise ArgumentError(
                    f"Shards: {piece.placement.name} has an array of shape {array.shape}, "
                    f"expected ({piece.size},)"
                )
        self._comm, self._held = comm, list(held)
        mine = [piece.to_json() for piece, _ in held]
        everyone = [
            [ArrayPiece.from_json(each) for each in pieces]
            for pieces in comm.all_gather_objects(mine)
        ]
        shapes: dict[str, Shape] = {}
        for placement in (piece.placement for pieces in everyone for piece in pieces):
            if shapes.setdefault(placement.name, placement.shape) != placement.shape:
                raise ArgumentError(
                    f"Shards: {placement.name} has the full shapes {shapes[placement.name]} and "
                    f"{placement.shape}, expected one"
                )
        self._names = set(shapes)
        self._written = _parts(self._held, owners(everyone)[comm.rank])

    def save(self, folder: Path, step: int, state: Mapping[str, Json], keep: int = 2) -> Path:
        """Write a checkpoint, as `tensorgrad.train.checkpoint.save_checkpoint` does.

        Args:
            folder: where the checkpoints of a run are, seen by all ranks.
            step: how many optimizer steps were done.
            state: anything that JSON can hold; that of rank 0 counts.
            keep: how many of the newest to keep besides the best, 1 or more.
        Returns:
            The checkpoint's folder.
        Raises:
            CheckpointError: a rank cannot write its part; earlier checkpoints are unchanged.
        """
        comm = self._comm
        new = folder / _on_main(comm, lambda: files.begin_checkpoint(folder, step).name)
        try:
            sums = dict(_on_all(comm, lambda: self._write(new)))
        except CheckpointError as error:
            reason = error
            raise CheckpointError(
                _on_main(comm, lambda: str(files.abandon_checkpoint(new, reason)))
            ) from error
        return Path(
            _on_main(comm, lambda: str(files.finish_checkpoint(new, step, state, sums, keep)))
        )

    def load(self, checkpoint: Checkpoint) -> None:
        """Take over the pieces that this rank holds, one after the other.

        Nothing changes on any rank when something does not fit.

        Raises:
            CheckpointError: something is missing, has another shape or dtype, or is not expected.
        """
        with ExitStack() as stack:
            stored: dict[str, list[Stored]] = {}
            _on_all(self._comm, lambda: self._check(checkpoint, stored, stack))
            for piece, array in self._held:
                if piece.size:
                    values = read_piece(piece, stored[piece.placement.name])
                    array[...] = backend.asarray_like(values, array)

    def _write(self, new: Path) -> tuple[str, dict[str, int]]:
        """Write this rank's file; return its name and sums."""
        path = new / f"rank-{self._comm.rank:05d}.safetensors"
        names = [f"{piece.placement.name}@{i}" for i, (piece, _) in enumerate(self._written)]
        pieces = {name: each[0].to_json() for name, each in zip(names, self._written, strict=True)}
        arrays = {name: each[1] for name, each in zip(names, self._written, strict=True)}
        save_arrays(path, arrays, {_PIECES: json.dumps(pieces)}, with_sum=False)
        return path.name, files.sums_of(path)

    def _check(
        self, checkpoint: Checkpoint, stored: dict[str, list[Stored]], stack: ExitStack
    ) -> None:
        """Open the files, fill `stored`, and make sure that all pieces can be made of them."""
        stored.update(open_pieces(checkpoint, stack))
        mine = {
            piece.placement.name: _Kind(array.dtype, piece.placement.shape)
            for piece, array in self._held
            if piece.size
        }
        others = self._names - mine.keys()
        found = {
            name: _Kind(parts[0].dtype, parts[0].piece.placement.shape)
            for name, parts in stored.items()
            if name not in others and parts[0].piece.placement.size
        }
        files.check_arrays(checkpoint, found, mine)
        for piece, _ in self._held:
            if piece.size:
                try:
                    copies(piece, [part.piece for part in stored[piece.placement.name]])
                except ShapeError as error:
                    raise CheckpointError(
                        f"load: {checkpoint.path} is not whole: {error}"
                    ) from error


class _Kind(NamedTuple):
    dtype: Dtype
    shape: Shape


class Stored(NamedTuple):
    """A piece that lies in a file."""

    piece: ArrayPiece
    name: str
    file: ArrayFile

    @property
    def dtype(self) -> Dtype:
        """Of its elements."""
        return self.file.dtype(self.name)


def _parts(held: Held, wanted: Sequence[ArrayPiece]) -> list[tuple[ArrayPiece, Array]]:
    """Return pieces that are parts of those that are held, with their elements."""
    by_box: dict[Placement, list[tuple[ArrayPiece, Array]]] = {}
    for piece, array in held:
        by_box.setdefault(piece.placement, []).append((piece, array))
    return [
        next(
            (piece, array[piece.start - whole.start : piece.stop - whole.start])
            for whole, array in by_box[piece.placement]
            if whole.start <= piece.start and piece.stop <= whole.stop
        )
        for piece in wanted
    ]


def pieces_of(
    model: Module, optimizer: Optimizer, placements: Mapping[str, Placement] | None = None
) -> list[tuple[ArrayPiece, Array]]:
    """Return what a rank holds of the model and the optimizer: what it updates, and the buffers.

    Args:
        model: what this rank has of the model.
        optimizer: of its parameters; of what ranks have shards of, the shard of this one.
        placements: by the name in `model`, which box of which array of the whole model it is;
            what is not there is whole and has the same name.
    Raises:
        ArgumentError: a buffer is not contiguous.
    """

    def named(kind: str, name: str, shape: Shape) -> Placement:
        box = (placements or {}).get(name) or Placement(name, shape)
        return replace(box, name=f"{kind}/{box.name}")

    held = []
    for name, values, place, data in optimizer.flat.owned():
        span, shape = (values.start, values.stop), optimizer.flat.slots[name].shape
        held.append((ArrayPiece(named("model", name, shape), *span), data))
        for kind, buffer in optimizer.state.items():
            held.append((ArrayPiece(named(f"optimizer/{kind}", name, shape), *span), buffer[place]))
    for name, tensor in model.state_dict().items():
        trained = name in optimizer.flat.slots
        if trained and tensor.size:
            continue
        if not tensor.data.flags.c_contiguous:
            raise ArgumentError(f"pieces_of: {name} has strides, expected it in C order")
        held.append((named("model", name, tensor.shape).piece, tensor.data.reshape(-1)))
        if trained:  # an empty one: no stretch of the buffers
            for kind, buffer in optimizer.state.items():
                held.append((named(f"optimizer/{kind}", name, tensor.shape).piece, buffer[:0]))
    return held


def save_pieces(
    comm: Comm,
    folder: Path,
    step: int,
    model: Module,
    optimizer: Optimizer,
    state: Mapping[str, Json],
    keep: int,
    placements: Mapping[str, Placement] | None = None,
) -> Path:
    """Write a checkpoint of which each rank writes a part; for `Ranks.save` and with its arguments.

    Raises:
        CheckpointError: a rank cannot write its part; earlier checkpoints are unchanged.
    """
    shards = Shards(comm, pieces_of(model, optimizer, placements))
    return shards.save(folder, step, {**state, "optimizer": optimizer.numbers()}, keep)


def load_pieces(
    comm: Comm,
    checkpoint: Checkpoint,
    model: Module,
    optimizer: Optimizer,
    placements: Mapping[str, Placement] | None = None,
) -> None:
    """Take over from any checkpoint what this rank updates; for `Ranks.load`.

    Parameters of which this rank updates a shard alone get that shard: the ranks then gather them.

    Raises:
        CheckpointError: it does not fit; then nothing changes.
    """
    shards = Shards(comm, pieces_of(model, optimizer, placements))
    numbers, before = checkpoint.entry("optimizer"), optimizer.numbers()
    try:
        optimizer.load_numbers(numbers)
    except CheckpointError as error:
        raise CheckpointError(f"load: {checkpoint.path}: {error}") from error
    try:
        shards.load(checkpoint)
    except BaseException:
        optimizer.load_numbers(before)
        raise
    for array in optimizer.flat.memory:
        mark_assigned(array)


def load_latest(folder: Path, comm: Comm) -> Checkpoint | None:
    """Open the newest checkpoint that is whole, the same on all ranks, which share the comparison.

    Returns:
        The checkpoint; None when there is none at all.
    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
        CommError: the ranks see different checkpoints: the folder is not shared by all hosts.
    """
    everyone = _on_all(comm, lambda: [path.name for path in files.list_checkpoints(folder)])
    comm.agree("load", {"the list of checkpoints": everyone[comm.rank]})

    def load(path: Path) -> Checkpoint:
        found: list[Checkpoint] = []
        _on_all(comm, lambda: found.append(files.load_checkpoint(path, comm.rank, comm.size)))
        return found[0]

    return files.load_latest(folder, load)


class ShardedRanks(Ranks):
    """Ranks each of which has pieces of the whole: they write checkpoints together.

    A strategy sets what is below, and gathers in `after_step` what it has loaded.
    """

    _world: Comm  # all that write
    _placements: Mapping[str, Placement] | None = None  # as of `pieces_of`

    def save(
        self,
        folder: Path,
        step: int,
        model: Module,
        optimizer: Optimizer,
        state: Mapping[str, Json],
        keep: int,
    ) -> Path:
        """Write a checkpoint of which each rank writes a part; see `Ranks.save`."""
        placements = self._placements
        return save_pieces(self._world, folder, step, model, optimizer, state, keep, placements)

    def load_latest(self, folder: Path) -> Checkpoint | None:
        """Open the newest checkpoint that is whole, the same on all ranks; None without any."""
        return load_latest(folder, self._world)

    def load(self, checkpoint: Checkpoint, model: Module, optimizer: Optimizer) -> None:
        """Take over a checkpoint of one process, or of which any number of ranks have pieces."""
        load_pieces(self._world, checkpoint, model, optimizer, self._placements)
        self.after_step()


def open_pieces(checkpoint: Checkpoint, stack: ExitStack) -> dict[str, list[Stored]]:
    """Return what lies where in a checkpoint, cut into pieces or of one process.

    Args:
        checkpoint: what `load_latest` gave.
        stack: closes the files.
    Returns:
        All pieces of each name, "model/NAME" or "optimizer/STATE/NAME".
    Raises:
        CheckpointError: a file does not say what its arrays are.
    """
    found: dict[str, list[Stored]] = {}
    for name in checkpoint.entry("files"):
        path = checkpoint.path / name
        file = stack.enter_context(ArrayFile(path))
        described = file.metadata.get(_PIECES)
        try:
            pieces = None if described is None else parse_json(described, f"the header of {path}")
            for key in file.names:
                if pieces is None:  # of one process: whole arrays
                    piece = Placement(f"{path.stem}/{key}", file.shape(key)).piece
                else:
                    piece = ArrayPiece.from_json(pieces[key])
                    if file.shape(key) != (piece.size,):
                        raise ValueError(f"{key} has shape {file.shape(key)}, expected {piece}")
                found.setdefault(piece.placement.name, []).append(Stored(piece, key, file))
        except (ArgumentError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"load: {path} does not say what it holds: {error!r}") from error
    for name, parts in found.items():
        kinds = {_Kind(part.dtype, part.piece.placement.shape) for part in parts}
        if len(kinds) > 1:
            raise CheckpointError(f"load: {checkpoint.path} has {name} as {kinds}, expected one")
    return found


def read_piece(target: ArrayPiece, stored: Sequence[Stored]) -> np.ndarray[Any, Any]:
    """Return a piece, 1-D, made of stored ones, of which only what it needs is read."""
    plan = copies(target, [each.piece for each in stored])  # first: they may not make it up
    out = np.empty(target.size, stored[0].dtype)
    for number, (_, name, file) in enumerate(stored):
        mine = plan[plan[:, 0] == number]
        if len(mine):
            first, last = int(mine[0, 1]), int(mine[-1, 1] + mine[-1, 3])
            values = file.read(name, first, last)
            for _, source, place, length in mine.tolist():
                out[place : place + length] = values[source - first : source - first + length]
    return out


def _on_all(comm: Comm, act: Callable[[], Json]) -> list[Json]:
    """Do something on every rank and return all results, or raise the errors of all on all.

    They are one DamagedError only where all are: what one rank alone could not read may be whole.
    """
    result, problem, damaged = None, "", True
    try:
        result = act()
    except (CheckpointError, OSError) as error:
        problem, damaged = str(error), isinstance(error, DamagedError)
    everyone = comm.all_gather_objects([result, problem, damaged])
    problems = dict.fromkeys(problem for _, problem, _ in everyone if problem)
    if problems:
        kind = DamagedError if all(damaged for *_, damaged in everyone) else CheckpointError
        raise kind("; ".join(problems))
    return [result for result, *_ in everyone]


def _on_main(comm: Comm, act: Callable[[], str]) -> str:
    """Do something on rank 0 and return its result on all, or raise its error on all."""
    return str(_on_all(comm, lambda: act() if comm.rank == 0 else "")[0])
