"""Stacks, splits and grids: compositions of concatenate, split, reshape and broadcast_to.

Names and meanings are NumPy's, gradients those of the ops they are made of.
Tests: tests/ops/test_stacking.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Never, SupportsIndex

import numpy as np

from tensorgrad.core.checks import axis_index, shape_of
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.signature import Shaped, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.ops.arguments import tensors_of
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

takes = Signatures(globals())
Cuts = int | Sequence[int]


def hstack(tensors: Sequence[Any]) -> Tensor:
    """Join tensors along their second axis, vectors along their only one.

    Args:
        tensors: one or more, of equal lengths in the other axes; numbers count as (1,).

    Returns:
        A tensor in the dtype that all have in common; errors are those of `concatenate`.

    Example:
        >>> tg.hstack([[1, 2], [3]])
        tensor([1, 2, 3], dtype=int64)
    """
    parts = [atleast_1d(part) for part in tensors_of("hstack", tensors)]
    return concatenate(parts, 0 if parts[0].ndim == 1 else 1)


def vstack(tensors: Sequence[Any]) -> Tensor:
    """Join tensors along their first axis; vectors are rows.

    Args:
        tensors: one or more, of equal lengths in the other axes; numbers count as (1, 1).

    Returns:
        A tensor in the dtype that all have in common; errors are those of `concatenate`.

    Example:
        >>> tg.vstack([[1, 2], [3, 4]])
        tensor([[1, 2],
                [3, 4]], dtype=int64)
    """
    return concatenate([atleast_2d(part) for part in tensors_of("vstack", tensors)], 0)


def dstack(tensors: Sequence[Any]) -> Tensor:
    """Join tensors along their third axis.

    Args:
        tensors: one or more, of equal lengths in the other axes; (M, N) counts as (M, N, 1), (N,)
            as (1, N, 1).

    Returns:
        A tensor in the dtype that all have in common; errors are those of `concatenate`.

    Example:
        >>> tg.dstack([[1, 2], [3, 4]])
        tensor([[[1, 3],
                 [2, 4]]], dtype=int64)
    """
    return concatenate([atleast_3d(part) for part in tensors_of("dstack", tensors)], 2)


def column_stack(tensors: Sequence[Any]) -> Tensor:
    """Join matrices along their second axis; vectors are columns.

    Args:
        tensors: one or more, with equal numbers of rows.

    Returns:
        A tensor in the dtype that all have in common; errors are those of `concatenate`.

    Example:
        >>> tg.column_stack([[1, 2], [[3, 4], [5, 6]]])
        tensor([[1, 3, 4],
                [2, 5, 6]], dtype=int64)
    """
    parts = tensors_of("column_stack", tensors)
    return concatenate([reshape(p, (-1, 1)) if p.ndim < 2 else p for p in parts], 1)


def append(
    x: ArrayLike, values: ArrayLike, axis: SupportsIndex | None = None, **unknown: Never
) -> Tensor:
    """Return x with values behind it along an axis; without one both are flattened.

    Args:
        x: any shape.
        values: the shape of x but for the axis.
        axis: the axis to join along.

    Returns:
        A tensor in the dtype that both have in common; errors are those of `concatenate`.

    Raises:
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.append([1, 2], [[3], [4]])
        tensor([1, 2, 3, 4], dtype=int64)
    """
    return concatenate(takes.append(x, values, unknown), axis)


def array_split(
    x: ArrayLike, indices_or_sections: Cuts, axis: SupportsIndex = 0, **unknown: Never
) -> list[Tensor]:
    """Cut x as `split` does, but into parts that may differ by one in length, longer ones first.

    Args:
        x: any shape and dtype.
        indices_or_sections: the number of parts, or the positions to cut at.
        axis: the axis to cut.

    Returns:
        The parts, views of x.

    Raises:
        ArgumentError: fewer than one part.

    Example:
        >>> [part.tolist() for part in tg.array_split([1, 2, 3, 4, 5], 2)]
        [[1, 2, 3], [4, 5]]
    """
    (x,) = takes.array_split(x, unknown)
    axis = axis_index("array_split", axis, x.ndim)
    if not isinstance(indices_or_sections, (int, np.integer)):
        return split(x, indices_or_sections, axis)
    count = int(indices_or_sections)
    if count < 1:
        raise ArgumentError(f"array_split: indices_or_sections is {count}, expected 1 or more")
    short, longer = divmod(x.shape[axis], count)
    return split(x, [i * short + min(i, longer) for i in range(1, count)], axis)


def hsplit(x: ArrayLike, indices_or_sections: Cuts) -> list[Tensor]:
    """Cut x along its second axis, a vector along its only one; see `split`.

    Args:
        x: one axis or more.
        indices_or_sections: the number of equal parts, or the positions to cut at.

    Returns:
        The parts, views of x; errors are those of `split`.

    Example:
        >>> [part.tolist() for part in tg.hsplit([[1, 2], [3, 4]], 2)]
        [[[1], [3]], [[2], [4]]]
    """
    (x,) = takes.hsplit(x)
    return split(x, indices_or_sections, 0 if x.ndim == 1 else 1)


def vsplit(x: ArrayLike, indices_or_sections: Cuts) -> list[Tensor]:
    """Cut x along its first axis; see `split`.

    Args:
        x: one axis or more.
        indices_or_sections: the number of equal parts, or the positions to cut at.

    Returns:
        The parts, views of x; errors are those of `split`.

    Example:
        >>> [part.tolist() for part in tg.vsplit([[1, 2], [3, 4]], 2)]
        [[[1, 2]], [[3, 4]]]
    """
    return split(x, indices_or_sections, 0)


def dsplit(x: ArrayLike, indices_or_sections: Cuts) -> list[Tensor]:
    """Cut x along its third axis; see `split`.

    Args:
        x: three axes or more.
        indices_or_sections: the number of equal parts, or the positions to cut at.

    Returns:
        The parts, views of x; errors are those of `split`.

    Example:
        >>> [part.tolist() for part in tg.dsplit([[[1, 2, 3]]], [1])]
        [[[[1]]], [[[2, 3]]]]
    """
    return split(x, indices_or_sections, 2)


def unstack(x: ArrayLike, *, axis: SupportsIndex = 0, **unknown: Never) -> tuple[Tensor, ...]:
    """Return the slices of x along an axis, which they lack.

    Args:
        x: one axis or more.
        axis: the axis to cut.

    Returns:
        The slices, views of x.

    Example:
        >>> [column.tolist() for column in tg.unstack([[1, 2], [3, 4]], axis=1)]
        [[1, 3], [2, 4]]
    """
    (x,) = takes.unstack(x, unknown)
    axis = axis_index("unstack", axis, x.ndim)
    before = (slice(None),) * axis
    return tuple([x[(*before, i)] for i in range(x.shape[axis])])


def atleast_1d(x: ArrayLike) -> Tensor:
    """Return x, a number as (1,).

    Args:
        x: any shape and dtype.

    Returns:
        x itself, or a view with one axis.

    Example:
        >>> tg.atleast_1d(3)
        tensor([3], dtype=int64)
    """
    (x,) = takes.atleast_1d(x)
    return x if x.ndim else ravel(x)


def atleast_2d(x: ArrayLike) -> Tensor:
    """Return x, a vector (N,) as (1, N), a number as (1, 1).

    Args:
        x: any shape and dtype.

    Returns:
        x itself, or a view with two axes.

    Example:
        >>> tg.atleast_2d([1, 2])
        tensor([[1, 2]], dtype=int64)
    """
    x = atleast_1d(x)
    return x if x.ndim > 1 else expand_dims(x, 0)


def atleast_3d(x: ArrayLike) -> Tensor:
    """Return x, a matrix (M, N) as (M, N, 1), a vector (N,) as (1, N, 1).

    Args:
        x: any shape and dtype.

    Returns:
        x itself, or a view with three axes.

    Example:
        >>> tg.atleast_3d([1, 2]).shape
        (1, 2, 1)
    """
    x = atleast_2d(x)
    return x if x.ndim > 2 else expand_dims(x, 2)


def broadcast_shapes(*shapes: int | Sequence[int]) -> tuple[int, ...]:
    """Return the shape that several shapes broadcast to.

    Args:
        *shapes: lengths, or one length each.

    Returns:
        A tuple of lengths.

    Raises:
        ShapeError: they do not broadcast.

    Example:
        >>> tg.broadcast_shapes((3, 1), (4,), 1)
        (3, 4)
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

    Args:
        *tensors: any shapes and dtypes.

    Returns:
        One read-only view of each.

    Raises:
        ShapeError: they do not broadcast.

    Example:
        >>> [x.tolist() for x in tg.broadcast_arrays([1, 2], [[3], [4]])]
        [[[1, 2], [1, 2]], [[3, 3], [4, 4]]]
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
        *axes: (n,) each.
        indexing: "ij" puts the points of axis i along axis i of the result; "xy" exchanges the
            first two.
        sparse: whether the other axes have length 1 instead.

    Returns:
        As many tensors as axes, each with as many axes.

    Example:
        >>> x, y = tg.meshgrid([1, 2, 3], [10, 20])
        >>> (x + y).tolist()
        [[11, 12, 13], [21, 22, 23]]
    """
    takes.meshgrid(indexing, sparse)
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


def fliplr(x: ArrayLike) -> Tensor:
    """Return a view with the order of the second axis reversed.

    Args:
        x: two axes or more.

    Returns:
        In the shape and dtype of x.

    Raises:
        ArgumentError: x has no such axis.

    Example:
        >>> tg.fliplr([[1, 2], [3, 4]])
        tensor([[2, 1],
                [4, 3]], dtype=int64)
    """
    return flip(x, 1)


def flipud(x: ArrayLike) -> Tensor:
    """Return a view with the order of the first axis reversed.

    Args:
        x: one axis or more.

    Returns:
        In the shape and dtype of x.

    Raises:
        ArgumentError: x has no such axis.

    Example:
        >>> tg.flipud([[1, 2], [3, 4]])
        tensor([[3, 4],
                [1, 2]], dtype=int64)
    """
    return flip(x, 0)


def rot90(x: ArrayLike, k: int = 1, axes: Sequence[int] = (0, 1)) -> Tensor:
    """Return a view rotated by k quarter turns, from the first of two axes to the second.

    Args:
        x: two axes or more.
        k: quarter turns; negative ones turn back.
        axes: the two axes.

    Returns:
        The shape of x, the two axes exchanged where k is odd.

    Raises:
        ArgumentError: there are not two different axes.

    Example:
        >>> tg.rot90([[1, 2], [3, 4]])
        tensor([[2, 4],
                [1, 3]], dtype=int64)
    """
    (x,) = takes.rot90(x, k)
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


def rollaxis(x: ArrayLike, axis: SupportsIndex, start: int = 0, **unknown: Never) -> Tensor:
    """Return a view with an axis moved to stand before the axis `start`; x.ndim is the end.

    Args:
        x: one axis or more.
        axis: the axis to move.
        start: the axis of x that it then stands before.

    Returns:
        The axes of x in their new order.

    Raises:
        OutOfRangeError: x has no such axis, or start is outside -x.ndim to x.ndim.

    Example:
        >>> tg.rollaxis(tg.zeros((2, 3, 4)), 2).shape
        (4, 2, 3)
    """
    (x,) = takes.rollaxis(x, start, unknown)
    axis = axis_index("rollaxis", axis, x.ndim)
    if start != x.ndim:
        start = axis_index("rollaxis", start, x.ndim, "start")
    return moveaxis(x, axis, start - (axis < start))


def matrix_transpose(x: Shaped[ArrayLike, "... M N"]) -> Tensor:
    """Return a view with the last two axes exchanged.

    Args:
        x: (..., M, N).

    Returns:
        (..., N, M).

    Raises:
        ShapeError: x is not (..., M, N).

    Example:
        >>> tg.matrix_transpose([[1, 2], [3, 4]])
        tensor([[1, 3],
                [2, 4]], dtype=int64)
    """
    (x,) = takes.matrix_transpose(x)
    return swapaxes(x, -1, -2)
