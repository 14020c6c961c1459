"""Casts and sums of arrays, and arrays of what users give.

On a GPU kernels do it, which kernels/arrays.py puts into `gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape, upcast
from tensorgrad.core.dtypes import Dtype, compute_dtype, int64, is_complex, is_float, uint64
from tensorgrad.core.errors import DtypeError, ShapeError


class Gpu:
    """How arrays on a GPU are cast and added; set when the kernels are imported.

    Attributes:
        converted: (array, dtype) -> a new array.
        added: (a, b, dtype) -> their sum, rounded once.
        add_into: (total, array) -> None; adds in place.
        summed: (x, axes, dtype) -> the sum over axes.
    """

    converted: Callable[[Array, Dtype], Array]
    added: Callable[[Array, Array, Dtype], Array]
    add_into: Callable[[Array, Array], None]
    summed: Callable[[Array, tuple[int, ...], Dtype], Array]


gpu = Gpu()


def converted(array: Array, dtype: Dtype) -> Array:
    """Return a new array of the same values as `dtype`.

    Raises:
        DtypeError: complex numbers as real ones.
    """
    if is_complex(array.dtype) and dtype.kind not in "cb":
        raise DtypeError(
            f"astype: x has dtype {array.dtype}, expected real numbers for {dtype}; take real(x)"
        )
    on_gpu = not backend.is_numpy(array) and backend.is_array(array)  # `fuse` traces symbols
    return gpu.converted(array, dtype) if on_gpu else array.astype(dtype)


def cast(array: Array, dtype: Dtype) -> Array:
    """Return the values as `dtype`: the array itself where it has it."""
    return array if array.dtype == dtype else converted(array, dtype)


def added(a: Array, b: Array, dtype: Dtype) -> Array:
    """Return the sum of two float arrays of one shape as `dtype`, rounded once."""
    if not backend.is_array(a):  # `fuse` traces symbols
        return a + b
    if backend.is_numpy(a):
        wide = np.result_type(*map(compute_dtype, (a.dtype, b.dtype, dtype)))
        return np.asarray(np.add(a, b, dtype=wide), dtype)
    return gpu.added(a, b, dtype)


def add_into(total: Array, array: Array) -> None:
    """Add an array to another in place; 16-bit types add in float32 and round once."""
    if backend.is_numpy(total):
        np.add(total, array, out=total, casting="unsafe")
    else:
        gpu.add_into(total, array)


def sum_array(
    x: Array, axes: tuple[int, ...], keepdims: bool = False, dtype: Dtype | None = None
) -> Array:
    """Return the sum of an array over axes in ascending order.

    Args:
        x: an array, any layout.
        axes: may be empty.
        keepdims: whether the reduced axes stay with length 1.
        dtype: of the sum; float32 keeps the precision of a sum of 16-bit floats. Default:
            `sum_dtype`.
    """
    dtype = dtype or sum_dtype(x.dtype)
    if type(x) is np.ndarray:
        y = np.add.reduce(upcast(x), axes, None, None, keepdims)  # type: ignore[call-overload]
        return np.asarray(y) if y.dtype is dtype else np.asarray(y, dtype)
    if is_complex(x.dtype):
        return x.sum(axes, dtype, keepdims=keepdims)
    if x.size:
        y = gpu.summed(x, axes, dtype)
    else:
        y = backend.cupy.zeros([n for i, n in enumerate(x.shape) if i not in axes], dtype)
    return keep_axes(y, x.shape, axes) if keepdims else y


def sum_to_shape(dy: Array, shape: Shape) -> Array:
    """Return the gradient of broadcasting `shape` to the shape of dy: its sum over the added axes.

    16-bit types are summed in float32 and stay float32.
    """
    extra = dy.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        i + extra for i, n in enumerate(shape) if n == 1 and dy.shape[i + extra] != 1
    )
    return sum_array(dy, axes, dtype=compute_dtype(dy.dtype)).reshape(shape)


def sum_dtype(dtype: Dtype) -> Dtype:
    """Return the dtype of a sum: integers become 64 bits wide, as in NumPy."""
    if is_float(dtype) or is_complex(dtype):
        return dtype
    return uint64 if dtype.kind == "u" else int64


def keep_axes(y: Array, shape: Shape, axes: tuple[int, ...]) -> Array:
    """Return a reduced array with its axes kept as length 1."""
    return y.reshape([1 if axis in axes else n for axis, n in enumerate(shape)])


def array_of(op: str, name: str, value: Any, expected: Any = "equal lengths") -> Array:
    """Return (nested lists of) numbers as an array; an array as it is.

    Raises:
        ShapeError: lists differ in length; the message ends with `expected`.
        DtypeError: the value is an array of another library.
    """
    if backend.is_array(value) and not isinstance(value, np.ndarray):
        return value
    if _library_of(value) in _FROM_OTHERS:
        raise not_an_operand(op, name, value)
    try:
        return np.asarray(value)  # the array itself, without its subclass
    except ValueError as error:
        raise ShapeError(f"{op}: {name} is {value!r:.80}, expected {expected}") from error


# How arrays of other libraries become ones that are taken here, by the library's name.
_FROM_OTHERS = {
    "torch": "tensorgrad.from_dlpack(t.detach()) or t.numpy()",
    "jax": "tensorgrad.from_dlpack(t) or numpy.asarray(t)",
    "jaxlib": "tensorgrad.from_dlpack(t) or numpy.asarray(t)",
    "mlx": "numpy.asarray(t)", "pandas": "t.to_numpy()", "polars": "t.to_numpy()",
    "pyarrow": "t.to_numpy()", "scipy": "t.toarray()", "tensorflow": "t.numpy()",
    "xarray": "t.to_numpy()",
}  # fmt: skip


def not_an_operand(
    op: str, name: str, value: Any, expected: str = "a tensor, array, number or list"
) -> DtypeError:
    """Return the error for an argument that is not an operand, which names the library."""
    kind = type(value)
    library = _library_of(value)
    if library not in _FROM_OTHERS:
        return DtypeError(f"{op}: {name} is a {kind.__name__}, expected {expected}")
    return DtypeError(
        f"{op}: {name} is a {library}.{kind.__name__}, expected {expected}; "
        f"give {_FROM_OTHERS[library]}"
    )


def _library_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]
