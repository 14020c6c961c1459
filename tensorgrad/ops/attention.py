"""Scaled dot-product attention as one op. Tests: tests/ops/test_attention.py.

Neither pass keeps the (Tq, Tk) matrix of weights: forward keeps its result and one number a row,
the logsumexp of the scores, from which backward recomputes the weights. Keys that a causal mask or
a window hides from a whole block of queries cost nothing.

`attention_numpy.py` is the reference. On the GPU `_implementation` chooses among the modules of
kernels/attention/: `short` for 16 bits and short sequences, `sm90` for 16 bits on Hopper, `sm80`
for 16 bits and TF32 on compute capability 8.0 and later, and `simple` for the rest.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import numpy as np

from tensorgrad import random
from tensorgrad.amp import cast_operands, product_kernel
from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.checks import check_integer, check_shape
from tensorgrad.core.dtypes import compute_dtype, int32
from tensorgrad.core.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.core.gradient import Gradient, Gradients, Needs, Saved
from tensorgrad.core.modes import mode
from tensorgrad.core.operands import constant_of, float_tensor, integer_array, tensor_of
from tensorgrad.core.record import record
from tensorgrad.core.signature import Count, Float, Probability, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.kernels.attention import short as attention_short
from tensorgrad.kernels.attention import simple as attention_simple
from tensorgrad.kernels.attention import sm80 as attention_sm80
from tensorgrad.kernels.attention import sm90 as attention_sm90
from tensorgrad.kernels.attention.options import (
    ALL,
    Arrays,
    AttentionOptions,
    ForwardPass,
    Sequences,
    empty_result,
)
from tensorgrad.kernels.rotary import Rotation
from tensorgrad.ops import attention_numpy
from tensorgrad.ops.arguments import broadcast, mask_operand
from tensorgrad.ops.attention_tangent import (
    attention_tangent,
    attention_tangent_packed,
    gradient_dtype,
)
from tensorgrad.ops.attention_unfused import attention_unfused
from tensorgrad.ops.philox import fill_attention_keep
from tensorgrad.ops.rotary import rotary, rotated, rotation_of, turned

__all__ = ["attention", "attention_packed", "attention_varlen"]

takes = Signatures(globals())

_SAVED = 7  # values that `_forward` keeps for backward


@overload
def attention(
    q: Any, k: Any, v: Any, mask: Any = ..., *, causal: bool = ..., scale: float | None = ...,
    dropout: float = ..., window: int | None = ..., return_logsumexp: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Any, k: Any, v: Any, mask: Any = ..., *, causal: bool = ..., scale: float | None = ...,
    dropout: float = ..., window: int | None = ..., return_logsumexp: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def attention(
    q: Float[ArrayLike, "B H Tq D"],
    k: Float[ArrayLike, "... Hkv Tk D"],
    v: Float[ArrayLike, "... Hkv Tk Dv"],
    mask: Any = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: Probability = 0.0,
    window: Count | None = None,
    return_logsumexp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return for each query the mean of the values, weighted by the softmax of its scores.

    y = softmax(scale * q k^T + mask) v

    Args:
        q: (B, H, Tq, D), any float dtype. Views with strides are read in place.
        k: (B, Hkv, Tk, D), dtype of q. H is a multiple of Hkv: query head h reads key head
            h // (H / Hkv) (grouped-query attention). B may be 1 or missing.
        v: (B, Hkv, Tk, Dv), dtype of q; B as for k.
        mask: broadcastable to (B, H, Tq, Tk); bool, True where a query attends, or float, added
            to the scores. A query without any key (False or -inf everywhere) gives zeros and no
            gradient. A float mask may require a gradient (a learned position bias).
        causal: query i attends to the keys up to i + Tk - Tq: the last query attends to all keys,
            as when k and v come from a cache that holds earlier steps too.
        scale: of the scores; default 1 / sqrt(D).
        dropout: probability with which a weight is set to 0; the others grow by
            1 / (1 - dropout). Applied whenever it is above 0.
        window: how many keys a query attends to, itself included: query i, at position
            p = i + Tk - Tq, to p - window + 1, ..., p; without causal also to the window - 1
            keys after. Keys outside cost no time. Default: all.
        return_logsumexp: also return the logarithm of each row's sum of exp(scores), by which
            results over parts of the keys can be joined.

    With a mask that requires a gradient, Dv other than D, or k and v of another batch than q the
    ops of `attention_unfused` run, which keep the (Tq, Tk) weights, round scores to the dtype of q
    and draw other random numbers for dropout. `mask.detach()` lets the kernels run instead.

    Returns:
        (B, H, Tq, Dv), dtype of q, and from the kernels in the memory order of (B, Tq, H, D). With
        return_logsumexp a
        pair: that, and (B, H, Tq), float32 (float64 for float64), -inf for a query without
        any key; no gradient flows through it.

    Raises:
        DtypeError: q, k or v does not hold floats.
        ShapeError: q is not (B, H, Tq, D), k not (..., Hkv, Tk, D), v not (..., Hkv, Tk, Dv).
        ArgumentError: dropout is not 0 <= dropout < 1.
        ArgumentError: window is not 1 or more.
        DeviceError: the operands are on different devices.
        ShapeError: B of k or v is not that of q, 1 or missing; H is not a multiple of Hkv; D is 0;
            or mask does not broadcast.
        DtypeError: q, k, v are not of one dtype, or mask is neither bool nor float.
        ArgumentError: return_logsumexp where `attention_unfused` runs.
    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; grouped queries: Ainslie et al. 2023,
        arXiv:2305.13245; without the matrix of weights: Dao 2023, arXiv:2307.08691; windows:
        Beltagy et al. 2020, arXiv:2004.05150.

    Example:
        >>> q = k = tg.zeros((1, 1, 2, 4))  # equal scores, so equal weights
        >>> v = tg.tensor([[[[1.0] * 4, [3.0] * 4]]])
        >>> tg.attention(q, k, v, causal=True)[0, 0, :, 0].tolist()
        [1.0, 2.0]
    """
    op = "attention"
    if mask is not None:
        q = tensor_of(op, "q", q, k, v, mask)  # a literal takes its dtype with the mask too
    q, k, v = takes.attention(q, k, v, causal, scale, dropout, window, return_logsumexp)
    q, k, v = _cast(op, q, k, v)
    batch, heads = q.shape[:2]
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[:-3] not in ((batch,), (1,), ()):
            rest = ", ".join(map(str, tensor.shape[-3:]))
            got = f"{op}: {name} has shape {tensor.shape}"
            raise ShapeError(f"{got}, expected ({batch}, {rest}), (1, {rest}) or ({rest})")
    _check_heads(op, heads, k.shape[-3])
    if v.shape != k.shape or k.shape[:-3] != (batch,) or _needs_gradient(mask):
        if return_logsumexp:
            raise ArgumentError(
                f"{op}: return_logsumexp is True, expected False with a mask that requires a "
                "gradient, Dv other than D, or a batch that broadcasts"
            )
        return attention_unfused(
            q,
            k,
            v,
            mask,
            causal=causal,
            scale=scale,
            dropout=dropout,
            window=window,
            fused_softmax=True,
        )
    arrays = q.data, k.data, v.data
    options = _options(op, arrays, mask, causal, scale, dropout, window)
    y, saved = _forward(arrays, options)
    result = record(op, y, (q, k, v), _backward, saved)
    if not return_logsumexp:
        return result
    logsumexp = saved[4]
    empty = logsumexp >= np.finfo(logsumexp.dtype).max / 4
    logsumexp = backend.namespace(y).where(empty, logsumexp.dtype.type(-np.inf), logsumexp)
    return result, Tensor(logsumexp)


def attention_packed(
    qkv: Float[ArrayLike, "B T channels"],
    heads: int,
    *,
    kv_heads: int | None = None,
    mask: Any = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: Probability = 0.0,
    window: Count | None = None,
    angles: tuple[Any, Any] | None = None,
    interleaved: bool = False,
    overwrite: bool = False,
) -> Tensor:
    """Return the attention of a sequence to itself, from one projection of it.

    The last axis of qkv holds the queries of all heads, then their keys, then their values. They
    are read in place, and their gradients are written into one array of the same layout.

    With angles, queries and keys are first rotated by their positions. Values and gradients have
    the bits of `rotary` before `attention_packed` without angles; but values are not copied, and
    gradients are rotated back where they lie.

    Args:
        qkv: (B, T, (heads + 2 * kv_heads) * D), any float dtype.
        heads: the number of query heads, H.
        kv_heads: the number of key and value heads; default H. It divides H.
        mask, causal, scale, dropout, window: as in `attention`.
        angles: cosines and sines of rotary positions, each broadcastable to
            (B, T, heads + kv_heads, D / 2), such as (T, 1, D / 2); see `rotary`. D is even.
        interleaved: as in `rotary`.
        overwrite: allow the rotation to write into the memory of qkv, which saves a copy. Only for
            an array that nothing reads afterwards, not even backward of another op: no error
            tells of such a read.

    Returns:
        (B, T, H * D), dtype of qkv.

    Raises:
        DtypeError: qkv does not hold floats.
        ShapeError: qkv is not (B, T, channels).
        ArgumentError: dropout is not 0 <= dropout < 1.
        ArgumentError: window is not 1 or more.
        ShapeError, ArgumentError, DtypeError, DeviceError, GradError: as in `attention` and
            `rotary`.

    Example:
        >>> qkv = tg.concatenate([tg.zeros((1, 2, 8)), tg.ones((1, 2, 4))], axis=-1)
        >>> tg.attention_packed(qkv, heads=2, causal=True).shape
        (1, 2, 4)
    """
    op = "attention_packed"
    if angles is not None and (not isinstance(angles, tuple) or len(angles) != 2):
        raise ArgumentError(f"{op}: angles is {angles!r:.80}, expected a pair: cosines and sines")
    if mask is not None or angles is not None:
        qkv = tensor_of(op, "qkv", qkv, mask, *(angles or ()))  # a literal takes its dtype with all
    (qkv,) = takes.attention_packed(
        qkv, heads, kv_heads, causal, scale, dropout, window, interleaved, overwrite
    )
    kv_heads = heads if kv_heads is None else kv_heads
    _check_heads(op, heads, kv_heads)
    parts = heads + 2 * kv_heads
    if not qkv.shape[2] or qkv.shape[2] % parts:
        raise ShapeError(
            f"{op}: qkv has shape {qkv.shape}, expected (B, T, {parts} * D) for {heads} heads "
            f"and {kv_heads} heads of keys and values"
        )
    given, rotation = qkv, None
    if mode.autocast is not None:
        (qkv,) = cast_operands(qkv)
    if angles is not None:
        rotation = _rotation(op, given, angles, heads + kv_heads, parts, interleaved)
        if qkv is not given or _needs_gradient(mask):  # in the dtype of qkv, or as an op of its own
            encoded = rotary(
                _separated(given, parts), *angles, heads=heads + kv_heads, interleaved=interleaved
            )
            (qkv,), rotation = cast_operands(encoded.reshape(given.shape)), None
    if _needs_gradient(mask):
        q, k, v = _unpack(qkv, heads, kv_heads)
        y = attention_unfused(
            q,
            k,
            v,
            mask,
            causal=causal,
            scale=scale,
            dropout=dropout,
            window=window,
            fused_softmax=True,
        )
        return y.swapaxes(1, 2).reshape(*qkv.shape[:2], heads * y.shape[3])
    arrays = _unpack(qkv.data, heads, kv_heads)
    options = _options(op, arrays, mask, causal, scale, dropout, window)
    if rotation is not None and _kernel_rotates(arrays, options, rotation):
        cos, sin, _, interleaved = rotation
        options = replace(options, rotation=(cos, sin, interleaved))
    elif rotation is not None:
        overwrite = overwrite and qkv.data.flags.c_contiguous
        array = rotated(_separated(qkv.data, parts), rotation, 1, overwrite)
        arrays = _unpack(array.reshape(qkv.shape), heads, kv_heads)
    y, saved = _forward(arrays, options)
    batch, length = qkv.shape[:2]
    y = y.swapaxes(1, 2).reshape(batch, length, heads * y.shape[3])
    whole = qkv.data if rotation is None or options.rotation is not None else array
    saved = (*saved, whole.reshape(qkv.shape), *(rotation or ()))
    return record(op, y, (qkv,), _backward_packed, saved)


def attention_varlen(
    q: Float[ArrayLike, "total H D"],
    k: Float[ArrayLike, "keys Hkv D"],
    v: Float[ArrayLike, "keys Hkv D"],
    starts: Any,
    k_starts: Any = None,
    *,
    max_length: int | None = None,
    max_k_length: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: Probability = 0.0,
    window: Count | None = None,
) -> Tensor:
    """Return the attention within each of several sequences, packed one after the other.

    No padding is stored or computed: sequence s is rows starts[s], ..., starts[s + 1] - 1.

    Args:
        q: (total, H, D), any float dtype.
        k: (keys, Hkv, D), dtype of q; H is a multiple of Hkv.
        v: (keys, Hkv, D), dtype of q.
        starts: (sequences + 1), integers: 0, the sums of the first lengths, total. Lengths of 0
            are allowed. On the CPU (a list will do), or where q is: then its values are not
            checked.
        k_starts: the same for k and v; default: starts.
        max_length: at least the length of the longest sequence. Where starts is on the GPU and
            this is missing, the host waits for the GPU to read it.
        max_k_length: the same for k and v; default with k_starts None: max_length.
        causal, scale, dropout, window: as in `attention`, in each sequence. Weight (s, h, i, j) is
            dropped where `attention` drops it for padded sequences of the greatest lengths.

    Returns:
        (total, H, D), dtype of q.

    Raises:
        DtypeError: q, k or v does not hold floats.
        ShapeError: q is not (total, H, D), k not (keys, Hkv, D), v not (keys, Hkv, D).
        ArgumentError: dropout is not 0 <= dropout < 1.
        ArgumentError: window is not 1 or more.
        DeviceError: the operands are on different devices.
        ShapeError: H is not a multiple of Hkv, D is 0, or starts does not rise from 0 to total.
        ArgumentError: a length is out of range.
        DtypeError: q, k, v are not of one dtype, or starts holds no integers.

    Example:
        >>> q = k = tg.zeros((3, 1, 2))  # a sequence of 1 and one of 2
        >>> v = tg.tensor([[[1.0, 1.0]], [[2.0, 2.0]], [[4.0, 4.0]]])
        >>> tg.attention_varlen(q, k, v, [0, 1, 3])[:, 0, 0].tolist()
        [1.0, 3.0, 3.0]
    """
    op = "attention_varlen"
    q, k, v = takes.attention_varlen(
        q, k, v, max_length, max_k_length, causal, scale, dropout, window
    )
    q, k, v = _cast(op, q, k, v)
    _check_heads(op, q.shape[1], k.shape[1])
    arrays: Any = tuple(a[None].swapaxes(1, 2) for a in (q.data, k.data, v.data))
    found, longest = _starts(op, "starts", "max_length", starts, max_length, q)
    if k_starts is None:
        if k.shape[0] != q.shape[0]:
            raise ShapeError(f"{op}: k has {k.shape[0]} rows, expected {q.shape[0]} like q")
        k_found, k_longest = found, longest
    else:
        k_found, k_longest = _starts(op, "k_starts", "max_k_length", k_starts, max_k_length, k)
        check_shape(op, "k_starts", k_found, found.shape, " like starts")
    sequences = Sequences(found, k_found, (longest, k_longest))
    options = _options(op, arrays, None, causal, scale, dropout, window, sequences)
    y, saved = _forward(arrays, options)
    return record(op, y[0].swapaxes(0, 1), (q, k, v), _backward_varlen, saved)


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    dtype = gradient_dtype(saved[0])
    gradients = [backend.empty(a.shape, dtype, like=a) for a in saved[:3]]
    _write_gradients(dy, saved, gradients)
    return gradients


def _backward_packed(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    saved, rotation = saved[:_SAVED], saved[_SAVED + 1 :]
    q, k, _, _, _, options, _ = saved
    (batch, heads, length, width), kv_heads = q.shape, k.shape[1]
    parts = heads + 2 * kv_heads
    dqkv = backend.empty((batch, length, parts * width), gradient_dtype(q), like=q)
    dy = dy.reshape(batch, length, heads, width).swapaxes(1, 2)
    # column sums are those of what is written, before it is rotated back
    column_sums = _write_gradients(dy, saved, _unpack(dqkv, heads, kv_heads), not rotation)
    if rotation and options.rotation is None:
        dqkv = dqkv.astype(q.dtype, copy=False)  # the walk does it before backward of `rotary`
        rotated(_separated(dqkv, parts), Rotation(*rotation), -1, in_place=True)
    return (dqkv if column_sums is None else Gradient(dqkv, column_sums),)


def _backward_varlen(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    dtype = gradient_dtype(saved[0])
    gradients = [empty_result(a, dtype) for a in saved[:3]]
    _write_gradients(dy[None].swapaxes(1, 2), saved, gradients)
    return [gradient[0].swapaxes(0, 1) for gradient in gradients]


@tangent_of(_backward)
def _tangent(op: Op, tq: Tensor | None, tk: Tensor | None, tv: Tensor | None) -> Tensor:
    q, k, v = (op.input(i, array) for i, array in enumerate(op.saved[:3]))
    return attention_tangent((q, k, v, tq, tk, tv), ForwardPass(*op.saved[:-1]))


@tangent_of(_backward_packed)
def _tangent_packed(op: Op, t: Tensor) -> Tensor:
    done, whole = ForwardPass(*op.saved[: _SAVED - 1]), op.saved[_SAVED]
    qkv, heads, kv_heads = op.input(0, whole), done.q.shape[1], done.k.shape[1]
    unpack = partial(_unpack, heads=heads, kv_heads=kv_heads)
    if len(op.saved) > _SAVED + 1:
        rotation, parts = Rotation(*op.saved[_SAVED + 1 :]), heads + 2 * kv_heads
        if done.options.rotation is not None:  # by the kernel
            whole = rotated(_separated(whole, parts), rotation, 1).reshape(whole.shape)
        qkv = _turned(qkv, whole, rotation, parts)
        t = _turned(t, rotated(_separated(t.data, parts), rotation, 1), rotation, parts)
        options = replace(done.options, rotation=None)
        q, k, v = unpack(whole)
        done = ForwardPass(q, k, v, done.y, done.logsumexp, options)
    return attention_tangent_packed(qkv, t, unpack, done)


@tangent_of(_backward_varlen)
def _tangent_varlen(op: Op, *tangents: Tensor | None) -> Tensor:
    done = ForwardPass(*op.saved[:-1])
    arrays = [array[0].swapaxes(0, 1) for array in done[:3]]
    inputs = (*(op.input(i, array) for i, array in enumerate(arrays)), *tangents)
    batched = [None if x is None else x[None].swapaxes(1, 2) for x in inputs]
    return attention_tangent(batched, done)[0].swapaxes(0, 1)


def _turned(x: Tensor, y: Array, rotation: Rotation, parts: int) -> Tensor:
    """Return y, the rotated array of x, (B, T, channels), as the result of `rotary`."""
    separate = _separated(x, parts)
    return turned(separate, y.reshape(separate.shape), rotation).reshape(x.shape)


def _implementation(arrays: Arrays, options: AttentionOptions) -> Any:
    """Return the module whose forward and backward support these arrays and options."""
    if type(arrays[0]) is np.ndarray:
        return attention_numpy
    for kernels in (attention_short, attention_sm90, attention_sm80):
        if kernels.supports(arrays, options):
            return kernels
    return attention_simple


def _forward(arrays: Arrays, options: AttentionOptions) -> tuple[Array, Saved]:
    """Return the result and what backward needs; the logsumexp of an empty row is huge."""
    q, k, _ = arrays
    if q.size and k.size:
        y, logsumexp = _implementation(arrays, options).forward(arrays, options)
    else:
        y = empty_result(q, q.dtype)
        y[...] = 0
        logsumexp = backend.namespace(q).full(q.shape[:3], np.inf, compute_dtype(q.dtype))
    return y, (*arrays, y, logsumexp, options, options.bias)  # _SAVED of them


def _write_gradients(dy: Array, saved: Saved, gradients: Any, sums: bool = False) -> Array | None:
    """Write the gradients; with `sums` return the column sums of the array that they are parts of.

    None where the kernels do not compute these.
    """
    done = ForwardPass(*saved[:-1])
    if done.y.size and done.k.size:
        kernels = _implementation(done[:3], done.options)
        column_sums = None
        if sums and kernels is attention_sm90:
            column_sums = attention_sm90.column_sums_for(done)
        kept = {} if column_sums is None else {"column_sums": column_sums}
        kernels.backward(dy, done, gradients, **kept)
        return column_sums
    for gradient in gradients:
        gradient[...] = 0
    return None


def _cast(op: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as autocast wants them, of one dtype and with heads that are not empty."""
    if mode.autocast is not None:
        q, k, v = cast_operands(q, k, v)
    dtype = q.data.dtype
    for name, tensor in (("k", k), ("v", v)):
        if tensor.data.dtype != dtype:
            raise DtypeError(f"{op}: {name} has dtype {tensor.dtype}, expected {dtype} like q")
    if not q.shape[-1]:
        raise ShapeError(f"{op}: q has shape {q.shape}, expected heads of width 1 or more")
    return q, k, v


def _check_heads(op: str, heads: int, kv_heads: int) -> None:
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ShapeError(
            f"{op}: got {heads} query heads and {kv_heads} heads of keys and values (kv_heads), "
            "expected a multiple"
        )


def _unpack(qkv: Any, heads: int, kv_heads: int) -> Any:
    """Return views (B, heads, T, D) of the queries, keys and values."""
    all_heads = _separated(qkv, heads + 2 * kv_heads).swapaxes(1, 2)
    q, k = all_heads[:, :heads], all_heads[:, heads : heads + kv_heads]
    return q, k, all_heads[:, heads + kv_heads :]


def _separated(qkv: Any, parts: int) -> Any:
    """Return a view (B, T, parts, D) of an array or tensor (B, T, parts * D)."""
    batch, length, channels = qkv.shape
    return qkv.reshape(batch, length, parts, channels // parts)


def _rotation(
    op: str, qkv: Tensor, angles: Any, heads: int, parts: int, interleaved: bool
) -> Rotation:
    """Return how the first heads of qkv are rotated."""
    tables = []
    for name, angle in zip(("cosines", "sines"), angles, strict=True):
        tables.append(float_tensor(op, name, angle, *angles, qkv))
        constant_of(op, f"angles, {name}", tables[-1], "rotary() has it")
    cos, sin = tables
    backend.same_device(op, ("qkv", "cosines", "sines"), (qkv.data, cos.data, sin.data))
    return rotation_of(op, "qkv", _separated(qkv.data, parts), cos, sin, heads, interleaved)


def _kernel_rotates(arrays: Arrays, options: AttentionOptions, rotation: Rotation) -> bool:
    """Whether the kernels of attention rotate queries and keys as they load them."""
    q = arrays[0]
    if type(q) is np.ndarray or not q.size:
        return False
    return attention_short.rotates(arrays, options, rotation.cos, rotation.sin)


def _starts(
    op: str, name: str, limit: str, value: Any, longest: int | None, tensor: Tensor
) -> tuple[Array, int]:
    """Return the first rows of the sequences of a tensor, int32 beside it, and a longest length."""
    starts, total = integer_array(op, name, value), tensor.shape[0]
    if starts.ndim != 1 or len(starts) < (2 if total else 1):
        raise ShapeError(f"{op}: {name} has shape {starts.shape}, expected (sequences + 1,)")
    on_gpu = not backend.is_numpy(starts)
    if on_gpu:
        backend.same_device(op, ("q", name), (tensor.data, starts))
    if longest is not None:
        check_integer(op, limit, longest, min(total, 1))  # a launch has a block or more
    if longest is None or not on_gpu:
        lengths = np.diff(backend.to_numpy(starts).astype(np.int64))
        most = int(lengths.max(initial=0))
        if starts[0] != 0 or starts[-1] != total or lengths.min(initial=0) < 0:
            raise ShapeError(f"{op}: {name} is {starts}, expected to rise from 0 to {total}")
        longest = most if longest is None else longest
        if longest < most:
            raise ArgumentError(f"{op}: {limit} is {longest}, expected at least {most}")
    return backend.asarray_like(starts, like=tensor.data).astype(int32, copy=False), longest


def _options(
    op: str,
    arrays: Any,
    mask: Any,
    causal: bool,
    scale: float | None,
    dropout: float,
    window: int | None,
    sequences: Sequences | None = None,
) -> AttentionOptions:
    """Return the options of one attention."""
    q, k, _ = arrays
    shape = (*q.shape[:3], k.shape[2])
    if sequences is not None:
        shape = (len(sequences.q_starts) - 1, q.shape[1], *sequences.longest)
    bias, adds = (None, False) if mask is None else _bias(op, mask, shape, q)
    before = ALL if window is None else min(window - 1, ALL)
    key, keep = random.next_key() if dropout else None, None
    if key is not None and type(q) is np.ndarray:
        keep = np.empty(shape, np.bool_)
        fill_attention_keep(keep, key, 1 - dropout)
    return AttentionOptions(
        scale=1 / math.sqrt(q.shape[3]) if scale is None else float(scale),
        before=before,
        after=0 if causal else before,
        bias=bias,
        adds=adds,
        dropout=dropout,
        key=key,
        keep=keep,
        sequences=sequences,
        tf32=product_kernel(*arrays) is not None,
    )


def _needs_gradient(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.requires_grad


def _bias(op: str, mask: Any, shape: Shape, q: Array) -> tuple[Array, bool]:
    """Return the mask as a bias of this shape, not copied, and whether it is a float mask."""
    mask = mask_operand(op, mask, "q", q)
    dtype = compute_dtype(q.dtype)
    if mask.dtype != np.bool_:
        return broadcast(op, "mask", mask.astype(dtype, copy=False), shape), True
    bias = backend.namespace(q).where(mask, dtype.type(0), dtype.type(-np.inf))
    return broadcast(op, "mask", bias, shape), False
