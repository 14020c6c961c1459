"""Adapters of CS336's assignment 1, 2024. In its tests, `adapters.py` becomes

from cs336.basics_2024 import *
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorgrad as tg
from cs336 import layers
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
)
from cs336.basics import run_rmsnorm as _rmsnorm
from cs336.bridge import call, call_with_weights

__all__ = [
    "get_adamw_cls",
    "get_tokenizer",
    "run_cross_entropy",
    "run_gelu",
    "run_get_batch",
    "run_get_lr_cosine_schedule",
    "run_gradient_clipping",
    "run_load_checkpoint",
    "run_multihead_self_attention",
    "run_positionwise_feedforward",
    "run_rmsnorm",
    "run_save_checkpoint",
    "run_scaled_dot_product_attention",
    "run_softmax",
    "run_train_bpe",
    "run_transformer_block",
    "run_transformer_lm",
]


def run_positionwise_feedforward(
    d_model: int, d_ff: int, weights: Mapping[str, Any], in_features: Any
) -> Any:
    """Return w2 gelu(w1 x)."""
    return call_with_weights(layers.gelu_feed_forward, weights, in_features)


def run_scaled_dot_product_attention(
    K: Any, Q: Any, V: Any, mask: Any = None, pdrop: float | None = None
) -> Any:
    """Return softmax(Q K^T / sqrt(D)) V; unlike in 2025, True in the mask excludes a key."""
    return call(
        lambda q, k, v, excluded: layers.attention(
            q, k, v, None if excluded is None else ~excluded, pdrop or 0.0
        ),
        Q, K, V, mask,
    )  # fmt: skip


def run_multihead_self_attention(
    d_model: int, num_heads: int, attn_pdrop: float, weights: Mapping[str, Any], in_features: Any
) -> Any:
    """Return causal attention of several heads, whose projections are single weights."""

    def joined(x: Any, w: Mapping[str, Any]) -> tg.Tensor:
        projections = {
            f"{name}_proj.weight": tg.concatenate(
                [w[f"{name}_heads.{head}.weight"] for head in range(num_heads)]
            )
            for name in "qkv"
        }
        output = {"output_proj.weight": w["output_proj.weight"]}
        return layers.self_attention(x, projections | output, num_heads, dropout=attn_pdrop)

    return call_with_weights(joined, weights, in_features)


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
    return call_with_weights(
        lambda x, w: layers.block(x, w, num_heads, None, attn_pdrop, residual_pdrop),
        weights,
        in_features,
    )


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
    return call_with_weights(
        lambda ids, w: layers.language_model(
            ids, w, num_layers, num_heads, None, attn_pdrop, residual_pdrop
        ),
        weights,
        in_indices,
    )


def run_rmsnorm(d_model: int, eps: float, weights: Mapping[str, Any], in_features: Any) -> Any:
    """Return x over its root mean square, times the weights."""
    return _rmsnorm(d_model, eps, weights["weight"], in_features)


def run_gelu(in_features: Any) -> Any:
    """Return GELU(x), the exact one."""
    return call(lambda x: tg.gelu(x, approximate="none"), in_features)
