"""Scaled dot-product attention as one op. Tests: tests/ops/test_attention.py.

Neither pass keeps the (Tq, Tk) matrix of weights: forward keeps its result and one number a row,
the logarithm of the sum of exponentials, from which backward computes the weights again. On the
CPU the matrix exists a block of queries at a time, in the cache, and under a causal mask a block
meets only the keys it may see. Scores, weights and sums are float32 for 16-bit inputs.

On GPUs of compute capability 9.0 heads of 64 and 128 in 16 bits have kernels of their own, which
`attention_cuda.py` launches; all else is done by CuPy, with the whole matrix in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from tensorgrad import backend
from tensorgrad.amp import cast_operands
from tensorgrad.autograd import mode, record
from tensorgrad.backend import Array, Shape
from tensorgrad.dtypes import Dtype
from tensorgrad.errors import DtypeError, GradError, ShapeError
from tensorgrad.ops import attention_cuda
from tensorgrad.ops.dropout import keep_mask
from tensorgrad.ops.operand import float_tensor, probability, tensor_of, widened
from tensorgrad.tensor import Tensor

__all__ = ["attention", "attention_packed"]

_FEW = 16  # up to so many queries it does not pay to copy the keys into an order made for products
_CAUSAL_ROWS = 64  # queries a block: fewer skip more of what is masked, more multiply faster


@dataclass(frozen=True)
class _Rule:
    """Who attends to whom, and how strongly; equal in forward and backward."""

    scale: float
    causal: bool
    bias: Array | None  # (B, H, Tq, Tk), mostly of stride 0: added to the scores, -inf forbids
    adds: bool  # whether bias holds more than 0 and -inf
    keep: Array | None  # (B, H, Tq, Tk), bool: which weights dropout spares
    kept: float  # the probability of being spared


def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return for each query the mean of the values, weighted by how its key fits.

    y = softmax(scale * q k^T + mask) v

    Args:
        q: (B, H, Tq, D), any float dtype. Views with strides are read in place.
        k: (B, Hkv, Tk, D), dtype of q. H is a multiple of Hkv: query head h reads key head
            h // (H / Hkv) (grouped-query attention).
        v: (B, Hkv, Tk, D), dtype of q.
        mask: broadcastable to (B, H, Tq, Tk); bool, True where a query may attend, or float,
            added to the scores. A query that may attend to nothing (False or -inf everywhere)
            gives zeros and no gradient.
        causal: query i attends to the keys up to i + Tk - Tq: the last query sees all keys, as
            when k and v come from a cache that holds earlier steps too.
        scale: of the scores; default 1 / sqrt(D).
        dropout: probability with which a weight is set to 0; the others grow by
            1 / (1 - dropout). Applied whenever it is above 0.

    Returns:
        (B, H, Tq, D), dtype of q, in the memory order of (B, Tq, H, D).

    Raises:
        ShapeError: the shapes do not fit as above.
        DtypeError: q, k, v are not floats of one dtype, or mask is neither bool nor float.
        DeviceError: the arguments are on different devices.
        GradError: mask requires a gradient.
        ArgumentError: dropout outside [0, 1).
    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; grouped queries: Ainslie et al. 2023,
        arXiv:2305.13245; without the matrix of weights: Dao 2023, arXiv:2307.08691.
    """
    op = "attention"
    q, k, v = float_tensor(op, "q", q), float_tensor(op, "k", k), float_tensor(op, "v", v)
    if mode.autocast is not None:
        q, k, v = cast_operands(q, k, v)
    backend.same_device(op, ("q", "k", "v"), (q.data, k.data, v.data))
    if q.ndim != 4:
        raise ShapeError(f"{op}: q has shape {q.shape}, expected (B, H, Tq, D)")
    batch, heads, _, width = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[3]) != (batch, width):
        raise ShapeError(f"{op}: k has shape {k.shape}, expected ({batch}, Hkv, Tk, {width})")
    if v.shape != k.shape:
        raise ShapeError(f"{op}: v has shape {v.shape}, expected {k.shape} like k")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise DtypeError(f"{op}: {name} has dtype {tensor.dtype}, expected {q.dtype} like q")
    _check_heads(op, heads, k.shape[1])
    y, saved = _forward(op, (q.data, k.data, v.data), mask, causal, scale, dropout)
    return record(op, y, (q, k, v), _backward, (q.data, k.data, v.data, *saved))


def attention_packed(
    qkv: Any,
    heads: int,
    kv_heads: int | None = None,
    mask: Any = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the attention of a sequence to itself, from one projection of it.

    The last axis of qkv holds the queries of all heads, then their keys, then their values. They
    are read where they lie, and their gradients are written into one array of the same layout.

    Args:
        qkv: (B, T, (heads + 2 * kv_heads) * D), any float dtype.
        heads: the number of query heads, H.
        kv_heads: the number of key and value heads; default H. It divides H.
        mask, causal, scale, dropout: as in `attention`.

    Returns:
        (B, T, H * D), dtype of qkv.

    Raises:
        ShapeError, ArgumentError, DtypeError, DeviceError, GradError: as in `attention`.
    """
    op = "attention_packed"
    qkv = float_tensor(op, "qkv", qkv)
    if mode.autocast is not None:
        (qkv,) = cast_operands(qkv)
    kv_heads = heads if kv_heads is None else kv_heads
    _check_heads(op, heads, kv_heads)
    parts = heads + 2 * kv_heads
    if qkv.ndim != 3 or not qkv.shape[2] or qkv.shape[2] % parts:
        raise ShapeError(
            f"{op}: qkv has shape {qkv.shape}, expected (B, T, {parts} * D) for {heads} heads "
            f"and {kv_heads} heads of keys and values"
        )
    views = _unpack(qkv.data, heads, kv_heads)
    y, saved = _forward(op, views, mask, causal, scale, dropout)
    batch, length = qkv.shape[:2]
    y = y.swapaxes(1, 2).reshape(batch, length, heads * y.shape[3])
    return record(op, y, (qkv,), _backward_packed, (qkv.data, heads, kv_heads, *saved))


def _backward(dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]) -> tuple[Array | None, ...]:
    q, k, v, y, logsumexp, rule, _ = saved
    backward = _backward_numpy if type(dy) is np.ndarray else _backward_cuda
    dtype = _gradient_dtype((q, k, v), rule)
    dq, dk, dv = (backend.empty(a.shape, dtype, like=a) for a in (q, k, v))
    backward(dy, (q, k, v), y, logsumexp, rule, (dq, dk, dv))
    return dq, dk, dv


def _backward_packed(
    dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]
) -> tuple[Array | None, ...]:
    qkv, heads, kv_heads, y, logsumexp, rule, _ = saved
    backward = _backward_numpy if type(dy) is np.ndarray else _backward_cuda
    views = _unpack(qkv, heads, kv_heads)
    dqkv = backend.empty(qkv.shape, _gradient_dtype(views, rule), like=qkv)
    dy = dy.reshape(*dy.shape[:2], heads, y.shape[3]).swapaxes(1, 2)
    backward(dy, views, y, logsumexp, rule, _unpack(dqkv, heads, kv_heads))
    return (dqkv,)


def _gradient_dtype(arrays: tuple[Array, Array, Array], rule: _Rule) -> Dtype:
    """Return the dtype that backward writes; the walk casts where it is not that of the inputs."""
    q = arrays[0]
    own = type(q) is not np.ndarray and _has_kernels(arrays, rule)
    dtype: Dtype = q.dtype if own else widened(q[:0]).dtype
    return dtype


def _has_kernels(arrays: tuple[Array, Array, Array], rule: _Rule) -> bool:
    """Whether attention_cuda does these GPU arrays."""
    plain = rule.bias is None and rule.keep is None
    return plain and attention_cuda.supports(arrays, rule.scale)


def _check_heads(op: str, heads: int, kv_heads: int) -> None:
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ShapeError(
            f"{op}: got {heads} query heads and {kv_heads} heads of keys and values, expected a "
            "multiple"
        )


def _unpack(qkv: Array, heads: int, kv_heads: int) -> tuple[Array, Array, Array]:
    """Return views (B, heads, T, D) of the queries, keys and values."""
    batch, length, channels = qkv.shape
    parts = heads + 2 * kv_heads
    each = qkv.reshape(batch, length, parts, channels // parts).swapaxes(1, 2)
    return each[:, :heads], each[:, heads : heads + kv_heads], each[:, heads + kv_heads :]


def _forward(
    op: str,
    arrays: tuple[Array, Array, Array],
    mask: Any,
    causal: bool,
    scale: float | None,
    dropout: float,
) -> tuple[Array, tuple[Array, Array, _Rule, Array | None]]:
    """Return the result and what backward needs beside q, k and v."""
    q, k, _ = arrays
    if not q.shape[3]:
        raise ShapeError(f"{op}: q has shape {q.shape}, expected heads of width 1 or more")
    probability(op, "dropout", dropout)
    shape = (*q.shape[:3], k.shape[2])
    bias, adds = (None, False) if mask is None else _bias(op, mask, shape, q)
    rule = _Rule(
        scale=1 / math.sqrt(q.shape[3]) if scale is None else float(scale),
        causal=causal,
        bias=bias,
        adds=adds,
        keep=keep_mask(shape, dropout, like=q) if dropout else None,
        kept=1 - dropout,
    )
    forward = _forward_numpy if type(q) is np.ndarray else _forward_cuda
    y, logsumexp = forward(arrays, rule)
    return y, (y, logsumexp, rule, bias)  # bias for the check that nobody assigned to a mask


def _bias(op: str, mask: Any, shape: Shape, q: Array) -> tuple[Array, bool]:
    """Return what is added to the scores, broadcast without copying, and if it is not just 0."""
    mask = tensor_of(op, "mask", mask)
    if mask.requires_grad:
        raise GradError(f"{op}: mask requires a gradient, expected one that does not")
    backend.same_device(op, ("q", "mask"), (q, mask.data))
    dtype = widened(q[:0]).dtype
    if mask.dtype == np.bool_:
        xp = backend.namespace(q)
        bias = xp.where(mask.data, dtype.type(0), dtype.type(-np.inf))
    else:
        bias = float_tensor(op, "mask", mask).data.astype(dtype, copy=False)
    try:
        return backend.namespace(q).broadcast_to(bias, shape), mask.dtype != np.bool_
    except ValueError as error:
        raise ShapeError(
            f"{op}: mask has shape {mask.shape}, expected one that broadcasts to {shape}"
        ) from error


def _empty_result(q: Array, dtype: Any) -> Array:
    """Return room for (B, H, T, D) in the memory order of (B, T, H, D)."""
    batch, heads, length, width = q.shape
    return backend.empty((batch, length, heads, width), dtype, like=q).swapaxes(1, 2)


def _forward_numpy(arrays: tuple[Array, Array, Array], rule: _Rule) -> tuple[Array, Array]:
    q, k, v = arrays
    dtype = widened(q[:0]).dtype
    y, logsumexp = _empty_result(q, q.dtype), np.empty(q.shape[:3], dtype)
    blocks = _Blocks(q.shape, k.shape, rule.causal)
    ones = np.ones(k.shape[2], dtype)
    order: Literal["C", "K"] = "C" if q.shape[2] > _FEW else "K"

    def run(pieces: slice) -> None:
        for b, heads, groups in blocks.units[pieces]:
            keys = np.asarray(k[b, groups].swapaxes(-1, -2), dtype, order=order)
            values = np.asarray(v[b, groups], dtype, order=order)
            for rows, seen in blocks.queries:
                queries = np.multiply(q[b, heads, rows], rule.scale, dtype=dtype, order="C")
                weights = _product(queries, keys[:, :, :seen])
                small = not rule.adds and weights.max(initial=0) < 40 > -weights.min(initial=0)
                _mask(weights, rule, (b, heads, rows))
                largest = np.zeros(weights.shape[:2], dtype)
                if not small:  # exp may overflow, or come to 0 for a whole row
                    np.max(weights, -1, out=largest, initial=-np.inf)
                    largest[largest == -np.inf] = 0
                    weights -= largest[..., None]
                np.exp(weights, out=weights)
                total = np.vecdot(weights, ones[:seen])
                nothing = total == 0  # no key to attend to
                total[nothing] = 1
                largest[nothing] = np.finfo(dtype).max / 4  # so that backward finds weights of 0
                logsumexp[b, heads, rows] = np.log(total) + largest
                if rule.keep is not None:
                    weights *= rule.keep[b, heads, rows, :seen]
                mixed = _product(weights, values[:, :seen])
                np.multiply(mixed, (1 / (total * rule.kept))[..., None], out=y[b, heads, rows])

    backend.parallel_blocks(run, len(blocks.units), 1, multiplies=True)
    return y, logsumexp


def _backward_numpy(
    dy: Array,
    arrays: tuple[Array, Array, Array],
    y: Array,
    logsumexp: Array,
    rule: _Rule,
    gradients: tuple[Array, Array, Array],
) -> None:
    q, k, v = arrays
    dq, dk, dv = gradients
    dtype = logsumexp.dtype
    blocks = _Blocks(q.shape, k.shape, rule.causal)

    def run(pieces: slice) -> None:
        for b, heads, groups in blocks.units[pieces]:
            keys = np.ascontiguousarray(k[b, groups], dtype)
            keys_one = _beside(k[b, groups], 1, 1, dtype).swapaxes(-1, -2).copy()
            values_one = _beside(v[b, groups], 1, 1, dtype).swapaxes(-1, -2).copy()
            dkeys, dvalues = np.zeros_like(keys), np.zeros_like(keys)
            for rows, seen in blocks.queries:
                place = b, heads, rows
                # What is subtracted from each row rides along in the product, as one more column
                # that meets the ones: weights = exp(q k - logsumexp), dscores = weights (dy v - c).
                queries = _beside(q[place], rule.scale, -logsumexp[place], dtype)
                weights = _product(queries, keys_one[:, :, :seen])
                _mask(weights, rule, place)
                np.exp(weights, out=weights)
                constant = np.vecdot(dy[place], y[place], dtype=dtype)
                dmixed = _beside(dy[place], 1, -constant, dtype)
                if rule.keep is None:
                    dscores = _product(dmixed, values_one[:, :, :seen])
                    dvalues[:, :seen] += _product_over_rows(weights, dmixed[..., :-1], keys)
                else:
                    keep = rule.keep[(*place, slice(seen))] * dtype.type(1 / rule.kept)
                    dscores = _product(dmixed[..., :-1], values_one[:, :-1, :seen])
                    dscores *= keep
                    dscores -= constant[..., None]
                    keep *= weights
                    dvalues[:, :seen] += _product_over_rows(keep, dmixed[..., :-1], keys)
                dscores *= weights
                np.multiply(_product(dscores, keys[:, :seen]), rule.scale, out=dq[place])
                dkeys[:, :seen] += _product_over_rows(dscores, queries[..., :-1], keys)
            dk[b, groups], dv[b, groups] = dkeys, dvalues

    backend.parallel_blocks(run, len(blocks.units), 1, multiplies=True)


class _Blocks:
    """How the CPU cuts the work.

    Attributes:
        units: what one thread does at a time: a sequence, some of its query heads, and the key
            heads that these read.
        queries: blocks of queries, each with the number of keys that its last one may see.
    """

    def __init__(self, q_shape: Shape, k_shape: Shape, causal: bool) -> None:
        batch, heads, tq, _ = q_shape
        _, groups, tk, _ = k_shape
        each = heads // groups
        most = _CAUSAL_ROWS if causal else tq
        count = min(most, tq, max(16, backend.BLOCK // max(1, each * tk)))
        together = max(1, backend.BLOCK // max(1, each * tk * count))
        self.units = [
            (b, slice(first * each, last * each), slice(first, last))
            for b in range(batch)
            for first in range(0, groups, together)
            if (last := min(first + together, groups))
        ]
        self.queries = []
        for first in range(0, tq, max(1, count)):
            last = min(first + count, tq)
            seen = min(max(last + tk - tq, 0), tk) if causal else tk
            self.queries.append((slice(first, last), seen))


def _mask(scores: Array, rule: _Rule, place: tuple[int, slice, slice]) -> None:
    """Add the mask to scores (heads, rows, keys) in place; -inf where forbidden."""
    _, count, seen = scores.shape
    if rule.bias is not None:
        scores += rule.bias[(*place, slice(seen))]
    if rule.causal and count > 1:
        corner = scores[..., max(seen - count, 0) :]  # keys before are seen by all these queries
        corner += _later(count, corner.shape[-1], scores.dtype)


@lru_cache(maxsize=64)
def _later(count: int, seen: int, dtype: Dtype) -> Array:
    """Return -inf where a key comes later than its query; the last query sees all keys."""
    return np.triu(np.full((count, seen), -np.inf, dtype), seen - count + 1)


def _beside(array: Array, scale: float, column: Any, dtype: Dtype) -> Array:
    """Return the scaled array (heads, rows, D) with one more column, in C order."""
    joined = np.empty((*array.shape[:2], array.shape[2] + 1), dtype)
    np.multiply(array, scale, out=joined[..., :-1])
    joined[..., -1] = column
    return joined


def _stacked(array: Array, groups: int) -> Array:
    """Return (heads, rows, n) as (groups, heads / groups * rows, n): what one key head meets."""
    heads, rows, width = array.shape
    return array.reshape(groups, heads // groups * rows, width)


def _product(array: Array, grouped: Array) -> Array:
    """Return (heads, rows, n) times (groups, n, m) as (heads, rows, m)."""
    product = _stacked(array, len(grouped)) @ grouped
    return product.reshape(*array.shape[:2], grouped.shape[2])


def _product_over_rows(array: Array, other: Array, grouped: Array) -> Array:
    """Return the transpose of (heads, rows, n) times (heads, rows, m) as (groups, n, m)."""
    groups = len(grouped)
    return _stacked(array, groups).swapaxes(-1, -2) @ _stacked(other, groups)


def _forward_cuda(arrays: tuple[Array, Array, Array], rule: _Rule) -> tuple[Array, Array]:
    cupy = backend.cupy
    q, _, v = arrays
    y = _empty_result(q, q.dtype)
    if not y.size or not v.size:
        y[...] = 0
        return y, cupy.zeros(q.shape[:3], widened(q[:0]).dtype)
    if _has_kernels(arrays, rule):
        return y, attention_cuda.forward(arrays, y, rule.scale, rule.causal)
    scores = _scores_cuda(arrays, rule)
    largest = scores.max(-1, keepdims=True)
    largest = cupy.where(largest == -cupy.inf, scores.dtype.type(0), largest)
    weights = cupy.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    nothing = total == 0
    weights /= cupy.where(nothing, scores.dtype.type(1), total)
    never = scores.dtype.type(np.finfo(scores.dtype).max / 4)  # backward finds weights of 0
    logsumexp = cupy.where(nothing, never, cupy.log(total) + largest)
    if rule.keep is not None:
        weights *= rule.keep.reshape(weights.shape) * weights.dtype.type(1 / rule.kept)
    y[...] = cupy.matmul(weights, widened(v)[:, :, None]).reshape(q.shape)
    return y, logsumexp.reshape(q.shape[:3])


def _scores_cuda(arrays: tuple[Array, Array, Array], rule: _Rule) -> Array:
    """Return all scores, (B, Hkv, H / Hkv, Tq, Tk)."""
    cupy = backend.cupy
    q, k, _ = arrays
    batch, heads, tq, width = q.shape
    kv_heads, tk = k.shape[1:3]
    queries = (widened(q) * widened(q[:0]).dtype.type(rule.scale)).reshape(
        batch, kv_heads, heads // kv_heads, tq, width
    )
    scores = cupy.matmul(queries, widened(k)[:, :, None].swapaxes(-1, -2))
    if rule.bias is not None:
        scores += rule.bias.reshape(scores.shape)
    if rule.causal:
        later = cupy.arange(tk) > cupy.arange(tq)[:, None] + (tk - tq)
        scores = cupy.where(later, scores.dtype.type(-np.inf), scores)
    return scores


def _backward_cuda(
    dy: Array,
    arrays: tuple[Array, Array, Array],
    y: Array,
    logsumexp: Array,
    rule: _Rule,
    gradients: tuple[Array, Array, Array],
) -> None:
    cupy = backend.cupy
    q, k, v = arrays
    dq, dk, dv = gradients
    if not q.size or not k.size:
        for gradient in gradients:
            gradient[...] = 0
        return
    if _has_kernels(arrays, rule):
        attention_cuda.backward(dy, arrays, y, logsumexp, gradients, rule.scale, rule.causal)
        return
    batch, heads, tq, width = q.shape
    kv_heads = k.shape[1]
    grouped = (batch, kv_heads, heads // kv_heads, tq, width)
    dy, y = widened(dy).reshape(grouped), widened(y).reshape(grouped)
    weights = cupy.exp(_scores_cuda(arrays, rule) - logsumexp.reshape(grouped[:4])[..., None])
    dweights = cupy.matmul(dy, widened(v)[:, :, None].swapaxes(-1, -2))
    kept = weights
    if rule.keep is not None:
        keep = rule.keep.reshape(weights.shape) * weights.dtype.type(1 / rule.kept)
        kept = weights * keep
        dweights *= keep
    dv[...] = cupy.matmul(kept.swapaxes(-1, -2), dy).sum(2)
    dscores = weights * (dweights - (dy * y).sum(-1, keepdims=True))
    dq[...] = cupy.matmul(dscores, widened(k)[:, :, None]).reshape(q.shape) * rule.scale
    dk[...] = cupy.matmul(dscores.swapaxes(-1, -2), widened(q).reshape(grouped)).sum(2) * rule.scale
