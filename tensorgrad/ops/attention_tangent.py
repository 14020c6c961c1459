"""The tangent of attention, an op of its own, and its gradients.

With S = s Q K^T + mask, P = softmax(S), O = P V and tS = s (tQ K^T + Q tK^T), r = rowsum(P tS):

    tO = (P (tS - r)) V + P tV

Its backward, for G the gradient of tO: u = G V^T, w = G tV^T, ub = rowsum(G O), c = rowsum(G tO),

    E = P (u - ub)      dtQ = s E K      dtK = s E^T Q      dtV = P^T G
    D = P ((tS - r)(u - ub) + w - c)
    dQ = s (D K + E tK)      dK = s (D^T Q + E^T tQ)      dV = (P (tS - r))^T G

Neither keeps a (Tq, Tk) matrix: P follows from the logsumexp of forward. Dropout scales P in front
of V and tV, and so u and w. `attention_numpy.py` is the reference. Where there are no kernels, and
for its own tangent, the definition in recorded ops runs. Tests:
tests/ops/test_attention_derivatives.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from tensorgrad.autograd.tangents import Op, Tangents, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import Dtype, compute_dtype
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.operands import data_of
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.attention import tangent as cuda
from tensorgrad.kernels.attention.options import (
    ALL,
    Arrays,
    AttentionOptions,
    ForwardPass,
    Sequences,
    TangentPass,
    empty_result,
)
from tensorgrad.ops import attention_numpy
from tensorgrad.ops.elementwise.fuse import fuse
from tensorgrad.ops.matmul import matmul
from tensorgrad.ops.philox import fill_attention_keep
from tensorgrad.ops.shape import astype, reshape
from tensorgrad.ops.softmax import row_products, softmax

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
    tangents = [data_of(x) for x in inputs[3:]]
    ty, means = _value(done, tangents)
    saved = (*done, done.options.bias, *tangents, ty, means)
    return record(_NAME, ty, inputs, _backward, saved)


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
    ty, means = _value(done, unpack(t.data))
    saved = (*done, done.options.bias, t.data, ty, means, unpack)
    return record(_NAME, ty.swapaxes(1, 2).reshape(shape), (qkv, t), _backward_packed, saved)


def _runs_unfused(done: ForwardPass) -> bool:
    """Whether there is no kernel, and the definition runs."""
    if type(done.q) is np.ndarray or not (done.y.size and done.k.size):
        return False
    return not cuda.supports(done[:3], done.options)


def _value(done: ForwardPass, tangents: Sequence[Array | None]) -> tuple[Array, Array | None]:
    """Return the tangent, and on a GPU the means of the tangents of scores."""
    if not (done.y.size and done.k.size):
        ty = empty_result(done.q, done.q.dtype)
        ty[...] = 0
        return ty, None
    if type(done.q) is np.ndarray:
        return attention_numpy.tangent(done, tangents), None
    return cuda.forward(
        done[:3], done.y, done.logsumexp, _without_none(tangents, done), done.options
    )


def _without_none(tangents: Sequence[Array | None], done: ForwardPass) -> Arrays:
    """Return the tangents, zeros for None."""
    zeros = backend.namespace(done.q).zeros_like
    tq, tk, tv = (zeros(x) if t is None else t for t, x in zip(tangents, done[:3], strict=True))
    return tq, tk, tv


def _write_gradients(
    dy: Array,
    done: ForwardPass,
    tangents: Sequence[Array | None],
    ty: Array,
    means: Array | None,
    gradients: Sequence[Array | None],
) -> None:
    """Write the gradients of q, k, v and their tangents; None: it is not wanted."""
    if not (done.y.size and done.k.size):
        for gradient in gradients:
            if gradient is not None:
                gradient[...] = 0
    elif means is None:
        attention_numpy.tangent_backward(dy, done, tangents, ty, gradients)
    else:
        of_tangent = TangentPass(*done[:5], *_without_none(tangents, done), ty, means, done.options)
        cuda.backward(dy, of_tangent, gradients)


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    done, tangents, (ty, means) = ForwardPass(*saved[:6]), saved[7:10], saved[10:]
    like = [*done[:3], *done[:3]]
    gradients = [
        empty_result(a, gradient_dtype(a)) if need else None
        for a, need in zip(like, needs, strict=True)
    ]
    _write_gradients(dy, done, tangents, ty, means, gradients)
    return gradients


def _backward_packed(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    done, (_, t, ty, means, unpack) = ForwardPass(*saved[:6]), saved[6:]
    batch, heads, length, width = done.q.shape
    dtype = gradient_dtype(done.q)
    gradients = [backend.empty(t.shape, dtype, like=t) if need else None for need in needs]
    parts = [(None,) * 3 if gradient is None else unpack(gradient) for gradient in gradients]
    dy = dy.reshape(batch, length, heads, width).swapaxes(1, 2)
    each = [part for three in parts for part in three]
    _write_gradients(dy, done, unpack(t), ty, means, each)
    return gradients


def gradient_dtype(q: Array) -> Dtype:
    """Return the dtype that backward writes; the walk casts where it is not that of the inputs."""
    return compute_dtype(q.dtype) if type(q) is np.ndarray else q.dtype


@tangent_of(_backward)
def _second_tangent(op: Op, *changes: Tensor | None) -> Tensor | None:
    arrays = (*op.saved[:3], *op.saved[7:10])
    inputs = [None if array is None else op.input(i, array) for i, array in enumerate(arrays)]
    return _second_unfused(inputs, changes, op.saved[5])


@tangent_of(_backward_packed)
def _second_tangent_packed(op: Op, uqkv: Tensor | None, ut: Tensor | None) -> Tensor:
    options, (_, t, _, _, unpack) = op.saved[5], op.saved[6:]
    whole = (op.input(0, _packed(op.saved[:3], unpack, t)), op.input(1, t), uqkv, ut)
    parts: list[Any] = [part for x in whole for part in ([None] * 3 if x is None else unpack(x))]
    y = cast(Tensor, _second_unfused(parts[:6], parts[6:], options))
    return reshape(y.swapaxes(1, 2), op.node.shape)


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
    work = _Unfused(inputs, options)
    q, k, v, tq, tk, tv = work.grouped(inputs)
    weights, t = work.weights(q, k), _sum_of(((tq, k), (q, tk)), True)
    change = None if t is None else work.changed(weights, t)
    return cast(Tensor, work.result(((change, v), (weights, tv))))


def _second_unfused(
    inputs: Tangents, changes: Tangents, options: AttentionOptions
) -> Tensor | None:
    """Return the tangent of `attention_tangent_unfused` for changes u of its inputs, op by op.

    With M = P (tS - r): change(M) V + M uV + change(P) tV + P utV, and
    change(M) = change(P) (tS - r) + P (utS - rowsum(P utS)) - P rowsum(change(P) tS).
    """
    work = _Unfused(inputs, options)
    q, k, v, tq, tk, tv = work.grouped(inputs)
    uq, uk, uv, utq, utk, utv = work.grouped(changes)
    weights, t = work.weights(q, k), _sum_of(((tq, k), (q, tk)), True)
    u = _sum_of(((uq, k), (q, uk)), True)
    ut = _sum_of(((utq, k), (tq, uk), (uq, tk), (q, utk)), True)
    by_t = None if t is None else work.changed(weights, t)
    by_u = None if u is None else work.changed(weights, u)
    by_both = None if ut is None else work.changed(weights, ut)
    if t is not None and by_u is not None:
        curved = by_u * (t - row_products(weights, t)) - weights * row_products(by_u, t)
        curved = curved * options.scale
        by_both = curved if by_both is None else by_both + curved
    return work.result(((by_both, v), (by_t, uv), (by_u, tv), (weights, utv)))


class _Unfused:
    """The steps of attention in recorded ops, on tensors (B, Hkv, H / Hkv, T, D)."""

    def __init__(self, inputs: Tangents, options: AttentionOptions) -> None:
        q, k, _ = (cast(Tensor, x) for x in inputs[:3])
        (batch, heads, length, _), (groups, steps) = q.shape, k.shape[1:3]
        self._shape, self._groups, self._scale = q.shape, groups, options.scale
        self._mask, keep = _mask(options, q.data, steps), _keep(options, q.data, steps)
        matrix = (batch, groups, heads // groups, length, steps)
        if self._mask is not None:
            xp = backend.namespace(q.data)
            self._mask = xp.broadcast_to(self._mask, (batch, heads, length, steps)).reshape(matrix)
        self._factor: Tensor | None = None
        if keep is not None:
            scale = 1 / (1 - options.dropout)
            self._factor = Tensor(keep.reshape(matrix).astype(compute_dtype(q.dtype)) * scale)

    def grouped(self, inputs: Tangents) -> list[Tensor | None]:
        """Return q, k, v and their tangents, (B, Hkv, H / Hkv or 1, T, D), in float32 or 64."""
        found: list[Tensor | None] = []
        for x in inputs:
            if x is not None:
                batch, heads, *rest = x.shape
                wide = astype(x, compute_dtype(x.dtype), copy=False)
                x = reshape(wide, (batch, self._groups, heads // self._groups, *rest))
            found.append(x)
        return found

    def weights(self, q: Tensor | None, k: Tensor | None) -> Tensor:
        """Return the weights before dropout."""
        scores = cast(Tensor, _sum_of(((q, k),), True))
        return softmax(scores, scale=self._scale, mask=self._mask)

    def changed(self, weights: Tensor, t: Tensor) -> Tensor:
        """Return the tangent of the weights from that of q k^T."""
        return _weight_tangent(weights, t, row_products(weights, t), self._scale)

    def result(self, terms: Sequence[tuple[Tensor | None, Tensor | None]]) -> Tensor | None:
        """Return the sum of products of weights, after dropout, and values; (B, H, T, D)."""
        if self._factor is not None:
            factor = self._factor
            terms = [(None if a is None else a * factor, b) for a, b in terms]
        total = _sum_of(terms, False)
        return None if total is None else reshape(total, self._shape)


def _sum_of(
    pairs: Sequence[tuple[Tensor | None, Tensor | None]], transposed: bool
) -> Tensor | None:
    """Return the sum of the products of pairs that are both there, b transposed if said so."""
    terms = [
        matmul(a, b.swapaxes(-1, -2) if transposed else b)
        for a, b in pairs
        if a is not None and b is not None
    ]
    return sum(terms[1:], terms[0]) if terms else None


@fuse
def _weight_tangent(weights: Tensor, t: Tensor, average: Tensor, scale: float) -> Tensor:
    return weights * (t - average) * scale


def _mask(options: AttentionOptions, q: Array, steps: int) -> Array | None:
    """Return which keys each query attends to, or a bias of the scores; None: to all keys."""
    xp, length = backend.namespace(q), q.shape[2]
    if options.sequences is None:
        distance = xp.arange(length)[:, None] + (steps - length) - xp.arange(steps)
        seen = None
    else:
        rows, keys = _places(options.sequences, length, steps, q)
        lengths, k_lengths = (xp.diff(starts) for starts in _starts(options.sequences))
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
        fill_attention_keep(keep, options.key, 1 - options.dropout)
    if sequences is None:
        return keep
    (number, row), (_, key) = _places(sequences, length, steps, q)
    key = backend.namespace(q).minimum(key, keep.shape[3] - 1)
    chosen: Array = keep[number[:, None], :, row[:, None], key]  # (Tq, Tk, H)
    return chosen.transpose(2, 0, 1)[None]


def _starts(sequences: Sequences) -> tuple[Array, Array]:
    return sequences.q_starts, sequences.k_starts


def _places(sequences: Sequences, length: int, steps: int, q: Array) -> list[tuple[Array, Array]]:
    """Return of each query, and of each key, its sequence and its place there."""
    xp = backend.namespace(q)
    found = []
    for starts, count in zip(_starts(sequences), (length, steps), strict=True):
        rows = xp.arange(count)
        number = xp.searchsorted(starts, rows, side="right") - 1
        found.append((number, rows - starts[number]))
    return found
