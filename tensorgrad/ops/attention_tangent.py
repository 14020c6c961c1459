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
from typing import Any

import numpy as np

from tensorgrad.autograd.functions import jvp
from tensorgrad.autograd.tangents import Op, Tangents, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import Dtype, compute_dtype
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.operands import data_of
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.attention.options import (
    ALL,
    AttentionOptions,
    ForwardPass,
    Sequences,
    empty_result,
)
from tensorgrad.ops import attention_numpy
from tensorgrad.ops.elementwise.fuse import fuse
from tensorgrad.ops.matmul import matmul
from tensorgrad.ops.philox import fill_keep
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
    if implementation(done) is None:
        return attention_tangent_unfused(inputs, done.options)
    tangents = [data_of(x) for x in inputs[3:]]
    ty = _value(done, tangents)
    return record(_NAME, ty, inputs, _backward, (*done, done.options.bias, *tangents, ty))


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
    if implementation(done) is None:
        y = attention_tangent_unfused([*unpack(qkv), *unpack(t)], done.options)
        return reshape(y.swapaxes(1, 2), shape)
    ty = _value(done, unpack(t.data))
    saved = (*done, done.options.bias, t.data, ty, unpack)
    return record(_NAME, ty.swapaxes(1, 2).reshape(shape), (qkv, t), _backward_packed, saved)


def implementation(done: ForwardPass) -> Any:
    """Return the module with `tangent` and `tangent_backward`; None where the definition runs."""
    return attention_numpy if type(done.q) is np.ndarray else None


def _value(done: ForwardPass, tangents: Sequence[Array | None]) -> Array:
    if done.y.size and done.k.size:
        ty: Array = implementation(done).tangent(done, tangents)
    else:
        ty = empty_result(done.q, done.q.dtype)
        ty[...] = 0
    return ty


def _write_gradients(
    dy: Array,
    done: ForwardPass,
    tangents: Sequence[Array | None],
    ty: Array,
    gradients: Sequence[Array | None],
) -> None:
    if done.y.size and done.k.size:
        implementation(done).tangent_backward(dy, done, tangents, ty, gradients)
        return
    for gradient in gradients:
        if gradient is not None:
            gradient[...] = 0


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    done, _, tangents, ty = ForwardPass(*saved[:6]), saved[6], saved[7:10], saved[10]
    like = [*done[:3], *done[:3]]
    gradients = [
        empty_result(a, gradient_dtype(a)) if need else None
        for a, need in zip(like, needs, strict=True)
    ]
    _write_gradients(dy, done, tangents, ty, gradients)
    return gradients


def _backward_packed(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    done, (_, t, ty, unpack) = ForwardPass(*saved[:6]), saved[6:]
    batch, heads, length, width = done.q.shape
    dtype = gradient_dtype(done.q)
    gradients = [backend.empty(t.shape, dtype, like=t) if need else None for need in needs]
    parts = [(None,) * 3 if gradient is None else unpack(gradient) for gradient in gradients]
    dy = dy.reshape(batch, length, heads, width).swapaxes(1, 2)
    _write_gradients(dy, done, unpack(t), ty, [part for three in parts for part in three])
    return gradients


def gradient_dtype(q: Array) -> Dtype:
    """Return the dtype that backward writes; the walk casts where it is not that of the inputs."""
    return compute_dtype(q.dtype) if type(q) is np.ndarray else q.dtype


@tangent_of(_backward)
def _second_tangent(op: Op, *tangents: Tensor | None) -> Tensor:
    arrays, options = (*op.saved[:3], *op.saved[7:10]), op.saved[5]
    inputs = [None if array is None else op.input(i, array) for i, array in enumerate(arrays)]
    return _along(lambda *xs: attention_tangent_unfused(xs, options), inputs, tangents)


@tangent_of(_backward_packed)
def _second_tangent_packed(op: Op, *tangents: Tensor | None) -> Tensor:
    options, (_, t, _, unpack) = op.saved[5], op.saved[6:]
    qkv = op.input(0, _packed(op.saved[:3], unpack, t))

    def run(qkv: Tensor, t: Tensor) -> Tensor:
        y = attention_tangent_unfused([*unpack(qkv), *unpack(t)], options)
        return reshape(y.swapaxes(1, 2), op.node.shape)

    return _along(run, [qkv, op.input(1, t)], tangents)


def _packed(arrays: Sequence[Array], unpack: Callable[[Any], Any], like: Array) -> Array:
    """Return the array of which q, k and v are parts."""
    whole = backend.empty(like.shape, arrays[0].dtype, like=like)
    for part, array in zip(unpack(whole), arrays, strict=True):
        part[...] = array
    return whole


def _along(
    f: Callable[..., Tensor], inputs: Sequence[Tensor | None], tangents: Sequence[Tensor | None]
) -> Tensor:
    """Return the derivative of f along the tangents that are given."""
    given = [place for place, t in enumerate(tangents) if t is not None]

    def run(*moved: Tensor) -> Tensor:
        operands = list(inputs)
        for place, tensor in zip(given, moved, strict=True):
            operands[place] = tensor
        return f(*operands)

    t: Tensor = jvp(run, [inputs[i] for i in given], [tangents[i] for i in given])[1]
    return t


def attention_tangent_unfused(inputs: Tangents, options: AttentionOptions) -> Tensor:
    """Return `attention_tangent` op by op; it keeps (Tq, Tk) matrices.

    Args:
        inputs: as for `attention_tangent`.
        options: of the attention, without rotation.
    """
    first = inputs[0]
    assert first is not None
    dtype, (batch, heads, length, width) = compute_dtype(first.dtype), first.shape
    assert inputs[1] is not None
    groups, steps = inputs[1].shape[1:3]
    if not first.size or not steps:
        return first * 0
    shapes = (batch, groups, heads // groups, length, width), (batch, groups, 1, steps, width)
    q, k, v, tq, tk, tv = (
        None if x is None else reshape(astype(x, dtype, copy=False), shapes[place % 3 > 0])
        for place, x in enumerate(inputs)
    )
    assert q is not None
    assert k is not None
    assert v is not None
    matrix = (batch, groups, heads // groups, length, steps)
    mask, keep = _mask(options, first.data, steps), _keep(options, first.data, steps)
    if mask is not None:
        xp = backend.namespace(mask)
        mask = xp.broadcast_to(mask, (batch, heads, length, steps)).reshape(matrix)
    weights = softmax(matmul(q, k.swapaxes(-1, -2)), scale=options.scale, mask=mask)
    factor: Any = 1.0
    if keep is not None:
        factor = Tensor(keep.reshape(matrix)).astype(dtype) / (1 - options.dropout)
    terms = []
    if tq is not None or tk is not None:
        products = [] if tq is None else [matmul(tq, k.swapaxes(-1, -2))]
        products += [] if tk is None else [matmul(q, tk.swapaxes(-1, -2))]
        t = sum(products[1:], products[0])
        average = row_products(weights, t)
        terms.append(matmul(_weight_tangent(weights, t, average, options.scale, factor), v))
    if tv is not None:
        terms.append(matmul(weights if keep is None else weights * factor, tv))
    return reshape(sum(terms[1:], terms[0]), first.shape)


@fuse
def _weight_tangent(
    weights: Tensor, t: Tensor, average: Tensor, scale: float, factor: Tensor
) -> Tensor:
    return weights * (t - average) * scale * factor


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
        fill_keep(keep, options.key, 1 - options.dropout)
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
