"""Unique elements and sets: unique, isin, union1d, ...; without gradients.

The number of elements of a result depends on the values, so on the GPU the host waits for it, and
no CUDA graph can capture these functions. Tests: tests/ops/test_sets.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tensorgrad.backend import Array, namespace, same_device, widened
from tensorgrad.checks import axis_index, promoted
from tensorgrad.operands import tensor_of
from tensorgrad.tensor import Tensor

__all__ = [
    "intersect1d", "isin", "setdiff1d", "setxor1d", "union1d", "unique", "unique_all",
    "unique_counts", "unique_inverse", "unique_values",
]  # fmt: skip


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
    x: Any,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    equal_nan: bool = True,
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
    """
    x = tensor_of("unique", "x", x)
    if axis is not None:
        axis = axis_index("unique", axis, x.ndim)
    xp = namespace(x.data)
    found = xp.unique(
        widened(x.data), return_index, return_inverse, return_counts, axis, equal_nan=equal_nan
    )
    parts = list(found) if isinstance(found, tuple) else [found]
    parts[0] = parts[0].astype(x.dtype, copy=False)
    if return_inverse and axis is None:
        place = 1 + return_index
        parts[place] = parts[place].reshape(x.shape)
    tensors = tuple([Tensor(part) for part in parts])
    return tensors if len(tensors) > 1 else tensors[0]


def unique_all(x: Any) -> UniqueAll:
    """Return `unique` with indices, inverse and counts; each NaN counts for itself."""
    return UniqueAll(*unique(x, True, True, True, equal_nan=False))


def unique_counts(x: Any) -> UniqueCounts:
    """Return `unique` with counts; each NaN counts for itself."""
    return UniqueCounts(*unique(x, return_counts=True, equal_nan=False))


def unique_inverse(x: Any) -> UniqueInverse:
    """Return `unique` with the inverse; each NaN counts for itself."""
    return UniqueInverse(*unique(x, return_inverse=True, equal_nan=False))


def unique_values(x: Any) -> Tensor:
    """Return `unique`; each NaN counts for itself."""
    found: Tensor = unique(x, equal_nan=False)
    return found


def isin(x: Any, values: Any, invert: bool = False) -> Tensor:
    """Return for each element of x whether it is among the values (or, inverted, is not), bool."""
    a, b = _pair("isin", "x", "values", x, values)
    return Tensor(namespace(a).isin(a, b, invert=invert))


def union1d(a: Any, b: Any) -> Tensor:
    """Return the elements of a and b, each once, in order."""
    return _of_sets("union1d", a, b)


def intersect1d(a: Any, b: Any) -> Tensor:
    """Return the elements that are in a and in b, each once, in order."""
    return _of_sets("intersect1d", a, b)


def setdiff1d(a: Any, b: Any) -> Tensor:
    """Return the elements of a that are not in b, each once, in order."""
    return _of_sets("setdiff1d", a, b)


def setxor1d(a: Any, b: Any) -> Tensor:
    """Return the elements that are in one of a and b, each once, in order."""
    return _of_sets("setxor1d", a, b)


def _of_sets(op: str, a: Any, b: Any) -> Tensor:
    first, second = _pair(op, "a", "b", a, b)
    dtype = promoted(op, ("a", "b"), (tensor_of(op, "a", a).data, tensor_of(op, "b", b).data))
    return Tensor(getattr(namespace(first), op)(first, second).astype(dtype, copy=False))


def _pair(op: str, name: str, other: str, a: Any, b: Any) -> tuple[Array, Array]:
    """Return two arrays of one device, 16-bit floats as float32."""
    arrays = tensor_of(op, name, a).data, tensor_of(op, other, b).data
    same_device(op, (name, other), arrays)
    return widened(arrays[0]), widened(arrays[1])
