"""Attention by tiles without tensor cores: all options, any width, in float32 or float64.

Launches attention/simple.cu. 16-bit arrays, where no other kernels are for them, go through copies
in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, upcast
from tensorgrad.core.dtypes import c_name
from tensorgrad.kernels.attention.arguments import blocks, option_arguments, readable, row_sums
from tensorgrad.kernels.attention.options import Arrays, AttentionOptions, ForwardPass, empty_result
from tensorgrad.kernels.loader import load

_FILE = "attention/simple.cu"
_THREADS, _ROWS, _PIECE = 256, 64, 64  # a block, and its rows and columns of the result


def forward(arrays: Arrays, options: AttentionOptions) -> tuple[Array, Array]:
    """Return the result, in the memory order of (B, T, H, D), and the logsumexp."""
    dtype = arrays[0].dtype
    q, k, v = (upcast(readable(array)) for array in arrays)
    y = empty_result(q, q.dtype)
    logsumexp = backend.empty(q.shape[:3], q.dtype, like=q)
    load(_FILE, f"attention_forward<{c_name(q.dtype)}>")(
        (blocks(q, _ROWS, options), -(-q.shape[3] // _PIECE)),
        (_THREADS,),
        (y, logsumexp, q, k, v, *option_arguments((q, k, v), y, options)),
    )
    return y.astype(dtype, copy=False), logsumexp


def backward(dy: Array, done: ForwardPass, gradients: Sequence[Array]) -> None:
    """Write the gradients."""
    q, k, v, dy = (upcast(readable(array)) for array in (*done[:3], dy))
    sums = row_sums(dy, upcast(done.y), done.logsumexp, math.e)
    own = [g if g.dtype == q.dtype else empty_result(g, q.dtype) for g in gradients]
    dq, dk, dv = own
    last = option_arguments((q, k, v), dy, done.options, own)
    for of_keys, results, rows, columns in (
        (True, (dk, dv), (k, v), (q, dy)),
        (False, (dq, dq), (q, dy), (k, v)),
    ):
        load(_FILE, f"attention_backward<{c_name(q.dtype)}, {str(of_keys).lower()}>")(
            (blocks(rows[0], _ROWS, done.options, of_keys), -(-q.shape[3] // _PIECE)),
            (_THREADS,),
            (*results, sums, *rows, *columns, *last),
        )
    for gradient, computed in zip(gradients, own, strict=True):
        if gradient is not computed:
            gradient[...] = computed
