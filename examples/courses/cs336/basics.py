"""Adapters of CS336's assignment 1, 2025. In its tests, `adapters.py` becomes

from cs336.basics import *
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import tensorgrad as tg
from cs336 import layers
from cs336.bpe import CourseTokenizer as get_tokenizer
from cs336.bpe import train as run_train_bpe
from cs336.bridge import call
from cs336.training import AdamW
from cs336.training import clip_gradients as run_gradient_clipping
from cs336.training import cosine_schedule as run_get_lr_cosine_schedule
from cs336.training import get_batch as run_get_batch
from cs336.training import load_checkpoint as run_load_checkpoint
from cs336.training import save_checkpoint as run_save_checkpoint

__all__ = [
    "get_adamw_cls", "get_tokenizer", "run_cross_entropy", "run_embedding", "run_get_batch",
    "run_get_lr_cosine_schedule", "run_gradient_clipping", "run_linear", "run_load_checkpoint",
    "run_multihead_self_attention", "run_multihead_self_attention_with_rope", "run_rmsnorm",
    "run_rope", "run_save_checkpoint", "run_scaled_dot_product_attention", "run_silu",
    "run_softmax", "run_swiglu", "run_train_bpe", "run_transformer_block", "run_transformer_lm",
]  # fmt: skip


def get_adamw_cls() -> type:
    """Return an optimizer class of PyTorch that steps with tensorgrad's AdamW."""
    return AdamW


def run_linear(d_in: int, d_out: int, weights: Any, in_features: Any) -> Any:
    """Return x W^T."""
    return call(tg.linear, in_features, weights)


def run_embedding(vocab_size: int, d_model: int, weights: Any, token_ids: Any) -> Any:
    """Return the row of the weights for each id."""
    return call(tg.embedding, weights, token_ids)


def run_rmsnorm(d_model: int, eps: float, weights: Any, in_features: Any) -> Any:
    """Return x over its root mean square, times the weights."""
    return call(partial(tg.rms_norm, eps=eps), in_features, weights)


def run_silu(in_features: Any) -> Any:
    """Return x sigmoid(x)."""
    return call(tg.silu, in_features)


def run_softmax(in_features: Any, dim: int) -> Any:
    """Return exp(x) over its sum along an axis."""
    return call(tg.softmax, in_features, dim)


def run_cross_entropy(inputs: Any, targets: Any) -> Any:
    """Return the mean cross-entropy."""
    return call(tg.cross_entropy, inputs, targets)


def run_swiglu(
    d_model: int, d_ff: int, w1_weight: Any, w2_weight: Any, w3_weight: Any, in_features: Any
) -> Any:
    """Return w2 (silu(w1 x) * w3 x)."""
    weights = {"w1.weight": w1_weight, "w2.weight": w2_weight, "w3.weight": w3_weight}
    return call(layers.swiglu, in_features, weights)


def run_rope(
    d_k: int, theta: float, max_seq_len: int, in_query_or_key: Any, token_positions: Any
) -> Any:
    """Return x with neighbours rotated by their positions."""
    return call(layers.rope, in_query_or_key, token_positions, theta)


def run_scaled_dot_product_attention(Q: Any, K: Any, V: Any, mask: Any = None) -> Any:
    """Return softmax(Q K^T / sqrt(D)) V."""
    return call(layers.attention, Q, K, V, mask)


def run_multihead_self_attention(
    d_model: int,
    num_heads: int,
    q_proj_weight: Any,
    k_proj_weight: Any,
    v_proj_weight: Any,
    o_proj_weight: Any,
    in_features: Any,
    token_positions: Any = None,
    *,
    theta: float | None = None,
) -> Any:
    """Return causal attention of several heads; theta rotates queries and keys."""
    weights = {
        "q_proj.weight": q_proj_weight,
        "k_proj.weight": k_proj_weight,
        "v_proj.weight": v_proj_weight,
        "output_proj.weight": o_proj_weight,
    }
    return call(layers.self_attention, in_features, weights, num_heads, theta, token_positions)


def run_multihead_self_attention_with_rope(
    d_model: int, num_heads: int, max_seq_len: int, theta: float, *args: Any, **kwargs: Any
) -> Any:
    """Return causal attention of several heads, with rotated queries and keys."""
    return run_multihead_self_attention(d_model, num_heads, *args, theta=theta, **kwargs)


def run_transformer_block(
    d_model: int,
    num_heads: int,
    d_ff: int,
    max_seq_len: int,
    theta: float,
    weights: Mapping[str, Any],
    in_features: Any,
) -> Any:
    """Return the output of a pre-norm block."""
    return call(layers.block, in_features, weights, num_heads, theta)


def run_transformer_lm(
    vocab_size: int,
    context_length: int,
    d_model: int,
    num_layers: int,
    num_heads: int,
    d_ff: int,
    rope_theta: float,
    weights: Mapping[str, Any],
    in_indices: Any,
) -> Any:
    """Return the logits of a language model."""
    return call(layers.language_model, in_indices, weights, num_layers, num_heads, rope_theta)
