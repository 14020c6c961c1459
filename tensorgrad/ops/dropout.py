"""Dropout, alone, with a bias and a residual add, and of SwiGLU.

Kernels: kernels/dropout.cu and swiglu_dropout.cu. No mask is saved: backward generates the same
random bits again. Tests: tests/ops/test_dropout.py.
"""

from __future__ import annotations

import numpy as np

from tensorgrad import random
from tensorgrad.autograd.tangents import Op, along, tangent, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.backward import gradients_within
from tensorgrad.core.dtypes import compute_dtype
from tensorgrad.core.errors import ShapeError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.modes import mode
from tensorgrad.core.nodes import Node
from tensorgrad.core.operands import data_of
from tensorgrad.core.record import record
from tensorgrad.core.signature import Float, Probability, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.kernels import dropout as dropout_cuda
from tensorgrad.kernels.dropout import KeepMask
from tensorgrad.ops import philox
from tensorgrad.ops.elementwise import add
from tensorgrad.ops.elementwise.activation import swiglu

__all__ = ["dropout", "dropout_add"]

takes = Signatures(globals())


def dropout(x: Float[ArrayLike, "..."], p: Probability = 0.5, training: bool = True) -> Tensor:
    """Set elements to 0 with probability p and scale the others by 1 / (1 - p).

    Which ones depends on the state of `tensorgrad.random` alone, not on the device.

    Args:
        x: any shape, any float dtype.
        p: in [0, 1).
        training: False returns x itself.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x does not hold floats.
        ArgumentError: p is not 0 <= p < 1.
    Source: Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from
        overfitting", section 10 (inverted).

    Example:
        >>> tg.manual_seed(0)
        >>> sorted(set(tg.dropout(tg.ones(100), 0.5).tolist()))
        [0.0, 2.0]
        >>> tg.dropout([1.0, 2.0], training=False).tolist()
        [1.0, 2.0]
    """
    (x,) = takes.dropout(x, p, training)
    if p == 0 or not training:
        return x
    return _dropped(x, KeepMask(random.next_key(), 1 - p, x.data.dtype))


def dropout_add(
    x: Float[ArrayLike, "*B"],
    residual: Float[ArrayLike, "*B"],
    *,
    p: Probability = 0.5,
    bias: Float[ArrayLike, "..."] | None = None,
    training: bool = True,
) -> Tensor:
    """Return residual + dropout(x + bias), with the random numbers of `dropout`.

    On the GPU it is one kernel, which reads each array once.

    Args:
        x: (..., C), any float dtype.
        residual: the shape of x.
        p: in [0, 1).
        bias: (C,), or None, which adds nothing.
        training: False drops nothing.

    Returns:
        The shape of x, in the dtype that all promote to. Where the dtypes differ it is more than
        one kernel, but for x of 16 bits, as under autocast, and a float32 residual.

    Raises:
        DtypeError: x, residual or bias does not hold floats.
        ShapeError: x is not (*B,), residual not (*B,).
        ArgumentError: p is not 0 <= p < 1.
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.dropout_add([1.0, 2.0], [10.0, 10.0], bias=[0.5, 0.5], training=False).tolist()
        [11.5, 12.5]
    """
    op = "dropout_add"
    x, residual, bias = takes.dropout_add(x, residual, p, bias, training)
    if bias is not None and (bias.shape != x.shape[-1:] or not x.ndim):
        raise ShapeError(f"{op}: bias has shape {bias.shape}, expected (C,) of x {x.shape}")
    drops = p > 0 and training
    alike = bias is None or bias.dtype == x.dtype
    if not drops or not alike or residual.dtype not in (x.dtype, compute_dtype(x.dtype)):
        shifted = x if bias is None else add(x, bias)
        return add(residual, dropout(shifted, p) if drops else shifted)
    mask = KeepMask(random.next_key(), 1 - p, x.dtype)
    y = _forward(x.data, mask, residual.data, data_of(bias))
    return record(op, y, (x, residual, bias), _add_backward, (mask,))


def swiglu_dropout(gate: Float[Tensor, "..."], up: Float[Tensor, "..."], p: Probability) -> Tensor:
    """Return dropout(swiglu(gate, up), p) as one op with the bits of the two; for `gated_linear`.

    On the GPU it is one kernel forward and one backward, for arguments of one dtype.

    Args:
        gate: a float tensor that requires a gradient, as up does.
        up: the shape of gate.
        p: from 0, below 1.

    Returns:
        The shape of gate, in the dtype that both promote to.

    Raises:
        DtypeError: gate or up does not hold floats.
        ArgumentError: p is not 0 <= p < 1.
        DeviceError: the operands are on different devices.
    """
    op = "swiglu_dropout"
    gate, up = takes.swiglu_dropout(gate, up, p)
    a, b = gate.data, up.data
    mask = KeepMask(random.next_key(), 1 - p, a.dtype) if p else None
    if type(a) is not np.ndarray and a.dtype == b.dtype:
        y = dropout_cuda.swiglu(mask, a, b) if mask else swiglu(gate.detach(), up.detach()).data
        return record(op, y, (gate, up), _swiglu_backward, (a, b, mask))
    hidden = swiglu(gate, up)
    if mask is None:
        return hidden
    mask = mask._replace(dtype=hidden.dtype)
    if mode.forward is not None:
        return _dropped(hidden, mask)
    y = _forward(hidden.data, mask)
    return record(op, y, (gate, up), _unfused_swiglu_backward, (mask, hidden.node))


def swiglu_gradients(
    node: Node, dy: Array, joined: bool
) -> tuple[Array | None, Array | None, Array | None]:
    """Return the gradients of gate and up and, if there is one, the array they are halves of.

    Args:
        node: what `swiglu_dropout` recorded.
        dy: gradient of its result.
        joined: let the rows of both lie side by side, on a GPU.
    """
    if node.backward is not _swiglu_backward:
        dgate, dup = gradients_within(node, dy)
        return dgate, dup, None
    gate, up, mask = node.saved
    return dropout_cuda.swiglu_backward(mask, dy, gate, up, joined)


def swiglu_operands(node: Node) -> tuple[Array, Array]:
    """Return the arrays of gate and up that `swiglu_dropout` got, from what it recorded."""
    saved = node.saved
    if node.backward is _unfused_swiglu_backward:
        saved = saved[1].saved
    return saved[0], saved[1]


def _dropped(x: Tensor, mask: KeepMask) -> Tensor:
    """Return mask / keep * x, in the dtype of the mask."""
    return record("dropout", _forward(x.data, mask), (x,), _backward, (mask,))


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    (mask,) = saved
    return (_forward(dy, mask),)


@tangent_of(_backward)
def _tangent(op: Op, t: Tensor) -> Tensor:
    return _dropped(t, *op.saved)


def _add_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    (mask,) = saved
    dx = _forward(dy, mask) if needs[0] or needs[2] else None
    return dx, dy, dx  # the walk sums the gradient of the bias


@tangent_of(_add_backward)
def _add_tangent(
    op: Op, tx: Tensor | None, tresidual: Tensor | None, tbias: Tensor | None
) -> Tensor | None:
    (mask,) = op.saved
    if tx is None and tbias is None:
        return tresidual
    x = data_of(tx)
    if tx is None:
        x = backend.namespace(data_of(tbias)).zeros(op.node.shape, mask.dtype)
    y = _forward(x, mask, data_of(tresidual), data_of(tbias))
    return record("dropout_add", y, (tx, tresidual, tbias), _add_backward, (mask,))


def _swiglu_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    gate, up, mask = saved
    return dropout_cuda.swiglu_backward(mask, dy, gate, up)[:2]


@tangent_of(_swiglu_backward)
def _swiglu_tangent(op: Op, *tangents: Tensor | None) -> Tensor | None:
    gate, up, mask = op.saved
    (t,) = along(swiglu, [op.input(0, gate), op.input(1, up)], tangents)
    return t if t is None or mask is None else _dropped(t, mask)


def _unfused_swiglu_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    mask, hidden = saved
    return gradients_within(hidden, _forward(dy, mask))


@tangent_of(_unfused_swiglu_backward)
def _unfused_swiglu_tangent(op: Op, *tangents: Tensor | None) -> Tensor | None:
    mask, hidden = op.saved
    inner = Op(hidden, hidden.saved, op.inputs)
    (t,) = tangent(inner, tangents, [(hidden.shape, hidden.dtype)])
    return None if t is None else _dropped(t, mask)


def _forward(
    x: Array, mask: KeepMask, residual: Array | None = None, bias: Array | None = None
) -> Array:
    """Return residual + mask / keep * (x + bias), rounded once."""
    forward = _forward_numpy if type(x) is np.ndarray else dropout_cuda.forward
    return forward(x, mask, residual, bias)


def _forward_numpy(x: Array, mask: KeepMask, residual: Array | None, bias: Array | None) -> Array:
    y = np.empty(x.shape, mask.dtype if residual is None else residual.dtype)
    compute = compute_dtype(x.dtype)
    scale = compute.type(1 / mask.keep)
    shifted = x if bias is None else x.astype(compute) + bias.astype(compute)
    flat, out = shifted.reshape(-1), y.reshape(-1)
    rest = None if residual is None else residual.reshape(-1)

    def run(piece: slice) -> None:
        scaled = flat[piece] * scale
        scaled *= philox.keep(mask.key, piece, mask.keep)
        if rest is not None:
            scaled += rest[piece].astype(compute)
        out[piece] = scaled

    backend.parallel_blocks(run, y.size, backend.BLOCK)
    return y
