"""Checks of arguments beyond their declaration: axes, indices, masks, values to store."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.arrays import not_an_operand
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.checks import axis_index
from tensorgrad.core.dtypes import Dtype, is_complex, is_float
from tensorgrad.core.errors import ArgumentError, DtypeError, GradError, OutOfRangeError, ShapeError
from tensorgrad.core.operands import array_beside, operands, tensor_of
from tensorgrad.core.tensor import Tensor


def along(op: str, array: Array, axis: Any) -> tuple[Array, int]:
    """Return the array and the axis, counted from the front; None flattens the array."""
    if axis is None:
        return array.reshape(-1), 0
    return array, axis_index(op, axis, array.ndim)


def broadcast(op: str, name: str, array: Array, shape: Shape) -> Array:
    """Return a view of the array in a shape that it broadcasts to."""
    try:
        return backend.namespace(array).broadcast_to(array, shape)
    except ValueError as error:
        expected = f"expected one that broadcasts to {shape}"
        raise ShapeError(f"{op}: {name} has shape {array.shape}, {expected}") from error


def check_indices(op: str, name: str, indices: Array, outside: Array, expected: str) -> None:
    """Raise OutOfRangeError for the first index that is marked as outside."""
    if outside.any():
        place = tuple(map(int, np.argwhere(outside)[0]))
        got = f"{name}{list(place) or ''} is {indices[place]}"
        raise OutOfRangeError(f"{op}: {got}, expected {expected}")


def check_holds(op: str, name: str, array: Array, dtype: Dtype) -> None:
    """Raise an error where values would lose more than digits as elements of a dtype.

    Floats do not become integers or bool, complex numbers not real ones. Integers must lie in the
    range of the dtype, 0 to 1 for bool; on the GPU, where looking would wait, they are not checked.

    Raises:
        DtypeError: the values are of a kind that the dtype does not hold.
        ArgumentError: an integer lies outside its range.
    """
    own = array.dtype
    if own == dtype or own.kind == "b" or is_complex(dtype):
        return
    if is_float(dtype):
        if is_complex(own):
            raise DtypeError(f"{op}: {name} has dtype {own}, expected real numbers for {dtype}")
        return
    if own.kind not in "iu":
        raise DtypeError(
            f"{op}: {name} has dtype {own}, expected integers for {dtype}; round and convert it "
            "with astype(), or convert the tensor"
        )
    if np.can_cast(own, dtype) or not array.size or not backend.is_numpy(array):
        return
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    low, high = (0, 1) if limits is None else (limits.min, limits.max)
    for value in (int(array.min()), int(array.max())):
        if not low <= value <= high:
            raise ArgumentError(f"{op}: {name} is {value}, expected {low} to {high} for {dtype}")


def mask_operand(op: str, mask: Any, name: str, other: Array) -> Array:
    """Return a mask of bools or floats on the device of the operand that `name` names.

    Raises:
        GradError: the mask requires a gradient.
        DtypeError: it holds neither bools nor floats.
    """
    tensor = tensor_of(op, "mask", mask)
    if tensor.requires_grad:
        raise GradError(f"{op}: mask requires a gradient, expected one that does not")
    backend.same_device(op, (name, "mask"), (other, tensor.data))
    if tensor.dtype != np.bool_ and not is_float(tensor.dtype):
        raise DtypeError(f"{op}: mask has dtype {tensor.dtype}, expected bool or a float")
    return tensor.data if tensor is mask else array_beside(op, "mask", mask, other)


def tensors_of(op: str, values: Any) -> list[Tensor]:
    """Return a sequence of operands as tensors on one device; see `operands`."""
    whole = isinstance(values, Tensor) or backend.is_array(values)
    if whole or not hasattr(values, "__iter__"):
        raise not_an_operand(op, "tensors", values, "a list or tuple of them")
    values = list(values)
    if not values:
        raise ArgumentError(f"{op}: tensors is empty, expected at least one")
    names = [f"tensors[{i}]" for i in range(len(values))]
    tensors = list(operands(op, names, values))
    backend.same_device(op, names, [t.data for t in tensors])
    return tensors
