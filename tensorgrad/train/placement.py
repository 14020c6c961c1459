"""Placements: which part of which parameter a rank holds, and pure functions to divide it.

A parameter of the whole model has a full name and a full shape. A rank holds a box of it, its
`Placement`: the whole parameter, or one or several ranges along one axis. Where ranks shard flat
buffers, a rank holds only a range of the box's elements in C order: an `ArrayPiece`.

    full (4, 6)        placement: axis 1, ranges (0, 1), (3, 5)     piece: 2 to 7 of that box
    . . . . . .        x . . x x .                                  . . . . x .
    . . . . . .        x . . x x .     a box (4, 3)                 x . . x x .
    . . . . . .        x . . x x .                                  x . . . . .
    . . . . . .        x . . x x .                                  . . . . . .

Tensor parallelism makes placements with `divide`, pipelines give them the names of the whole model,
and sharded buffers hold pieces of them. Pieces are all that a checkpoint needs to load on another
mesh: the elements of a piece ascend in the C order of the full array, so the intersection of any
two pieces is a list of runs that ascend in both. Tests: tests/parallel/test_placement.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.errors import ArgumentError, ShapeError

Ranges = tuple[tuple[int, int], ...]
Runs = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Placement:
    """The box of a parameter that a rank holds: some ranges along one axis, the others whole.

    Equal boxes are equal placements: adjacent ranges are merged, and ranges that cover the whole
    axis become None, with axis 0.

    Args:
        name: of the parameter in the whole model.
        shape: of the parameter in the whole model.
        axis: the divided axis.
        ranges: (start, stop) along the axis, ascending and disjoint; the box has them side by
            side. None: the whole parameter.
    Raises:
        ArgumentError: the axis does not exist, or a range is outside it or out of order.
    """

    name: str
    shape: Shape
    axis: int = 0
    ranges: Ranges | None = None

    def __post_init__(self) -> None:
        """Check the ranges and merge adjacent ones."""
        if self.ranges is None:
            object.__setattr__(self, "axis", 0)
            return
        if not 0 <= self.axis < len(self.shape):
            raise ArgumentError(
                f"Placement: axis of {self.name} is {self.axis}, expected one of {self.shape}"
            )
        length, end = self.shape[self.axis], 0
        joined: list[tuple[int, int]] = []
        for start, stop in self.ranges:
            if not end <= start <= stop <= length:
                raise ArgumentError(
                    f"Placement: ranges of {self.name} are {self.ranges}, expected ascending and "
                    f"disjoint ones in 0 to {length}"
                )
            end = stop
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            elif start < stop:
                joined.append((start, stop))
        whole = joined == [(0, length)]
        object.__setattr__(self, "ranges", None if whole else tuple(joined))
        object.__setattr__(self, "axis", 0 if whole else self.axis)

    @property
    def box(self) -> Shape:
        """The shape of what the rank holds."""
        if self.ranges is None:
            return self.shape
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    @property
    def size(self) -> int:
        """The number of elements of the box."""
        return math.prod(self.box)

    @property
    def piece(self) -> ArrayPiece:
        """The piece with all elements of the box."""
        return ArrayPiece(self, 0, self.size)


class ArrayPiece(NamedTuple):
    """Elements `start` to `stop` of a box, in C order, as a 1-D array."""

    placement: Placement
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it has all elements of the parameter."""
        return self.placement.ranges is None and self.size == self.placement.size

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes that an array of its elements may have: 1-D, and that of a whole parameter."""
        return ((self.size,), self.placement.shape)[: 1 + self.is_whole]

    def to_json(self) -> list[Any]:
        """Return the piece as a list for JSON."""
        box = self.placement
        return [box.name, box.shape, box.axis, box.ranges, self.start, self.stop]

    @staticmethod
    def from_json(value: Sequence[Any]) -> ArrayPiece:
        """Return the piece that `to_json` encoded.

        Raises:
            ArgumentError: the value does not describe a piece.
        """
        try:
            name, shape, axis, ranges, start, stop = value
            ranges = None if ranges is None else tuple((a, b) for a, b in ranges)
            numbers = [*shape, axis, start, stop, *itertools.chain(*(ranges or ()))]
            if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
                raise ValueError(f"it has the numbers {numbers}")
            if not isinstance(name, str) or math.prod(shape) >= 2**63:
                raise ValueError(f"it is {name!r} of shape {shape}")
            box = Placement(name, tuple(shape), axis, ranges)
            piece = ArrayPiece(box, start, stop)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"ArrayPiece: got {value!r:.200}, expected what to_json gives"
            ) from error
        if not 0 <= piece.start <= piece.stop <= box.size:
            raise ArgumentError(
                f"ArrayPiece: {name} has elements {start} to {stop}, expected some of 0 to "
                f"{box.size}"
            )
        return piece


def divide(
    name: str,
    shape: Shape,
    axis: int,
    part: int,
    parts: int,
    sections: Sequence[int] | None = None,
    units: int | None = None,
) -> Placement:
    """Return the placement of one of several parts of a parameter, as equal as possible.

    Args:
        name, shape: of the parameter in the whole model.
        axis: the axis to divide.
        part: which part, 0 to parts - 1.
        parts: number of parts.
        sections: lengths along the axis that are divided separately: a joint weight of queries,
            keys and values has three, so that every part has some heads of all three.
        units: number of equal units of a section; no unit is divided, so 25 heads in 2 parts are
            12 and 13. Default: as many as parts.
    Raises:
        ArgumentError: the sections do not add up to the axis, or the part does not exist.
        ShapeError: a section is not a multiple of the units.
    """
    if not 0 <= axis < len(shape) or not 0 <= part < parts:
        raise ArgumentError(
            f"divide: {name} {shape} got axis {axis} and part {part} of {parts}, expected an axis "
            "and a part that exist"
        )
    sections = (shape[axis],) if sections is None else sections
    if sum(sections) != shape[axis]:
        raise ArgumentError(
            f"divide: sections of {name} are {tuple(sections)}, expected a sum of {shape[axis]}"
        )
    count, kind = (parts, "parts") if units is None else (units, "units")
    first, last = count * part // parts, count * (part + 1) // parts
    ranges, start = [], 0
    for length in sections:
        if length % count:
            raise ShapeError(
                f"divide: {name} has {length} rows on axis {axis}, expected a multiple of the "
                f"{count} {kind}"
            )
        unit = length // count
        ranges.append((start + first * unit, start + last * unit))
        start += length
    return Placement(name, shape, axis, tuple(ranges))


def cut_box(full: Array, placement: Placement) -> Array:
    """Return the box of a full array: a view of a single range, otherwise a copy.

    Raises:
        ShapeError: the array does not have the full shape.
    """
    if full.shape != placement.shape:
        raise ShapeError(
            f"cut: {placement.name} has shape {full.shape}, expected {placement.shape}"
        )
    if placement.ranges is None:
        return full
    before = (slice(None),) * placement.axis
    parts = [full[(*before, slice(start, stop))] for start, stop in placement.ranges]
    if len(parts) == 1:
        return parts[0]
    return backend.namespace(full).concatenate(parts or [full[(*before, slice(0))]], placement.axis)


def paste_box(box: Array, full: Array, placement: Placement) -> None:
    """Write a box to its place in a full array; the inverse of `cut_box`.

    Raises:
        ShapeError: the full array or the box does not have the shape of the placement.
    """
    if (full.shape, box.shape) != (placement.shape, placement.box):
        raise ShapeError(
            f"paste: {placement.name} has shapes {full.shape} and {box.shape}, expected "
            f"{placement.shape} and {placement.box}"
        )
    if placement.ranges is None:
        full[...] = box
        return
    before, done = (slice(None),) * placement.axis, 0
    for start, stop in placement.ranges:
        part = box[(*before, slice(done, done + stop - start))]
        full[(*before, slice(start, stop))] = part
        done += stop - start


def copies(target: ArrayPiece, sources: Sequence[ArrayPiece]) -> Runs:
    """Return the runs to copy to assemble a piece from others, each element from one of them.

    Args:
        target: the piece to assemble.
        sources: pieces of the same parameter, divided in any way; where they overlap, the run
            that begins earlier counts, and of two that begin together the first source's.
    Returns:
        (N, 4), ascending in the third column: number of the source, start in it, start in the
        target, and length of each run.
    Raises:
        ShapeError: no source has some of the elements.
    """
    found = [np.empty((0, 4), np.int64)]
    for number, source in enumerate(sources):
        meeting = _intersect(target, source)
        numbers = np.full(len(meeting), number)
        found.append(np.stack([numbers, meeting[:, 1], meeting[:, 0], meeting[:, 2]], 1))
    runs: Runs = np.concatenate(found)
    runs = runs[np.lexsort((runs[:, 0], runs[:, 2]))]
    # Elements already copied before a run begins; negative where elements are missing.
    ends = np.maximum.accumulate(runs[:, 2] + runs[:, 3]) if len(runs) else runs[:, 0]
    there = np.concatenate([[0], ends])[: len(runs)] - runs[:, 2]
    gaps = np.flatnonzero(there < 0)
    end = int(ends[-1]) if len(runs) else 0
    if len(gaps) or end < target.size:
        missing = int((runs[:, 2] + there)[gaps[0]]) if len(gaps) else end
        raise ShapeError(
            f"copies: no piece of {target.placement.name} {target.placement.shape} has element "
            f"{missing} of the {target.size} that are wanted, expected all of them"
        )
    runs[:, 1:3] += there[:, None]
    runs[:, 3] -= there
    kept: Runs = runs[runs[:, 3] > 0]
    return kept


def assign_writers(held: Sequence[Sequence[ArrayPiece]]) -> list[list[ArrayPiece]]:
    """Return which rank writes what, so that everything is written once, in about equal amounts.

    Args:
        held: the pieces that each rank holds; those that several hold are equal there.
    Returns:
        For each rank the pieces that it writes: parts of those that it holds.
    """
    holders: dict[Placement, dict[tuple[int, int], list[int]]] = {}
    for rank, pieces in enumerate(held):
        for placement, start, stop in pieces:
            if start < stop or not placement.size:
                holders.setdefault(placement, {}).setdefault((start, stop), []).append(rank)
    shared: list[tuple[ArrayPiece, list[int]]] = []
    for placement, found in holders.items():
        edges = sorted({edge for span in found for edge in span})
        for start, stop in itertools.pairwise(edges) if placement.size else [(0, 0)]:
            both = {r for (a, b), rs in found.items() if a <= start and stop <= b for r in rs}
            if both:
                shared.append((ArrayPiece(placement, start, stop), sorted(both)))
    written: list[list[ArrayPiece]] = [[] for _ in held]
    load = [0] * len(held)
    # First what one rank alone holds, then the largest pieces, each to the rank with the least.
    for piece, ranks in sorted(shared, key=lambda each: (len(each[1]) > 1, -each[0].size)):
        rank = min(ranks, key=lambda r: (load[r], r))
        written[rank].append(piece)
        load[rank] += piece.size
    return written


def _runs(piece: ArrayPiece) -> Runs:
    """Return (N, 3): start in the full array, start in the piece, and length of each run."""
    shape, axis, ranges = piece.placement.shape, piece.placement.axis, piece.placement.ranges
    if ranges is None:
        return np.array([[piece.start, 0, piece.size]], np.int64)
    if not piece.size:
        return np.empty((0, 3), np.int64)
    inner = math.prod(shape[axis + 1 :])
    first, last = np.array(ranges, np.int64).reshape(-1, 2).T
    lengths = (last - first) * inner
    together = int(lengths.sum())  # elements of the box with equal indices before the axis
    outer = np.arange(piece.start // together, -(-piece.stop // together))
    full = ((outer[:, None] * shape[axis] + first) * inner).reshape(-1)
    ends = outer[0] * together + np.cumsum(np.tile(lengths, len(outer)))
    starts = ends - np.tile(lengths, len(outer))
    begin, end = np.maximum(starts, piece.start), np.minimum(ends, piece.stop)
    runs: Runs = np.stack([full + begin - starts, begin - piece.start, end - begin], 1)
    kept: Runs = runs[begin < end]
    return kept


def _intersect(one: ArrayPiece, other: ArrayPiece) -> Runs:
    """Return (N, 3): start in one piece, start in the other, and length of their common runs."""
    if one.placement == other.placement:  # the same run, whatever the box
        start, stop = max(one.start, other.start), min(one.stop, other.stop)
        run = [[start - one.start, start - other.start, stop - start]]
        return np.array(run if start < stop else np.empty((0, 3)), np.int64)
    if (one.placement.name, one.placement.shape) != (other.placement.name, other.placement.shape):
        raise ShapeError(
            f"copies: {other.placement.name} {other.placement.shape} is not a part of "
            f"{one.placement.name} {one.placement.shape}, expected pieces of one parameter"
        )
    if _disjoint(one.placement, other.placement):
        return np.empty((0, 3), np.int64)
    a, b = _runs(one), _runs(other)
    if not len(a) or not len(b):
        return np.empty((0, 3), np.int64)
    edges = np.concatenate([a[:, 0], a[:, 0] + a[:, 2], b[:, 0], b[:, 0] + b[:, 2]])
    edges.sort()  # duplicates give empty runs
    starts = edges[:-1]
    in_a = np.searchsorted(a[:, 0], starts, "right") - 1
    in_b = np.searchsorted(b[:, 0], starts, "right") - 1
    offset_a, offset_b = starts - a[in_a, 0], starts - b[in_b, 0]
    lengths = np.diff(edges)
    both = (in_a >= 0) & (in_b >= 0) & (offset_a < a[in_a, 2]) & (offset_b < b[in_b, 2])
    meeting = np.stack([a[in_a, 1] + offset_a, b[in_b, 1] + offset_b, lengths], 1)
    kept: Runs = meeting[both & (lengths > 0)]
    return kept


def _disjoint(one: Placement, other: Placement) -> bool:
    """Return whether two boxes divided along the same axis have no row in common."""
    if one.ranges is None or other.ranges is None or one.axis != other.axis:
        return False
    return not any(a < d and c < b for a, b in one.ranges for c, d in other.ranges)
