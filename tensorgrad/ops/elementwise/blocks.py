"""Elementwise functions on NumPy, block by block on all cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import BLOCK, Array, Shape
from tensorgrad.core.dtypes import SCALARS, Dtype, compute_dtype


def evaluate(
    function: Callable[..., tuple[Any, ...]],
    arrays: Sequence[Any],
    dtypes: Sequence[Dtype],
    block: int = BLOCK,
) -> list[Array]:
    """Return the results of an elementwise function; 16-bit floats compute in float32.

    Args:
        function: takes blocks of the arrays, returns one result for each dtype.
        arrays: arrays that broadcast, and Python numbers.
        dtypes: of the results, each rounded once.
        block: elements at a time, so that temporaries stay in cache.
    """
    shape = np.broadcast_shapes(*[a.shape for a in arrays if type(a) not in SCALARS])
    outs = [np.empty(shape, dtype) for dtype in dtypes]
    if not outs or not outs[0].size:
        return outs
    size = outs[0].size
    operands, targets, cut = arrays, outs, [False] * len(arrays)
    if size > block:
        merged = _merged(shape, arrays)
        if merged is not None:
            operands, cut, flat = merged
            targets = [out.reshape(flat) for out in outs]
        else:
            cut = [
                type(a) not in SCALARS and a.ndim == len(shape) and a.shape[0] == shape[0]
                for a in arrays
            ]

    def run(piece: slice) -> None:
        values = function(
            *[_widen(a[piece] if c else a) for a, c in zip(operands, cut, strict=True)]
        )
        for target, value in zip(targets, values, strict=True):
            target[piece if size > block else ...] = value

    length = targets[0].shape[0] if size > block else 1
    backend.parallel_blocks(run, length, max(1, block * length // size))
    return outs


def _merged(
    shape: Shape, arrays: Sequence[Any]
) -> tuple[list[Any], list[bool], tuple[int, ...]] | None:
    """Return the arrays with their leading axes merged, which of them have these, and the shape.

    None where an array has only some of the leading axes, or is not contiguous.
    """
    inner = 0
    cut = []
    for array in arrays:
        full = type(array) not in SCALARS and array.shape == shape
        cut.append(full)
        if full:
            if not array.flags.c_contiguous:
                return None
        elif type(array) not in SCALARS:
            inner = max(inner, len(_stripped(array.shape)))
    if inner == len(shape):
        return None
    tail = shape[len(shape) - inner :]
    operands = [
        a.reshape(-1, *tail) if c else a if type(a) in SCALARS else a.reshape(_stripped(a.shape))
        for a, c in zip(arrays, cut, strict=True)
    ]
    return operands, cut, (-1, *tail)


def _stripped(shape: Shape) -> Shape:
    """Return the shape without leading axes of length 1."""
    for axis, length in enumerate(shape):
        if length != 1:
            return shape[axis:]
    return ()


def _widen(array: Any) -> Any:
    if type(array) in SCALARS:
        return array
    dtype = compute_dtype(array.dtype)
    return array if dtype is array.dtype else array.astype(dtype)
