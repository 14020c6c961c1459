"""The tangent of attention, an op of its own, and its gradients.

With S = s Q K^T + mask, P = softmax(S), O = P V and tS = s (tQ K^T + Q tK^T), r = rowsum(P tS):

    tO = (P (tS - r)) V + P tV

Its backward, for G the gradient of tO: u = G V^T, w = G tV^T, ub = rowsum(G O), c = rowsum(G tO),

    E = P (u - ub)      dtQ = s E K      dtK = s E^T Q      dtV = P^T G
    D = P ((tS - r)(u - ub) + w - c)
    dQ = s (D K + E tK)      dK = s (D^T Q + E^T tQ)      dV = (P (tS - r))^T G

Neither keeps a (Tq, Tk) matrix: P follows from the logsumexp of forward. Dropout scales P in front
of V and tV, and so u and w. Where there are no kernels, as on the CPU, and for its own tangent, the
tangent follows from the definition of attention in recorded ops, which is the reference too. Tests:
tests/ops/test_attention_derivatives.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from tensorgrad.autograd.tangents import Op, Tangents, along, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import compute_dtype
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.attention import tangent as cuda
from tensorgrad.kernels.attention.options import (
    ALL,
    AttentionOptions,
    ForwardPass,
    Sequences,
    TangentPass,
    empty_result,
)
from tensorgrad.ops.matmul import matmul
from tensorgrad.ops.philox import fill_keep
from tensorgrad.ops.shape import astype, reshape
from tensorgrad.ops.softmax import softmax

_NAME = "tangent of attention"


def attention_tangent(inputs: Tangents, done: ForwardPass) -> Tensor:
    """Return the tangent of attention.

    Args:
        inputs: q, k, v and their tangents, (B, H, T, D); a tangent is None where it is constant.
        done: the arrays of the first three, and results of attention. Rotation comes before.

    Returns:
        (B, H, Tq, D).
    """
    if _runs_unfused(done):
        return attention_tangent_unfused(inputs, done.options)
    zeros = backend.namespace(done.q).zeros_like
    tangents = [
        Tensor(zeros(a)) if x is None else x for a, x in zip(done[:3], inputs[3:], strict=True)
    ]
    moved = _pass_of(done, [t.data for t in tangents])
    saved = (*moved, moved.options.bias)
    return record(_NAME, moved.ty, (*inputs[:3], *tangents), _backward, saved)


def attention_tangent_packed(
    qkv: Tensor, t: Tensor, unpack: Callable[[Any], Any], done: ForwardPass
) -> Tensor:
    """Return the tangent of attention where q, k and v are parts of one array.

    Args:
        qkv, t: (B, T, channels), what they are parts of, and its tangent.
        unpack: returns q, k and v, views (B, H, T, D), of such an array or tensor.
        done: as for `attention_tangent`.

    Returns:
        (B, T, H * D).
    """
    shape = (*qkv.shape[:2], done.q.shape[1] * done.q.shape[3])
    if _runs_unfused(done):
        y = attention_tangent_unfused([*unpack(qkv), *unpack(t)], done.options)
        return reshape(y.swapaxes(1, 2), shape)
    moved = _pass_of(done, unpack(t.data))
    saved = (*moved, moved.options.bias, t.data, unpack)
    y = moved.ty.swapaxes(1, 2).reshape(shape)
    return record(_NAME, y, (qkv, t), _backward_packed, saved)


def _runs_unfused(done: ForwardPass) -> bool:
    """Whether there is no kernel, and the definition runs."""
    if type(done.q) is np.ndarray or not (done.y.size and done.k.size):
        return True
    return not cuda.supports(done[:3], done.options)


def _pass_of(done: ForwardPass, tangents: Sequence[Array]) -> TangentPass:
    """Return the tangent, and what its backward needs."""
    tq, tk, tv = tangents
    results = cuda.forward(done[:3], done.y, done.logsumexp, (tq, tk, tv), done.options)
    return TangentPass(*done[:5], tq, tk, tv, *results, done.options)


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    done = TangentPass(*saved[:-1])
    gradients = [
        empty_result(a, a.dtype) if need else None
        for a, need in zip((*done[:3], *done[:3]), needs, strict=True)
    ]
    cuda.backward(dy, done, gradients)
    return gradients


def _backward_packed(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    *arrays, _, t, unpack = saved
    done = TangentPass(*arrays)
    batch, heads, length, width = done.q.shape
    gradients = [backend.empty(t.shape, done.q.dtype, like=t) if need else None for need in needs]
    parts = [(None,) * 3 if gradient is None else unpack(gradient) for gradient in gradients]
    dy = dy.reshape(batch, length, heads, width).swapaxes(1, 2)
    cuda.backward(dy, done, [part for three in parts for part in three])
    return gradients


@tangent_of(_backward)
def _second_tangent(op: Op, *changes: Tensor | None) -> Tensor | None:
    done = TangentPass(*op.saved[:-1])
    arrays = done.q, done.k, done.v, done.tq, done.tk, done.tv
    inputs = [op.input(i, array) for i, array in enumerate(arrays)]
    return along(lambda *xs: attention_tangent_unfused(xs, done.options), inputs, changes)[0]


@tangent_of(_backward_packed)
def _second_tangent_packed(op: Op, *changes: Tensor | None) -> Tensor | None:
    *arrays, options, _, t, unpack = op.saved

    def f(qkv: Tensor, t: Tensor) -> Tensor:
        y = attention_tangent_unfused([*unpack(qkv), *unpack(t)], options)
        return reshape(y.swapaxes(1, 2), op.node.shape)

    inputs = op.input(0, _packed(arrays[:3], unpack, t)), op.input(1, t)
    return along(f, inputs, changes)[0]


def _packed(arrays: Sequence[Array], unpack: Callable[[Any], Any], like: Array) -> Array:
    """Return the array of which q, k and v are parts."""
    whole = backend.empty(like.shape, arrays[0].dtype, like=like)
    for part, array in zip(unpack(whole), arrays, strict=True):
        part[...] = array
    return whole


def attention_tangent_unfused(inputs: Tangents, options: AttentionOptions) -> Tensor:
    """Return `attention_tangent` op by op; it keeps (Tq, Tk) matrices.

    Args:
        inputs: as for `attention_tangent`.
        options: of the attention, without rotation.
    """
    return cast(Tensor, along(partial(_defined, options=options), inputs[:3], inputs[3:])[0])


def _defined(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Return attention in recorded ops, (B, H, Tq, D), in float32 or 64."""
    (batch, heads, length, _), (groups, steps) = q.shape, k.shape[1:3]
    mask, keep = _mask(options, q.data, steps), _keep(options, q.data, steps)
    matrix, dtype = (batch, groups, heads // groups, length, steps), compute_dtype(q.dtype)
    if mask is not None:
        xp = backend.namespace(q.data)
        mask = xp.broadcast_to(mask, (batch, heads, length, steps)).reshape(matrix)
    queries, keys, values = (
        reshape(astype(x, dtype, copy=False), (batch, groups, n // groups, *x.shape[2:]))
        for x, n in ((q, heads), (k, groups), (v, groups))
    )
    scores = matmul(queries, keys.swapaxes(-1, -2))
    weights = softmax(scores, scale=options.scale, mask=mask)
    if keep is not None:
        weights = weights * Tensor(keep.reshape(matrix).astype(dtype) / (1 - options.dropout))
    return reshape(matmul(weights, values), q.shape)


def _mask(options: AttentionOptions, q: Array, steps: int) -> Array | None:
    """Return which keys each query attends to, or a bias of the scores; None: to all keys."""
    xp, length = backend.namespace(q), q.shape[2]
    if options.sequences is None:
        distance = xp.arange(length)[:, None] + (steps - length) - xp.arange(steps)
        seen = None
    else:
        rows, keys = _places(options.sequences, length, steps, q)
        lengths, k_lengths = map(xp.diff, (options.sequences.q_starts, options.sequences.k_starts))
        shift = (k_lengths - lengths)[rows[0]]
        distance = (rows[1] + shift)[:, None] - keys[1]
        seen = rows[0][:, None] == keys[0]
    for limit, away in ((options.before, distance), (options.after, -distance)):
        if limit < ALL:
            seen = away <= limit if seen is None else seen & (away <= limit)
    if seen is None or options.bias is None:
        return options.bias if seen is None else seen
    return xp.where(seen, options.bias, options.bias.dtype.type(-np.inf))


def _keep(options: AttentionOptions, q: Array, steps: int) -> Array | None:
    """Return the keep mask of dropout, (B, H, Tq, Tk)."""
    if options.key is None:
        return None
    keep, sequences = options.keep, options.sequences
    batch, heads, length, _ = q.shape
    if keep is None:
        shape = (batch, heads, length, steps)
        if sequences is not None:
            shape = (len(sequences.q_starts) - 1, heads, *sequences.longest)
        keep = backend.empty(shape, np.dtype(np.bool_), like=q)
        fill_keep(keep, options.key, 1 - options.dropout)
    if sequences is None:
        return keep
    (number, row), (_, key) = _places(sequences, length, steps, q)
    key = backend.namespace(q).minimum(key, keep.shape[3] - 1)
    chosen: Array = keep[number[:, None], :, row[:, None], key]  # (Tq, Tk, H)
    return chosen.transpose(2, 0, 1)[None]


def _places(sequences: Sequences, length: int, steps: int, q: Array) -> list[tuple[Array, Array]]:
    """Return of each query, and of each key, its sequence and its place there."""
    xp = backend.namespace(q)
    found = []
    for starts, count in zip(
        (sequences.q_starts, sequences.k_starts), (length, steps), strict=True
    ):
        rows = xp.arange(count)
        number = xp.searchsorted(starts, rows, side="right") - 1
        found.append((number, rows - starts[number]))
    return found
