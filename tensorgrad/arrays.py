"""Casts and sums of arrays, used by ops, the backward walk and optimizers.

On the GPU a thread loads 16 bytes of floats at a time, where CuPy's own kernels load one element.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array, Shape, widened
from tensorgrad.dtypes import Dtype, compute_dtype, int64, is_complex, is_float, uint64
from tensorgrad.errors import DtypeError
from tensorgrad.kernels.elementwise import launch
from tensorgrad.kernels.expression import Expressions, Formula
from tensorgrad.kernels.reduce import reduce_cuda


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
    wide = _wide(array.dtype, dtype) if on_gpu else None
    if wide is None:
        return array.astype(dtype)
    y = backend.empty(array.shape, dtype, like=array)
    launch(_SAME, [array], [y], wide)
    return y


def cast(array: Array, dtype: Dtype) -> Array:
    """Return the values as `dtype`: the array itself where it has it."""
    return array if array.dtype == dtype else converted(array, dtype)


def added(a: Array, b: Array, dtype: Dtype) -> Array:
    """Return the sum of two float arrays of one shape as `dtype`, rounded once."""
    if not backend.is_array(a):  # `fuse` traces symbols
        return a + b
    wide = _wide(a.dtype, b.dtype, dtype)
    assert wide is not None, "sums of floats"
    if backend.is_numpy(a):
        return np.asarray(np.add(a, b, dtype=wide), dtype)
    y = backend.empty(a.shape, dtype, like=a)
    launch(_SUM, [a, b], [y], wide)
    return y


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
        y = np.add.reduce(widened(x), axes, None, None, keepdims)  # type: ignore[call-overload]
        return np.asarray(y) if y.dtype is dtype else np.asarray(y, dtype)
    if is_complex(x.dtype):
        return x.sum(axes, dtype, keepdims=keepdims)
    if x.size:
        y = reduce_cuda("Sum", x, axes, dtype, 0)
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


@cache
def _wide(*dtypes: Dtype) -> Dtype | None:
    """Return the common compute dtype of floats; None if one of the dtypes is not a float."""
    if not all(map(is_float, dtypes)):
        return None
    return np.result_type(*map(compute_dtype, dtypes))


_names = Expressions()
_SAME = Formula("convert", ["x"], _names, [_names.name("x")])
_SUM = Formula("sum", ["a", "b"], _names, [_names.node("+", _names.name("a"), _names.name("b"))])
