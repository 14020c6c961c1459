"""Copies and sums of arrays, in another dtype or the same.

On the GPU floats are moved 16 bytes at a time; CuPy moves an element.
"""

from __future__ import annotations

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import Dtype, compute_dtype, is_float
from tensorgrad.ops.expression import Expressions, Formula
from tensorgrad.ops.row_cuda import launch


def converted(array: Array, dtype: Dtype) -> Array:
    """Return a new array of the same values as `dtype`.

    On the GPU floats are moved 16 bytes at a time; CuPy's own conversion moves an element.
    """
    source = array.dtype
    on_gpu = backend.is_array(array) and not backend.is_numpy(array)  # `fuse` traces symbols
    if not (on_gpu and is_float(source) and is_float(dtype)):
        return array.astype(dtype)
    y = backend.empty(array.shape, dtype, like=array)
    launch(_SAME, [array], [y], np.result_type(compute_dtype(source), compute_dtype(dtype)))
    return y


def added(a: Array, b: Array, dtype: Dtype) -> Array:
    """Return the sum of two float arrays of one shape as `dtype`, rounded once."""
    if not backend.is_array(a):  # `fuse` traces symbols
        return a + b
    wide = np.result_type(*map(compute_dtype, (a.dtype, b.dtype, dtype)))
    if backend.is_numpy(a):
        return np.asarray(np.add(a, b, dtype=wide), dtype)
    y = backend.empty(a.shape, dtype, like=a)
    launch(_SUM, [a, b], [y], wide)
    return y


_names = Expressions()
_SAME = Formula("convert", ["x"], _names, [_names.name("x")])
_SUM = Formula("sum", ["a", "b"], _names, [_names.node("+", _names.name("a"), _names.name("b"))])
