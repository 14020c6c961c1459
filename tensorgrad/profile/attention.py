"""Attention in separate ops, to see what fusing them saves. Tests: tests/profile/test_gpt2.py."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np

from tensorgrad import backend
from tensorgrad.errors import ArgumentError
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.nn import MultiHeadAttention
from tensorgrad.ops.elementwise import where
from tensorgrad.ops.matmul import matmul
from tensorgrad.ops.shape import split
from tensorgrad.ops.softmax import softmax
from tensorgrad.tensor import Tensor

Kind = Literal["flash", "fused-softmax", "unfused"]
KINDS: tuple[Kind, ...] = ("flash", "fused-softmax", "unfused")


def use_attention(model: LanguageModel, kind: Kind) -> None:
    """Compute the attention of a model with one op or with several; results agree but for rounding.

    flash           one op, which never keeps the (T, T) scores
    fused-softmax   a product, the softmax with scale and causal mask in one op, a product
    unfused         a product, the scale, the mask, the softmax, a product: an op each

    Args:
        model: without rotary embeddings, windows or dropout of attention weights; changed in place.
        kind: one of these.
    Raises:
        ArgumentError: the kind is unknown, or the attention has a feature that it lacks.
    """
    if kind not in KINDS:
        raise ArgumentError(f"use_attention: kind is {kind!r}, expected one of {', '.join(KINDS)}")
    for layer in model.attention_layers():
        if kind == "flash":
            vars(layer).pop("forward", None)
            continue
        grouped = layer.kv_heads != layer.heads
        if grouped or layer.rotary is not None or layer.window is not None or layer.dropout:
            raise ArgumentError(
                f"use_attention: kind is {kind!r} and the attention has grouped queries, a rotary "
                "embedding, a window or dropout, expected 'flash' or none of them"
            )
        vars(layer)["forward"] = partial(_in_parts, layer, kind == "fused-softmax")


def _in_parts(
    layer: MultiHeadAttention, fused: bool, x: Any, mask: Any = None, cache: Any = None
) -> Tensor:
    """Return the attention of x, (B, T, C), from scores (B, H, T, T)."""
    if mask is not None or cache is not None:
        raise ArgumentError("attention: got a mask or a cache, expected neither unless it is flash")
    qkv: Tensor = layer.qkv(x)
    batch, length, width = qkv.shape
    parts = layer.heads + 2 * layer.kv_heads
    each = qkv.reshape(batch, length, parts, width // parts).swapaxes(1, 2)
    q, k, v = split(each, [layer.heads, layer.heads + layer.kv_heads], axis=1)
    scores, scale = matmul(q, k.swapaxes(-1, -2)), (width // parts) ** -0.5
    if fused:
        weights = softmax(scores, scale=scale, causal=layer.causal)
    else:
        scores = scores * scale
        if layer.causal:
            xp = backend.namespace(scores.data)
            scores = where(xp.tri(length, dtype=np.bool_), scores, -np.inf)
        weights = softmax(scores)
    y = matmul(weights, v).swapaxes(1, 2).reshape(batch, length, layer.heads * v.shape[3])
    result: Tensor = layer.proj(y)
    return result
