"""Sorting: sort, argsort, topk, searchsorted. Tests: tests/ops/test_sorting.py.

Equal elements keep their order, ascending and descending, and NaN counts as larger than any
number; so both devices agree on every index. Sorted values are taken by index, and their
gradient goes back to where each came from.
"""

from __future__ import annotations

from typing import Any, Literal

from tensorgrad.backend import Array, namespace, same_device, widened
from tensorgrad.checks import along, axis_index, check_integer, promoted
from tensorgrad.errors import ArgumentError, ShapeError
from tensorgrad.operands import tensor_of
from tensorgrad.ops.indexing import take, take_along_axis
from tensorgrad.tensor import Tensor

__all__ = ["argsort", "searchsorted", "sort", "topk"]


def sort(x: Any, axis: int | None = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Return the elements in ascending (or descending) order along an axis.

    Args:
        x: any shape and dtype.
        axis: the axis to sort along; None sorts the flattened x.
        descending: largest first.
        stable: equal elements keep their order in any case.

    Raises:
        ArgumentError: x has no such axis.
    """
    x = tensor_of("sort", "x", x)
    order = _order("sort", x.data, axis, descending)
    return take_along_axis(x, order, axis)


def argsort(x: Any, axis: int | None = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Return the indices that sort x along an axis; arguments and errors are those of `sort`."""
    return Tensor(_order("argsort", tensor_of("argsort", "x", x).data, axis, descending))


def topk(x: Any, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k largest (or smallest) elements along an axis, the extreme first.

    Args:
        x: any shape and dtype.
        k: how many, from 0 to the length of the axis.
        axis: the axis to search.
        largest: False for the smallest.

    Returns:
        The values, with a gradient, and their indices; both with length k along the axis.

    Raises:
        ArgumentError: k is out of its range or x has no such axis.
    """
    x = tensor_of("topk", "x", x)
    axis = axis_index("topk", axis, x.ndim)
    check_integer("topk", "k", k)
    if not 0 <= k <= x.shape[axis]:
        raise ArgumentError(f"topk: k is {k}, expected 0 to {x.shape[axis]} (axis {axis} of x)")
    order = _order("topk", x.data, axis, largest)
    first = order[(*[slice(None)] * axis, slice(0, k))]
    return take_along_axis(x, first, axis), Tensor(first)


def searchsorted(
    sorted_sequence: Any, values: Any, side: Literal["left", "right"] = "left", sorter: Any = None
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
    """
    if sorter is not None:
        sorted_sequence = take(sorted_sequence, sorter, 0)
    names = ("sorted_sequence", "values")
    arrays = [
        tensor_of("searchsorted", name, value).data
        for name, value in zip(names, (sorted_sequence, values), strict=True)
    ]
    same_device("searchsorted", names, arrays)
    if arrays[0].ndim != 1:
        raise ShapeError(
            f"searchsorted: sorted_sequence has shape {arrays[0].shape}, expected one axis"
        )
    if side not in ("left", "right"):
        raise ArgumentError(f"searchsorted: side is {side!r}, expected 'left' or 'right'")
    common = promoted("searchsorted", names, arrays)
    sequence, wanted = [widened(array.astype(common, copy=False)) for array in arrays]
    indices = namespace(sequence).searchsorted(sequence, wanted.reshape(-1), side)
    return Tensor(indices.reshape(wanted.shape))


def _order(op: str, array: Array, axis: int | None, descending: bool) -> Array:
    """Return the indices that sort stably along an axis."""
    array, axis = along(op, array, axis)
    array = widened(array)  # 16-bit NaNs of ml_dtypes do not sort
    if not descending:
        return array.argsort(axis, kind="stable")
    backwards = (*[slice(None)] * axis, slice(None, None, -1))
    order = array[backwards].argsort(axis, kind="stable")
    return (array.shape[axis] - 1 - order)[backwards]
