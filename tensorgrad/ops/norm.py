"""Normalisation over the last axis. Kernels: kernels/norm.cu. Tests: tests/ops/test_norm.py.

Statistics are float32 for 16-bit inputs, float64 for float64. What backward keeps is x and one
or two numbers a row; the normalised rows are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.autograd import record
from tensorgrad.backend import Array
from tensorgrad.errors import ShapeError
from tensorgrad.ops.norm_cuda import backward as _backward_cuda
from tensorgrad.ops.norm_cuda import forward as _forward_cuda
from tensorgrad.ops.operand import float_tensor, widened
from tensorgrad.tensor import Tensor

__all__ = ["layer_norm", "rms_norm"]

_ABSENT = Tensor(np.zeros(()))  # stands among the inputs for a parameter that was not given


def layer_norm(x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift.

    y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    Args:
        x: (..., C), any float dtype.
        weight: (C,), or None for 1.
        bias: (C,), or None for 0.
        eps: added to the variance.

    Returns:
        (..., C), dtype of x.

    Raises:
        ShapeError: x has no axis, or weight or bias is not (C,).
        DtypeError: an argument is not a float.
        DeviceError: the arguments are on different devices.
    Source: Ba et al. 2016, arXiv:1607.06450, eq. 4.
    """
    return _run("layer_norm", x, weight, bias, eps, centre=True)


def rms_norm(x: Any, weight: Any = None, eps: float = 1e-6) -> Tensor:
    """Divide the last axis by its root mean square, then scale.

    y = x / sqrt(E[x^2] + eps) * weight

    Args:
        x: (..., C), any float dtype.
        weight: (C,), or None for 1.
        eps: added to the mean square.

    Returns:
        (..., C), dtype of x.

    Raises:
        ShapeError: x has no axis, or weight is not (C,).
        DtypeError: an argument is not a float.
        DeviceError: the arguments are on different devices.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    return _run("rms_norm", x, weight, None, eps, centre=False)


def _run(op: str, x: Any, weight: Any, bias: Any, eps: float, centre: bool) -> Tensor:
    x = float_tensor(op, "x", x)
    if x.ndim == 0:
        raise ShapeError(f"{op}: x has shape (), expected (..., C)")
    given = {"x": x}
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            given[name] = tensor = float_tensor(op, name, value)
            if tensor.shape != x.shape[-1:]:
                raise ShapeError(
                    f"{op}: {name} has shape {tensor.shape}, expected {x.shape[-1:]} "
                    "(last axis of x)"
                )
    backend.same_device(op, list(given), [t.data for t in given.values()])
    weight, bias = given.get("weight"), given.get("bias")
    scale = None if weight is None else weight.data
    shift = None if bias is None else bias.data
    forward = _forward_numpy if type(x.data) is np.ndarray else _forward_cuda
    y, mean, rstd = forward(x.data, scale, shift, eps, centre)
    inputs = (x, _ABSENT if weight is None else weight, _ABSENT if bias is None else bias)
    return record(op, y, inputs, _backward, (x.data, scale, mean, rstd))


def _backward(dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]) -> tuple[Array | None, ...]:
    backward = _backward_numpy if type(dy) is np.ndarray else _backward_cuda
    x, weight, mean, rstd = saved
    return backward(dy, x, weight, mean, rstd, needs)


def _forward_numpy(
    x: Array, weight: Array | None, bias: Array | None, eps: float, centre: bool
) -> tuple[Array, Array | None, Array]:
    wide, width = widened(x), x.shape[-1]
    count = x.size // width if width else 0
    scale = None if weight is None else weight.astype(wide.dtype, copy=False)
    shift = None if bias is None else bias.astype(wide.dtype, copy=False)
    y = np.empty(x.shape, wide.dtype)
    mean = np.empty((count, 1), wide.dtype) if centre else None
    rstd = np.empty((count, 1), wide.dtype)
    rows, y_rows = wide.reshape(count, width), y.reshape(count, width)
    average = np.full(width, 1 / max(width, 1), wide.dtype)  # a dot product is the fastest sum

    def run(piece: slice) -> None:
        x, out = rows[piece], y_rows[piece]
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
    return y.astype(x.dtype, copy=False), mean, rstd


def _backward_numpy(
    dy: Array,
    x: Array,
    weight: Array | None,
    mean: Array | None,
    rstd: Array,
    needs: Sequence[bool],
) -> tuple[Array | None, ...]:
    count, width = len(rstd), x.shape[-1]
    dtype = rstd.dtype
    dy_rows, x_rows = widened(dy).reshape(count, width), widened(x).reshape(count, width)
    scale = np.ones(width, dtype) if weight is None else weight.astype(dtype, copy=False)
    average = scale / max(width, 1)
    dx = np.empty((count, width), dtype)
    block = _block(width)
    dweights = np.zeros((-(-count // block), width), dtype)  # one row a block of rows of x
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
    return dx.reshape(x.shape), dweights.sum(0), dbiases.sum(0)


def _block(width: int) -> int:
    """Return how many rows to take at a time; up to four arrays of that length are in use."""
    return max(1, backend.BLOCK // (2 * max(width, 1)))
