"""Collectives with gradients: the operations of tensor parallel layers.

Ranks that share a layer compute parts of it. The collectives at the entry and the exit of such a
parallel region come in pairs, each the other's gradient:

    operation            forward            backward                    where
    all_reduce_gradient  x unchanged        sum of dx over the ranks    entry
    all_reduce           sum of x           dx unchanged                exit
    all_gather_rows      rows of all ranks  own rows of the sum of dx   entry, sequence parallel
    reduce_scatter_rows  own rows of a sum  rows of all ranks           exit, sequence parallel

`all_gather_columns` is for results. Every rank continues with the same whole array, so its gradient
is the rank's own columns of dy, without a sum. Every rank must call the same operations in the same
order, in forward and so in backward. Sums are in the dtype of the array, in the same order on all
ranks. Tests: tests/parallel/test_tensor.py.
"""

from __future__ import annotations

from typing import Any

from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.errors import ShapeError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.operands import float_tensor
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor
from tensorgrad.parallel.comm.collectives import Comm


def all_reduce_gradient(x: Any, comm: Comm) -> Tensor:
    """Return x, which is the same on all ranks; its gradient is summed over the ranks.

    Args:
        x: any shape, any float dtype.
        comm: the ranks, each of which computes another part from x.
    Raises:
        DtypeError: x is not a float.
    """
    x = float_tensor("all_reduce_gradient", "x", x)
    return record("all_reduce_gradient", x.data, (x,), _sum_backward, (comm, all_reduce_gradient))


def _sum_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    return (summed(dy, saved[0]),)


def all_reduce(x: Any, comm: Comm, overwrite: bool = False) -> Tensor:
    """Return the sum of x over the ranks.

    Args:
        x: any shape, any float dtype, the same on all ranks.
        comm: the ranks.
        overwrite: write the sum to the array of x, which saves a copy; nothing else may use x.
    Raises:
        DtypeError: x is not a float.
        CommError: the ranks disagree, or the network fails.
    """
    x = float_tensor("all_reduce", "x", x)
    if overwrite:
        comm.all_reduce(x.data)
    y = x.data if overwrite else summed(x.data, comm)
    return record("all_reduce", y, (x,), _all_reduce_backward, (comm, all_reduce))


def _all_reduce_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    return (dy,)


def all_gather_rows(x: Any, comm: Comm) -> Tensor:
    """Return the rows of all ranks, concatenated; the gradient is summed and divided again.

    Args:
        x: (B, T / ranks, C), any float dtype: this rank's part of the B * T rows in memory order.
        comm: the ranks, each of which computes another part from all rows.
    Returns:
        (B, T, C).
    Raises:
        ShapeError: x has fewer than three axes.
        DtypeError: x is not a float.
        CommError: the ranks disagree, or the network fails.
    """
    x = float_tensor("all_gather_rows", "x", x)
    if x.ndim < 3:
        raise ShapeError(f"all_gather_rows: x has shape {x.shape}, expected (B, T / ranks, C)")
    return record(
        "all_gather_rows", gathered(x.data, comm), (x,), _gather_backward, (comm, all_gather_rows)
    )


def _gather_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    return (scattered("all_gather_rows", dy, saved[0]),)


def reduce_scatter_rows(x: Any, comm: Comm) -> Tensor:
    """Return this rank's part of the rows of the sum of x over the ranks.

    Args:
        x: (B, T, C), any float dtype, the same on all ranks.
        comm: the ranks.
    Returns:
        (B, T / ranks, C): the B * T rows in memory order, divided equally. With B == 1 each rank
        has a part of the sequence; with B a multiple of the ranks it has whole sequences.
    Raises:
        ShapeError: x has fewer than three axes, or T is not a multiple of the number of ranks.
        DtypeError: x is not a float.
        CommError: the ranks disagree, or the network fails.
    """
    op = "reduce_scatter_rows"
    x = float_tensor(op, "x", x)
    return record(
        op, scattered(op, x.data, comm), (x,), _scatter_backward, (comm, reduce_scatter_rows)
    )


def _scatter_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    return (gathered(dy, saved[0]),)


def all_gather_columns(x: Any, comm: Comm) -> Tensor:
    """Concatenate x of all ranks along the last axis.

    Args:
        x: (..., n), any float dtype, the same shape on all ranks.
        comm: the ranks, all of which continue with the same result.
    Returns:
        (..., ranks * n).
    Raises:
        ShapeError: x has no axes.
        DtypeError: x is not a float.
        CommError: the ranks disagree, or the network fails.
    """
    op = "all_gather_columns"
    x = float_tensor(op, "x", x)
    if not x.ndim:
        raise ShapeError(f"{op}: x has shape (), expected (..., n)")
    parts = comm.all_gather(x.data)
    y = backend.namespace(parts).moveaxis(parts, 0, -2)
    y = y.reshape(*x.shape[:-1], comm.size * x.shape[-1])
    return record(op, y, (x,), _columns_backward, (comm, all_gather_columns, x.shape[-1]))


def _columns_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    comm, _, width = saved
    return (dy[..., width * comm.rank : width * (comm.rank + 1)],)


@tangent_of(
    *(_sum_backward, _all_reduce_backward, _gather_backward, _scatter_backward, _columns_backward)
)
def _collective_tangent(op: Op, t: Tensor) -> Tensor:
    comm, collective, *_ = op.saved  # which is linear
    result: Tensor = collective(t, comm)
    return result


def summed(array: Array, comm: Comm) -> Array:
    """Return the sum over the ranks, a new array."""
    total = array.copy(order="C")
    comm.all_reduce(total)
    return total


def gathered(array: Array, comm: Comm) -> Array:
    """Return the rows of all ranks: (B, T, ...) of (B, T / ranks, ...)."""
    batch, length = array.shape[:2]
    return comm.all_gather(array).reshape(batch, comm.size * length, *array.shape[2:])


def scattered(op: str, array: Array, comm: Comm) -> Array:
    """Return this rank's rows of the sum: (B, T / ranks, ...) of (B, T, ...)."""
    if array.ndim < 3 or array.shape[1] % comm.size:
        raise ShapeError(
            f"{op}: x has shape {array.shape}, expected (B, T, C) with T a multiple of the "
            f"{comm.size} ranks"
        )
    batch, length = array.shape[:2]
    own = backend.empty((batch, length // comm.size, *array.shape[2:]), array.dtype, like=array)
    comm.reduce_scatter(backend.contiguous(array).reshape(-1), own.reshape(-1))
    return own
