"""Attention by CuPy, with the whole matrix of scores in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import bool_
from tensorgrad.ops.attention_rule import Arrays, Rule, empty_result
from tensorgrad.ops.operand import widened
from tensorgrad.philox import fill_keep


def forward(arrays: Arrays, rule: Rule) -> tuple[Array, Array]:
    """Return the result and the logarithm of each row's sum of exponentials."""
    q, _, _ = arrays
    y = empty_result(q, q.dtype)
    logsumexp = backend.empty(q.shape[:3], widened(q[:0]).dtype, like=q)
    for rows, keys, own in _sequences(arrays, rule):
        part = q[:, :, rows], arrays[1][:, :, keys], arrays[2][:, :, keys]
        y[:, :, rows], logsumexp[:, :, rows] = _forward(part, own)
    return y, logsumexp


def backward(
    dy: Array, arrays: Arrays, y: Array, logsumexp: Array, rule: Rule, gradients: Arrays
) -> None:
    """Write the gradients of q, k and v."""
    q, k, v = arrays
    dq, dk, dv = gradients
    for rows, keys, own in _sequences(arrays, rule):
        _backward(
            dy[:, :, rows], (q[:, :, rows], k[:, :, keys], v[:, :, keys]), y[:, :, rows],
            logsumexp[:, :, rows], own, (dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]),
        )  # fmt: skip


def _sequences(arrays: Arrays, rule: Rule) -> list[tuple[slice, slice, Rule]]:
    q, k, _ = arrays
    shape = (*q.shape[:3], k.shape[2])
    if rule.sequences is not None:
        shape = (len(rule.sequences.q_starts) - 1, q.shape[1], *rule.sequences.longest)
    keep = None
    if rule.key is not None:
        keep = backend.empty(shape, bool_, like=q)
        fill_keep(keep, rule.key, 1 - rule.dropout)
    if rule.sequences is None:
        return [(slice(None), slice(None), replace(rule, keep=keep))]
    q_starts, k_starts = rule.sequences.q_starts.tolist(), rule.sequences.k_starts.tolist()
    found = []
    for s in range(shape[0]):
        rows, keys = slice(*q_starts[s : s + 2]), slice(*k_starts[s : s + 2])
        own = None
        if keep is not None:
            own = keep[s : s + 1, :, : rows.stop - rows.start, : keys.stop - keys.start]
        if rows.stop > rows.start:
            found.append((rows, keys, replace(rule, keep=own, sequences=None)))
    return found


def _forward(arrays: Arrays, rule: Rule) -> tuple[Array, Array]:
    cupy = backend.cupy
    q, _, v = arrays
    scores = _scores(arrays, rule)
    largest = scores.max(-1, keepdims=True, initial=-np.inf)
    largest = cupy.where(largest == -cupy.inf, scores.dtype.type(0), largest)
    weights = cupy.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    nothing = total == 0
    weights /= cupy.where(nothing, scores.dtype.type(1), total)
    never = scores.dtype.type(np.finfo(scores.dtype).max / 4)  # backward finds weights of 0
    logsumexp = cupy.where(nothing, never, cupy.log(total) + largest)
    if rule.keep is not None:
        weights *= rule.keep.reshape(weights.shape) * weights.dtype.type(1 / (1 - rule.dropout))
    y = cupy.matmul(weights, widened(v)[:, :, None]).reshape(q.shape)
    return y, logsumexp.reshape(q.shape[:3])


def _scores(arrays: Arrays, rule: Rule) -> Array:
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
    distance = cupy.arange(tk) - cupy.arange(tq)[:, None] - (tk - tq)
    seen = (distance >= -rule.before) & (distance <= rule.after)
    scores = cupy.where(seen, scores, scores.dtype.type(-np.inf))
    return scores


def _backward(
    dy: Array, arrays: Arrays, y: Array, logsumexp: Array, rule: Rule, gradients: Arrays
) -> None:
    cupy = backend.cupy
    q, k, v = arrays
    dq, dk, dv = gradients
    batch, heads, tq, width = q.shape
    kv_heads = k.shape[1]
    grouped = (batch, kv_heads, heads // kv_heads, tq, width)
    dy, y = widened(dy).reshape(grouped), widened(y).reshape(grouped)
    weights = cupy.exp(_scores(arrays, rule) - logsumexp.reshape(grouped[:4])[..., None])
    dweights = cupy.matmul(dy, widened(v)[:, :, None].swapaxes(-1, -2))
    kept = weights
    if rule.keep is not None:
        keep = rule.keep.reshape(weights.shape) * weights.dtype.type(1 / (1 - rule.dropout))
        kept = weights * keep
        dweights *= keep
    dv[...] = cupy.matmul(kept.swapaxes(-1, -2), dy).sum(2)
    dscores = weights * (dweights - (dy * y).sum(-1, keepdims=True))
    dq[...] = cupy.matmul(dscores, widened(k)[:, :, None]).reshape(q.shape) * rule.scale
    dk[...] = cupy.matmul(dscores.swapaxes(-1, -2), widened(q).reshape(grouped)).sum(2) * rule.scale
