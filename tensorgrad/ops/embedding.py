"""Rows of a table, picked by integers. Tests: tests/ops/test_embedding.py.

The gradient adds up the rows of dy that used the same id, in the order in which they stand: it
sorts the ids (stably) and sums each run, so two runs give equal bits on either device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.autograd import record
from tensorgrad.backend import Array
from tensorgrad.errors import OutOfRangeError, ShapeError
from tensorgrad.ops.operand import float_tensor, integer_array, widened
from tensorgrad.tensor import Tensor

__all__ = ["embedding"]


def embedding(weight: Any, ids: Any) -> Tensor:
    """Return the row of `weight` that each id names.

    y[..., :] = weight[ids[...], :]

    Args:
        weight: (V, C), any float dtype.
        ids: any shape, integers in [0, V). On the GPU the values are not inspected before the
            launch, which would wait for the device: an id outside gives a row of NaN and no
            gradient.

    Returns:
        (*ids.shape, C), dtype of weight.

    Raises:
        OutOfRangeError: an id outside the vocabulary (on the CPU).
        ShapeError: weight is not (V, C).
        DtypeError: ids are not integers, or weight is not a float.
        DeviceError: ids are on another device than weight.
    """
    weight, ids = (
        float_tensor("embedding", "weight", weight),
        integer_array("embedding", "ids", ids),
    )
    if weight.ndim != 2:
        raise ShapeError(f"embedding: weight has shape {weight.shape}, expected (V, C)")
    backend.same_device("embedding", ("weight", "ids"), (weight.data, ids))
    forward = _forward_numpy if type(weight.data) is np.ndarray else _forward_cuda
    y = forward(weight.data, ids)
    return record("embedding", y, (weight,), _backward, (ids, weight.shape))


def _backward(dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]) -> tuple[Array | None]:
    backward = _backward_numpy if type(dy) is np.ndarray else _backward_cuda
    return (backward(dy, *saved),)


def _forward_numpy(weight: Array, ids: Array) -> Array:
    outside = (ids < 0) | (ids >= len(weight))
    if outside.any():
        place = tuple(int(i) for i in np.argwhere(outside)[0])
        raise OutOfRangeError(
            f"embedding: ids{list(place) or ''} is {ids[place]}, expected 0 to {len(weight) - 1} "
            f"(a vocabulary of {len(weight)})"
        )
    return weight.take(ids, axis=0)


def _backward_numpy(dy: Array, ids: Array, shape: tuple[int, int]) -> Array:
    rows = widened(dy).reshape(ids.size, shape[1])
    dweight = np.zeros(shape, rows.dtype)
    if rows.size:
        order = ids.ravel().argsort(kind="stable")
        ordered = ids.ravel()[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        dweight[ordered[starts]] = np.add.reduceat(rows[order], starts, axis=0)
    return dweight


def _forward_cuda(weight: Array, ids: Array) -> Array:
    weight, ids = backend.contiguous(weight), backend.contiguous(ids)
    y = backend.empty((*ids.shape, weight.shape[1]), weight.dtype, like=weight)
    if y.size:
        _gather_kernel()(weight, ids, np.int64(len(weight)), np.int64(weight.shape[1]), y)
    return y


def _backward_cuda(dy: Array, ids: Array, shape: tuple[int, int]) -> Array:
    rows = backend.contiguous(widened(dy))
    dweight = backend.cupy.zeros(shape, rows.dtype)
    if rows.size:
        order = ids.ravel().argsort()  # stable in CuPy
        _scatter_kernel()(
            rows, ids.ravel()[order], order, np.int64(shape[0]), np.int64(shape[1]),
            dweight, size=rows.size,
        )  # fmt: skip
    return dweight


@cache
def _gather_kernel() -> Any:
    return backend.cupy.ElementwiseKernel(
        "raw T weight, raw I ids, int64 vocabulary, int64 width",
        "T y",
        """
        const long long id = ids[i / width];
        y = 0 <= id && id < vocabulary ? weight[id * width + i % width] : T(nanf(""));
        """,
        "embedding_forward",
    )


@cache
def _scatter_kernel() -> Any:
    """One thread a column of a run of equal ids; the others have nothing to do."""
    return backend.cupy.ElementwiseKernel(
        "raw T dy, raw I ids, raw J order, int64 vocabulary, int64 width",
        "raw T dweight",
        """
        const long long row = i / width, column = i % width, id = ids[row];
        if (0 <= id && id < vocabulary && (row == 0 || ids[row - 1] != ids[row])) {
            T sum = 0;
            for (long long r = row; r < ids.size() && ids[r] == id; ++r)
                sum += dy[order[r] * width + column];
            dweight[id * width + column] = sum;
        }
        """,
        "embedding_backward",
    )
