"""Embedding lookup, alone and with a position embedding added. Kernel: kernels/embedding.cu.

The gradient (kernels/indexing.cu) adds up the rows of dy that used the same id in a fixed order, so
two runs give equal bits on either device. Tests: tests/ops/test_embedding.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.arrays import sum_array
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_integer, check_shape
from tensorgrad.core.dtypes import compute_dtype
from tensorgrad.core.errors import DtypeError, OutOfRangeError, ShapeError
from tensorgrad.core.gradient import Gradients, Needs, Saved, add_at, out_of
from tensorgrad.core.operands import integer_array
from tensorgrad.core.record import record
from tensorgrad.core.signature import Float, Int, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.kernels.embedding import forward as _forward_cuda
from tensorgrad.ops.arguments import check_indices
from tensorgrad.ops.indexing import add_rows

__all__ = ["embedding"]

takes = Signatures(globals())


def embedding(
    weight: Float[ArrayLike, "V C"],
    ids: Int[ArrayLike, "..."],
    positions: Float[ArrayLike, "..."] | None = None,
    *,
    start: Any = 0,
) -> Tensor:
    """Return the row of `weight` that each id names, and with positions their sum.

        y[..., t, :] = weight[ids[..., t], :] + positions[start[...] + t, :]

    Args:
        weight: (V, C), any float dtype.
        ids: any shape, integers in [0, V). On the GPU the values are not inspected before the
            launch, which would wait for the device: an id or position outside gives a row of NaN
            and no gradient.
        positions: (P, C), dtype of weight, the position embedding; None adds nothing.
        start: the position of the first id along the last axis: an integer, or integers of the
            shape of ids without that axis, on its device.

    Returns:
        (*ids.shape, C), dtype of weight.

    Raises:
        DtypeError: weight or positions does not hold floats, or ids does not hold integers.
        ShapeError: weight is not (V, C).
        DeviceError: the operands are on different devices.
        OutOfRangeError: an id outside the vocabulary (on the CPU), or too few positions.
        ShapeError: positions is not (P, C), or ids has no axis for them.
        DtypeError: positions has another dtype than weight.
        ShapeError, DtypeError, DeviceError: start is not as above.

    Example:
        >>> weight = tg.tensor([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]])
        >>> tg.embedding(weight, [2, 1]).tolist()
        [[3.0, 4.0], [1.0, 2.0]]
    """
    op = "embedding"
    if not isinstance(ids, Tensor):  # also ranges and lists of arrays
        ids = Tensor(integer_array(op, "ids", ids))
    weight, ids, positions = takes.embedding(weight, ids, positions)
    numbers, rows, starts = ids.data, None, None
    start = start.data if isinstance(start, Tensor) else start
    if positions is not None:
        _check_positions(weight, numbers, positions)
        rows = positions.data
        if backend.is_array(start):
            starts = _checked_starts(numbers, positions, start)
        else:
            _check_start(numbers, positions, start)
            rows = rows[start : start + numbers.shape[-1]]
    forward = _forward_numpy if type(weight.data) is np.ndarray else _forward_cuda
    y = forward(weight.data, numbers, rows, starts)
    shapes = weight.shape, None if positions is None else positions.shape
    return record(op, y, (weight, positions), _backward, (numbers, start, *shapes))


def _check_positions(weight: Tensor, ids: Array, positions: Tensor) -> None:
    """Raise unless positions fits to weight."""
    op = "embedding"
    if positions.ndim != 2 or positions.shape[1] != weight.shape[1] or not ids.ndim:
        raise ShapeError(
            f"{op}: positions has shape {positions.shape}, expected (P, {weight.shape[1]}) for "
            f"ids of shape {ids.shape}"
        )
    if positions.dtype != weight.dtype:
        raise DtypeError(f"{op}: positions has dtype {positions.dtype}, expected {weight.dtype}")


def _check_start(ids: Array, positions: Tensor, start: Any) -> None:
    """Raise unless each id along the last axis has a row of positions."""
    op = "embedding"
    check_integer(op, "start", start)
    if not 0 <= start <= positions.shape[0] - ids.shape[-1]:
        raise OutOfRangeError(
            f"{op}: start is {start} and {ids.shape[-1]} ids follow, expected at most "
            f"{positions.shape[0]} positions"
        )


def _checked_starts(ids: Array, positions: Tensor, start: Any) -> Array:
    """Return the starts of the rows of ids, (*ids.shape[:-1],), checked as far as the host can."""
    op = "embedding"
    starts = integer_array(op, "start", start)
    backend.same_device(op, ("ids", "start"), (ids, starts))
    check_shape(op, "start", starts, ids.shape[:-1], " like ids without the last axis")
    if backend.is_numpy(starts):
        most = positions.shape[0] - ids.shape[-1]
        outside = (starts < 0) | (starts > most)
        check_indices(op, "start", starts, outside, f"0 to {most} ({positions.shape[0]} positions)")
    return starts


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    ids, start, shape, positions_shape = saved
    dweight = None
    if needs[0]:
        wide = compute_dtype(dy.dtype)
        target = out_of(needs[0], wide)
        if target is None:
            total = dweight = backend.namespace(dy).zeros(shape, wide)
        else:
            total, beta = target
            if beta == 0:
                total.fill(0)
        if dy.size:
            add_rows(total, ids.reshape(-1), dy.reshape(ids.size, -1))
    if not needs[1]:
        return dweight, None
    if backend.is_array(start):
        dpositions = backend.namespace(dy).zeros(positions_shape, compute_dtype(dy.dtype))
        if dy.size:
            add_rows(dpositions, _places(ids, start).reshape(-1), dy.reshape(ids.size, -1))
        return dweight, dpositions
    drows = sum_array(dy, tuple(range(dy.ndim - 2)), dtype=compute_dtype(dy.dtype))
    place = slice(start, start + ids.shape[-1])
    return dweight, add_at(needs[1], place, drows, positions_shape)


@tangent_of(_backward)
def _tangent(op: Op, tweight: Tensor | None, tpositions: Tensor | None) -> Tensor:
    ids, start, *_ = op.saved
    if tweight is not None:
        return embedding(tweight, ids, tpositions, start=start)
    assert tpositions is not None
    if backend.is_array(start):
        return embedding(tpositions, _places(ids, start))
    return embedding(tpositions, backend.namespace(ids).arange(start, start + ids.shape[-1]))


def _places(ids: Array, starts: Array) -> Array:
    """Return the position of each id, the shape of ids."""
    return starts[..., None] + backend.namespace(ids).arange(ids.shape[-1])


def check_ids(op: str, ids: Array, vocabulary: int) -> None:
    """Raise OutOfRangeError for an id outside the vocabulary; ids on a GPU are not read."""
    if backend.is_numpy(ids):
        outside = (ids < 0) | (ids >= vocabulary)
        expected = f"0 to {vocabulary - 1} (a vocabulary of {vocabulary})"
        check_indices(op, "ids", ids, outside, expected)


def _forward_numpy(
    weight: Array, ids: Array, positions: Array | None, starts: Array | None
) -> Array:
    check_ids("embedding", ids, len(weight))
    y = weight.take(ids, axis=0)
    if positions is not None and starts is not None:
        positions = positions.take(_places(ids, starts), axis=0)
    if positions is not None:
        np.add(y, positions, out=y, dtype=compute_dtype(y.dtype), casting="same_kind")
    return y
