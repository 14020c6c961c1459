"""Sorting, unique elements, sets, and whether arrays are equal.

Equal elements keep their order, ascending and descending, and NaN counts as larger than any
number; so both devices agree on every index. Sorted values are taken by index, and their
gradient goes back to where each came from. Unique elements and sets have no gradients; how many
there are depends on the values, so on the GPU the host waits for them, and no CUDA graph can
capture these functions. Tests: tests/ops/test_sorting.py, tests/ops/test_sets.py and
tests/ops/test_close.py.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Never, SupportsIndex

from tensorgrad.core.backend import Array, namespace, same_device, upcast
from tensorgrad.core.checks import axis_index, check_choice, check_flag, check_number, promoted
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.operands import constant_of, integer_array, operands
from tensorgrad.core.signature import Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.ops.arguments import along
from tensorgrad.ops.indexing import take, take_along_axis
from tensorgrad.ops.stacking import broadcast_shapes

__all__ = [
    "allclose", "argsort", "array_equal", "array_equiv", "intersect1d", "isclose", "isin",
    "searchsorted", "setdiff1d", "setxor1d", "sort", "topk", "union1d", "unique", "unique_all",
    "unique_counts", "unique_inverse", "unique_values",
]  # fmt: skip

takes = Signatures(globals())


def sort(
    x: ArrayLike,
    axis: SupportsIndex | None = -1,
    *,
    descending: bool = False,
    stable: bool | int = True,
    **unknown: Never,
) -> Tensor:
    """Return the elements in ascending (or descending) order along an axis.

    Args:
        x: any shape and dtype.
        axis: the axis to sort along; None sorts the flattened x.
        descending: largest first.
        stable: equal elements keep their order in any case.

    Returns:
        The shape of x (one axis without `axis`), in its dtype.

    Raises:
        ArgumentError: x has no such axis.

    Example:
        >>> tg.sort([[3, 1, 2], [9, 7, 8]])
        tensor([[1, 2, 3],
                [7, 8, 9]], dtype=int64)
        >>> tg.sort([3, 1, 2], descending=True)
        tensor([3, 2, 1], dtype=int64)
    """
    (x,) = takes.sort(x, descending, unknown)
    order = _order("sort", x.data, axis, descending)
    return take_along_axis(x, order, axis)


def argsort(
    x: ArrayLike,
    axis: SupportsIndex | None = -1,
    *,
    descending: bool = False,
    stable: bool | int = True,
    **unknown: Never,
) -> Tensor:
    """Return the indices that sort x along an axis; equal elements keep their order.

    Args:
        x: any shape and dtype.
        axis: the axis to sort along; None sorts the flattened x.
        descending: largest first.
        stable: equal elements keep their order in any case.

    Returns:
        The shape of x (one axis without `axis`), int64.

    Raises:
        ArgumentError: x has no such axis.

    Example:
        >>> tg.argsort([30, 10, 20])
        tensor([1, 2, 0], dtype=int64)
    """
    (x,) = takes.argsort(x, descending, unknown)
    return Tensor(_order("argsort", x.data, axis, descending))


def topk(
    x: ArrayLike, k: int, axis: SupportsIndex = -1, *, largest: bool = True, **unknown: Never
) -> tuple[Tensor, Tensor]:
    """Return the k largest (or smallest) elements along an axis, the extreme first.

    Args:
        x: any shape and dtype.
        k: how many, from 0 to the length of the axis.
        axis: the axis to search.
        largest: False for the smallest.

    Returns:
        The values, with a gradient, and their indices, int64; both with length k along the axis.

    Raises:
        ArgumentError: k is out of its range or x has no such axis.

    Example:
        >>> values, indices = tg.topk([1.0, 5.0, 3.0], 2)
        >>> values.tolist(), indices.tolist()
        ([5.0, 3.0], [1, 2])
    """
    (x,) = takes.topk(x, k, largest, unknown)
    place = axis_index("topk", axis, x.ndim)
    if not 0 <= k <= x.shape[place]:
        raise ArgumentError(f"topk: k is {k}, expected 0 to {x.shape[place]} (axis {place} of x)")
    order = _order("topk", x.data, place, largest)
    first = order[(*[slice(None)] * place, slice(0, k))]
    return take_along_axis(x, first, place), Tensor(first)


def searchsorted(
    sorted_sequence: ArrayLike,
    values: ArrayLike,
    side: Literal["left", "right"] = "left",
    sorter: ArrayLike | None = None,
) -> Tensor:
    """Return for each value the index to insert it at so that the sequence stays sorted.

    Args:
        sorted_sequence: (n,), ascending.
        values: any shape.
        side: "left" puts a value before its equals, "right" behind them.
        sorter: (n,) indices that sort the sequence, where it is not ascending itself.

    Returns:
        int64 indices from 0 to n, in the shape of `values`.

    Raises:
        ShapeError: the sequence does not have one axis.
        ArgumentError: another side.

    Example:
        >>> tg.searchsorted([1, 3, 5], [0, 3, 6])
        tensor([0, 1, 3], dtype=int64)
        >>> tg.searchsorted([1, 3, 5], 3, side="right")
        tensor(2, dtype=int64)
    """
    names = ("sorted_sequence", "values")
    sequence, wanted = operands("searchsorted", names, (sorted_sequence, values), compared=True)
    if sorter is not None:
        sequence = take(sequence, integer_array("searchsorted", "sorter", sorter), 0)
    arrays = sequence.data, wanted.data
    same_device("searchsorted", names, arrays)
    if arrays[0].ndim != 1:
        raise ShapeError(
            f"searchsorted: sorted_sequence has shape {arrays[0].shape}, expected one axis"
        )
    check_choice("searchsorted", "side", side, ("left", "right"))
    common = promoted("searchsorted", names, arrays)
    sequence, wanted = [upcast(array.astype(common, copy=False)) for array in arrays]
    indices = namespace(sequence).searchsorted(sequence, wanted.reshape(-1), side)
    return Tensor(indices.reshape(wanted.shape))


def _order(op: str, array: Array, axis: SupportsIndex | None, descending: bool) -> Array:
    """Return the indices that sort stably along an axis."""
    array, place = along(op, array, axis)
    array = upcast(array)  # 16-bit NaNs of ml_dtypes do not sort
    if not descending:
        return array.argsort(place, kind="stable")
    backwards = (*[slice(None)] * place, slice(None, None, -1))
    order = array[backwards].argsort(place, kind="stable")
    return (array.shape[place] - 1 - order)[backwards]


class UniqueAll(NamedTuple):
    """Unique elements; where each was first; for each element of x its place; how often."""

    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class UniqueCounts(NamedTuple):
    """Unique elements and how often each occurs."""

    values: Tensor
    counts: Tensor


class UniqueInverse(NamedTuple):
    """Unique elements and, for each element of x, its place among them."""

    values: Tensor
    inverse_indices: Tensor


def unique(
    x: ArrayLike,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: SupportsIndex | None = None,
    *,
    equal_nan: bool = True,
    **unknown: Never,
) -> Any:
    """Return the different elements of x, or its different slices along an axis, in order.

    Args:
        x: any shape.
        return_index: whether to return the index of the first occurrence of each.
        return_inverse: whether to return for each element of x its place in the result.
        return_counts: whether to return how often each occurs.
        axis: the axis of the slices; None for the elements of the flattened x.
        equal_nan: whether all NaN count as one.

    Returns:
        A tensor, or a tuple of it and what was asked for, in this order.

    Raises:
        GradError: x requires a gradient.

    Example:
        >>> tg.unique([3, 1, 3])
        tensor([1, 3], dtype=int64)
        >>> values, counts = tg.unique([3, 1, 3], return_counts=True)
        >>> counts.tolist()
        [1, 2]
    """
    (x,) = takes.unique(x, return_index, return_inverse, return_counts, equal_nan, unknown)
    if axis is not None:
        axis = axis_index("unique", axis, x.ndim)
    xp = namespace(x.data)
    array = constant_of("unique", "x", x, _ONCE)
    found = xp.unique(
        upcast(array), return_index, return_inverse, return_counts, axis, equal_nan=equal_nan
    )
    parts = list(found) if isinstance(found, tuple) else [found]
    parts[0] = parts[0].astype(x.dtype, copy=False)
    if return_inverse and axis is None:
        place = 1 + return_index
        parts[place] = parts[place].reshape(x.shape)
    tensors = tuple([Tensor(part) for part in parts])
    return tensors if len(tensors) > 1 else tensors[0]


def unique_all(x: ArrayLike) -> UniqueAll:
    """Return `unique` with indices, inverse and counts; each NaN counts for itself.

    Args:
        x: any shape.

    Returns:
        `values`, `indices` and `counts`, (m,) each, and `inverse_indices` in the shape of x.

    Raises:
        GradError: x requires a gradient.

    Example:
        >>> found = tg.unique_all([3, 1, 3])
        >>> found.values.tolist(), found.indices.tolist(), found.inverse_indices.tolist()
        ([1, 3], [1, 0], [1, 0, 1])
    """
    return UniqueAll(*unique(x, True, True, True, equal_nan=False))


def unique_counts(x: ArrayLike) -> UniqueCounts:
    """Return `unique` with counts; each NaN counts for itself.

    Args:
        x: any shape.

    Returns:
        `values` and `counts`, (m,) each.

    Raises:
        GradError: x requires a gradient.

    Example:
        >>> values, counts = tg.unique_counts([3, 1, 3])
        >>> values.tolist(), counts.tolist()
        ([1, 3], [1, 2])
    """
    return UniqueCounts(*unique(x, return_counts=True, equal_nan=False))


def unique_inverse(x: ArrayLike) -> UniqueInverse:
    """Return `unique` with the inverse; each NaN counts for itself.

    Args:
        x: any shape.

    Returns:
        `values`, (m,), and `inverse_indices` in the shape of x: values[inverse_indices] is x.

    Raises:
        GradError: x requires a gradient.

    Example:
        >>> values, places = tg.unique_inverse([3, 1, 3])
        >>> values[places]
        tensor([3, 1, 3], dtype=int64)
    """
    return UniqueInverse(*unique(x, return_inverse=True, equal_nan=False))


def unique_values(x: ArrayLike) -> Tensor:
    """Return `unique`; each NaN counts for itself.

    Args:
        x: any shape.

    Returns:
        (m,) in the dtype of x, ascending.

    Raises:
        GradError: x requires a gradient.

    Example:
        >>> tg.unique_values([3, 1, 3])
        tensor([1, 3], dtype=int64)
    """
    found: Tensor = unique(x, equal_nan=False)
    return found


def isin(x: ArrayLike, values: ArrayLike, *, invert: bool = False) -> Tensor:
    """Return for each element of x whether it is among the values (or, inverted, is not).

    Args:
        x: any shape.
        values: any shape.
        invert: whether to return what is not among them.

    Returns:
        In the shape of x, bool.

    Example:
        >>> tg.isin([1, 2, 3], [2, 5])
        tensor([False,  True, False], dtype=bool)
    """
    check_flag("isin", "invert", invert)
    a, b = map(upcast, _pair("isin", "x", "values", x, values))
    return Tensor(namespace(a).isin(a, b, invert=invert))


def union1d(a: ArrayLike, b: ArrayLike) -> Tensor:
    """Return the elements of a and b, each once, in order.

    Args:
        a, b: any shape; they are flattened.

    Returns:
        (m,) in the dtype that both have in common, ascending.

    Raises:
        GradError: an operand requires a gradient.

    Example:
        >>> tg.union1d([3, 1], [2, 3])
        tensor([1, 2, 3], dtype=int64)
    """
    return _of_sets("union1d", a, b)


def intersect1d(a: ArrayLike, b: ArrayLike) -> Tensor:
    """Return the elements that are in a and in b, each once, in order.

    Args:
        a, b: any shape; they are flattened.

    Returns:
        (m,) in the dtype that both have in common, ascending.

    Raises:
        GradError: an operand requires a gradient.

    Example:
        >>> tg.intersect1d([3, 1, 2], [2, 3, 3])
        tensor([2, 3], dtype=int64)
    """
    return _of_sets("intersect1d", a, b)


def setdiff1d(a: ArrayLike, b: ArrayLike) -> Tensor:
    """Return the elements of a that are not in b, each once, in order.

    Args:
        a, b: any shape; they are flattened.

    Returns:
        (m,) in the dtype that both have in common, ascending.

    Raises:
        GradError: an operand requires a gradient.

    Example:
        >>> tg.setdiff1d([3, 1, 2], [2])
        tensor([1, 3], dtype=int64)
    """
    return _of_sets("setdiff1d", a, b)


def setxor1d(a: ArrayLike, b: ArrayLike) -> Tensor:
    """Return the elements that are in one of a and b, each once, in order.

    Args:
        a, b: any shape; they are flattened.

    Returns:
        (m,) in the dtype that both have in common, ascending.

    Raises:
        GradError: an operand requires a gradient.

    Example:
        >>> tg.setxor1d([3, 1], [2, 3])
        tensor([1, 2], dtype=int64)
    """
    return _of_sets("setxor1d", a, b)


_ONCE = "which of several equal elements would get it is not defined"


def _of_sets(op: str, a: Any, b: Any) -> Tensor:
    for name, x in (("a", a), ("b", b)):
        if isinstance(x, Tensor):
            constant_of(op, name, x, _ONCE)
    arrays = _pair(op, "a", "b", a, b)
    dtype = promoted(op, ("a", "b"), arrays)
    found = getattr(namespace(arrays[0]), op)(*map(upcast, arrays))
    return Tensor(found.astype(dtype, copy=False))


def _pair(op: str, name: str, other: str, a: Any, b: Any) -> tuple[Array, Array]:
    """Return two arrays of one device, to be compared."""
    first, second = operands(op, (name, other), (a, b), compared=True)
    same_device(op, (name, other), (first.data, second.data))
    return first.data, second.data


def isclose(
    a: ArrayLike, b: ArrayLike, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> Tensor:
    """Return whether |a - b| <= atol + rtol |b|, elementwise; infinities are close to themselves.

    Args:
        a, b: tensors, arrays, numbers or lists that broadcast.
        rtol, atol: the relative and the absolute tolerance.
        equal_nan: whether NaN is close to NaN.

    Returns:
        In the shape that a and b broadcast to, bool.

    Raises:
        ShapeError: a and b do not broadcast.

    Example:
        >>> tg.isclose([1.0, 2.0], [1.000001, 2.1])
        tensor([ True, False], dtype=bool)
    """
    check_number("isclose", "rtol", rtol)
    check_number("isclose", "atol", atol)
    check_flag("isclose", "equal_nan", equal_nan)
    first, second = _pair("isclose", "a", "b", a, b)
    broadcast_shapes(first.shape, second.shape)
    xp = namespace(first)
    return Tensor(
        xp.asarray(xp.isclose(upcast(first), upcast(second), float(rtol), float(atol), equal_nan))
    )


def allclose(
    a: ArrayLike, b: ArrayLike, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Return whether all elements are close; see `isclose`. The host waits for the answer.

    Args:
        a, b: tensors, arrays, numbers or lists that broadcast.
        rtol, atol: the relative and the absolute tolerance.
        equal_nan: whether NaN is close to NaN.

    Returns:
        A bool of Python.

    Raises:
        ShapeError: a and b do not broadcast.

    Example:
        >>> tg.allclose([1.0, 2.0], [1.0, 2.1], rtol=0.1)
        True
    """
    return bool(isclose(a, b, rtol, atol, equal_nan).data.all())


def array_equal(a: ArrayLike, b: ArrayLike, equal_nan: bool = False) -> bool:
    """Return whether a and b have one shape and equal elements. The host waits for the answer.

    Args:
        a, b: tensors, arrays, numbers or lists.
        equal_nan: whether NaN is equal to NaN.

    Returns:
        A bool of Python.

    Example:
        >>> tg.array_equal([1, 2], [1.0, 2.0])
        True
    """
    check_flag("array_equal", "equal_nan", equal_nan)
    first, second = _pair("array_equal", "a", "b", a, b)
    if first.shape != second.shape:
        return False
    alike = first == second
    if equal_nan:
        alike = alike | ((first != first) & (second != second))
    return bool(alike.all())


def array_equiv(a: ArrayLike, b: ArrayLike) -> bool:
    """Return whether a and b broadcast to one shape and have equal elements there.

    Args:
        a, b: tensors, arrays, numbers or lists.

    Returns:
        A bool of Python.

    Example:
        >>> tg.array_equiv([[1, 2], [1, 2]], [1, 2])
        True
    """
    first, second = _pair("array_equiv", "a", "b", a, b)
    try:
        broadcast_shapes(first.shape, second.shape)
    except ShapeError:
        return False
    return bool((first == second).all())
