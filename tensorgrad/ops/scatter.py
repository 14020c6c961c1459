"""Copies of an array with some elements replaced or added to, with gradients.

NumPy assigns in place, x[key] = value, which no gradient flows through. These return a copy, under
PyTorch's names; `index_put` is the general one and all others are a key for it. Gradients flow to x
and to the values. Keys are checked as in indexing. Tests: tests/ops/test_scatter.py.
"""

from __future__ import annotations

from typing import Any, Never, SupportsIndex

import numpy as np

from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core.arrays import cast, sum_to_shape
from tensorgrad.core.backend import Array, Shape, is_array, is_numpy, namespace
from tensorgrad.core.checks import axis_index
from tensorgrad.core.dtypes import compute_dtype, is_complex, is_float
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.record import record
from tensorgrad.core.signature import Shaped, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.ops.arguments import check_holds
from tensorgrad.ops.indexing import add_rows, explained, index_array, lines, plain_key
from tensorgrad.ops.shape import broadcast_to, moveaxis

__all__ = [
    "diagonal_scatter", "index_add", "index_copy", "index_fill", "index_put", "scatter",
    "scatter_add", "select_scatter", "slice_scatter",
]  # fmt: skip

takes = Signatures(globals())


def index_put(x: ArrayLike, indices: Any, values: ArrayLike, *, accumulate: bool = False) -> Tensor:
    """Return a copy of x with y[indices] = values, or y[indices] += values for each index.

    Args:
        x: any shape and dtype.
        indices: all that x may be indexed with; arrays may be tensors.
        values: broadcasts to x[indices]; cast to the dtype of x.
        accumulate: add to what is there. An element that occurs repeatedly gets all its values;
            without, it gets the last of them.

    Returns:
        In the shape and dtype of x. 16-bit floats are added up in float32 and rounded once.

    Raises:
        DeviceError: the operands are on different devices.
        ShapeError: the values do not broadcast to x[indices], or the indices do not fit x.
        OutOfRangeError: an index lies outside its axis (not checked on the GPU for arrays).
        DtypeError: an index is neither an integer, bool, slice, None nor `...`.

    Example:
        >>> tg.index_put([1, 2, 3], [0, 0], [10, 20])
        tensor([20,  2,  3], dtype=int64)
        >>> tg.index_put([1, 2, 3], [0, 0], [10, 20], accumulate=True)
        tensor([31,  2,  3], dtype=int64)
    """
    x, values = takes.index_put(x, values, accumulate)
    return _put("index_put", x, indices, values, accumulate)


def scatter(
    x: ArrayLike, axis: SupportsIndex, index: Any, src: ArrayLike, **unknown: Never
) -> Tensor:
    """Return a copy of x with y[index[i][j]][j] = src[i][j] for axis 0, and so for the others.

    Args:
        x: any shape and dtype.
        axis: the axis that `index` counts along.
        index: integers; as many axes as x, none longer than that of x, but for `axis`.
        src: a number, or an array at least as long as `index` along each axis.

    Returns:
        In the shape and dtype of x; errors are those of `index_put`.

    Raises:
        DeviceError: the operands are on different devices.
        ShapeError: index or src does not fit.

    Example:
        >>> tg.scatter(tg.zeros((2, 3)), 1, [[2], [0]], [[5.0], [6.0]])
        tensor([[0., 0., 5.],
                [6., 0., 0.]], dtype=float32)
    """
    x, src = takes.scatter(x, src, unknown)
    return _scatter("scatter", x, axis, index, src, False)


def scatter_add(
    x: ArrayLike, axis: SupportsIndex, index: Any, src: ArrayLike, **unknown: Never
) -> Tensor:
    """Return a copy of x with src added at `index`: y[index[i][j]][j] += src[i][j] for axis 0.

    Args:
        x: any shape and dtype.
        axis: the axis that `index` counts along.
        index: integers; as many axes as x, none longer than that of x, but for `axis`.
        src: a number, or an array at least as long as `index` along each axis.

    Returns:
        In the shape and dtype of x; an element that occurs repeatedly gets all its values.
        Errors are those of `index_put`.

    Raises:
        DeviceError: the operands are on different devices.
        ShapeError: index or src does not fit.

    Example:
        >>> tg.scatter_add([1, 1, 1], 0, [2, 2, 0], [10, 20, 30])
        tensor([31,  1, 31], dtype=int64)
    """
    x, src = takes.scatter_add(x, src, unknown)
    return _scatter("scatter_add", x, axis, index, src, True)


def index_add(
    x: ArrayLike,
    axis: SupportsIndex,
    index: Any,
    source: ArrayLike,
    *,
    alpha: float = 1,
    **unknown: Never,
) -> Tensor:
    """Return a copy of x with alpha * source[i] added to slice index[i] along an axis.

    Args:
        x: any shape and dtype.
        axis: the axis that `index` counts along.
        index: (N,) integers, or one.
        source: broadcasts to x with N slices along the axis.
        alpha: a factor.

    Returns:
        In the shape and dtype of x; errors are those of `index_put`.

    Raises:
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.index_add(tg.zeros((2, 2)), 0, [1, 1], [[1.0, 2.0], [3.0, 4.0]])
        tensor([[0., 0.],
                [4., 6.]], dtype=float32)
    """
    x, source = takes.index_add(x, source, alpha, unknown)
    source = source if isinstance(alpha, int) and alpha == 1 else source * alpha
    return _put("index_add", x, _slices("index_add", x, axis, index), source, True, "source")


def index_copy(
    x: ArrayLike, axis: SupportsIndex, index: Any, source: ArrayLike, **unknown: Never
) -> Tensor:
    """Return a copy of x with slice index[i] replaced by source[i] along an axis.

    Args:
        x: any shape and dtype.
        axis: the axis that `index` counts along.
        index: (N,) integers, or one.
        source: broadcasts to x with N slices along the axis.

    Returns:
        In the shape and dtype of x; errors are those of `index_put`.

    Raises:
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.index_copy([1, 2, 3], 0, [2, 0], [30, 10])
        tensor([10,  2, 30], dtype=int64)
    """
    x, source = takes.index_copy(x, source, unknown)
    return _put("index_copy", x, _slices("index_copy", x, axis, index), source, False, "source")


def index_fill(
    x: ArrayLike, axis: SupportsIndex, index: Any, value: Shaped[ArrayLike, ""], **unknown: Never
) -> Tensor:
    """Return a copy of x with a number in the slices `index` along an axis.

    Args:
        x: any shape and dtype.
        axis: the axis that `index` counts along.
        index: (N,) integers, or one.
        value: a number, or a tensor without axes.

    Returns:
        In the shape and dtype of x; errors are those of `index_put`.

    Raises:
        ShapeError: value is not ().
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.index_fill([[1, 2, 3], [4, 5, 6]], 1, [0, 2], 9)
        tensor([[9, 2, 9],
                [9, 5, 9]], dtype=int64)
    """
    x, value = takes.index_fill(x, value, unknown)
    return _put("index_fill", x, _slices("index_fill", x, axis, index), value, False)


def select_scatter(
    x: ArrayLike, src: ArrayLike, axis: SupportsIndex, index: SupportsIndex, **unknown: Never
) -> Tensor:
    """Return a copy of x with the slice at one index along an axis replaced by src.

    Args:
        x: any shape and dtype.
        src: broadcasts to the slice, which lacks the axis.
        axis: the axis that `index` counts along.
        index: where the slice lies.

    Returns:
        In the shape and dtype of x; errors are those of `index_put`.

    Raises:
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.select_scatter([[1, 2], [3, 4]], [8, 9], 1, 0)
        tensor([[8, 2],
                [9, 4]], dtype=int64)
    """
    x, src = takes.select_scatter(x, src, unknown)
    return _put("select_scatter", x, _slices("select_scatter", x, axis, index), src, False, "src")


def slice_scatter(
    x: ArrayLike,
    src: ArrayLike,
    axis: SupportsIndex = 0,
    start: int | None = None,
    end: int | None = None,
    step: int | None = 1,
    **unknown: Never,
) -> Tensor:
    """Return a copy of x with slices `start:end:step` along an axis replaced by src.

    Args:
        x: any shape and dtype.
        src: broadcasts to the slices.
        axis: the axis to cut.
        start: the first slice; the beginning by default.
        end: the slice behind the last; the end by default.
        step: from one slice to the next.

    Returns:
        In the shape and dtype of x; errors are those of `index_put`.

    Raises:
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.slice_scatter([1, 2, 3, 4], [20, 30], 0, 1, 3)
        tensor([ 1, 20, 30,  4], dtype=int64)
    """
    x, src = takes.slice_scatter(x, src, start, end, step, unknown)
    key = _slices("slice_scatter", x, axis, slice(start, end, step))
    return _put("slice_scatter", x, key, src, False, "src")


def diagonal_scatter(
    x: ArrayLike,
    src: ArrayLike,
    offset: int = 0,
    axis1: SupportsIndex = 0,
    axis2: SupportsIndex = 1,
) -> Tensor:
    """Return a copy of x with a diagonal, as of `diagonal`, replaced by src.

    Args:
        x: two axes or more.
        src: broadcasts to the diagonal, which is the last axis of `diagonal(x, ...)`.
        offset: how far above the main diagonal; negative: below.
        axis1, axis2: the axes of the rows and the columns.

    Returns:
        In the shape and dtype of x.

    Raises:
        DeviceError: the operands are on different devices.
        ArgumentError: the two axes are one.
        ShapeError: src does not broadcast to the diagonal.

    Example:
        >>> tg.diagonal_scatter(tg.zeros((2, 3)), [1.0, 2.0], 1)
        tensor([[0., 1., 0.],
                [0., 0., 2.]], dtype=float32)
    """
    op = "diagonal_scatter"
    x, src = takes.diagonal_scatter(x, src, offset)
    first, second = two_axes(op, axis1, axis2, x.ndim)
    rows, columns = max(0, -offset), max(0, offset)
    length = max(0, min(x.shape[first] - rows, x.shape[second] - columns))
    y, xp = moveaxis(x, (first, second), (0, 1)), namespace(x.data)
    _check_fits(op, "src has", src.shape, (*y.shape[2:], length))
    src = moveaxis(broadcast_to(src, (*y.shape[2:], length)), -1, 0)
    key = xp.arange(length) + rows, xp.arange(length) + columns
    return moveaxis(_put(op, y, key, src, False, "src"), (0, 1), (first, second))


def two_axes(op: str, axis1: SupportsIndex, axis2: SupportsIndex, ndim: int) -> tuple[int, int]:
    """Return two different axes, counted from the front."""
    first, second = axis_index(op, axis1, ndim, "axis1"), axis_index(op, axis2, ndim, "axis2")
    if first == second:
        raise ArgumentError(f"{op}: axis2 is {axis2}, expected another axis than axis1")
    return first, second


def _scatter(op: str, x: Tensor, axis: SupportsIndex, index: Any, src: Tensor, add: bool) -> Tensor:
    """Put src, cropped to the shape of the index, at the index along an axis."""
    axis = axis_index(op, axis, x.ndim)
    rows = index_array(op, index, x.data, "index")
    fits = rows.ndim == x.ndim and all(
        n <= most for place, (n, most) in enumerate(zip(rows.shape, x.shape, strict=True))
        if place != axis
    )  # fmt: skip
    if not fits:
        raise ShapeError(
            f"{op}: index has shape {rows.shape}, expected at most {x.shape} but for axis {axis}"
        )
    if src.ndim:
        if src.ndim != rows.ndim or any(a < b for a, b in zip(src.shape, rows.shape, strict=True)):
            raise ShapeError(f"{op}: src has shape {src.shape}, expected at least {rows.shape}")
        if src.shape != rows.shape:
            src = src[tuple([slice(n) for n in rows.shape])]
    return _put(op, x, lines(rows.shape, rows, axis), src, add, "src")


def _slices(op: str, x: Tensor, axis: SupportsIndex, part: Any) -> tuple[Any, ...]:
    """Return the key of slices along an axis."""
    if not isinstance(part, slice | int):
        part = index_array(op, part, x.data, "index")
        if part.ndim > 1:
            raise ShapeError(f"{op}: index has shape {part.shape}, expected (N,) or ()")
    return (slice(None),) * axis_index(op, axis, x.ndim) + (part,)


def _put(op: str, x: Tensor, key: Any, values: Tensor, add: bool, name: str = "values") -> Tensor:
    """Compute `index_put`, and record it under the name of the op."""
    array, given = x.data, values.data
    key = plain_key(op, key, array)
    check_holds(op, name, given, array.dtype)
    try:
        shape = array[key].shape
    except (IndexError, ValueError, TypeError) as error:
        raise explained(op, array.shape, key, error) from error
    _check_fits(op, f"{name} has", given.shape, shape)
    xp = namespace(array)
    if add:
        y = _added(array, key, xp.broadcast_to(given, shape))
    else:
        y = _replaced(array, key, xp.broadcast_to(cast(given, array.dtype), shape))
    parts = key if isinstance(key, tuple) else (key,)
    return record(op, y, (x, values), _put_backward, (given.shape, add, *parts))


def _check_fits(op: str, what: str, given: Shape, shape: Shape) -> None:
    """Raise ShapeError unless a shape broadcasts to another."""
    try:
        fits = np.broadcast_shapes(given, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(f"{op}: {what} shape {given}, expected one that broadcasts to {shape}")


def _replaced(array: Array, key: Any, values: Array) -> Array:
    """Return a copy of an array with values at a key, the last one where it repeats."""
    if is_numpy(array) or not _may_repeat(key):
        y = array.copy()
        y[key] = values
        return y
    _, owners = _owners(array.shape, key, array)
    if not owners.size or not values.size:
        return array.copy()
    xp = namespace(array)
    owners = owners.reshape(array.shape)
    return xp.where(owners < 0, array, values.reshape(-1)[xp.maximum(owners, 0)])


def _may_repeat(key: Any) -> bool:
    """Whether a key may name an element several times: it has an array of integers."""
    parts = key if isinstance(key, tuple) else (key,)
    return any(is_array(part) and part.dtype.kind in "iu" for part in parts)


def _owners(shape: Shape, key: Any, like: Array) -> tuple[Array, Array]:
    """Return the elements that a key names, and for each element the last place that names it.

    Elements are numbers in C order, places too, -1 for none. All on the device of `like`.
    """
    xp = namespace(like)
    size = int(np.prod(shape))
    elements = xp.arange(size).reshape(shape)[key].reshape(-1)
    if is_numpy(like):
        owners = np.full(size, -1)
        owners[elements] = np.arange(elements.size)
        return elements, owners
    places = xp.arange(1, elements.size + 1, dtype=np.uint64)
    found = xp.zeros(size, np.uint64)
    xp.maximum.at(found, elements, places)  # an order that does not depend on the threads
    return elements, found.astype(np.int64) - 1


def _added(array: Array, key: Any, values: Array) -> Array:
    """Return a copy of an array with values added at a key, repeatedly where it repeats."""
    xp = namespace(array)
    if not is_float(array.dtype) or is_complex(array.dtype):
        y = array.copy()
        xp.add.at(y, key, cast(values, array.dtype))
        return y
    wide = compute_dtype(array.dtype)
    total = array.astype(wide, order="C")  # a copy, as add_rows wants it
    if values.size:
        elements = xp.arange(array.size).reshape(array.shape)[key]
        add_rows(total.reshape(-1, 1), elements.reshape(-1), values.reshape(-1, 1))
    return total.astype(array.dtype, copy=False)


def _put_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    shape, add, *parts = saved
    key = tuple(parts)
    dx = dvalues = None
    if needs[0]:
        dx = dy
        if not add:
            dx = dy.copy()
            dx[key] = 0
    if needs[1]:
        xp = namespace(dy)
        own = xp.asarray(dy[key])  # 0-d results come as scalars
        if not add and own.size and _may_repeat(key):
            elements, owners = _owners(dy.shape, key, dy)
            kept = owners[elements] == xp.arange(elements.size)
            own = own * kept.reshape(own.shape).astype(own.dtype)
        dvalues = own if own.shape == shape else sum_to_shape(own, shape)
    return dx, dvalues


@tangent_of(_put_backward)
def _put_tangent(op: Op, tx: Tensor | None, tvalues: Tensor | None) -> Tensor:
    _, add, *parts = op.saved
    if tx is None:
        assert tvalues is not None
        tx = Tensor(namespace(tvalues.data).zeros(op.node.shape, op.node.dtype))
    elif tvalues is None:
        if add:
            return tx
        tvalues = Tensor(namespace(tx.data).zeros((), tx.dtype))
    return _put(op.node.name, tx, tuple(parts), tvalues, add)
