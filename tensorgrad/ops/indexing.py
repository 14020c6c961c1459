"""NumPy's indexing, take, take_along_axis and assignment. Tests: tests/ops/test_indexing.py.

The gradient is a scatter-add: dx starts at 0 and every element of dy is added where it was taken
from, so an element that was taken twice gets the sum. Equal inputs give equal bits on both devices:
on the GPU the indices are sorted and summed in order, without atomics.

On the CPU an index outside its axis raises an error. On the GPU checking would wait for the device,
so there the index wraps around, as in CuPy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Never, SupportsIndex, TypeVar

import numpy as np

from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core import backend, nodes
from tensorgrad.core.arrays import array_of, converted, not_an_operand, sum_array
from tensorgrad.core.backend import Array, Axis, Shape, is_array, is_numpy, namespace, same_device
from tensorgrad.core.checks import axis_tuple
from tensorgrad.core.dtypes import compute_dtype, is_complex, is_float
from tensorgrad.core.errors import (
    ArgumentError,
    DtypeError,
    GradError,
    IndexShapeError,
    OutOfRangeError,
    ShapeError,
)
from tensorgrad.core.gradient import Gradients, Needs, Saved, add_at
from tensorgrad.core.modes import mode
from tensorgrad.core.operands import array_beside, integer_array
from tensorgrad.core.record import no_grad, record
from tensorgrad.core.signature import Shaped, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.kernels.indexing import add_rows_cuda
from tensorgrad.ops.arguments import along, check_holds, check_indices

__all__ = [
    "argwhere", "count_nonzero", "flatnonzero", "getitem", "nonzero", "put_along_axis", "take",
    "take_along_axis",
]  # fmt: skip

takes = Signatures(globals())
_REALS = frozenset((bool, int, float))
_AnyTensor = TypeVar("_AnyTensor", bound=Tensor)
_WIDE = 32  # from this row length on, adding whole rows beats adding single elements


def getitem(x: ArrayLike, key: Any) -> Tensor:
    """Return x[key]: a view for integers, slices, `...` and None; a copy for index arrays.

    Args:
        x: any shape and dtype.
        key: all that NumPy takes; index arrays and masks may be tensors too.

    Returns:
        The shape that NumPy gives, in the dtype of x.

    Raises:
        OutOfRangeError: an index lies outside its axis (not checked on the GPU for arrays).
        ShapeError: too many indices, a mask of another shape, or index arrays that do not
            broadcast.
        DtypeError: an index is neither an integer, bool, slice, None nor `...`.

    Example:
        >>> x = tg.tensor([[1, 2, 3], [4, 5, 6]])
        >>> tg.getitem(x, (slice(None), [2, 0]))
        tensor([[3, 1],
                [6, 4]], dtype=int64)
        >>> x[:, [2, 0]].shape
        (2, 2)
    """
    (x,) = takes.getitem(x)
    basic = _is_basic(key)
    if not basic:
        key = plain_key("getitem", key, x.data)
    try:
        y = x.data[key]
    except (IndexError, ValueError, TypeError) as error:
        raise explained("getitem", x.data.shape, key, error) from error
    if basic:
        return record("getitem", y, (x,), _view_backward, (key, x.data.shape))
    arrays = key if isinstance(key, tuple) else (key,)  # saved one by one: assignment is noticed
    return record("getitem", y, (x,), _getitem_backward, (x.data.shape, *arrays))


def _view_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    key, shape = saved
    parts = key if type(key) is tuple else (key,)
    if ... not in parts:
        parts = (*parts, ...)  # so that a single element is a view too
    return (add_at(needs[0], parts, dy, shape),)


@tangent_of(_view_backward)
def _view_tangent(op: Op, t: Tensor) -> Tensor:
    return getitem(t, op.saved[0])


def _getitem_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    shape, *parts = saved
    key = tuple(parts)
    if not any(is_array(part) and part.dtype.kind in "iu" for part in key):
        dx = namespace(dy).zeros(shape, dy.dtype)  # only masks: no element was taken twice
        dx[key] = dy
        return (dx,)
    if len(key) == 1:
        return (_add_back(shape, key[0], dy),)
    return (_add_elements_back(shape, key, dy),)


@tangent_of(_getitem_backward)
def _getitem_tangent(op: Op, t: Tensor) -> Tensor:
    return getitem(t, op.saved[1:])


def assign(x: Tensor, key: Any, value: Any) -> None:
    """Assign x[key] = value; no gradient flows through it.

    Args:
        x: a tensor outside any graph, or any tensor under `no_grad()`.
        key: as for `getitem`.
        value: a number, list, array or tensor that broadcasts to x[key]. Floats are rounded to the
            dtype of x; integers must lie in its range (not checked on the GPU for arrays).

    Raises:
        GradError: x is part of a graph, or the gradient of the value would be lost.
        DeviceError: the value is an array on another device.
        ArgumentError: the memory is read-only, or the dtype of x does not hold an integer.
        ShapeError, OutOfRangeError, DtypeError: as in `getitem`, or the value does not broadcast,
            or x holds integers or bool and the value floats, or x reals and the value complex ones.
    """
    key = plain_key("assignment", key, x.data)
    _check_gradients(
        "assignment", x, value, "use where() or concatenate(), or assign value.detach()"
    )
    value = value.data if isinstance(value, Tensor) else value
    _check_writeable("assignment", x)
    if type(value) not in _REALS or not is_float(x.dtype):  # otherwise it is rounded as it is
        value = _assignable(x, value)
    try:
        nodes.assign(x, key, value)
    except OverflowError as error:
        raise ArgumentError(f"assignment: the value is {value}, expected {x.dtype}") from error
    except (IndexError, ValueError, TypeError) as error:
        raise explained("assignment", x.data.shape, key, error) from error


def _assignable(x: Tensor, value: Any) -> Any:
    """Return a value that the dtype of x holds, lists as an array on its device."""
    array = array_beside("assignment", "the value", value, x)
    check_holds("assignment", "the value", array, x.dtype)
    if is_array(value):
        same_device("assignment", ("the tensor", "the value"), (x.data, array))
        return array
    return backend.asarray_like(array, x.data) if array.ndim else value


def assign_result(
    x: _AnyTensor, symbol: str, operation: Callable[[Any, Any], Tensor], other: Any
) -> _AnyTensor:
    """Compute an augmented assignment such as x += other in the memory of x; return x.

    As in NumPy: views of that memory see it, the result is computed from the old elements even
    where `other` overlaps them, and is then rounded to the dtype of x. No gradient flows through.

    Args:
        x: a tensor outside any graph, or any tensor under `no_grad()`.
        symbol: such as "+=", for errors.
        operation: computes the new elements from x and `other`.
        other: a number, array or tensor.

    Raises:
        GradError: x is part of a graph, or the gradient of `other` would be lost.
        ArgumentError: the memory is read-only.
        ShapeError: the result has another shape than x.
        DtypeError: the result has another kind of dtype (floats in integers, integers in bool).
        DeviceError: `other` is an array on another device.
    """
    plain = f"a = a {symbol[:-1]} b"
    _check_gradients(symbol, x, other, f"write {plain}, or use b.detach()")
    _check_writeable(symbol, x)
    with no_grad():
        y = operation(x, other)
    if y.shape != x.shape:
        raise ShapeError(
            f"{symbol}: the result has shape {y.shape}, expected {x.shape} as the tensor; "
            f"write {plain}"
        )
    rounded = is_float(x.dtype) and not is_complex(y.dtype)
    if not (rounded or np.can_cast(y.dtype, x.dtype, "same_kind")):
        raise DtypeError(
            f"{symbol}: the result has dtype {y.dtype}, which {x.dtype} of the tensor does not "
            f"take; write {plain}"
        )
    check_holds(symbol, "the result", y.data, x.dtype)
    nodes.assign(x, ..., y.data if y.dtype == x.dtype else converted(y.data, x.dtype))
    return x


def _check_gradients(op: str, x: Tensor, value: Any, instead: str) -> None:
    """Raise GradError where an assignment to x would break a graph or lose a gradient."""
    nodes.check_assignable(op, x)
    if mode.grad_enabled and isinstance(value, Tensor) and value.requires_grad:
        raise GradError(f"{op}: the value requires a gradient, which would be lost; {instead}")


def _check_writeable(op: str, x: Tensor) -> None:
    if is_numpy(x.data) and not x.data.flags.writeable:
        raise ArgumentError(f"{op}: the tensor's memory is read-only; assign to a copy")


def take(x: ArrayLike, indices: Any, axis: SupportsIndex | None = None, **unknown: Never) -> Tensor:
    """Return the slices of x at `indices` along an axis; axis None takes from the flattened x.

    Args:
        x: any shape and dtype.
        indices: integers of any shape; it replaces the axis in the result's shape.
        axis: the axis to index.

    Returns:
        In the dtype of x.

    Raises:
        OutOfRangeError: an index lies outside the axis (not checked on the GPU).
        DtypeError: the indices are not integers.

    Example:
        >>> tg.take([10, 20, 30], [[0, 2]])
        tensor([[10, 30]], dtype=int64)
        >>> tg.take([[1, 2, 3], [4, 5, 6]], [2, 0], axis=1)
        tensor([[3, 1],
                [6, 4]], dtype=int64)
    """
    (x,) = takes.take(x, unknown)
    data = x.data
    rows = index_array("take", indices, data)
    data, axis = along("take", data, axis)
    try:
        y = data.take(rows, axis)
    except IndexError:
        _check_range("take", rows, axis, data.shape[axis])
        raise
    return record("take", y, (x,), _take_backward, (x.data.shape, data.shape, axis, rows))


def _take_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    own, shape, axis, rows = saved
    outer, inner = shape[:axis], shape[axis + 1 :]
    dy = dy.reshape((int(np.prod(outer)), rows.size, *inner)).swapaxes(0, 1)
    dx = _add_back((shape[axis], *dy.shape[1:]), rows.reshape(-1), dy)
    return (dx.swapaxes(0, 1).reshape(own),)


@tangent_of(_take_backward)
def _take_tangent(op: Op, t: Tensor) -> Tensor:
    _, shape, axis, rows = op.saved
    return take(t.reshape(shape), rows, axis)


def take_along_axis(
    x: ArrayLike, indices: Any, axis: SupportsIndex | None = -1, **unknown: Never
) -> Tensor:
    """Return x[..., indices[..., j, ...], ...]: each line along the axis has its own indices.

    Args:
        x: any shape and dtype.
        indices: integers; the number of axes of x; other axes broadcast against those of x.
        axis: the axis to index; None indexes the flattened x with 1-D indices.

    Returns:
        The shape of the indices and x broadcast, but for the axis; the dtype of x.

    Raises:
        OutOfRangeError: an index lies outside the axis (not checked on the GPU).
        ShapeError: the indices do not fit the shape of x.
        DtypeError: the indices are not integers.

    Example:
        >>> x = tg.tensor([[3, 1, 2], [7, 9, 8]])
        >>> tg.take_along_axis(x, tg.argmax(x, axis=1, keepdims=True), axis=1)
        tensor([[3],
                [9]], dtype=int64)
    """
    (x,) = takes.take_along_axis(x, unknown)
    data = x.data
    rows = index_array("take_along_axis", indices, data)
    data, axis = along("take_along_axis", data, axis)
    if rows.ndim != data.ndim:
        raise ShapeError(
            f"take_along_axis: indices has {rows.ndim} axes, expected {data.ndim} as x"
        )
    key = lines(data.shape, rows, axis)
    try:
        y = data[key]
    except IndexError as error:
        _check_range("take_along_axis", rows, axis, data.shape[axis])
        raise ShapeError(
            f"take_along_axis: indices has shape {rows.shape}, expected {data.shape} "
            f"but for axis {axis}"
        ) from error
    return record(
        "take_along_axis", y, (x,), _along_backward, (x.data.shape, data.shape, axis, rows)
    )


def _along_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    own, shape, axis, rows = saved
    return (_add_elements_back(shape, lines(shape, rows, axis), dy).reshape(own),)


@tangent_of(_along_backward)
def _along_tangent(op: Op, t: Tensor) -> Tensor:
    _, shape, axis, rows = op.saved
    return take_along_axis(t.reshape(shape), rows, axis)


def lines(shape: Shape, rows: Array, axis: int) -> tuple[Array, ...]:
    """Return index arrays that take `rows` along one axis and leave all others as they are."""
    xp = namespace(rows)
    key = [
        xp.arange(n).reshape([-1 if j == i else 1 for j in range(len(shape))])
        for i, n in enumerate(shape)
    ]
    key[axis] = rows
    return tuple(key)


def put_along_axis(
    x: Tensor, indices: Any, values: Any, axis: SupportsIndex | None = -1, **unknown: Never
) -> None:
    """Assign x[..., indices[..., j, ...], ...] = values in place; no gradient flows through.

    Args:
        x: a tensor outside any graph, or any tensor under `no_grad()`.
        indices: as for `take_along_axis`.
        values: broadcast to the shape of the indices.
        axis: the axis to index; None indexes the flattened x with 1-D indices.

    Raises:
        GradError: x is part of a graph, or the gradient of the values would be lost.
        ShapeError, OutOfRangeError, DtypeError: as in `take_along_axis`.

    Example:
        >>> x = tg.tensor([[3, 1, 2], [7, 9, 8]])
        >>> tg.put_along_axis(x, [[0], [1]], 0, axis=1)
        >>> x
        tensor([[0, 1, 2],
                [7, 0, 8]], dtype=int64)
    """
    takes.put_along_axis(unknown)
    if not isinstance(x, Tensor):
        raise DtypeError(f"put_along_axis: x is a {type(x).__name__}, expected a tensor to change")
    rows = index_array("put_along_axis", indices, x.data)
    _, place = along("put_along_axis", x.data, axis)
    if rows.ndim != (1 if axis is None else x.ndim):
        expected = 1 if axis is None else x.ndim
        raise ShapeError(f"put_along_axis: indices has {rows.ndim} axes, expected {expected}")
    if axis is None:
        _check_range("put_along_axis", rows, 0, x.size) if is_numpy(rows) else None
        assign(x, namespace(rows).unravel_index(rows % max(x.size, 1), x.shape), values)
    else:
        assign(x, lines(x.shape, rows, place), values)


def nonzero(x: Shaped[ArrayLike, "N ..."]) -> tuple[Tensor, ...]:
    """Return the indices of the elements that are not 0: one tensor for each axis.

    On the GPU the host waits for their number, so no CUDA graph can capture it.

    Args:
        x: (N, ...), any dtype.

    Returns:
        (n,) int64 for each axis, in C order of the elements.

    Raises:
        ShapeError: x is not (N, ...).

    Example:
        >>> rows, columns = tg.nonzero([[0, 5], [6, 0]])
        >>> rows.tolist(), columns.tolist()
        ([0, 1], [1, 0])
    """
    (x,) = takes.nonzero(x)
    return tuple([Tensor(found) for found in x.data.nonzero()])


def flatnonzero(x: ArrayLike) -> Tensor:
    """Return the indices of the elements of the flattened x that are not 0.

    On the GPU the host waits for their number, so no CUDA graph can capture it.

    Args:
        x: any shape and dtype.

    Returns:
        (n,) int64, ascending.

    Example:
        >>> tg.flatnonzero([[0, 5], [6, 0]])
        tensor([1, 2], dtype=int64)
    """
    (x,) = takes.flatnonzero(x)
    return Tensor(x.data.reshape(-1).nonzero()[0])


def argwhere(x: ArrayLike) -> Tensor:
    """Return the indices of the elements that are not 0, a row for each.

    On the GPU the host waits for their number, so no CUDA graph can capture it.

    Args:
        x: any shape and dtype.

    Returns:
        (n, x.ndim) int64.

    Example:
        >>> tg.argwhere([[0, 5], [6, 0]])
        tensor([[0, 1],
                [1, 0]], dtype=int64)
    """
    (x,) = takes.argwhere(x)
    return Tensor(namespace(x.data).argwhere(x.data))


def count_nonzero(
    x: ArrayLike, axis: Axis = None, *, keepdims: bool = False, **unknown: Never
) -> Tensor:
    """Return the number of elements that are not 0.

    Args:
        x: any shape and dtype.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, int64.

    Example:
        >>> tg.count_nonzero([[0, 5], [6, 7]], axis=1)
        tensor([1, 2], dtype=int64)
    """
    (x,) = takes.count_nonzero(x, keepdims, unknown)
    axes = tuple(sorted(axis_tuple("count_nonzero", axis, x.ndim)))
    nonzero = namespace(x.data).asarray(x.data != 0)  # 0-d results come as scalars
    return Tensor(sum_array(nonzero, axes, keepdims))


def add_rows(total: Array, rows: Array, values: Array) -> None:
    """Add total[rows[i]] += values[i] for every i, in order, in the dtype of `total`.

    Args:
        total: (n, C), C-contiguous, float32 or float64.
        rows: (m,) integers; may repeat. What is not in 0 to n - 1 is skipped on the GPU.
        values: (m, C), any float dtype.
    """
    if not is_numpy(total):
        add_rows_cuda(total, backend.asarray_like(rows, total), values)  # rows may be on the CPU
        return
    rows = rows.astype(np.int64, copy=False)
    values = values.astype(total.dtype, copy=False)
    width = total.shape[1]
    if width < _WIDE:
        elements = rows if width == 1 else rows[:, None] * width + np.arange(width)
        np.add.at(total.reshape(-1), elements.reshape(-1), values.reshape(-1))
        return
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    counts = np.diff(starts, append=len(rows))
    once = starts[counts == 1]
    total[rows[once]] += values[order[once]]
    for start, count in zip(starts[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
        row = total[rows[start]]
        row += np.add.reduce(values[order[start : start + count]], 0)


def _add_back(shape: Shape, rows: Array, dy: Array) -> Array:
    """Return zeros of `shape` with dy[i] added at [rows[i]], in the compute dtype of dy."""
    dx = namespace(dy).zeros(shape, compute_dtype(dy.dtype))
    if dx.size and rows.size:
        rows = rows.astype(np.int64, copy=False).reshape(-1)
        rows = namespace(rows).where(rows < 0, rows + shape[0], rows)
        add_rows(dx.reshape(shape[0], -1), rows, dy.reshape(rows.size, -1))
    return dx


def _add_elements_back(shape: Shape, key: tuple[Any, ...], dy: Array) -> Array:
    """Return zeros of `shape` with dy added at [key], where an element may occur repeatedly."""
    size = int(np.prod(shape))
    elements = namespace(dy).arange(size).reshape(shape)[key]
    return _add_back((size,), elements, dy).reshape(shape)


def plain_key(op: str, key: Any, like: Array) -> Any:
    """Return an index with arrays on the device of `like` for its sequences and tensors."""
    if isinstance(key, tuple):
        return tuple([_plain_part(op, part, like) for part in key])
    return _plain_part(op, key, like)


def _plain_part(op: str, part: Any, like: Array) -> Any:
    """Return what indexes one axis or more."""
    if isinstance(part, Tensor):
        part = part.data
    elif isinstance(part, Sequence) and not isinstance(part, (str, bytes)):
        plain = [value.data if isinstance(value, Tensor) else value for value in part]
        part = array_of(op, "the index", plain)
        part = part.astype(np.int64) if part.size == 0 else part
    elif not (is_array(part) or type(part) in _BASIC or isinstance(part, (bool, np.bool_))):
        try:
            if getattr(part, "shape", ()):
                raise TypeError("an array of another library, which one element makes an integer")
            part = operator.index(part)
        except TypeError as error:
            raise not_an_operand(
                op, "the index", part, "an integer, slice, None, ..., integer array or mask"
            ) from error
    if isinstance(part, np.ndarray):
        part = np.asarray(part)  # without its subclass, which would pass for CuPy's
    if is_array(part) and is_numpy(part) is not is_numpy(like):
        if is_numpy(like):
            same_device(op, ("the tensor", "the index"), (like, part))
        return backend.asarray_like(part, like)
    return part


_BASIC = frozenset((int, slice, type(None), type(...), np.int64, np.int32, np.uint8))


def _is_basic(key: Any) -> bool:
    """Whether indexing gives a view."""
    return _BASIC.issuperset(map(type, key)) if type(key) is tuple else type(key) in _BASIC


def index_array(op: str, indices: Any, like: Array, name: str = "indices") -> Array:
    """Return indices as an integer array on the device of the array they index."""
    return _plain_part(op, integer_array(op, name, indices), like)


def _check_range(op: str, indices: Array, axis: int, size: int) -> None:
    """Raise OutOfRangeError for the first index outside its axis."""
    outside = (indices < -size) | (indices >= size)
    expected = f"{-size} to {size - 1} (axis {axis} has length {size})"
    check_indices(op, "indices", indices, outside, expected)


def explained(op: str, shape: Shape, key: Any, error: Exception) -> Exception:
    """Return an error that names the part of the key and the axis that it does not fit."""
    parts = list(key) if isinstance(key, tuple) else [key]
    for part in parts:
        if is_array(part) and part.dtype.kind not in "iub":
            return DtypeError(f"{op}: the index has dtype {part.dtype}, expected integers or bool")
    used = sum([_axes_used(part) for part in parts])
    if used > len(shape):
        return IndexShapeError(
            f"{op}: the index has {used} axes, expected at most {len(shape)} (x is {shape})"
        )
    axis = 0
    for part in parts:
        count = len(shape) - used if part is ... else _axes_used(part)
        own = shape[axis : axis + count]
        axis += count
        if is_array(part) and part.dtype.kind == "b":
            if part.shape != own:
                return IndexShapeError(
                    f"{op}: the mask has shape {part.shape}, expected {own} (x is {shape})"
                )
        elif count == 1 and part is not ... and not isinstance(part, slice):
            size = own[0]
            for index in np.asarray(part).reshape(-1).tolist():
                if not -size <= index < size:
                    return OutOfRangeError(
                        f"{op}: got index {index} for axis {axis - 1}, expected {-size} to "
                        f"{size - 1} (x is {shape})"
                    )
    kind = DtypeError if isinstance(error, TypeError) else ShapeError
    return kind(f"{op}: {error}, expected what fits x, which is {shape}")


def _axes_used(part: Any) -> int:
    """Return how many axes of x one part of an index consumes."""
    if part is None or part is ... or isinstance(part, (bool, np.bool_)):
        return 0
    return int(part.ndim) if is_array(part) and part.dtype.kind == "b" else 1
