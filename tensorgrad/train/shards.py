"""The parts of a run that a process saves and loads: its shard of a checkpoint.

    checkpoints/step-00000500/
        rank-00000.safetensors   what rank 0 writes; the header says which piece each array is: full
        rank-00001.safetensors   name and shape, box and range (train/placement.py)
        state.json               step, generator, metrics; size and CRC-32 of the other files

A run in one process has one shard with everything. What several ranks hold is written once; they
divide it. A whole array keeps its name and shape in the file, other pieces are 1-D. To load, each
process reads only what it needs from each file (train/pieces.py), so any number of processes loads
what any other number has saved, and one process reads whole arrays (`Checkpoint.arrays`). Tests:
tests/parallel/test_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.dtypes import float32
from tensorgrad.core.errors import ArgumentError, CheckpointError, ShapeError
from tensorgrad.core.nodes import mark_assigned
from tensorgrad.io.files import to_json
from tensorgrad.nn import Module
from tensorgrad.optim import Optimizer
from tensorgrad.train.checkpoint import Checkpoint, Contents, OneWriter, check_arrays
from tensorgrad.train.pieces import PIECES, Kind, LowBits, Stored, read_piece
from tensorgrad.train.placement import ArrayPiece, Placement, assign_writers, copies

Held = Sequence[tuple[ArrayPiece, Array]]
Json = Any


class Shards:
    """The ranks' parts of a run, to save and load it. All ranks call the same methods.

    Args:
        writers: the ranks.
        held: this rank's pieces, each with the live memory that has its elements, 1-D; a whole
            array may have its own shape. Names are those of the checkpoint: "model/NAME" and
            "optimizer/STATE/NAME". What several ranks hold must be equal when it is saved.
    Raises:
        ArgumentError: an array has another shape than its piece, or a name several full shapes.
    """

    def __init__(self, writers: OneWriter, held: Held) -> None:
        """Agree on which rank writes which pieces."""
        for piece, array in held:
            if array.shape not in piece.shapes:
                expected = " or ".join(map(str, piece.shapes))
                raise ArgumentError(
                    f"Shards: {piece.placement.name} has an array of shape {array.shape}, "
                    f"expected {expected}"
                )
        self._writers, self._held = writers, list(held)
        mine = [piece.to_json() for piece, _ in held]
        everyone = [
            [ArrayPiece.from_json(piece) for piece in pieces]
            for pieces in writers.on_all(lambda: mine)
        ]
        shapes: dict[str, Shape] = {}
        for placement in (piece.placement for pieces in everyone for piece in pieces):
            if shapes.setdefault(placement.name, placement.shape) != placement.shape:
                raise ArgumentError(
                    f"Shards: {placement.name} has the full shapes {shapes[placement.name]} and "
                    f"{placement.shape}, expected one"
                )
        self._names = set(shapes)
        self._written = _parts(self._held, assign_writers(everyone)[writers.rank])

    def contents(self, numbers: Mapping[str, Json] | None = None) -> Contents:
        """Return the file of the pieces that this rank writes."""
        arrays, pieces = {}, {}
        for number, (piece, array) in enumerate(self._written):
            name = piece.placement.name if piece.is_whole else f"{piece.placement.name}@{number}"
            arrays[name], pieces[name] = array.reshape(piece.shapes[-1]), piece.to_json()
        header = {PIECES: to_json(pieces, op="save")}
        file = f"rank-{self._writers.rank:05d}.safetensors"
        return Contents(file, arrays, header, numbers, self._writers)

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the pieces that this rank holds, one after the other.

        An error changes nothing on any rank.

        Raises:
            CheckpointError: an array is missing, has another shape or dtype, or is not expected.
        """
        with ExitStack() as stack:
            stored: dict[str, list[Stored]] = {}
            self._writers.on_all(lambda: self._check(checkpoint, stored, stack))
            for piece, array in self._held:
                if piece.size:
                    values = read_piece(piece, stored[piece.placement.name])
                    array[...] = backend.asarray_like(values.reshape(array.shape), array)

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
        check_arrays(checkpoint, found, mine)
        for piece, _ in self._held:
            if piece.size:
                try:
                    copies(piece, [part.piece for part in stored[piece.placement.name]])
                except ShapeError as error:
                    raise CheckpointError(
                        f"load: {checkpoint.path} is not whole: {error}"
                    ) from error


def _parts(held: Held, wanted: Sequence[ArrayPiece]) -> list[tuple[ArrayPiece, Array]]:
    """Return the wanted parts of the held pieces, with their elements."""
    by_box: dict[Placement, list[tuple[ArrayPiece, Array]]] = {}
    for piece, array in held:
        by_box.setdefault(piece.placement, []).append((piece, array))
    return [
        next(
            (piece, array if piece == whole else array.reshape(-1)[_place(piece, whole)])
            for whole, array in by_box[piece.placement]
            if whole.start <= piece.start and piece.stop <= whole.stop
        )
        for piece in wanted
    ]


def _place(piece: ArrayPiece, whole: ArrayPiece) -> slice:
    """Return the place of a piece in one that has all its elements."""
    return slice(piece.start - whole.start, piece.stop - whole.start)


def pieces_of(
    model: Module, optimizer: Optimizer, placements: Mapping[str, Placement] | None = None
) -> list[tuple[ArrayPiece, Array]]:
    """Return what a rank holds of the model and the optimizer: what it updates, and the buffers.

    Args:
        model: this rank's part of the model.
        optimizer: of its parameters. Where ranks shard them, it has this rank's shards.
        placements: by the name in `model`, the box of an array of the whole model; arrays without
            an entry are whole and have the same name.
    """

    def named(kind: str, name: str, shape: Shape) -> Placement:
        box = (placements or {}).get(name) or Placement(name, shape)
        return replace(box, name=f"{kind}/{box.name}")

    held = []
    for name, values, _, data in optimizer.flat.parameter_shards():
        span, shape = (values.start, values.stop), optimizer.flat.slots[name].shape
        held.append((ArrayPiece(named("model", name, shape), *span), data))
    for kind, name, shape, values, array in optimizer.state_shards():
        placement = named(f"optimizer/{kind}", name, shape)
        if kind in optimizer.slots:  # whole on each rank
            placement = Placement(placement.name, shape)
        held.append((ArrayPiece(placement, values.start, values.stop), array))
    for name, tensor in model.state_dict().items():
        trained = name in optimizer.flat.slots
        if trained and tensor.size:
            continue
        held.append((named("model", name, tensor.shape).piece, tensor.data))
        if trained:  # empty, so it has no range of the flat buffers
            for kind, buffer in optimizer.state.items():
                if kind not in optimizer.slots and name in optimizer.entries(kind):
                    held.append((named(f"optimizer/{kind}", name, tensor.shape).piece, buffer[:0]))
    return held


def load_pieces(
    writers: OneWriter,
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
    shards = Shards(writers, pieces_of(model, optimizer, placements))
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
