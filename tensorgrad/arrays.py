"""Copies and sums of arrays, in another dtype or the same.

On the GPU floats are moved 16 bytes at a time; CuPy moves an element.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import Dtype, compute_dtype, is_float
from tensorgrad.kernels.elementwise import launch
from tensorgrad.kernels.expression import Expressions, Formula


def converted(array: Array, dtype: Dtype) -> Array:
    """Return a new array of the same values as `dtype`."""
    on_gpu = not backend.is_numpy(array) and backend.is_array(array)  # `fuse` traces symbols
    wide = _wide(array.dtype, dtype) if on_gpu else None
    if wide is None:
        return array.astype(dtype)
    y = backend.empty(array.shape, dtype, like=array)
    launch(_SAME, [array], [y], wide)
    return y


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


@cache
def _wide(*dtypes: Dtype) -> Dtype | None:
    """Return what floats of these dtypes are computed in together; None if one is no float."""
    if not all(map(is_float, dtypes)):
        return None
    return np.result_type(*map(compute_dtype, dtypes))


_names = Expressions()
_SAME = Formula("convert", ["x"], _names, [_names.name("x")])
_SUM = Formula("sum", ["a", "b"], _names, [_names.node("+", _names.name("a"), _names.name("b"))])
