"""Dropout, alone and with the residual add behind it. Kernel: kernels/dropout.cu.

No mask is kept: backward draws the same bits again. Tests: tests/ops/test_dropout.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tensorgrad import backend, philox, random
from tensorgrad.accumulation import Gradients, Needs, Saved
from tensorgrad.autograd import record
from tensorgrad.backend import Array
from tensorgrad.checks import probability
from tensorgrad.dtypes import Dtype, compute_dtype
from tensorgrad.errors import ShapeError
from tensorgrad.kernels.dropout import forward as _forward_cuda
from tensorgrad.kernels.random import Key
from tensorgrad.operands import float_tensor
from tensorgrad.ops.elementwise import add
from tensorgrad.tensor import Tensor

__all__ = ["dropout", "dropout_add"]


class _Draw(NamedTuple):
    """Which elements are spared: random bits and the probability; and the dtype of x."""

    key: Key
    keep: float
    dtype: Dtype


def dropout(x: Any, p: float = 0.5, training: bool = True) -> Tensor:
    """Set elements to 0 with probability p and scale the others by 1 / (1 - p).

    Which ones depends on the state of `tensorgrad.random` alone, not on the device.

    Args:
        x: any shape, any float dtype.
        p: in [0, 1).
        training: False returns x itself.

    Returns:
        The shape and dtype of x.

    Raises:
        ArgumentError: p outside [0, 1).
        DtypeError: x is not a float.
    Source: Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from
        overfitting", section 10 (inverted).
    """
    tensor = float_tensor("dropout", "x", x)
    if probability("dropout", "p", p) == 0 or not training:
        return tensor
    draw = _Draw(random.next_key(), 1 - p, tensor.dtype)
    y = _forward(tensor.data, draw, draw.dtype)
    return record("dropout", y, (tensor,), _backward, (draw,))


def dropout_add(
    x: Any, residual: Any, p: float = 0.5, bias: Any = None, training: bool = True
) -> Tensor:
    """Return residual + dropout(x + bias), with the random numbers of `dropout`.

    On the GPU it is one kernel, which reads each array once.

    Args:
        x: (..., C), any float dtype.
        residual: the shape of x.
        p: in [0, 1).
        bias: (C,), or None.
        training: False drops nothing.

    Returns:
        The shape of x, in the dtype that all promote to. Where the dtypes differ it is more than
        one kernel, but for x of 16 bits, as under autocast, and a float32 residual.

    Raises:
        ArgumentError: p outside [0, 1).
        ShapeError: residual or bias does not fit x.
        DtypeError: an argument is not a float.
        DeviceError: the arguments are on different devices.
    """
    op = "dropout_add"
    x, residual = float_tensor(op, "x", x), float_tensor(op, "residual", residual)
    inputs = [x, residual]
    if residual.shape != x.shape:
        raise ShapeError(f"{op}: residual has shape {residual.shape}, expected {x.shape} like x")
    if bias is not None:
        inputs.append(float_tensor(op, "bias", bias))
        if inputs[2].shape != x.shape[-1:] or not x.ndim:
            raise ShapeError(
                f"{op}: bias has shape {inputs[2].shape}, expected (C,) of x {x.shape}"
            )
    names = ("x", "residual", "bias")[: len(inputs)]
    backend.same_device(op, names, [t.data for t in inputs])
    drops = probability(op, "p", p) > 0 and training
    alike = all(t.dtype == x.dtype for t in inputs if t is not residual)
    if not drops or not alike or residual.dtype not in (x.dtype, compute_dtype(x.dtype)):
        shifted = x if bias is None else add(x, inputs[2])
        return add(residual, dropout(shifted, p) if drops else shifted)
    draw = _Draw(random.next_key(), 1 - p, x.dtype)
    shift = None if bias is None else inputs[2].data
    y = _forward(x.data, draw, residual.dtype, residual.data, shift)
    return record(op, y, inputs, _add_backward, (draw,))


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    (draw,) = saved
    return (_forward(dy, draw, draw.dtype),)


def _add_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    (draw,) = saved
    dx = _forward(dy, draw, draw.dtype) if needs[0] or needs[-1] else None
    return (dx, dy, dx)[: len(needs)]  # the walk sums the gradient of the bias


def _forward(
    x: Array, draw: _Draw, dtype: Dtype, residual: Array | None = None, bias: Array | None = None
) -> Array:
    """Return residual + keep * scale * (x + bias), rounded to `dtype`, that of a residual, once."""
    forward = _forward_numpy if type(x) is np.ndarray else _forward_cuda
    return forward(x, draw.key, draw.keep, dtype, residual, bias)


def _forward_numpy(
    x: Array, key: Key, keep: float, dtype: Dtype, residual: Array | None, bias: Array | None
) -> Array:
    y = np.empty(x.shape, dtype)
    compute = compute_dtype(x.dtype)
    scale = compute.type(1 / keep)
    shifted = x if bias is None else x.astype(compute) + bias.astype(compute)
    flat, out = shifted.reshape(-1), y.reshape(-1)
    rest = None if residual is None else residual.reshape(-1)

    def run(piece: slice) -> None:
        scaled = flat[piece] * scale
        scaled *= philox.keep(key, piece, keep)
        if rest is not None:
            scaled += rest[piece].astype(compute)
        out[piece] = scaled

    backend.parallel_blocks(run, y.size, backend.BLOCK)
    return y
