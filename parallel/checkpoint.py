"""Sharded checkpoints: all ranks write them together, and any other number of ranks can load them.

    checkpoints/step-00000500/
        rank-00000.safetensors   the pieces that rank 0 writes, 1-D; the header says what each is:
        rank-00001.safetensors   full name and shape, box and range (tensorgrad/train/placement.py)
        state.json               step, generator, metrics; size and CRC-32 of the other files

What several ranks hold is written once; they divide it. The folder is created under another name
and renamed by rank 0 when all files are on the disk, as for one process (train/checkpoint.py). So
killing a rank at any moment leaves the earlier checkpoints intact. To load, the ranks divide the
verification of the checksums; then each reads only what it needs from each file, by
train/pieces.py. A checkpoint of one process is read in the same way, its arrays as pieces, and one
process reads the pieces of ranks (`Checkpoint.arrays`). Tests: tests/parallel/test_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.dtypes import float32
from tensorgrad.core.errors import ArgumentError, CheckpointError, DamagedError, ShapeError
from tensorgrad.core.nodes import mark_assigned
from tensorgrad.io.files import to_json
from tensorgrad.nn import Module
from tensorgrad.optim import Optimizer
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.train import checkpoint as files
from tensorgrad.train.checkpoint import Checkpoint, Contents, OneWriter, PendingCheckpoint
from tensorgrad.train.pieces import PIECES, Kind, LowBits, Stored, read_piece
from tensorgrad.train.placement import ArrayPiece, Placement, assign_writers, copies
from tensorgrad.train.strategy import Strategy

Held = Sequence[tuple[ArrayPiece, Array]]
Json = Any


class Shards:
    """The ranks' parts of a run, to save and load it. All ranks call the same methods.

    Args:
        comm: the ranks.
        held: this rank's pieces, each with the 1-D view of live memory that has its elements.
            Names are those of the checkpoint: "model/NAME" and "optimizer/STATE/NAME". What
            several ranks hold must be equal when it is saved.
    Raises:
        ArgumentError: an array is not as long as its piece, or a name has several full shapes.
    """

    def __init__(self, comm: Comm, held: Held) -> None:
        """Agree on which rank writes which pieces."""
        for piece, array in held:
            if array.shape != (piece.size,):
                raise ArgumentError(
                    f"Shards: {piece.placement.name} has an array of shape {array.shape}, "
                    f"expected ({piece.size},)"
                )
        self._comm, self._held = comm, list(held)
        mine = [piece.to_json() for piece, _ in held]
        everyone = [
            [ArrayPiece.from_json(piece) for piece in pieces]
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
        self._written = _parts(self._held, assign_writers(everyone)[comm.rank])

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
        pending = PendingCheckpoint(folder, step, self.contents(), state, keep)
        pending.write()
        return pending.finish()

    def contents(self, numbers: Mapping[str, Json] | None = None) -> Contents:
        """Return the file of the pieces that this rank writes."""
        file = f"rank-{self._comm.rank:05d}"
        named = {
            f"{p.placement.name}@{n}": (p, array) for n, (p, array) in enumerate(self._written)
        }
        pieces = to_json({name: piece.to_json() for name, (piece, _) in named.items()}, op="save")
        arrays = {name: array for name, (_, array) in named.items()}
        return Contents({file: arrays}, numbers, {file: {PIECES: pieces}}, RankWriters(self._comm))

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the pieces that this rank holds, one after the other.

        An error changes nothing on any rank.

        Raises:
            CheckpointError: an array is missing, has another shape or dtype, or is not expected.
        """
        with ExitStack() as stack:
            stored: dict[str, list[Stored]] = {}
            RankWriters(self._comm).on_all(lambda: self._check(checkpoint, stored, stack))
            for piece, array in self._held:
                if piece.size:
                    values = read_piece(piece, stored[piece.placement.name])
                    array[...] = backend.asarray_like(values, array)

    def _check(
        self, checkpoint: Checkpoint, stored: dict[str, list[Stored]], stack: ExitStack
    ) -> None:
        """Open the files, fill `stored`, and check that they contain all pieces."""
        stored.update(checkpoint.pieces(stack))
        for name in self._names - stored.keys():
            former = name.replace("optimizer/low_bits/", "optimizer/master/", 1)
            if former in stored and stored[former][0].dtype == float32:
                stored[name] = [LowBits.of(part, name) for part in stored.pop(former)]
        mine = {
            piece.placement.name: Kind(array.dtype, piece.placement.shape)
            for piece, array in self._held
            if piece.size
        }
        others = self._names - mine.keys()
        found = {
            name: Kind(parts[0].dtype, parts[0].piece.placement.shape)
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


class RankWriters(OneWriter):
    """Ranks that write a checkpoint together.

    Args:
        comm: the ranks.
    """

    alone = False

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def on_all(self, act: Callable[[], Json]) -> list[Json]:
        """Run a function on every rank and return all results, or raise the errors of all on all.

        The error is a DamagedError only if it is on all ranks: what one rank could not read may be
        intact.
        """
        result, problem, damaged = None, "", True
        try:
            result = act()
        except (CheckpointError, OSError) as error:
            problem, damaged = str(error), isinstance(error, DamagedError)
        everyone = self._comm.all_gather_objects([result, problem, damaged])
        problems = dict.fromkeys(problem for _, problem, _ in everyone if problem)
        if problems:
            kind = DamagedError if all(damaged for *_, damaged in everyone) else CheckpointError
            raise kind("; ".join(problems))
        return [result for result, *_ in everyone]

    def on_main(self, act: Callable[[], str]) -> str:
        """Run a function on rank 0 and return its result on all, or raise its error on all."""
        return str(self.on_all(lambda: act() if self._comm.rank == 0 else "")[0])


def _parts(held: Held, wanted: Sequence[ArrayPiece]) -> list[tuple[ArrayPiece, Array]]:
    """Return the wanted parts of the held pieces, with their elements."""
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
        model: this rank's part of the model.
        optimizer: of its parameters. Where ranks shard them, it has this rank's shards.
        placements: by the name in `model`, the box of an array of the whole model; arrays without
            an entry are whole and have the same name.
    Raises:
        ArgumentError: a buffer is not contiguous.
    """

    def named(kind: str, name: str, shape: Shape) -> Placement:
        box = (placements or {}).get(name) or Placement(name, shape)
        return replace(box, name=f"{kind}/{box.name}")

    held = []
    for name, values, _, data in optimizer.flat.owned():
        span, shape = (values.start, values.stop), optimizer.flat.slots[name].shape
        held.append((ArrayPiece(named("model", name, shape), *span), data))
    for kind, name, shape, values, array in optimizer.held():
        placement = named(f"optimizer/{kind}", name, shape)
        if kind in optimizer.slots:  # whole on each rank
            placement = Placement(placement.name, shape)
        held.append((ArrayPiece(placement, values.start, values.stop), array))
    for name, tensor in model.state_dict().items():
        trained = name in optimizer.flat.slots
        if trained and tensor.size:
            continue
        if not tensor.data.flags.c_contiguous:
            raise ArgumentError(f"pieces_of: {name} has strides, expected it in C order")
        held.append((named("model", name, tensor.shape).piece, tensor.data.reshape(-1)))
        if trained:  # empty, so it has no range of the flat buffers
            for kind, buffer in optimizer.state.items():
                if kind not in optimizer.slots and name in optimizer.entries(kind):
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
    """Write a sharded checkpoint.

    Args:
        comm: the ranks.
        folder, step, state, keep: as for `Shards.save`.
        model, optimizer, placements: as for `pieces_of`.
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
    """Load from any checkpoint what this rank updates; for `Strategy.load`.

    Of sharded parameters only this rank's shard is loaded; the ranks must gather them afterwards.

    Raises:
        CheckpointError: it does not match; then nothing changes.
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
    """Open the newest undamaged checkpoint, the same on all ranks, which divide the verification.

    Returns:
        The checkpoint; None without any.
    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
        CommError: the ranks see different checkpoints: the hosts do not share the folder.
    """
    writers = RankWriters(comm)
    everyone = writers.on_all(lambda: [path.name for path in files.list_checkpoints(folder)])
    comm.agree("load", {"the list of checkpoints": everyone[comm.rank]})

    def load(path: Path) -> Checkpoint:
        found: list[Checkpoint] = []
        writers.on_all(lambda: found.append(files.load_checkpoint(path, comm.rank, comm.size)))
        return found[0]

    return files.load_latest(folder, load)


class ShardedStrategy(Strategy):
    """Strategy of ranks that each hold a part of the whole, and write sharded checkpoints together.

    A strategy sets the attributes below, and gathers in `after_step` what was loaded.
    """

    _world: Comm  # all ranks that write
    _placements: Mapping[str, Placement] | None = None  # the placements of `pieces_of`

    def contents(self, model: Module, optimizer: Optimizer) -> Contents:
        """Return the pieces that this rank writes."""
        shards = Shards(self._world, pieces_of(model, optimizer, self._placements))
        return shards.contents(optimizer.numbers())

    def load_latest(self, folder: Path) -> Checkpoint | None:
        """Open the newest undamaged checkpoint, the same on all ranks; None without any."""
        return load_latest(folder, self._world)

    def load(self, checkpoint: Checkpoint, model: Module, optimizer: Optimizer) -> None:
        """Load a checkpoint of one process or of any number of ranks."""
        load_pieces(self._world, checkpoint, model, optimizer, self._placements)
        self.after_step()
