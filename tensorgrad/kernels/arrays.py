"""Casts and sums of arrays on a GPU: what core/arrays.py does there.

A thread loads 16 bytes of floats at a time, where CuPy's own kernels load one element.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.arrays import gpu
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import Dtype, c_name, compute_dtype, is_float
from tensorgrad.kernels.elementwise import launch
from tensorgrad.kernels.expression import Expressions, Formula
from tensorgrad.kernels.reduce import reduce_cuda

_names = Expressions()
_SAME = Formula("convert", ["x"], _names, [_names.name("x")])
_SUM = Formula("sum", ["a", "b"], _names, [_names.node("+", _names.name("a"), _names.name("b"))])


def converted(array: Array, dtype: Dtype) -> Array:
    """Return a new array of the same values as `dtype`."""
    wide = _wide(array.dtype, dtype)
    if wide is None:
        return array.astype(dtype)
    y = backend.empty(array.shape, dtype, like=array)
    launch(_SAME, [array], [y], wide)
    return y


def added(a: Array, b: Array, dtype: Dtype) -> Array:
    """Return the sum of two float arrays of one shape as `dtype`, rounded once."""
    wide = _wide(a.dtype, b.dtype, dtype)
    assert wide is not None, "sums of floats"
    y = backend.empty(a.shape, dtype, like=a)
    launch(_SUM, [a, b], [y], wide)
    return y


def add_into(total: Array, array: Array) -> None:
    """Add an array to another in place; 16-bit types add in float32 and round once."""
    _add_into_kernel(c_name(compute_dtype(total.dtype)))(array, total)


@cache
def _add_into_kernel(compute: str) -> Any:
    return backend.cupy.ElementwiseKernel(
        "X x", "Y y", f"y = Y({compute}(y) + {compute}(x))", f"add_into_{compute}"
    )


def summed(x: Array, axes: tuple[int, ...], dtype: Dtype) -> Array:
    """Return the sum of an array with elements over axes in ascending order."""
    return reduce_cuda("Sum", x, axes, dtype, 0)


@cache
def _wide(*dtypes: Dtype) -> Dtype | None:
    """Return the common compute dtype of floats; None if one of the dtypes is not a float."""
    if not all(map(is_float, dtypes)):
        return None
    return np.result_type(*map(compute_dtype, dtypes))


gpu.converted, gpu.added, gpu.add_into, gpu.summed = converted, added, add_into, summed
