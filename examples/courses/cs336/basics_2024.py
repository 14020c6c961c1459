"""Adapters of CS336's assignment 1, 2024. In its tests, `adapters.py` becomes

from cs336.basics_2024 import *
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorgrad as tg
from cs336 import basics, layers
from cs336.basics import (
    get_adamw_cls,
    get_tokenizer,
    run_cross_entropy,
    run_get_batch,
    run_get_lr_cosine_schedule,
    run_gradient_clipping,
    run_load_checkpoint,
    run_save_checkpoint,
    run_softmax,
    run_train_bpe,
)  # fmt: skip
from cs336.bridge import call

__all__ = [
    "get_adamw_cls", "get_tokenizer", "run_cross_entropy", "run_gelu", "run_get_batch",
    "run_get_lr_cosine_schedule", "run_gradient_clipping", "run_load_checkpoint",
    "run_multihead_self_attention", "run_positionwise_feedforward", "run_rmsnorm",
    "run_save_checkpoint", "run_scaled_dot_product_attention", "run_softmax", "run_train_bpe",
    "run_transformer_block", "run_transformer_lm",
]  # fmt: skip


def run_gelu(in_features: Any) -> Any:
    """Return GELU(x), the exact one."""
    return call(tg.gelu, in_features)


def run_rmsnorm(d_model: int, eps: float, weights: Mapping[str, Any], in_features: Any) -> Any:
    """Return x over its root mean square, times the weights."""
    return basics.run_rmsnorm(d_model, eps, weights["weight"], in_features)


def run_positionwise_feedforward(
    d_model: int, d_ff: int, weights: Mapping[str, Any], in_features: Any
) -> Any:
    """Return w2 gelu(w1 x)."""
    return call(layers.gelu_feed_forward, in_features, weights)


def run_scaled_dot_product_attention(
    K: Any, Q: Any, V: Any, mask: Any = None, pdrop: float | None = None
) -> Any:
    """Return softmax(Q K^T / sqrt(D)) V; unlike in 2025, True in the mask excludes a key."""
    return call(layers.attention, Q, K, V, None if mask is None else ~mask, pdrop or 0.0)


def run_multihead_self_attention(
    d_model: int, num_heads: int, attn_pdrop: float, weights: Mapping[str, Any], in_features: Any
) -> Any:
    """Return causal attention of several heads, whose projections are single weights."""

    def joined(x: Any, w: Mapping[str, Any]) -> tg.Tensor:
        projections = {"output_proj.weight": w["output_proj.weight"]}
        for name in "qkv":
            heads = [w[f"{name}_heads.{head}.weight"] for head in range(num_heads)]
            projections[f"{name}_proj.weight"] = tg.concatenate(heads)
        return layers.self_attention(x, projections, num_heads, dropout=attn_pdrop)

    return call(joined, in_features, weights)


def run_transformer_block(
    d_model: int,
    num_heads: int,
    d_ff: int,
    attn_pdrop: float,
    residual_pdrop: float,
    weights: Mapping[str, Any],
    in_features: Any,
) -> Any:
    """Return the output of a pre-norm block."""
    return call(layers.block, in_features, weights, num_heads, None, attn_pdrop, residual_pdrop)


def run_transformer_lm(
    vocab_size: int,
    context_length: int,
    d_model: int,
    num_layers: int,
    num_heads: int,
    d_ff: int,
    attn_pdrop: float,
    residual_pdrop: float,
    weights: Mapping[str, Any],
    in_indices: Any,
) -> Any:
    """Return the logits of a language model with learned positions."""
    return call(
        layers.language_model, in_indices, weights, num_layers, num_heads, None, attn_pdrop,
        residual_pdrop,
    )  # fmt: skip
