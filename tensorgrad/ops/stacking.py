"""Stacks, splits and grids: compositions of concatenate, split, reshape and broadcast_to.

Names and meanings are NumPy's, gradients those of the ops they are made of.
Tests: tests/ops/test_stacking.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Never

import numpy as np

from tensorgrad.core.checks import axis_index, check_integer, shape_of, unexpected
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.operands import operands, tensor_of, tensors_of
from tensorgrad.core.tensor import Tensor
from tensorgrad.ops.shape import (
    broadcast_to,
    concatenate,
    expand_dims,
    flip,
    moveaxis,
    ravel,
    reshape,
    split,
    swapaxes,
)

__all__ = [
    "append", "array_split", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_arrays",
    "broadcast_shapes", "column_stack", "dsplit", "dstack", "fliplr", "flipud", "hsplit", "hstack",
    "matrix_transpose", "meshgrid", "rollaxis", "rot90", "unstack", "vsplit", "vstack",
]  # fmt: skip

Cuts = int | Sequence[int]


def hstack(tensors: Sequence[Any]) -> Tensor:
    """Join tensors along their second axis, vectors along their only one."""
    parts = [atleast_1d(part) for part in tensors_of("hstack", tensors)]
    return concatenate(parts, 0 if parts[0].ndim == 1 else 1)


def vstack(tensors: Sequence[Any]) -> Tensor:
    """Join tensors along their first axis; vectors are rows."""
    return concatenate([atleast_2d(part) for part in tensors_of("vstack", tensors)], 0)


def dstack(tensors: Sequence[Any]) -> Tensor:
    """Join tensors along their third axis; (M, N) counts as (M, N, 1), (N,) as (1, N, 1)."""
    return concatenate([atleast_3d(part) for part in tensors_of("dstack", tensors)], 2)


def column_stack(tensors: Sequence[Any]) -> Tensor:
    """Join matrices along their second axis; vectors are columns."""
    parts = tensors_of("column_stack", tensors)
    return concatenate([reshape(p, (-1, 1)) if p.ndim < 2 else p for p in parts], 1)


def append(x: Any, values: Any, axis: int | None = None, **unknown: Never) -> Tensor:
    """Return x with values behind it along an axis; without one both are flattened."""
    if unknown:
        raise unexpected("append", unknown)
    return concatenate(operands("append", ("x", "values"), (x, values)), axis)


def array_split(x: Any, indices_or_sections: Cuts, axis: int = 0, **unknown: Never) -> list[Tensor]:
    """Cut x as `split` does, but into parts that may differ by one in length, longer ones first.

    Raises:
        ArgumentError: fewer than one part.
    """
    if unknown:
        raise unexpected("array_split", unknown)
    x = tensor_of("array_split", "x", x)
    axis = axis_index("array_split", axis, x.ndim)
    if not isinstance(indices_or_sections, (int, np.integer)):
        return split(x, indices_or_sections, axis)
    count = int(indices_or_sections)
    if count < 1:
        raise ArgumentError(f"array_split: indices_or_sections is {count}, expected 1 or more")
    short, longer = divmod(x.shape[axis], count)
    return split(x, [i * short + min(i, longer) for i in range(1, count)], axis)


def hsplit(x: Any, indices_or_sections: Cuts) -> list[Tensor]:
    """Cut x along its second axis, a vector along its only one; see `split`."""
    x = tensor_of("hsplit", "x", x)
    return split(x, indices_or_sections, 0 if x.ndim == 1 else 1)


def vsplit(x: Any, indices_or_sections: Cuts) -> list[Tensor]:
    """Cut x along its first axis; see `split`."""
    return split(x, indices_or_sections, 0)


def dsplit(x: Any, indices_or_sections: Cuts) -> list[Tensor]:
    """Cut x along its third axis; see `split`."""
    return split(x, indices_or_sections, 2)


def unstack(x: Any, *, axis: int = 0, **unknown: Never) -> tuple[Tensor, ...]:
    """Return the slices of x along an axis, which they lack."""
    if unknown:
        raise unexpected("unstack", unknown)
    x = tensor_of("unstack", "x", x)
    axis = axis_index("unstack", axis, x.ndim)
    before = (slice(None),) * axis
    return tuple([x[(*before, i)] for i in range(x.shape[axis])])


def atleast_1d(x: Any) -> Tensor:
    """Return x, a number as (1,)."""
    x = tensor_of("atleast_1d", "x", x)
    return x if x.ndim else ravel(x)


def atleast_2d(x: Any) -> Tensor:
    """Return x, a vector (N,) as (1, N)."""
    x = atleast_1d(x)
    return x if x.ndim > 1 else expand_dims(x, 0)


def atleast_3d(x: Any) -> Tensor:
    """Return x, a matrix (M, N) as (M, N, 1), a vector (N,) as (1, N, 1)."""
    x = atleast_2d(x)
    return x if x.ndim > 2 else expand_dims(x, 2)


def broadcast_shapes(*shapes: int | Sequence[int]) -> tuple[int, ...]:
    """Return the shape that these broadcast to.

    Raises:
        ShapeError: they do not broadcast.
    """
    lengths = [shape_of("broadcast_shapes", shape) for shape in shapes]
    try:
        return np.broadcast_shapes(*lengths)
    except ValueError as error:
        raise ShapeError(
            f"broadcast_shapes: got {lengths}, expected shapes that broadcast"
        ) from error


def broadcast_arrays(*tensors: Any) -> tuple[Tensor, ...]:
    """Return views of all tensors in the shape that they broadcast to.

    Raises:
        ShapeError: they do not broadcast.
    """
    if not tensors:
        return ()
    parts = tensors_of("broadcast_arrays", tensors)
    shape = broadcast_shapes(*[part.shape for part in parts])
    return tuple([broadcast_to(part, shape) for part in parts])


def meshgrid(
    *axes: Any, indexing: Literal["xy", "ij"] = "xy", sparse: bool = False
) -> tuple[Tensor, ...]:
    """Return the coordinates of the points of a grid, one tensor for each axis.

    Args:
        axes: (n,) each.
        indexing: "ij" puts the points of axis i along axis i of the result; "xy" exchanges the
            first two.
        sparse: whether the other axes have length 1 instead.

    Raises:
        ArgumentError: another indexing.
    """
    if indexing not in ("xy", "ij"):
        raise ArgumentError(f"meshgrid: indexing is {indexing!r}, expected 'xy' or 'ij'")
    if not axes:
        return ()
    count = len(axes)
    parts = [
        reshape(part, [-1 if j == i else 1 for j in range(count)])
        for i, part in enumerate(tensors_of("meshgrid", axes))
    ]
    if indexing == "xy" and count > 1:
        parts = [swapaxes(part, 0, 1) for part in parts]
    return tuple(parts) if sparse else broadcast_arrays(*parts)


def fliplr(x: Any) -> Tensor:
    """Return a view with the order of the second axis reversed."""
    return flip(x, 1)


def flipud(x: Any) -> Tensor:
    """Return a view with the order of the first axis reversed."""
    return flip(x, 0)


def rot90(x: Any, k: int = 1, axes: Sequence[int] = (0, 1)) -> Tensor:
    """Return a view rotated by k quarter turns in the plane of two axes, from the first to the
    second.

    Raises:
        ArgumentError: there are not two different axes, or k is not an integer.
    """
    x = tensor_of("rot90", "x", x)
    check_integer("rot90", "k", k)
    if not isinstance(axes, (tuple, list)) or len(axes) != 2:
        raise ArgumentError(f"rot90: axes is {axes}, expected two of them")
    first, second = (axis_index("rot90", axis, x.ndim, "axes") for axis in axes)
    if first == second:
        raise ArgumentError(f"rot90: axes is {axes}, expected two different ones")
    if k % 4 == 2:
        return flip(x, (first, second))
    if k % 4 == 1:
        return swapaxes(flip(x, second), first, second)
    return flip(swapaxes(x, first, second), second) if k % 4 else flip(x, ())


def rollaxis(x: Any, axis: int, start: int = 0, **unknown: Never) -> Tensor:
    """Return a view with an axis moved to stand before the axis `start`; x.ndim is the end.

    Raises:
        OutOfRangeError: x has no such axis, or start is outside -x.ndim to x.ndim.
    """
    if unknown:
        raise unexpected("rollaxis", unknown)
    x = tensor_of("rollaxis", "x", x)
    axis = axis_index("rollaxis", axis, x.ndim)
    if start != x.ndim:
        start = axis_index("rollaxis", start, x.ndim, "start")
    return moveaxis(x, axis, start - (axis < start))


def matrix_transpose(x: Any) -> Tensor:
    """Return a view with the last two axes exchanged.

    Raises:
        ShapeError: x has fewer than two axes.
    """
    x = tensor_of("matrix_transpose", "x", x)
    if x.ndim < 2:
        raise ShapeError(f"matrix_transpose: x has shape {x.shape}, expected two axes or more")
    return swapaxes(x, -1, -2)
