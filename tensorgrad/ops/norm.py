"""Normalisation over the last axis. Tests: tests/ops/test_norm.py.

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
    wide = widened(x)
    width = x.shape[-1]
    count = x.size // width if width else 0
    scale = None if weight is None else weight.astype(wide.dtype, copy=False)
    shift = None if bias is None else bias.astype(wide.dtype, copy=False)
    y = np.empty(x.shape, wide.dtype)
    mean = np.empty((count, 1), wide.dtype) if centre else None
    rstd = np.empty((count, 1), wide.dtype)
    rows, y_rows = wide.reshape(count, width), y.reshape(count, width)
    mean_of = np.full(width, 1 / max(width, 1), wide.dtype)  # a dot product is the fastest sum

    def run(piece: slice) -> None:
        out = y_rows[piece]
        if mean is None:
            rms = np.sqrt(np.vecdot(rows[piece], rows[piece]) / width + eps)
            np.multiply(rows[piece], (1 / rms)[:, None], out=out)
        else:
            mean[piece, 0] = np.vecdot(rows[piece], mean_of)
            np.subtract(rows[piece], mean[piece], out=out)
            rms = np.sqrt(np.vecdot(out, out) / width + eps)
            out *= (1 / rms)[:, None]
        rstd[piece, 0] = 1 / rms
        if scale is not None:
            out *= scale
        if shift is not None:
            out += shift

    backend.parallel_blocks(run, count, max(1, backend.BLOCK // max(width, 1)))
    return y.astype(x.dtype, copy=False), mean, rstd


def _backward_numpy(
    dy: Array,
    x: Array,
    weight: Array | None,
    mean: Array | None,
    rstd: Array,
    needs: Sequence[bool],
) -> tuple[Array | None, ...]:
    width = x.shape[-1]
    count = len(rstd)
    wide_dy, wide = widened(dy).reshape(count, width), widened(x).reshape(count, width)
    scale = None if weight is None else weight.astype(wide.dtype, copy=False)
    dx = np.empty((count, width), wide.dtype)
    mean_of = np.full(width, 1 / max(width, 1), wide.dtype)
    block = max(1, backend.BLOCK // max(width, 1))
    dweights = np.zeros((-(-count // block), width), wide.dtype)  # one row a block of rows of x
    dbiases = np.zeros_like(dweights)

    def run(piece: slice) -> None:
        dy, out = wide_dy[piece], dx[piece]
        x_hat = wide[piece] * rstd[piece] if mean is None else wide[piece] - mean[piece]
        if mean is not None:
            x_hat *= rstd[piece]
        if needs[1]:
            np.multiply(dy, x_hat, out=out)
            np.add.reduce(out, 0, out=dweights[piece.start // block])
        if needs[2]:
            np.add.reduce(dy, 0, out=dbiases[piece.start // block])
        if needs[0]:
            # dx = rstd * (dx_hat - mean(dx_hat) - x_hat * mean(dx_hat * x_hat))
            np.multiply(dy, 1 if scale is None else scale, out=out)
            x_hat *= (np.vecdot(out, x_hat) / width)[:, None]
            if mean is not None:
                x_hat += np.vecdot(out, mean_of)[:, None]
            out -= x_hat
            out *= rstd[piece]

    backend.parallel_blocks(run, count, block)
    return (
        dx.reshape(x.shape) if needs[0] else None,
        dweights.sum(0) if needs[1] else None,
        dbiases.sum(0) if needs[2] else None,
    )


def _forward_cuda(
    x: Array, weight: Array | None, bias: Array | None, eps: float, centre: bool
) -> tuple[Array, Array | None, Array]:
    wide = widened(x)
    mean = wide.mean(-1, keepdims=True) if centre else None
    y = wide if mean is None else wide - mean
    rstd = backend.cupy.reciprocal(backend.cupy.sqrt((y * y).mean(-1, keepdims=True) + eps))
    y = y * rstd
    if weight is not None:
        y *= weight.astype(wide.dtype, copy=False)
    if bias is not None:
        y += bias.astype(wide.dtype, copy=False)
    return y.astype(x.dtype, copy=False), mean, rstd


def _backward_cuda(
    dy: Array,
    x: Array,
    weight: Array | None,
    mean: Array | None,
    rstd: Array,
    needs: Sequence[bool],
) -> tuple[Array | None, ...]:
    dy, wide = widened(dy), widened(x)
    x_hat = (wide if mean is None else wide - mean) * rstd
    rows = tuple(range(dy.ndim - 1))
    dx = dweight = dbias = None
    if needs[0]:
        dx_hat = dy if weight is None else dy * weight.astype(wide.dtype, copy=False)
        dx = dx_hat - x_hat * (dx_hat * x_hat).mean(-1, keepdims=True)
        if mean is not None:
            dx -= dx_hat.mean(-1, keepdims=True)
        dx *= rstd
    if needs[1]:
        dweight = (dy * x_hat).sum(rows)
    if needs[2]:
        dbias = dy.sum(rows)
    return dx, dweight, dbias
