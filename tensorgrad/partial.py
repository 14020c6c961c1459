"""Gradients that are no arrays yet, and know how to be added to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tensorgrad.backend import Array, Shape, add_into, is_numpy, namespace
from tensorgrad.dtypes import Dtype


class Part:
    """A gradient that is zero outside a view `dx[key]`; backward functions may return one.

    Parts of one array are collected and added into it once, so a loop over the T rows of an
    array costs T rows, not T arrays.
    """

    __slots__ = ("pieces",)
    __array_ufunc__ = None  # so that `array + part` calls Part.__radd__
    dtype = shape = None  # no array's: the walk hands it to `_fit`

    def __init__(self, key: Any, dy: Array) -> None:
        self.pieces = [(key, dy)]

    def __add__(self, other: Part | Array) -> Part:
        # in place: the walk alone holds a part, and T parts must not be copied T times
        self.pieces += other.pieces if type(other) is Part else [(..., other)]
        return self

    __radd__ = __add__

    def cast(self, dtype: Dtype) -> Part:
        """Give the pieces a dtype."""
        self.pieces = [(key, dy.astype(dtype, copy=False)) for key, dy in self.pieces]
        return self

    def spread(self, shape: Shape) -> Array:
        """Return the gradient as an array."""
        dtypes = [dy.dtype for _, dy in self.pieces]
        dx = namespace(self.pieces[0][1]).zeros(shape, np.result_type(*dtypes))
        self.add_to(dx)
        return dx

    def add_to(self, total: Array) -> None:
        """Add the gradient to an array."""
        for key, dy in self.pieces:
            add_into(total[key], dy)


class Twin(Part):
    """The gradients of an op's two results, on their way to the one node that takes both.

    `first` is None while nobody has sent one.
    """

    __slots__ = ("first", "second")

    def __init__(self, first: Array | Part | None, second: Array) -> None:
        self.first = first
        self.second = second

    def __add__(self, other: Part | Array) -> Twin:
        return Twin(other if self.first is None else self.first + other, self.second)

    __radd__ = __add__


class Late:
    """A gradient that is computed once it is known where it goes; backward may return one.

    Args:
        compute: `compute(None)` returns it; `compute(total)` adds it to a contiguous array on the
            GPU: cheaper than adding it up afterwards where the computation ends in a sum anyway,
            as a matrix product does.
        into: the dtype of the arrays it can be added to so; None: of none.
    """

    __slots__ = ("compute", "into")
    dtype = shape = None  # as of Part

    def __init__(self, compute: Callable[[Array | None], Array | None], into: Dtype | None) -> None:
        self.compute, self.into = compute, into

    def spread(self, shape: Shape) -> Array:
        """Return the gradient as an array."""
        return self.compute(None)

    def add_to(self, total: Array) -> None:
        """Add the gradient to an array."""
        if total.dtype is self.into and not is_numpy(total) and total.flags.c_contiguous:
            self.compute(total)
        else:
            add_into(total, self.compute(None))
