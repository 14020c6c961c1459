"""Layer norm and RMS norm, with and without a residual add. Kernels: kernels/norm_*.cu.

Statistics are float32 for 16-bit inputs, float64 for float64. Backward keeps x and one or two
numbers a row, and computes the normalised rows again. Tests: tests/ops/test_norm.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.backend import Array, upcast
from tensorgrad.core.checks import promoted
from tensorgrad.core.dtypes import compute_dtype
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.gradient import Gradient, Gradients, Needs, Recompute, Saved, accumulated
from tensorgrad.core.modes import mode
from tensorgrad.core.nodes import assigned_since, latest_version
from tensorgrad.core.operands import data_of
from tensorgrad.core.record import record
from tensorgrad.core.signature import Count, Float, NotNegative, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.kernels import norm as norm_cuda
from tensorgrad.ops.column_sums import column_sums
from tensorgrad.ops.elementwise.fuse import fuse
from tensorgrad.ops.norm_tangent import norm_tangent
from tensorgrad.ops.shape import astype, reshape

__all__ = ["add_layer_norm", "add_rms_norm", "group_norm", "layer_norm", "rms_norm"]

takes = Signatures(globals())


def layer_norm(
    x: Float[ArrayLike, "... C"],
    weight: Float[ArrayLike, "C"] | None = None,
    bias: Float[ArrayLike, "C"] | None = None,
    *,
    eps: NotNegative = 1e-5,
) -> Tensor:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift.

    y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    Args:
        x: (..., C), any float dtype.
        weight: (C,), or None for 1.
        bias: (C,), or None for 0.
        eps: added to the variance; from 0.

    Returns:
        (..., C), dtype of x.

    Raises:
        DtypeError: x, weight or bias does not hold floats.
        ShapeError: x is not (..., C), weight not (C,), bias not (C,).
        ArgumentError: eps is not a finite number from 0.
        DeviceError: the operands are on different devices.
    Source: Ba et al. 2016, arXiv:1607.06450, eq. 4.

    Example:
        >>> tg.layer_norm([1.0, 3.0], bias=[0.0, 10.0], eps=0.0).tolist()
        [-1.0, 11.0]
    """
    x, weight, bias = takes.layer_norm(x, weight, bias, eps)
    return _run("layer_norm", x, weight, bias, eps, centre=True)


def rms_norm(
    x: Float[ArrayLike, "... C"],
    weight: Float[ArrayLike, "C"] | None = None,
    *,
    eps: NotNegative | None = None,
) -> Tensor:
    """Divide the last axis by its root mean square, then scale.

    y = x / sqrt(E[x^2] + eps) * weight

    Args:
        x: (..., C), any float dtype.
        weight: (C,), or None for 1.
        eps: added to the mean square; from 0. None: the machine epsilon of float32, or of float64
            for x of that dtype.

    Returns:
        (..., C), dtype of x.

    Raises:
        DtypeError: x or weight does not hold floats.
        ShapeError: x is not (..., C), weight not (C,).
        ArgumentError: eps is not a finite number from 0.
        DeviceError: the operands are on different devices.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4.

    Example:
        >>> tg.rms_norm([1.0, 7.0], weight=[5.0, 5.0], eps=0.0).tolist()
        [1.0, 7.0]
    """
    x, weight = takes.rms_norm(x, weight, eps)
    return _run("rms_norm", x, weight, None, eps, centre=False)


def group_norm(
    x: Float[ArrayLike, "B C ..."],
    num_groups: Count,
    weight: Float[ArrayLike, "C"] | None = None,
    bias: Float[ArrayLike, "C"] | None = None,
    eps: NotNegative = 1e-5,
) -> Tensor:
    """Normalise groups of channels to mean 0 and variance 1, then scale and shift channels.

    y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias, over C / num_groups channels and all
    positions of an example

    Args:
        x: (B, C, ...), any float dtype.
        num_groups: divides C.
        weight: (C,), or None for 1.
        bias: (C,), or None for 0.
        eps: added to the variance; from 0.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x, weight or bias does not hold floats.
        ShapeError: x is not (B, C, ...), weight not (C,), bias not (C,).
        ArgumentError: num_groups is not 1 or more.
        ArgumentError: eps is not a finite number from 0.
        DeviceError: the operands are on different devices.
        ArgumentError: num_groups does not divide C.
    Source: Wu & He 2018, arXiv:1803.08494, eq. 1 to 7.

    Example:
        >>> tg.nn.functional.group_norm([[1.0, 3.0, 10.0, 10.0]], 2, eps=1e-9).round(3).tolist()
        [[-1.0, 1.0, 0.0, 0.0]]
    """
    x, weight, bias = takes.group_norm(x, num_groups, weight, bias, eps)
    channels = x.shape[1]
    if channels % num_groups:
        got = f"group_norm: num_groups is {num_groups}"
        raise ArgumentError(f"{got}, expected a divisor of {channels}")
    size = channels // num_groups * math.prod(x.shape[2:])
    y = reshape(layer_norm(reshape(x, (x.shape[0], num_groups, size)), eps=eps), x.shape)
    if weight is None and bias is None:
        return y
    along = (channels, *(1,) * (x.ndim - 2))
    factor = 1 if weight is None else reshape(weight, along)
    shift = 0 if bias is None else reshape(bias, along)
    return astype(_scaled_and_shifted(y, factor, shift), x.dtype, copy=False)


@fuse
def _scaled_and_shifted(x: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
    return x * factor + shift


def add_layer_norm(
    x: Float[ArrayLike, "*B C"],
    residual: Float[ArrayLike, "*B C"] | None = None,
    weight: Float[ArrayLike, "C"] | None = None,
    bias: Float[ArrayLike, "C"] | None = None,
    *,
    eps: NotNegative = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Add, then normalise: the end of one residual branch and the beginning of the next.

    s = x + residual, y = layer_norm(s, weight, bias, eps), in one pass forward and one backward

    Args:
        x: (..., C), any float dtype.
        residual: the shape of x, any float dtype. None adds nothing and s is x: use s in place of
            x beside y, and the one backward pass adds up the gradients of both.
        weight: (C,), or None for 1.
        bias: (C,), or None for 0.
        eps: added to the variance; from 0.

    Returns:
        s and y, both (..., C) in the dtype that x and residual promote to.

    Raises:
        DtypeError: x, residual, weight or bias does not hold floats.
        ShapeError: x is not (*B, C), residual not (*B, C), weight not (C,), bias not (C,).
        ArgumentError: eps is not a finite number from 0.
        DeviceError: the operands are on different devices.

    Example:
        >>> added, normed = tg.add_layer_norm([1.0, 1.0], [0.0, 2.0], eps=0.0)
        >>> added.tolist(), normed.tolist()
        ([1.0, 3.0], [-1.0, 1.0])
    """
    x, residual, weight, bias = takes.add_layer_norm(x, residual, weight, bias, eps)
    return _run_added("add_layer_norm", x, residual, weight, bias, eps, centre=True)


def add_rms_norm(
    x: Float[ArrayLike, "*B C"],
    residual: Float[ArrayLike, "*B C"] | None = None,
    weight: Float[ArrayLike, "C"] | None = None,
    *,
    eps: NotNegative | None = None,
) -> tuple[Tensor, Tensor]:
    """Add, then divide by the root mean square, as `add_layer_norm` does with `layer_norm`.

    s = x + residual, y = rms_norm(s, weight, eps)

    Args:
        x: (..., C), any float dtype.
        residual: the shape of x, any float dtype; or None, as there.
        weight: (C,), or None for 1.
        eps: added to the mean square; from 0. None: as of `rms_norm`, for the dtype of s.

    Returns:
        s and y, both (..., C) in the dtype that x and residual promote to.

    Raises:
        DtypeError: x, residual or weight does not hold floats.
        ShapeError: x is not (*B, C), residual not (*B, C), weight not (C,).
        ArgumentError: eps is not a finite number from 0.
        DeviceError: the operands are on different devices.

    Example:
        >>> added, normed = tg.add_rms_norm([1.0, 1.0], [0.0, 6.0], [5.0, 5.0], eps=0.0)
        >>> added.tolist(), normed.tolist()
        ([1.0, 7.0], [1.0, 7.0])
    """
    x, residual, weight = takes.add_rms_norm(x, residual, weight, eps)
    return _run_added("add_rms_norm", x, residual, weight, None, eps, centre=False)


def operand_to_save(x: Any) -> tuple[Array | Recompute, tuple[Any, ...]]:
    """Return what backward needs instead of the tensor x, and arrays it depends on, saved as well.

    Under `mode.recompute_norms` the output of a norm is dropped: half of what a norm and the linear
    layer after it keep. Its input is there for the norm's own backward. An output that was assigned
    to, or what it was computed from, is saved itself.
    """
    again: Recompute | None = x.recompute
    if again is None or assigned_since(again.version, (x.data, *again.arrays)):
        return x.data, ()
    return again, again.arrays


def saved_operand(x: Array | Recompute) -> Array:
    """Return the operand that was saved so."""
    return x() if type(x) is Recompute else x


def _output(eps: float, centre: bool, x: Array, weight: Array | None, bias: Array | None) -> Array:
    """Return the normalised rows, with the same bits whenever it is called."""
    forward = _forward_numpy if type(x) is np.ndarray else norm_cuda.forward
    return forward(x, None, weight, bias, eps, centre)[0]


def _run(
    op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None, centre: bool
) -> Tensor:
    operands = (x.data, None, data_of(weight), data_of(bias))
    (_, y), saved, again = _normalise(*operands, eps, centre)
    normed = record(op, y, (x, weight, bias), _backward, saved)
    normed.recompute = again
    return normed


def _run_added(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    centre: bool,
) -> tuple[Tensor, Tensor]:
    first, second = x.data, data_of(residual)
    if second is not None:
        dtype = promoted(op, ("x", "residual"), (first, second))
        first, second = first.astype(dtype, copy=False), second.astype(dtype, copy=False)
    operands = (first, second, data_of(weight), data_of(bias))
    outputs, saved, again = _normalise(*operands, eps, centre)
    added, normed = record(op, outputs, (x, residual, weight, bias), _backward_added, saved)
    normed.recompute = again
    return added, normed


def _normalise(
    x: Array,
    residual: Array | None,
    weight: Array | None,
    bias: Array | None,
    eps: float | None,
    centre: bool,
) -> tuple[tuple[Array, Array], Saved, Recompute | None]:
    """Return the sum and its normalised rows, and what backward needs.

    Under `mode.recompute_norms` also how to compute the normalised rows again.
    """
    if eps is None:
        eps = float(np.finfo(compute_dtype(x.dtype)).eps)
    forward = _forward_numpy if type(x) is np.ndarray else norm_cuda.forward
    y, total, mean, rstd = forward(x, residual, weight, bias, eps, centre)
    aligned = residual is None or type(residual) is np.ndarray or residual.data.ptr % 16 == 0
    again = None
    if mode.recompute_norms and mode.grad_enabled and aligned:  # otherwise by another kernel
        output = partial(_output, eps, centre)
        again = Recompute(output, (total, weight, bias), y.shape, latest_version())
    return (total, y), (total, weight, mean, rstd, eps), again


def _backward(dy: Array, saved: Saved, needs: Needs, dsum: Array | None = None) -> Gradients:
    dx: Any
    x, weight, mean, rstd, _ = saved
    if type(dy) is np.ndarray:
        dx, dweight, dbias = _backward_numpy(dy, dsum, x, weight, mean, rstd)
        return dx, accumulated(dweight, needs[1]), accumulated(dbias, needs[2])
    wanted = bool(needs[0]), any(needs[1:])
    dx, sums, parts = norm_cuda.backward(dy, dsum, x, weight, mean, rstd, *wanted)
    dx = dx if sums is None else Gradient(dx, sums)
    if parts is None:
        return dx, None, None
    if not parts.size:
        return dx, parts[0, 0], parts[0, 1]
    return dx, *column_sums([parts[:, 0], parts[:, 1]], needs[1:])


def _backward_added(dys: Sequence[Array | None], saved: Saved, needs: Needs) -> Gradients:
    dsum, dy = dys
    if dy is None:  # the normalised rows were not used
        return dsum, dsum, None, None
    wanted = (needs[0] or needs[1], needs[2], needs[3])
    dx, dweight, dbias = _backward(dy, saved, wanted, dsum)
    return dx, dx, dweight, dbias


@tangent_of(_backward)
def _tangent(op: Op, tx: Tensor | None, tw: Tensor | None, tb: Tensor | None) -> Tensor:
    x, weight, *_ = op.saved
    weight = None if weight is None else op.input(1, weight)
    return norm_tangent(op.input(0, x), weight, (tx, tw, tb), op.saved[2:])


@tangent_of(_backward_added)
def _tangent_added(
    op: Op, tx: Tensor | None, tr: Tensor | None, tw: Tensor | None, tb: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    total, weight, *_ = op.saved
    weight = None if weight is None else op.input(2, weight)
    ts = tr if tx is None else tx if tr is None else tx + tr
    return ts, norm_tangent(op.output(total, 0), weight, (ts, tw, tb), op.saved[2:])


def _forward_numpy(
    x: Array,
    residual: Array | None,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    centre: bool,
) -> tuple[Array, Array, Array | None, Array]:
    width = x.shape[-1]
    count, dtype = x.size // width if width else 0, compute_dtype(x.dtype)
    scale = None if weight is None else weight.astype(dtype, copy=False)
    shift = None if bias is None else bias.astype(dtype, copy=False)
    y = np.empty(x.shape, dtype)
    total = x if residual is None else np.empty(x.shape, x.dtype)
    mean = np.empty((count, 1), dtype) if centre else None
    rstd = np.empty((count, 1), dtype)
    rows, y_rows = x.reshape(count, width), y.reshape(count, width)
    sums = rows if total is x else total.reshape(count, width)
    added = None if residual is None else residual.reshape(count, width)
    average = np.empty(width, dtype)
    average.fill(1 / max(width, 1))  # a dot product is the fastest sum

    def run(piece: slice) -> None:
        out = y_rows[piece]
        if added is not None:
            sums[piece] = upcast(rows[piece]) + upcast(added[piece])
        x = upcast(sums[piece])
        if mean is not None:
            mean[piece, 0] = np.vecdot(x, average)
            x = np.subtract(x, mean[piece], out=out)
        rstd[piece, 0] = 1 / np.sqrt(np.vecdot(x, x) / width + eps)
        np.multiply(x, rstd[piece], out=out)
        if scale is not None:
            out *= scale
        if shift is not None:
            out += shift

    backend.parallel_blocks(run, count, _block(width))
    return y.astype(x.dtype, copy=False), total, mean, rstd


def _backward_numpy(
    dy: Array, dsum: Array | None, x: Array, weight: Array | None, mean: Array | None, rstd: Array
) -> tuple[Array, Array, Array]:
    count, width = len(rstd), x.shape[-1]
    dtype = rstd.dtype
    dy_rows, x_rows = upcast(dy).reshape(count, width), upcast(x).reshape(count, width)
    scale = np.ones(width, dtype) if weight is None else weight.astype(dtype, copy=False)
    average = scale / max(width, 1)
    dx = np.empty((count, width), dtype)
    block = _block(width)
    dweights = np.zeros((-(-count // block), width), dtype)  # a row for each block of rows of x
    dbiases = np.zeros_like(dweights)

    def run(piece: slice) -> None:
        # With dx_hat = dy weight, and x_hat = x rstd once the mean is taken from x:
        # dx = rstd (dx_hat - mean(dx_hat) - x_hat mean(dx_hat x_hat))
        dy, out, factor = dy_rows[piece], dx[piece], rstd[piece]
        x = x_rows[piece].copy() if mean is None else x_rows[piece] - mean[piece]
        np.multiply(dy, x, out=out)
        np.matmul(factor[:, 0], out, out=dweights[piece.start // block])
        np.add.reduce(dy, 0, out=dbiases[piece.start // block])
        x *= (np.vecdot(out, average) * factor[:, 0] ** 2)[:, None]
        if mean is not None:
            x += np.vecdot(dy, average)[:, None]
        np.multiply(dy, scale, out=out)
        out -= x
        out *= factor

    backend.parallel_blocks(run, count, block, multiplies=True)
    dx = dx.reshape(x.shape)
    if dsum is not None:
        dx += dsum
    return dx, dweights.sum(0), dbiases.sum(0)


def _block(width: int) -> int:
    """Return how many rows to take at a time; up to four arrays of that length are in use."""
    return max(1, backend.BLOCK // (2 * max(width, 1)))
