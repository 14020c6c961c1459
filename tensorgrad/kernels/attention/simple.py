"""Launches of kernels/attention/simple.cu: all options, any width, float32 and float64.

16-bit arrays, where no other kernels are for them, go through copies in float32.
"""

from __future__ import annotations

from tensorgrad import backend
from tensorgrad.backend import Array, widened
from tensorgrad.dtypes import c_name
from tensorgrad.kernels.attention.arguments import blocks, dropout, problem, readable, rest, sums
from tensorgrad.kernels.attention.options import Arrays, AttentionOptions, empty_result
from tensorgrad.kernels.loader import load

_FILE = "attention/simple.cu"
_THREADS, _ROWS, _PIECE = 256, 64, 64


def forward(arrays: Arrays, options: AttentionOptions) -> tuple[Array, Array]:
    """Return the result, in the memory order of (B, T, H, D), and the logsumexp."""
    dtype = arrays[0].dtype
    q, k, v = (widened(readable(array)) for array in arrays)
    y = empty_result(q, q.dtype)
    logsumexp = backend.empty(q.shape[:3], q.dtype, like=q)
    load(_FILE, f"attention_forward<{c_name(q.dtype)}>")(
        (blocks(q, _ROWS, options), -(-q.shape[3] // _PIECE)),
        (_THREADS,),
        (y, logsumexp, q, k, v, *rest(options), problem((q, k, v), y, options), dropout(options)),
    )
    return y.astype(dtype, copy=False), logsumexp


def backward(
    dy: Array,
    arrays: Arrays,
    y: Array,
    logsumexp: Array,
    options: AttentionOptions,
    gradients: Arrays,
) -> None:
    """Write the gradients."""
    q, k, v, dy = (widened(readable(array)) for array in (*arrays, dy))
    of_queries = sums(dy, widened(y), logsumexp)
    own = [g if g.dtype == q.dtype else empty_result(g, q.dtype) for g in gradients]
    dq, dk, dv = own
    told = (*rest(options), problem((q, k, v), dy, options, own), dropout(options))
    pieces, kernel = -(-q.shape[3] // _PIECE), f"attention_backward<{c_name(q.dtype)}"
    load(_FILE, f"{kernel}, true>")(
        (blocks(k, _ROWS, options, keys=True), pieces),
        (_THREADS,),
        (dk, dv, of_queries, k, v, q, dy, *told),
    )
    load(_FILE, f"{kernel}, false>")(
        (blocks(q, _ROWS, options), pieces),
        (_THREADS,),
        (dq, dq, of_queries, q, dy, k, v, *told),
    )
    for gradient, computed in zip(gradients, own, strict=True):
        if gradient is not computed:
            gradient[...] = computed
