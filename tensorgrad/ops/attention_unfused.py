"""Attention as a composition of ops, which keeps the (Tq, Tk) scores: what flash attention avoids.

To read, to measure against, and for scores to look at: `attention` has the same results in less
time and memory. `attention` runs these ops for what its kernels lack: a gradient of the mask,
values of another width than the keys, and a batch that broadcasts.
Tests: tests/ops/test_attention_unfused.py.
"""

from __future__ import annotations

import math
from typing import Any

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.errors import ShapeError
from tensorgrad.core.operands import float_tensor, tensor_of
from tensorgrad.core.signature import Count, Float, Probability, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.ops.arguments import broadcast, mask_operand
from tensorgrad.ops.dropout import dropout as dropout_op
from tensorgrad.ops.elementwise import exp, where
from tensorgrad.ops.matmul import matmul
from tensorgrad.ops.reduce import max as max_op
from tensorgrad.ops.shape import broadcast_to
from tensorgrad.ops.softmax import softmax

__all__ = ["attention_unfused"]

takes = Signatures(globals())


def attention_unfused(
    q: Float[ArrayLike, "..."],
    k: Float[ArrayLike, "..."],
    v: Float[ArrayLike, "..."],
    mask: Any = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: Probability = 0.0,
    window: Count | None = None,
    fused_softmax: bool = False,
) -> Tensor:
    """Return `attention` computed op by op: scores, mask, softmax, dropout, weighted mean.

    Dropout draws other random numbers than `attention` does.

    Args:
        q, k, v, mask, causal, scale, dropout, window: as for `attention`.
        fused_softmax: whether scaling, causal mask and softmax are one kernel; otherwise
            exponential, sum and division are ops of their own too.

    Returns:
        (B, H, Tq, Dv), dtype of q.

    Raises:
        DtypeError: q, k or v does not hold floats.
        ArgumentError: dropout is not 0 <= dropout < 1.
        ArgumentError: window is not 1 or more.
        DeviceError: the operands are on different devices.
        ShapeError: q, k, v are not (B, H, T, D) of fitting sizes.
        DtypeError, DeviceError: the mask is not as for `attention`.

    Example:
        >>> from tensorgrad.ops.attention_unfused import attention_unfused
        >>> q, k, v = tg.zeros((1, 1, 2, 4)), tg.zeros((1, 1, 2, 4)), tg.ones((1, 1, 2, 4))
        >>> attention_unfused(q, k, v, causal=True)[0, 0].tolist()
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    """
    op = "attention_unfused"
    if mask is not None:
        q = tensor_of(op, "q", q, k, v, mask)  # a literal takes its dtype with the mask too
    q, k, v = takes.attention_unfused(q, k, v, causal, scale, dropout, window, fused_softmax)
    _check_shapes(op, q, k, v)
    k, v = (x.reshape(1, *x.shape) if x.ndim == 3 else x for x in (k, v))
    batch, heads, length, width = q.shape
    kv_heads, steps = k.shape[1:3]
    groups = kv_heads, heads // kv_heads
    scale = 1 / math.sqrt(width) if scale is None else scale
    grouped = q.reshape(batch, *groups, length, width)
    k, v = (x.reshape(x.shape[0], kv_heads, 1, *x.shape[2:]) for x in (k, v))
    scores = matmul(grouped, k.swapaxes(-1, -2))  # (B, Hkv, H / Hkv, Tq, Tk)
    bias = allowed = None
    if mask is not None and tensor_of(op, "mask", mask).requires_grad:
        bias = _learned_bias(op, mask, q, (batch, heads, length, steps)).reshape(scores.shape)
    elif mask is not None:
        found = mask_operand(op, mask, "q", q.data)
        allowed = broadcast(op, "mask", found, (batch, heads, length, steps)).reshape(scores.shape)
    if bias is not None:
        scores, scale = scores * scale + bias, 1.0
        allowed = bias.data > -math.inf  # so that a row of -inf gives zeros
    if fused_softmax:
        seen = None if window is None else _within(scores.data, causal, window)
        weights = softmax(scores, scale=scale, mask=_both(seen, allowed), causal=causal)
    else:
        seen = _within(scores.data, causal, window) if causal or window is not None else None
        weights = _softmax(scores * scale, _both(seen, allowed))
    weights = dropout_op(weights, dropout) if dropout else weights
    return matmul(weights, v).reshape(batch, heads, length, v.shape[-1])


def _check_shapes(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ShapeError unless k and v fit q in batch, heads and width."""
    batches = q.shape[:1], (1,), ()
    fit = q.ndim == 4 and min(k.ndim, v.ndim) >= 3
    fit = fit and k.shape[:-3] in batches and v.shape[:-3] in batches
    fit = fit and k.shape[-3:-1] == v.shape[-3:-1] and k.shape[-1] == q.shape[-1]
    if not fit or q.shape[1] % max(1, k.shape[-3]):
        raise ShapeError(
            f"{op}: q has shape {q.shape}, k {k.shape}, v {v.shape}, expected (B, H, Tq, D), "
            "(B or 1, Hkv, Tk, D) and (B or 1, Hkv, Tk, Dv)"
        )


def _learned_bias(op: str, mask: ArrayLike, q: Tensor, shape: Shape) -> Tensor:
    """Return a mask that requires a gradient, broadcast to the scores, in the dtype of q."""
    mask = float_tensor(op, "mask", mask)
    backend.same_device(op, ("q", "mask"), (q.data, mask.data))
    broadcast(op, "mask", mask.data, shape)  # names the argument where it does not fit
    return broadcast_to(mask.astype(q.dtype), shape)


def _softmax(scores: Tensor, mask: Array | None) -> Tensor:
    """Return the softmax of the last axis; zeros for a row that the mask excludes whole."""
    if mask is not None and mask.dtype == bool:
        scores = where(mask, scores, -math.inf)
    elif mask is not None:
        scores = scores + mask.astype(scores.dtype, copy=False)
    largest = max_op(scores, axis=-1, keepdims=True).detach()
    weights = exp(scores - where(largest > -math.inf, largest, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / where(total > 0, total, 1.0)


def _within(scores: Array, causal: bool, window: int | None) -> Array:
    """Return which keys each query may attend to, bool (Tq, Tk)."""
    xp = backend.namespace(scores)
    length, steps = scores.shape[-2:]
    distance = xp.arange(length)[:, None] + steps - length - xp.arange(steps)  # to earlier keys
    seen = distance >= 0 if causal else xp.ones_like(distance, dtype=bool)
    return seen if window is None else seen & (abs(distance) < window)


def _both(seen: Array | None, mask: Array | None) -> Array | None:
    """Return one mask of two."""
    if seen is None or mask is None:
        return mask if seen is None else seen
    if mask.dtype == bool:
        return mask & seen
    return backend.namespace(mask).where(seen, mask, mask.dtype.type(-math.inf))
