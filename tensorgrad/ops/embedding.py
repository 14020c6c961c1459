"""Rows of a table, picked by integers. Tests: tests/ops/test_embedding.py.

The gradient adds up the rows of dy that used the same id, in a fixed order: two runs give equal
bits on either device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.autograd import record
from tensorgrad.backend import Array
from tensorgrad.dtypes import compute_dtype
from tensorgrad.errors import OutOfRangeError, ShapeError
from tensorgrad.ops.indexing import add_rows
from tensorgrad.ops.operand import float_tensor, integer_array
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


def _backward(dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]) -> tuple[Array]:
    ids, shape = saved
    dweight = backend.namespace(dy).zeros(shape, compute_dtype(dy.dtype))
    if ids.size:
        add_rows(dweight, ids.reshape(-1), dy.reshape(ids.size, shape[1]))
    return (dweight,)


def _forward_numpy(weight: Array, ids: Array) -> Array:
    outside = (ids < 0) | (ids >= len(weight))
    if outside.any():
        place = tuple(int(i) for i in np.argwhere(outside)[0])
        raise OutOfRangeError(
            f"embedding: ids{list(place) or ''} is {ids[place]}, expected 0 to {len(weight) - 1} "
            f"(a vocabulary of {len(weight)})"
        )
    return weight.take(ids, axis=0)


def _forward_cuda(weight: Array, ids: Array) -> Array:
    weight, ids = backend.contiguous(weight), backend.contiguous(ids)
    y = backend.empty((*ids.shape, weight.shape[1]), weight.dtype, like=weight)
    if y.size:
        _gather_kernel()(weight, ids, np.int64(len(weight)), np.int64(weight.shape[1]), y)
    return y


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
