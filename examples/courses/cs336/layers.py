"""The transformer of CS336 as functions of weights: tensors of tensorgrad in, tensors out.

`as_torch_function` of `tensorgrad.compat.interop` makes them functions of PyTorch's tensors,
through which gradients flow to the weights too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tensorgrad as tg
from tensorgrad.nn import RotaryEmbedding

Weights = Mapping[str, tg.Tensor]


def submodule(weights: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the weights of a submodule, under its own names."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): w for key, w in weights.items() if key.startswith(prefix)}


def attention(q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0) -> tg.Tensor:
    """Return softmax(q k^T / sqrt(D)) v of (..., T, D), with any axes before.

    Args:
        q: (..., Tq, D).
        k: (..., Tk, D).
        v: (..., Tk, Dv).
        mask: broadcastable to (..., Tq, Tk); bool, True where a query attends. Default: all.
        dropout: probability of dropping a weight.
    """
    batch = math.prod(q.shape[:-2])
    if mask is not None:
        mask = tg.broadcast_to(mask, (*q.shape[:-1], k.shape[-2]))
        mask = mask.reshape(batch, 1, *mask.shape[-2:])
    q_rows, k_rows, v_rows = (x.reshape(batch, 1, *x.shape[-2:]) for x in (q, k, v))
    y = tg.attention(q_rows, k_rows, v_rows, mask, dropout=dropout)
    return y.reshape(*q.shape[:-1], v.shape[-1])


def rope(x: Any, positions: Any, theta: float) -> tg.Tensor:
    """Return x, (..., T, D), with neighbours rotated by positions, broadcastable to (..., T)."""
    rows = x.reshape(-1, 1, 1, x.shape[-1])  # the layer takes (B, T, H, D)
    positions = tg.broadcast_to(positions, x.shape[:-1]).reshape(-1, 1)
    return RotaryEmbedding(x.shape[-1], base=theta, interleaved=True)(rows, positions).reshape(
        x.shape
    )


def self_attention(
    x: Any,
    weights: Weights,
    heads: int,
    theta: float | None = None,
    positions: Any = None,
    dropout: float = 0.0,
) -> tg.Tensor:
    """Return causal attention of several heads, with queries, keys and values from one product.

    Args:
        x: (..., T, C).
        weights: "q_proj.weight", "k_proj.weight", "v_proj.weight", "output_proj.weight".
        heads: H.
        theta: of the rotation of queries and keys; default: none.
        positions: broadcastable to (..., T); default: 0 to T - 1.
        dropout: probability of dropping an attention weight.
    """
    projections = tg.concatenate([weights[f"{name}_proj.weight"] for name in "qkv"])
    length = x.shape[-2]
    qkv = tg.linear(x.reshape(-1, length, x.shape[-1]), projections)  # (B, T, 3 H D)
    if theta is not None:
        parts = qkv.reshape(len(qkv), length, 3 * heads, -1)
        if positions is not None:
            positions = tg.broadcast_to(positions, x.shape[:-1]).reshape(-1, length)
        rotary = RotaryEmbedding(parts.shape[-1], base=theta, interleaved=True)
        qkv = rotary(parts, 0 if positions is None else positions, 2 * heads).reshape(qkv.shape)
    y = tg.nn.functional.attention_packed(qkv, heads, kv_heads=heads, causal=True, dropout=dropout)
    return tg.linear(y, weights["output_proj.weight"]).reshape(*x.shape[:-1], -1)


def swiglu(x: Any, weights: Weights) -> tg.Tensor:
    """Return w2 (silu(w1 x) * w3 x)."""
    w1, w2, w3 = (weights[f"w{number}.weight"] for number in (1, 2, 3))
    return tg.linear(tg.swiglu(tg.linear(x, w1), tg.linear(x, w3)), w2)


def gelu_feed_forward(x: Any, weights: Weights) -> tg.Tensor:
    """Return w2 gelu(w1 x), by the exact GELU."""
    hidden = tg.linear(x, weights["w1.weight"])
    return tg.linear(tg.gelu(hidden, approximate="none"), weights["w2.weight"])


def block(
    x: Any,
    weights: Weights,
    heads: int,
    theta: float | None,
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
) -> tg.Tensor:
    """Return the pre-norm block: with SwiGLU where there is a `w3`, otherwise with GELU.

    Args:
        x: (..., T, C).
        weights: of "ln1", "attn", "ln2" and "ffn".
        heads: H.
        theta: of the rotation of queries and keys; None: none.
        attention_dropout: probability of dropping an attention weight.
        dropout: probability of dropping an output of the two sublayers.
    """
    attn, ffn = submodule(weights, "attn"), submodule(weights, "ffn")
    normed = tg.rms_norm(x, weights["ln1.weight"], eps=1e-5)
    attended = self_attention(normed, attn, heads, theta, dropout=attention_dropout)
    middle: tg.Tensor = x + tg.dropout(attended, dropout)
    normed = tg.rms_norm(middle, weights["ln2.weight"], eps=1e-5)
    feed_forward = swiglu if "w3.weight" in ffn else gelu_feed_forward
    return middle + tg.dropout(feed_forward(normed, ffn), dropout)


def language_model(
    ids: Any,
    weights: Weights,
    layers: int,
    heads: int,
    theta: float | None,
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
) -> tg.Tensor:
    """Return logits (B, T, V) of ids (B, T); learned positions are added where weights has them.

    Args:
        ids: (B, T), integers.
        weights: of "token_embeddings", perhaps "position_embeddings", "layers.0", ..., "ln_final"
            and "lm_head".
        layers: the number of blocks.
        heads: H.
        theta: of the rotation of queries and keys; None: none.
        attention_dropout: probability of dropping an attention weight.
        dropout: probability of dropping an embedding or an output of a sublayer.
    """
    positions = weights.get("position_embeddings.weight")
    x = tg.dropout(tg.embedding(weights["token_embeddings.weight"], ids, positions), dropout)
    for number in range(layers):
        layer = submodule(weights, f"layers.{number}")
        x = block(x, layer, heads, theta, attention_dropout, dropout)
    return tg.linear(
        tg.rms_norm(x, weights["ln_final.weight"], eps=1e-5), weights["lm_head.weight"]
    )
