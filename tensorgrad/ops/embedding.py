"""Embedding lookup, alone and with a position embedding added. Kernel: kernels/embedding.cu.

The gradient (kernels/indexing.cu) adds up the rows of dy that used the same id in a fixed order, so
two runs give equal bits on either device. Tests: tests/ops/test_embedding.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.accumulation import Gradients, Needs, Saved, accumulated_view
from tensorgrad.arrays import sum_array
from tensorgrad.autograd import record
from tensorgrad.backend import Array
from tensorgrad.checks import check_indices, check_integer
from tensorgrad.dtypes import compute_dtype
from tensorgrad.errors import DtypeError, OutOfRangeError, ShapeError
from tensorgrad.kernels.embedding import forward as _forward_cuda
from tensorgrad.operands import float_tensor, integer_array
from tensorgrad.ops.indexing import add_rows
from tensorgrad.tensor import Tensor

__all__ = ["embedding"]


def embedding(weight: Any, ids: Any, positions: Any = None, start: int = 0) -> Tensor:
    """Return the row of `weight` that each id names, and with positions their sum.

        y[..., t, :] = weight[ids[..., t], :] + positions[start + t, :]

    Args:
        weight: (V, C), any float dtype.
        ids: any shape, integers in [0, V). On the GPU the values are not inspected before the
            launch, which would wait for the device: an id outside gives a row of NaN and no
            gradient.
        positions: (P, C), dtype of weight, the position embedding; None adds nothing.
        start: the position of the first id along the last axis.

    Returns:
        (*ids.shape, C), dtype of weight.

    Raises:
        OutOfRangeError: an id outside the vocabulary (on the CPU), or too few positions.
        ShapeError: weight is not (V, C), or positions does not fit.
        DtypeError: ids are not integers, weight is not a float, or positions has another dtype.
        DeviceError: the arguments are on different devices.
    """
    op = "embedding"
    weight, ids = float_tensor(op, "weight", weight), integer_array(op, "ids", ids)
    if weight.ndim != 2:
        raise ShapeError(f"{op}: weight has shape {weight.shape}, expected (V, C)")
    backend.same_device(op, ("weight", "ids"), (weight.data, ids))
    rows = None
    if positions is not None:
        positions = float_tensor(op, "positions", positions)
        _check_positions(weight, ids, positions, start)
        rows = positions.data[start : start + ids.shape[-1]]
    forward = _forward_numpy if type(weight.data) is np.ndarray else _forward_cuda
    y = forward(weight.data, ids, rows)
    shapes = weight.shape, None if positions is None else positions.shape
    return record(op, y, (weight, positions), _backward, (ids, start, *shapes))


def _check_positions(weight: Tensor, ids: Array, positions: Tensor, start: int) -> None:
    """Raise unless each id along the last axis has a row of positions."""
    op = "embedding"
    check_integer(op, "start", start)
    backend.same_device(op, ("weight", "positions"), (weight.data, positions.data))
    if positions.ndim != 2 or positions.shape[1] != weight.shape[1] or not ids.ndim:
        raise ShapeError(
            f"{op}: positions has shape {positions.shape}, expected (P, {weight.shape[1]}) for "
            f"ids of shape {ids.shape}"
        )
    if positions.dtype != weight.dtype:
        raise DtypeError(f"{op}: positions has dtype {positions.dtype}, expected {weight.dtype}")
    if not 0 <= start <= positions.shape[0] - ids.shape[-1]:
        raise OutOfRangeError(
            f"{op}: start is {start} and {ids.shape[-1]} ids follow, expected at most "
            f"{positions.shape[0]} positions"
        )


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    ids, start, shape, positions_shape = saved
    dweight = None
    if needs[0]:
        dweight = backend.namespace(dy).zeros(shape, compute_dtype(dy.dtype))
        if dy.size:
            add_rows(dweight, ids.reshape(-1), dy.reshape(ids.size, -1))
    if not needs[1]:
        return dweight, None
    drows = sum_array(dy, tuple(range(dy.ndim - 2)), dtype=compute_dtype(dy.dtype))
    place = slice(start, start + ids.shape[-1])
    return dweight, accumulated_view(drows, needs[1], positions_shape, place)


def check_ids(op: str, ids: Array, vocabulary: int) -> None:
    """Raise OutOfRangeError for an id outside the vocabulary; ids on a GPU are not read."""
    if backend.is_numpy(ids):
        outside = (ids < 0) | (ids >= vocabulary)
        expected = f"0 to {vocabulary - 1} (a vocabulary of {vocabulary})"
        check_indices(op, "ids", ids, outside, expected)


def _forward_numpy(weight: Array, ids: Array, positions: Array | None) -> Array:
    check_ids("embedding", ids, len(weight))
    y = weight.take(ids, axis=0)
    if positions is not None:
        np.add(y, positions, out=y, dtype=compute_dtype(y.dtype), casting="same_kind")
    return y
