"""Reshape, transpose, concatenate, pad and other ops that move elements or view them.

Names, argument forms and meanings are NumPy's. What is a view in NumPy is a view here. Each op has
one implementation for both array types. Tests: tests/ops/test_shape.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Literal, Never, SupportsIndex

import numpy as np

from tensorgrad.autograd.tangents import Op, same, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.arrays import array_of, converted
from tensorgrad.core.backend import Array, namespace
from tensorgrad.core.checks import axis_index, axis_tuple, promoted, shape_of
from tensorgrad.core.dtypes import DtypeLike, as_dtype, compute_dtype, is_float
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.operands import constant_of, operands
from tensorgrad.core.record import cast_of, record
from tensorgrad.core.signature import Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.ops.arguments import broadcast, check_holds, tensors_of
from tensorgrad.ops.indexing import take

__all__ = [
    "astype",
    "broadcast_to",
    "concatenate",
    "copy",
    "expand_dims",
    "flip",
    "moveaxis",
    "pad",
    "ravel",
    "repeat",
    "reshape",
    "roll",
    "split",
    "squeeze",
    "stack",
    "swapaxes",
    "tile",
    "to",
    "transpose",
]

takes = Signatures(globals())
PadMode = Literal["constant", "edge", "reflect", "symmetric", "wrap"]


def astype(
    x: ArrayLike, dtype: DtypeLike, *, copy: bool = True, device: str | None = None
) -> Tensor:
    """Return the values as `dtype`; between float types the gradient flows back.

    Args:
        x: any shape and dtype.
        dtype: a name, Python type or NumPy dtype.
        copy: False returns x itself where it has the dtype already.
        device: where to; default: where x is.

    Returns:
        In the shape of x.

    Raises:
        DtypeError: the library has no such dtype.

    Example:
        >>> tg.astype([1.7, -2.3], "int64")
        tensor([ 1, -2], dtype=int64)
    """
    (given,) = takes.astype(x, copy)
    if device is not None:
        given = to(given, device)
    target = as_dtype(dtype)
    if not copy and given.data.dtype == target:
        return given
    y = converted(given.data, target)
    return cast_of(y, given) if is_float(target) else Tensor(y)


def copy(x: ArrayLike) -> Tensor:
    """Return the values in memory of their own, C-contiguous; the gradient flows back.

    Args:
        x: any shape and dtype.

    Returns:
        In the shape and dtype of x.

    Example:
        >>> x = tg.tensor([1, 2])
        >>> y = tg.copy(x)
        >>> y[0] = 5
        >>> x.tolist(), y.tolist()
        ([1, 2], [5, 2])
    """
    (x,) = takes.copy(x)
    return record("copy", x.data.copy(), (x,), same, ())


def to(x: ArrayLike, device: str) -> Tensor:
    """Return x on a device: x itself when it is there; the gradient flows back.

    Args:
        x: any shape and dtype.
        device: "cpu", "cuda" or "cuda:N".

    Returns:
        In the shape and dtype of x.

    Raises:
        DeviceError: there is no such device here.

    Example:
        >>> tg.to([1, 2], "cpu").device
        'cpu'
    """
    (given,) = takes.to(x)
    y = backend.to_device(given.data, device)
    if y is given.data:
        return given
    return record("to", y, (given,), _to_backward, (given.device, device))


def _to_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    return (backend.to_device(dy, saved[0]),)


@tangent_of(_to_backward)
def _to_tangent(op: Op, t: Tensor) -> Tensor:
    return to(t, op.saved[1])


def reshape(x: ArrayLike, shape: int | Sequence[int], *, copy: bool | None = None) -> Tensor:
    """Return the elements, in C order, in another shape; one length may be -1.

    Args:
        x: any shape and dtype.
        shape: the lengths, or one length.
        copy: True always copies, False raises an error where no view has that shape.

    Returns:
        That shape, a view where the strides of x allow.

    Raises:
        ShapeError: the shape has another number of elements.
        ArgumentError: a copy is needed.

    Example:
        >>> tg.reshape([1, 2, 3, 4, 5, 6], (2, -1))
        tensor([[1, 2, 3],
                [4, 5, 6]], dtype=int64)
    """
    (x,) = takes.reshape(x, copy)
    if copy is not None:
        return _reshape_copying(x, shape, copy)
    try:
        y = x.data.reshape(shape)
    except (ValueError, TypeError) as error:
        raise ShapeError(
            f"reshape: x has shape {x.shape}, expected {x.size} elements, shape is {shape}"
        ) from error
    return record("reshape", y, (x,), _reshape_backward, (x.data.shape,))


def _reshape_copying(x: Tensor, shape: int | Sequence[int], copying: bool) -> Tensor:
    y = reshape(x, shape)
    fresh = not namespace(x.data).may_share_memory(y.data, x.data)
    if fresh and not copying:
        raise ArgumentError("reshape: copy is False, expected a shape that x has as a view")
    return copy(y) if copying and not fresh else y


def ravel(x: ArrayLike) -> Tensor:
    """Return the elements, in C order, in one axis.

    Args:
        x: any shape and dtype.

    Returns:
        (x.size,), a view where the strides of x allow.

    Example:
        >>> tg.ravel([[1, 2], [3, 4]])
        tensor([1, 2, 3, 4], dtype=int64)
    """
    (x,) = takes.ravel(x)
    return record("ravel", x.data.reshape(-1), (x,), _reshape_backward, (x.data.shape,))


def _reshape_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    return (dy.reshape(*saved),)


@tangent_of(_reshape_backward)
def _reshape_tangent(op: Op, t: Tensor) -> Tensor:
    return t.reshape(op.node.shape)


def transpose(x: ArrayLike, axes: Sequence[int] | None = None) -> Tensor:
    """Return a view with the axes in another order; reversed by default.

    Args:
        x: any shape and dtype.
        axes: all axes of x, in the order of the result.

    Returns:
        Axis i is axis axes[i] of x.

    Raises:
        ArgumentError: `axes` does not name each axis once.

    Example:
        >>> tg.transpose([[1, 2, 3], [4, 5, 6]])
        tensor([[1, 4],
                [2, 5],
                [3, 6]], dtype=int64)
        >>> tg.permute_dims(tg.zeros((2, 3, 4)), (2, 0, 1)).shape
        (4, 2, 3)
    """
    (x,) = takes.transpose(x)
    ndim = x.data.ndim
    if axes is None:
        order = tuple(range(ndim))[::-1]
    else:
        axes = (int(axes),) if isinstance(axes, (int, np.integer)) else axes
        if not isinstance(axes, Iterable) or getattr(axes, "ndim", 1) != 1:
            raise ArgumentError(f"transpose: axes is {axes!r:.80}, expected integers")
        order = tuple(axes)
    try:
        y = x.data.transpose(order)
    except (ValueError, TypeError) as error:
        axis_tuple("transpose", order, ndim, "axes")
        raise ArgumentError(f"transpose: axes is {axes}, expected all {ndim} axes of x") from error
    return record("transpose", y, (x,), _transpose_backward, (order,))


def _transpose_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    order = [axis % dy.ndim for axis in saved[0]]
    return (dy.transpose(sorted(range(dy.ndim), key=order.__getitem__)),)


@tangent_of(_transpose_backward)
def _transpose_tangent(op: Op, t: Tensor) -> Tensor:
    return transpose(t, *op.saved)


def swapaxes(x: ArrayLike, axis1: SupportsIndex, axis2: SupportsIndex) -> Tensor:
    """Return a view with two axes exchanged.

    Args:
        x: any shape and dtype.
        axis1, axis2: the two axes.

    Returns:
        The axes of x, these two exchanged.

    Raises:
        ArgumentError: x has no such axis.

    Example:
        >>> tg.swapaxes(tg.zeros((2, 3, 4)), 0, 2).shape
        (4, 3, 2)
    """
    (x,) = takes.swapaxes(x)
    try:
        y = x.data.swapaxes(axis1, axis2)
    except (ValueError, TypeError, OverflowError):
        axis_index("swapaxes", axis1, x.data.ndim, "axis1")
        axis_index("swapaxes", axis2, x.data.ndim, "axis2")
        raise
    return record("swapaxes", y, (x,), _swapaxes_backward, (axis1, axis2))


def _swapaxes_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    return (dy.swapaxes(*saved),)


@tangent_of(_swapaxes_backward)
def _swapaxes_tangent(op: Op, t: Tensor) -> Tensor:
    return swapaxes(t, *op.saved)


def moveaxis(
    x: ArrayLike, source: SupportsIndex | Sequence[int], destination: SupportsIndex | Sequence[int]
) -> Tensor:
    """Return a view with some axes moved to other positions, the others in their old order.

    Args:
        x: any shape and dtype.
        source: an axis or several.
        destination: where each of them stands in the result.

    Returns:
        The axes of x in their new order.

    Raises:
        ArgumentError: an axis does not exist, or source and destination differ in number.

    Example:
        >>> tg.moveaxis(tg.zeros((2, 3, 4)), 0, -1).shape
        (3, 4, 2)
    """
    (x,) = takes.moveaxis(x)
    ndim = x.data.ndim
    sources = axis_tuple("moveaxis", source, ndim, "source")
    targets = axis_tuple("moveaxis", destination, ndim, "destination")
    if len(sources) != len(targets):
        raise ArgumentError(
            f"moveaxis: destination has {len(targets)} axes, expected {len(sources)} like source"
        )
    order = [axis for axis in range(ndim) if axis not in sources]
    for position, axis in sorted(zip(targets, sources, strict=True)):
        order.insert(position, axis)
    return record("moveaxis", x.data.transpose(order), (x,), _transpose_backward, (order,))


def expand_dims(x: ArrayLike, axis: int | Sequence[int], **unknown: Never) -> Tensor:
    """Return a view with axes of length 1 inserted, so that they stand at `axis` in the result.

    Args:
        x: any shape and dtype.
        axis: an axis or several, counted in the result.

    Returns:
        The axes of x and the new ones.

    Raises:
        ArgumentError: the result has no such axis, or one is named twice.

    Example:
        >>> tg.expand_dims([1, 2, 3], 1).shape
        (3, 1)
        >>> tg.expand_dims([1, 2, 3], (0, -1)).shape
        (1, 3, 1)
    """
    (x,) = takes.expand_dims(x, unknown)
    inserted = axis if isinstance(axis, (tuple, list)) else (axis,)
    count = len(inserted)
    axes = axis_tuple("expand_dims", inserted, x.data.ndim + count)
    lengths = iter(x.data.shape)
    shape = tuple([1 if i in axes else next(lengths) for i in range(x.data.ndim + count)])
    return record("expand_dims", x.data.reshape(shape), (x,), _reshape_backward, (x.data.shape,))


def squeeze(x: ArrayLike, axis: int | Sequence[int] | None = None, **unknown: Never) -> Tensor:
    """Return a view without the axes of length 1, all of them or those named.

    Args:
        x: any shape and dtype.
        axis: an axis or several of length 1; all of them by default.

    Returns:
        The remaining axes of x.

    Raises:
        ShapeError: a named axis is longer.

    Example:
        >>> tg.squeeze(tg.zeros((1, 3, 1)), 0).shape
        (3, 1)
    """
    (x,) = takes.squeeze(x, unknown)
    shape = x.data.shape
    if axis is None:
        axes = tuple([i for i, length in enumerate(shape) if length == 1])
    else:
        axes = axis_tuple("squeeze", axis, x.data.ndim)
    for i in axes:
        if shape[i] != 1:
            raise ShapeError(f"squeeze: axis {i} of x has length {shape[i]}, expected 1")
    return record("squeeze", x.data.squeeze(axes), (x,), _reshape_backward, (shape,))


def broadcast_to(x: ArrayLike, shape: int | Sequence[int]) -> Tensor:
    """Return a read-only view of x repeated to `shape` by NumPy's broadcasting rules.

    Args:
        x: any shape and dtype.
        shape: the lengths, or one length.

    Returns:
        A read-only view of that shape.

    Raises:
        ShapeError: x does not broadcast to the shape.

    Example:
        >>> tg.broadcast_to([1, 2, 3], (2, 3))
        tensor([[1, 2, 3],
                [1, 2, 3]], dtype=int64)
    """
    (x,) = takes.broadcast_to(x)
    target = shape_of("broadcast_to", shape)
    y = broadcast("broadcast_to", "x", x.data, target)
    return record("broadcast_to", y, (x,), same, ())


def concatenate(tensors: Sequence[Any], axis: SupportsIndex | None = 0, **unknown: Never) -> Tensor:
    """Join tensors along an existing axis; with axis None they are flattened first.

    Args:
        tensors: one or more, of equal lengths in the other axes.
        axis: the axis to join along.

    Returns:
        The lengths along the axis added up, in the dtype that all have in common.

    Raises:
        ShapeError: shapes differ in another axis than this one.
        DtypeError: NumPy has no common dtype for them.

    Example:
        >>> tg.concatenate([[[1, 2]], [[3, 4], [5, 6]]])
        tensor([[1, 2],
                [3, 4],
                [5, 6]], dtype=int64)
        >>> tg.concat([[[1, 2]], [[3, 4]]], axis=1)
        tensor([[1, 2, 3, 4]], dtype=int64)
    """
    takes.concatenate(unknown)
    parts = tensors_of("concatenate", tensors)
    if axis is None:
        parts, axis = [ravel(part) for part in parts], 0
    arrays = [part.data for part in parts]
    first = arrays[0].shape
    axis = axis_index("concatenate", axis, len(first))
    for i, array in enumerate(arrays):
        lengths = array.shape
        alike = len(lengths) == len(first) and lengths[:axis] == first[:axis]
        if not alike or lengths[axis + 1 :] != first[axis + 1 :]:
            expected = str((*first[:axis], "any", *first[axis + 1 :])).replace("'", "")
            raise ShapeError(f"concatenate: tensors[{i}] has shape {lengths}, expected {expected}")
    return _join("concatenate", parts, axis)


def _join(op: str, parts: list[Tensor], axis: int) -> Tensor:
    arrays = [part.data for part in parts]
    if any([a.dtype is not arrays[0].dtype for a in arrays]):
        dtype = promoted(op, [f"tensors[{i}]" for i in range(len(arrays))], arrays)
        arrays = [a.astype(dtype, copy=False) for a in arrays]
    y = namespace(arrays[0]).concatenate(arrays, axis)
    lengths = tuple([a.shape[axis] for a in arrays])
    return record(op, y, parts, _concatenate_backward, (axis, lengths))


def _concatenate_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    axis, lengths = saved
    before = (slice(None),) * axis
    return [
        dy[(*before, slice(end - length, end))] if need else None
        for length, end, need in zip(lengths, accumulate(lengths), needs, strict=True)
    ]


@tangent_of(_concatenate_backward)
def _concatenate_tangent(op: Op, *tangents: Tensor | None) -> Tensor:
    axis, lengths = op.saved
    like = next(t for t in tangents if t is not None)
    shape, xp = op.node.shape, namespace(like.data)
    zero = xp.zeros((), op.node.dtype)
    parts = [
        Tensor(xp.broadcast_to(zero, (*shape[:axis], n, *shape[axis + 1 :]))) if t is None else t
        for t, n in zip(tangents, lengths, strict=True)
    ]
    return _join("concatenate", parts, axis)


def stack(tensors: Sequence[Any], axis: SupportsIndex = 0, **unknown: Never) -> Tensor:
    """Join tensors of one shape along a new axis, which stands at `axis` in the result.

    Args:
        tensors: one or more, of one shape.
        axis: the new axis, counted in the result.

    Returns:
        One axis more than each, in the dtype that all have in common.

    Raises:
        ShapeError: the shapes differ.
        DtypeError: NumPy has no common dtype for them.

    Example:
        >>> tg.stack([[1, 2], [3, 4]], axis=1)
        tensor([[1, 3],
                [2, 4]], dtype=int64)
    """
    takes.stack(unknown)
    parts = tensors_of("stack", tensors)
    shape = parts[0].data.shape
    for i, part in enumerate(parts):
        if part.data.shape != shape:
            raise ShapeError(f"stack: tensors[{i}] has shape {part.shape}, expected {shape}")
    axis = axis_index("stack", axis, len(shape) + 1)
    return _join("stack", [expand_dims(part, axis) for part in parts], axis)


def split(
    x: ArrayLike,
    indices_or_sections: int | Sequence[int],
    axis: SupportsIndex = 0,
    **unknown: Never,
) -> list[Tensor]:
    """Cut x along an axis.

    Args:
        x: any shape and dtype.
        indices_or_sections: the number of equal parts, or the positions to cut at.
        axis: the axis to cut.

    Returns:
        The parts, views of x.

    Raises:
        ArgumentError: the axis does not divide into that many equal parts.

    Example:
        >>> [part.tolist() for part in tg.split([1, 2, 3, 4], 2)]
        [[1, 2], [3, 4]]
        >>> [part.tolist() for part in tg.split([1, 2, 3, 4], [1, 3])]
        [[1], [2, 3], [4]]
    """
    (x,) = takes.split(x, unknown)
    axis = axis_index("split", axis, x.data.ndim)
    length = x.data.shape[axis]
    if isinstance(indices_or_sections, (int, np.integer)):
        sections = int(indices_or_sections)
        if sections < 1 or length % sections:
            raise ArgumentError(
                f"split: axis {axis} of x has length {length}, expected a multiple of {sections}"
            )
        cuts = [length // sections * i for i in range(1, sections)]
    else:
        try:
            cuts = [operator.index(cut) for cut in indices_or_sections]
        except TypeError as error:
            raise ArgumentError(
                f"split: indices_or_sections is {indices_or_sections!r}, expected an integer or "
                "several"
            ) from error
    before = (slice(None),) * axis
    pieces = [slice(*pair) for pair in zip([0, *cuts], [*cuts, None], strict=True)]
    return [x[(*before, piece)] for piece in pieces]


def repeat(
    x: ArrayLike, repeats: Any, axis: SupportsIndex | None = None, **unknown: Never
) -> Tensor:
    """Repeat each element (axis None: of the flattened x) or each slice along an axis.

    Args:
        x: any shape and dtype.
        repeats: how often, one number for all or a sequence with one for each.
        axis: the axis to repeat along.

    Returns:
        The shape of x, but for the axis (one axis without it).

    Raises:
        ArgumentError: a number is negative.
        ShapeError: the sequence has another length than the axis.

    Example:
        >>> tg.repeat([1, 2], 2)
        tensor([1, 1, 2, 2], dtype=int64)
        >>> tg.repeat([[1, 2], [3, 4]], [1, 2], axis=0)
        tensor([[1, 2],
                [3, 4],
                [3, 4]], dtype=int64)
    """
    (x,) = takes.repeat(x, unknown)
    if axis is None:
        x, axis = ravel(x), 0
    axis = axis_index("repeat", axis, x.data.ndim)
    length = x.data.shape[axis]
    counts = array_of("repeat", "repeats", repeats)
    if counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ArgumentError(f"repeat: repeats is {repeats!r}, expected integers of 0 or more")
    if counts.size == 1:
        count = int(counts.reshape(()))
        y = namespace(x.data).repeat(x.data, count, axis)
        return record("repeat", y, (x,), _repeat_backward, (axis, count, x.data.shape))
    if counts.shape != (length,):
        raise ShapeError(
            f"repeat: repeats has shape {counts.shape}, expected ({length},), axis {axis} of x"
        )
    return take(x, np.repeat(np.arange(length), counts), axis)


def _repeat_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    axis, count, shape = saved
    copies = dy.reshape(*shape[: axis + 1], count, *shape[axis + 1 :])
    return (copies.sum(axis + 1, dtype=compute_dtype(dy.dtype)),)


@tangent_of(_repeat_backward)
def _repeat_tangent(op: Op, t: Tensor) -> Tensor:
    axis, count, _ = op.saved
    return repeat(t, count, axis)


def tile(x: ArrayLike, reps: int | Sequence[int]) -> Tensor:
    """Repeat all of x `reps` times along each axis, new axes first.

    Args:
        x: any shape and dtype.
        reps: how often along each axis, the last ones where there are fewer; one number: the last.

    Returns:
        The lengths of x times those numbers.

    Raises:
        ShapeError: a number is negative.

    Example:
        >>> tg.tile([1, 2], 2)
        tensor([1, 2, 1, 2], dtype=int64)
        >>> tg.tile([1, 2], (2, 1))
        tensor([[1, 2],
                [1, 2]], dtype=int64)
    """
    (x,) = takes.tile(x)
    counts = shape_of("tile", reps, "reps")
    ndim = max(len(counts), x.data.ndim)
    counts = (1,) * (ndim - len(counts)) + counts
    shape = (1,) * (ndim - x.data.ndim) + x.data.shape
    y = namespace(x.data).tile(x.data, counts)
    return record("tile", y, (x,), _tile_backward, (counts, shape, x.data.shape))


def _tile_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    counts, shape, own = saved
    copies = dy.reshape([length for pair in zip(counts, shape, strict=True) for length in pair])
    every_other = tuple(range(0, copies.ndim, 2))
    return (copies.sum(every_other, dtype=compute_dtype(dy.dtype)).reshape(own),)


@tangent_of(_tile_backward)
def _tile_tangent(op: Op, t: Tensor) -> Tensor:
    return tile(t, op.saved[0])


def flip(x: ArrayLike, axis: int | Sequence[int] | None = None, **unknown: Never) -> Tensor:
    """Return a view with the order of elements reversed along an axis, several or all.

    Args:
        x: any shape and dtype.
        axis: an axis or several; all by default.

    Returns:
        In the shape and dtype of x.

    Example:
        >>> tg.flip([[1, 2], [3, 4]], axis=1)
        tensor([[2, 1],
                [4, 3]], dtype=int64)
    """
    (x,) = takes.flip(x, unknown)
    axes = axis_tuple("flip", axis, x.data.ndim)
    key = (*[slice(None, None, -1 if i in axes else 1) for i in range(x.data.ndim)], ...)
    return record("flip", x.data[key], (x,), _flip_backward, (key, axes))


def _flip_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    return (dy[saved[0]],)


@tangent_of(_flip_backward)
def _flip_tangent(op: Op, t: Tensor) -> Tensor:
    return flip(t, op.saved[1])


def roll(
    x: ArrayLike,
    shift: int | Sequence[int],
    axis: int | Sequence[int] | None = None,
    **unknown: Never,
) -> Tensor:
    """Move elements along an axis; those that leave at one end come back at the other.

    Args:
        x: any shape and dtype.
        shift: by how many elements, one number or one for each axis.
        axis: an axis or several, whose shifts add up where an axis comes twice; None rolls the
            flattened x and restores its shape.

    Returns:
        In the shape and dtype of x.

    Raises:
        ArgumentError: shift and axis are sequences of different length.

    Example:
        >>> tg.roll([1, 2, 3, 4], 1)
        tensor([4, 1, 2, 3], dtype=int64)
    """
    (x,) = takes.roll(x, unknown)
    several = isinstance(shift, (tuple, list)) or (isinstance(shift, np.ndarray) and shift.ndim)
    given: Any = shift if several else (shift,)
    try:
        shifts = tuple([operator.index(one) for one in given])
    except TypeError as error:
        raise ArgumentError(f"roll: shift is {shift!r}, expected integers") from error
    if axis is None:
        y = namespace(x.data).roll(x.data, sum(shifts))
        return record("roll", y, (x,), _roll_backward, (-sum(shifts), None))
    names = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple([axis_index("roll", name, x.data.ndim) for name in names])
    if not several:
        shifts *= len(axes)
    elif len(shifts) != len(axes):
        raise ArgumentError(f"roll: shift is {shift}, expected {len(axes)} numbers as in axis")
    y = namespace(x.data).roll(x.data, shifts, axes)
    return record("roll", y, (x,), _roll_backward, (tuple([-one for one in shifts]), axes))


def _roll_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    return (namespace(dy).roll(dy, *saved),)


@tangent_of(_roll_backward)
def _roll_tangent(op: Op, t: Tensor) -> Tensor:
    shifts, axes = op.saved
    return roll(t, -shifts if axes is None else [-shift for shift in shifts], axes)


def pad(
    x: ArrayLike, pad_width: Any, mode: PadMode = "constant", *, constant_values: complex = 0
) -> Tensor:
    """Add elements before and after each axis.

    Args:
        x: any shape and dtype.
        pad_width: n for all sides, (before, after) for all axes, or one such pair for each axis.
        mode: "constant", or "edge", "reflect", "symmetric", "wrap" as in NumPy.
        constant_values: the number to fill with, in mode "constant".

    Returns:
        Each axis longer by its two widths, in the dtype of x.

    Raises:
        ArgumentError: a width is negative or not an integer, or the mode is unknown.
        ShapeError: pad_width does not fit the number of axes.

    Example:
        >>> tg.pad([1, 2, 3], (1, 2))
        tensor([0, 1, 2, 3, 0, 0], dtype=int64)
        >>> tg.pad([1, 2, 3], 2, "reflect")
        tensor([3, 2, 1, 2, 3, 2, 1], dtype=int64)
    """
    (y,) = takes.pad(x, mode)
    widths = _pad_pairs(pad_width, y.data.ndim)
    if mode == "constant":
        return _pad_constant(y, widths, constant_values)
    for axis, width in enumerate(widths):
        if width != (0, 0):
            if y.data.shape[axis] == 0:
                raise ShapeError(f"pad: axis {axis} of x is empty, expected elements to {mode}")
            y = take(y, np.pad(np.arange(y.data.shape[axis]), width, mode), axis)
    return y


def _pad_pairs(pad_width: Any, ndim: int) -> list[tuple[int, int]]:
    """Return (before, after) for each axis."""
    try:
        widths = np.asarray(pad_width)
        pairs = np.broadcast_to(widths, (ndim, 2)).tolist()
    except ValueError as error:
        raise ShapeError(
            f"pad: pad_width is {pad_width!r}, expected n, (before, after) or {ndim} such pairs"
        ) from error
    if widths.size and (widths.dtype.kind not in "iu" or (widths < 0).any()):
        raise ArgumentError(f"pad: pad_width is {pad_width!r}, expected integers of 0 or more")
    return [(before, after) for before, after in pairs]


def _pad_constant(x: Tensor, widths: list[tuple[int, int]], value: complex) -> Tensor:
    data = x.data
    lengths = [b + n + a for (b, a), n in zip(widths, data.shape, strict=True)]
    inner = tuple([slice(b, b + n) for (b, _), n in zip(widths, data.shape, strict=True)])
    number = operands("pad", ("x", "constant_values"), (x, value))[1]
    fill = constant_of("pad", "constant_values", number, "where() or concatenate() have one")
    if fill.ndim:
        raise ShapeError(f"pad: constant_values has shape {fill.shape}, expected one number")
    check_holds("pad", "constant_values", fill, data.dtype)
    y = namespace(data).full(lengths, fill.item(), compute_dtype(data.dtype))
    y = y.astype(data.dtype, copy=False)
    y[inner] = data
    return record("pad", y, (x,), _pad_backward, (*inner, ...))


def _pad_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    return (dy[saved],)


@tangent_of(_pad_backward)
def _pad_tangent(op: Op, t: Tensor) -> Tensor:
    *inner, _ = op.saved
    lengths = zip(inner, op.node.shape, strict=True)
    return _pad_constant(t, [(part.start, n - part.stop) for part, n in lengths], 0)
