"""The tangent of attention and its backward: the module for an array and options.

`tangent_sm90` is for 16 bits on Hopper without mask, dropout and sequences of unequal length,
`tangent_sm80` for 16 bits and TF32 on compute capability 8.0 and later. What `supports` denies has
no kernel: the ops of `attention_unfused` compute it.
"""

from __future__ import annotations

from typing import Any

from tensorgrad.core.backend import Array
from tensorgrad.kernels.attention import tangent_sm80, tangent_sm90
from tensorgrad.kernels.attention.options import Arrays, AttentionOptions, TangentPass


def supports(arrays: Arrays, options: AttentionOptions) -> bool:
    """Whether there are kernels for this GPU, for q, k, v and these options."""
    return _module(arrays, options) is not None


def forward(
    arrays: Arrays, y: Array, logsumexp: Array, tangents: Arrays, options: AttentionOptions
) -> tuple[Array, Array]:
    """Return the tangent of the result, and the mean of each query's tangents of scores.

    Args:
        arrays: q, k, v: (B, H, T, D), not empty.
        y, logsumexp: the results of attention, (B, H, Tq, D) and (B, H, Tq).
        tangents: of q, k and v, of their dtype.
        options: those of attention.

    Returns:
        (B, H, Tq, D), in the memory order of (B, Tq, H, D), and (B, H, Tq), float32.
    """
    module = _module(arrays, options)
    result: tuple[Array, Array] = module.forward(arrays, y, logsumexp, tangents, options)
    return result


def backward(dy: Array, done: TangentPass) -> tuple[Array, ...]:
    """Return the gradients of q, k, v, tq, tk and tv, of the dtype of q.

    Args:
        dy: (B, H, Tq, D), the gradient of the tangent alone.
        done: the arrays of forward.

    Returns:
        Arrays (B, H, T, D) in the memory order of (B, T, H, D).
    """
    gradients: tuple[Array, ...] = _module(done[:3], done.options).backward(dy, done)
    return gradients


def _module(arrays: Any, options: AttentionOptions) -> Any:
    """Return the module whose kernels are for these arrays and options, or None."""
    for module in (tangent_sm90, tangent_sm80):
        if module.supports(arrays, options):
            return module
    return None
