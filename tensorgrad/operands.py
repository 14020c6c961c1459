"""What ops accept as operands, with errors that name the argument."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tensorgrad import backend, ranges
from tensorgrad.backend import Array
from tensorgrad.checks import array_of, not_an_operand
from tensorgrad.dtypes import (
    Dtype,
    DtypeLike,
    as_dtype,
    complex64,
    complex128,
    float32,
    float64,
    is_float,
    is_known,
)
from tensorgrad.engine import mode
from tensorgrad.errors import ArgumentError, DtypeError, GradError, ShapeError
from tensorgrad.tensor import Tensor

# Python's numbers, and what NumPy makes of them
_DEFAULTS: dict[Any, Dtype] = {
    float: float32, complex: complex64, float64: float32, complex128: complex64
}  # fmt: skip


def tensor_of(op: str, name: str, value: Any) -> Tensor:
    """Return the operand as a tensor; an array is wrapped, a Python number becomes 0-d."""
    if ranges.active is not None:
        ranges.active.enter(op)
    if isinstance(value, Tensor):
        return value
    if backend.is_array(value):
        if not is_known(value.dtype):
            raise DtypeError(f"{op}: {name} has dtype {value.dtype}, expected numbers")
        # without a subclass of NumPy's, which would pass for CuPy's
        return Tensor(np.asarray(value) if isinstance(value, np.ndarray) else value)
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return Tensor(np.asarray(value, _DEFAULTS.get(type(value))))
    if isinstance(value, (list, tuple)):
        return Tensor(values_of(op, value))
    raise not_an_operand(op, name, value)


def values_of(op: str, value: Any, dtype: DtypeLike | None = None) -> Array:
    """Return the value as an array; values without a dtype get the library's default."""
    if isinstance(value, np.ndarray):
        value = np.asarray(value)
    elif not backend.is_array(value):
        owns_dtype = False
        for leaf in leaves_of(value):
            if isinstance(leaf, Tensor) or backend.is_array(leaf):
                raise DtypeError(
                    f"{op}: value holds a {type(leaf).__name__}, expected numbers; "
                    "use stack() or concatenate()"
                )
            owns_dtype = owns_dtype or isinstance(leaf, np.generic)
        try:
            value = np.asarray(value, None if dtype is None else as_dtype(dtype))
        except (ValueError, TypeError, OverflowError) as error:
            if isinstance(value, (list, tuple)) and "inhomogeneous" in str(error):
                raise ShapeError(f"{op}: value is {value!r:.80}, expected equal lengths") from error
            raise ArgumentError(f"{op}: value does not fit the dtype: {error}") from error
        if dtype is None and not owns_dtype:
            value = value.astype(_DEFAULTS.get(value.dtype, value.dtype), copy=False)
    as_dtype(value.dtype)
    return value


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield what nested lists hold."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


def constant_of(
    op: str, name: str, tensor: Tensor, why: str = "complex numbers carry none"
) -> Array:
    """Return the array of an operand that an op has no gradient of.

    Raises:
        GradError: the operand requires a gradient, which would be lost; `why` says the reason.
    """
    if tensor.requires_grad and mode.grad_enabled:
        raise GradError(
            f"{op}: {name} requires a gradient, expected one that does not: {why}; use detach()"
        )
    return tensor.data


def data_of(tensor: Tensor | None) -> Any:
    """Return the array of an optional operand."""
    return None if tensor is None else tensor.data


def tensors_of(op: str, values: Any) -> list[Tensor]:
    """Return a sequence of operands as tensors on one device."""
    if ranges.active is not None:
        ranges.active.enter(op)
    whole = isinstance(values, Tensor) or backend.is_array(values)
    if whole or not hasattr(values, "__iter__"):
        raise not_an_operand(op, "tensors", values, "a list or tuple of them")
    tensors = [
        value if isinstance(value, Tensor) else tensor_of(op, f"tensors[{i}]", value)
        for i, value in enumerate(values)
    ]
    if not tensors:
        raise ArgumentError(f"{op}: tensors is empty, expected at least one")
    names = [f"tensors[{i}]" for i in range(len(tensors))]
    backend.same_device(op, names, [t.data for t in tensors])
    return tensors


def float_operand(op: str, name: str, tensor: Tensor) -> None:
    """Raise DtypeError unless the tensor holds floats."""
    if not is_float(tensor.data.dtype):
        raise DtypeError(f"{op}: {name} has dtype {tensor.data.dtype}, expected a float")


def float_tensor(op: str, name: str, value: Any) -> Tensor:
    """Return the operand as a tensor of floats."""
    tensor = tensor_of(op, name, value)
    float_operand(op, name, tensor)
    return tensor


def mask_operand(op: str, mask: Any, name: str, other: Array) -> Array:
    """Return a mask of bools or floats on the device of the operand that `name` names.

    Raises:
        GradError: the mask requires a gradient.
        DtypeError: it holds neither bools nor floats.
    """
    mask = tensor_of(op, "mask", mask)
    if mask.requires_grad:
        raise GradError(f"{op}: mask requires a gradient, expected one that does not")
    backend.same_device(op, (name, "mask"), (other, mask.data))
    if mask.dtype != np.bool_ and not is_float(mask.dtype):
        raise DtypeError(f"{op}: mask has dtype {mask.dtype}, expected bool or a float")
    return mask.data


def integer_array(op: str, name: str, value: Any) -> Array:
    """Return the integers of a tensor, an array or (nested lists of) Python numbers."""
    value = value.data if isinstance(value, Tensor) else value
    array = array_of(op, name, value)
    if array is not value and not array.size:
        array = array.astype(np.int64)  # NumPy makes an empty list float64
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{op}: {name} has dtype {array.dtype}, expected integers")
    return array
