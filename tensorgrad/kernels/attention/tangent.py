"""The tangent of attention and its backward: the module for an array and options.

`tangent_sm90` is for 16 bits on Hopper without mask, dropout and sequences of unequal length,
`tangent_sm80` for 16 bits and TF32 on compute capability 8.0 and later. What `supports` denies has
no kernel: it follows from the definition in ops/attention_tangent.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorgrad.core.backend import Array
from tensorgrad.kernels.attention import tangent_sm80, tangent_sm90
from tensorgrad.kernels.attention.arguments import aligned
from tensorgrad.kernels.attention.options import Arrays, AttentionOptions, TangentPass, empty_result


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


def backward(dy: Array, done: TangentPass, gradients: Sequence[Array | None]) -> None:
    """Write the gradients of q, k, v, tq, tk and tv.

    Args:
        dy: (B, H, Tq, D), the gradient of the tangent alone.
        done: the arrays of forward.
        gradients: (B, H, T, D), in any layout; None: it is not wanted. Copied where the kernels
            cannot write in place: those of one side have unequal strides, or rows that do not start
            at multiples of 16 bytes.
    """
    written = list(gradients)
    for side in (0, 3), (1, 2, 4, 5):  # the gradients of queries, and of keys
        if not _one_layout([gradients[i] for i in side], done.q):
            for i in side:
                gradient = gradients[i]
                written[i] = None if gradient is None else empty_result(gradient, done.q.dtype)
    _module(done[:3], done.options).backward(dy, done, written)
    for gradient, result in zip(gradients, written, strict=True):
        if gradient is not None and gradient is not result:
            gradient[...] = result


def _one_layout(gradients: Sequence[Array | None], like: Array) -> bool:
    """Whether kernels can write these in place."""
    present = [gradient for gradient in gradients if gradient is not None]
    vectors = like.shape[3] * like.itemsize % 16 == 0
    return all(
        gradient.dtype == like.dtype
        and gradient.strides == present[0].strides
        and gradient.strides[3] == like.itemsize
        and (aligned(gradient) or not vectors)
        for gradient in present
    )


def _module(arrays: Any, options: AttentionOptions) -> Any:
    """Return the module whose kernels are for these arrays and options, or None."""
    for module in (tangent_sm90, tangent_sm80):
        if module.supports(arrays, options):
            return module
    return None
