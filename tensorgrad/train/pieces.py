"""The pieces in the files of a checkpoint, and whole arrays or other pieces assembled from them.

The header of each file says which pieces it has (see shards.py). They are read here, in any
process: neither the other ranks nor MPI are needed. Tests: tests/parallel/test_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from tensorgrad.core.backend import Shape
from tensorgrad.core.dtypes import Dtype, uint16
from tensorgrad.core.errors import ArgumentError, CheckpointError
from tensorgrad.io.readers import parse_json
from tensorgrad.io.weights import ArrayFile
from tensorgrad.optim.master import low_bits_of
from tensorgrad.train.placement import ArrayPiece, Placement, copies

PIECES = "pieces"  # the entry of a file's header that describes its arrays


class Kind(NamedTuple):
    """The dtype and the full shape of an array."""

    dtype: Dtype
    shape: Shape


class Stored(NamedTuple):
    """A piece in a file."""

    piece: ArrayPiece
    name: str
    file: ArrayFile

    @property
    def dtype(self) -> Dtype:
        """The dtype of its elements."""
        return self.file.dtype(self.name)

    def read(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return elements `start` to `stop` of it, 1-D."""
        return self.file.read(self.name, start, stop)


class LowBits(Stored):
    """The low bits of float32 master weights in a file, as former versions wrote them."""

    @classmethod
    def of(cls, weights: Stored, name: str) -> Self:
        """Return the low bits of weights as a piece of the given name."""
        placement = replace(weights.piece.placement, name=name)
        return cls(weights.piece._replace(placement=placement), weights.name, weights.file)

    @property
    def dtype(self) -> Dtype:
        """The dtype of its elements."""
        return uint16

    def read(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return elements `start` to `stop` of it, 1-D."""
        found: np.ndarray[Any, Any] = low_bits_of(super().read(start, stop))
        return found


def open_pieces(folder: Path, files: Iterable[str], stack: ExitStack) -> dict[str, list[Stored]]:
    """Return which pieces the files of a checkpoint have.

    Args:
        folder: of the checkpoint.
        files: the names of its safetensors files.
        stack: closes the files.
    Returns:
        All pieces of each name, "model/NAME" or "optimizer/STATE/NAME".
    Raises:
        CheckpointError: a file does not describe its arrays.
    """
    found: dict[str, list[Stored]] = {}
    for name in files:
        path = folder / name
        file = stack.enter_context(ArrayFile(path))
        described = file.metadata.get(PIECES)
        try:
            pieces = None if described is None else parse_json(described, f"the header of {path}")
            for key in file.names:
                if pieces is None:  # former versions wrote whole arrays alone without a header
                    piece = Placement(f"{path.stem}/{key}", file.shape(key)).piece
                else:
                    piece = ArrayPiece.from_json(pieces[key])
                    if file.shape(key) not in piece.shapes:
                        raise ValueError(f"{key} has shape {file.shape(key)}, expected {piece}")
                found.setdefault(piece.placement.name, []).append(Stored(piece, key, file))
        except (ArgumentError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"load: {path} does not say what it holds: {error!r}") from error
    for name, parts in found.items():
        kinds = {Kind(part.dtype, part.piece.placement.shape) for part in parts}
        if len(kinds) > 1:
            raise CheckpointError(f"load: {folder} has {name} as {kinds}, expected one")
    return found


def read_piece(target: ArrayPiece, stored: Sequence[Stored]) -> np.ndarray[Any, Any]:
    """Return a piece, 1-D, assembled from stored ones; only the needed elements are read."""
    plan = copies(target, [array.piece for array in stored])  # raises before anything is read
    out = np.empty(target.size, stored[0].dtype)
    for number, part in enumerate(stored):
        mine = plan[plan[:, 0] == number]
        if len(mine):
            first, last = int(mine[0, 1]), int(mine[-1, 1] + mine[-1, 3])
            values = part.read(first, last)
            for _, source, place, length in mine.tolist():
                out[place : place + length] = values[source - first : source - first + length]
    return out


def read_whole(name: str, stored: Sequence[Stored]) -> np.ndarray[Any, Any]:
    """Return a whole array in its full shape.

    Raises:
        ShapeError: no piece has some of its elements.
    """
    placement = Placement(name, stored[0].piece.placement.shape)
    return read_piece(placement.piece, stored).reshape(placement.shape)
