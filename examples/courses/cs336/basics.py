"""Adapters of CS336's assignment 1, 2025. In its tests, `adapters.py` becomes

from cs336.basics import *
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorgrad as tg
from cs336 import bpe, layers, training
from cs336.bridge import call, call_with_weights

__all__ = [
    "get_adamw_cls",
    "get_tokenizer",
    "run_cross_entropy",
    "run_embedding",
    "run_get_batch",
    "run_get_lr_cosine_schedule",
    "run_gradient_clipping",
    "run_linear",
    "run_load_checkpoint",
    "run_multihead_self_attention",
    "run_multihead_self_attention_with_rope",
    "run_rmsnorm",
    "run_rope",
    "run_save_checkpoint",
    "run_scaled_dot_product_attention",
    "run_silu",
    "run_softmax",
    "run_swiglu",
    "run_train_bpe",
    "run_transformer_block",
    "run_transformer_lm",
]


def run_linear(d_in: int, d_out: int, weights: Any, in_features: Any) -> Any:
    """Return x W^T."""
    return call(tg.linear, in_features, weights)


def run_embedding(vocab_size: int, d_model: int, weights: Any, token_ids: Any) -> Any:
    """Return the row of the weights for each id."""
    return call(tg.embedding, weights, token_ids)


def run_swiglu(
    d_model: int, d_ff: int, w1_weight: Any, w2_weight: Any, w3_weight: Any, in_features: Any
) -> Any:
    """Return w2 (silu(w1 x) * w3 x)."""
    weights = {"w1.weight": w1_weight, "w2.weight": w2_weight, "w3.weight": w3_weight}
    return call_with_weights(layers.swiglu, weights, in_features)


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
) -> Any:
    """Return causal attention of several heads."""
    weights = _projections(q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    return call_with_weights(
        lambda x, w: layers.self_attention(x, w, num_heads), weights, in_features
    )


def run_multihead_self_attention_with_rope(
    d_model: int,
    num_heads: int,
    max_seq_len: int,
    theta: float,
    q_proj_weight: Any,
    k_proj_weight: Any,
    v_proj_weight: Any,
    o_proj_weight: Any,
    in_features: Any,
    token_positions: Any = None,
) -> Any:
    """Return causal attention of several heads, with rotated queries and keys."""
    weights = _projections(q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    return call_with_weights(
        lambda x, w, positions: layers.self_attention(x, w, num_heads, theta, positions),
        weights,
        in_features,
        token_positions,
    )


def _projections(q: Any, k: Any, v: Any, output: Any) -> dict[str, Any]:
    parts = {"q": q, "k": k, "v": v, "output": output}
    return {f"{name}_proj.weight": weight for name, weight in parts.items()}


def run_rope(
    d_k: int, theta: float, max_seq_len: int, in_query_or_key: Any, token_positions: Any
) -> Any:
    """Return x with neighbours rotated by their positions."""
    return call(
        lambda x, positions: layers.rope(x, positions, theta), in_query_or_key, token_positions
    )


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
    return call_with_weights(
        lambda x, w: layers.block(x, w, num_heads, theta), weights, in_features
    )


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
    return call_with_weights(
        lambda ids, w: layers.language_model(ids, w, num_layers, num_heads, rope_theta),
        weights,
        in_indices,
    )


def run_rmsnorm(d_model: int, eps: float, weights: Any, in_features: Any) -> Any:
    """Return x over its root mean square, times the weights."""
    return call(lambda x, weight: tg.rms_norm(x, weight, eps), in_features, weights)


def run_silu(in_features: Any) -> Any:
    """Return x sigmoid(x)."""
    return call(tg.silu, in_features)


def run_softmax(in_features: Any, dim: int) -> Any:
    """Return exp(x) over its sum along an axis."""
    return call(lambda x: tg.softmax(x, axis=dim), in_features)


def run_cross_entropy(inputs: Any, targets: Any) -> Any:
    """Return the mean cross-entropy."""
    return call(tg.cross_entropy, inputs, targets)


def run_get_batch(dataset: Any, batch_size: int, context_length: int, device: str) -> Any:
    """Return inputs and targets from uniform places of a text."""
    return training.get_batch(dataset, batch_size, context_length, device)


def run_gradient_clipping(parameters: Iterable[Any], max_l2_norm: float) -> None:
    """Scale the gradients in place, to a total norm of at most max_l2_norm."""
    training.clip_gradients(parameters, max_l2_norm)


def get_adamw_cls() -> type:
    """Return an optimizer class of PyTorch that steps with tensorgrad's AdamW."""
    return training.AdamW


def run_get_lr_cosine_schedule(
    it: int,
    max_learning_rate: float,
    min_learning_rate: float,
    warmup_iters: int,
    cosine_cycle_iters: int,
) -> float:
    """Return the learning rate of an iteration."""
    return training.cosine_schedule(
        it, max_learning_rate, min_learning_rate, warmup_iters, cosine_cycle_iters
    )


def run_save_checkpoint(model: Any, optimizer: Any, iteration: int, out: training.File) -> None:
    """Write a model, an optimizer and the number of iterations."""
    training.save_checkpoint(model, optimizer, iteration, out)


def run_load_checkpoint(src: training.File, model: Any, optimizer: Any) -> int:
    """Load a model and an optimizer; return the number of iterations."""
    return training.load_checkpoint(src, model, optimizer)


def get_tokenizer(
    vocab: Mapping[int, bytes],
    merges: Sequence[bpe.Pair],
    special_tokens: Sequence[str] | None = None,
) -> bpe.CourseTokenizer:
    """Return a tokenizer with `encode`, `encode_iterable` and `decode`."""
    return bpe.CourseTokenizer(vocab, merges, special_tokens)


def run_train_bpe(
    input_path: str | os.PathLike[str],
    vocab_size: int,
    special_tokens: Sequence[str],
    **kwargs: Any,
) -> tuple[dict[int, bytes], list[bpe.Pair]]:
    """Return the vocabulary and the merges of a text."""
    return bpe.train(input_path, vocab_size, special_tokens)
