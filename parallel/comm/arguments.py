"""Argument checks of the collectives, before anything is sent."""

from __future__ import annotations

import numpy as np

from tensorgrad.core import backend, dtypes
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.errors import ArgumentError, DtypeError, ShapeError

_REDUCTIONS = ("sum", "mean", "max")


def checked(op: str, name: str, array: Array, written: bool) -> Array:
    """Return the checked array; a subclass of numpy.ndarray (a memory map) as a plain array."""
    if not backend.is_array(array):
        raise ArgumentError(
            f"{op}: {name} is a {type(array).__name__}, expected a NumPy or CuPy array "
            "(of a Tensor, its .data)"
        )
    if array.dtype not in dtypes.ALL:
        raise DtypeError(
            f"{op}: {name} is {array.dtype}, expected one of {', '.join(map(str, dtypes.ALL))}"
        )
    if not isinstance(array, np.ndarray):
        return array
    if written and not array.flags.writeable:
        raise ArgumentError(f"{op}: {name} is read-only, expected a writable array")
    return np.asarray(array)


def check_reduction(op: str, array: Array, reduction: str) -> None:
    """Raise unless the reduction is known and applies to the dtype."""
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"{op}: op is {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
    if reduction == "mean" and not dtypes.is_float(array.dtype):
        raise DtypeError(f"{op}: array is {array.dtype}, expected floats for a mean")
    if reduction == "sum" and array.dtype == dtypes.bool_:
        raise DtypeError(f"{op}: array is bool, expected numbers, or op 'max' for any")


def check_piece(
    op: str, names: tuple[str, str], piece: Array, whole: Array, rank: int, ranks: int
) -> None:
    """Raise unless `whole` holds a piece for each rank and overlaps `piece` only in its own."""
    part, name = names
    if piece.ndim == 0:
        raise ShapeError(f"{op}: {part} has shape (), expected at least one axis")
    length = piece.shape[0]
    check_like(op, names, piece, whole, (ranks * length, *piece.shape[1:]))
    own = whole[rank * length : (rank + 1) * length]
    if overlap(whole, piece) and not same_memory(own, piece):
        raise ArgumentError(
            f"{op}: {part} overlaps {name}, expected piece {rank} of it or other memory"
        )


def check_like(
    op: str, names: tuple[str, str], array: Array, other: Array, expected: Shape
) -> None:
    """Raise unless `other` has the expected shape, and the dtype and device of `array`."""
    if other.shape != expected:
        raise ShapeError(
            f"{op}: {names[1]} has shape {other.shape}, expected {expected} as {names[0]} has "
            f"{array.shape}"
        )
    if other.dtype != array.dtype:
        raise DtypeError(
            f"{op}: {names[1]} is {other.dtype}, expected {array.dtype} like {names[0]}"
        )
    backend.same_device(op, names, (array, other))


def overlap(a: Array, b: Array) -> bool:
    """Return whether the address ranges of two arrays intersect."""
    (begin_a, end_a), (begin_b, end_b) = backend.byte_bounds(a), backend.byte_bounds(b)
    return a.size > 0 and b.size > 0 and begin_a < end_b and begin_b < end_a


def same_memory(a: Array, b: Array) -> bool:
    """Return whether two arrays of one shape are views of the same elements."""
    steps = zip(a.shape, a.strides, b.strides, strict=True)
    apart = any(of_a != of_b for length, of_a, of_b in steps if length > 1)
    return not apart and backend.byte_bounds(a) == backend.byte_bounds(b)


def as_bytes(array: Array) -> Array:
    """View a contiguous array as bytes, for transfers that do not depend on the dtype."""
    return array.reshape(-1).view("uint8")


def as_numbers(array: Array) -> Array:
    """View a contiguous array as 1-D, bool as uint8 with values 0 and 1."""
    flat = array.reshape(-1)
    return flat.view("uint8") if flat.dtype == dtypes.bool_ else flat
