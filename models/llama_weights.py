"""Llama, Mistral and Qwen as Hugging Face transformers stores them: see architecture.py.

All are a TransformerLM and have the same names; they differ in biases, windows, norms of queries
and keys, and in the defaults of config.json. SmolLM is a Llama. Queries, keys and values are three
matrices there and one here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from tensorgrad import nn
from tensorgrad.models.architecture import Architecture, PublishedSettings, StoredArray
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig

__all__ = ["LLAMA_ARCHITECTURES"]

_SIZES = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "hidden_size": "width",
    "intermediate_size": "hidden",
}
# The values that are supported, the default first.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
}
# The same for entries where an architecture has none of them.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
}
# Entries of other kinds of scaling, which these do not read.
_OTHER_ROPE = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "short_factor", "long_factor"),
    *("mscale", "mscale_all_dim", "truncate"),
)
# The defaults of transformers, where config.json has no such entry.
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_WINDOW, _FULL_LAYERS, _HEAD_WIDTH = 4096, 28, {"qwen3": 128}


def _read(kind: str, name: str, theirs: PublishedSettings) -> TransformerLMConfig:
    theirs.only(_FIXED)
    sizes = {ours: theirs.integer(key) for key, ours in _SIZES.items()}
    attention_bias = kind in ("llama", "qwen3") and theirs.boolean("attention_bias", False)
    window, window_from = _windows(kind, theirs, sizes["layers"])
    rope_base, rope_scaling = _rope(theirs, sizes["context"])
    kv_heads = sizes["heads"]
    if "num_key_value_heads" not in theirs.values:
        kv_heads = _KV_HEADS.get(kind, kv_heads)
    config = TransformerLMConfig(
        **sizes,
        kv_heads=theirs.integer("num_key_value_heads", kv_heads),
        head_width=theirs.integer("head_dim", _HEAD_WIDTH.get(kind)),
        attention_dropout=theirs.number("attention_dropout", 0.0),
        tied=theirs.boolean("tie_word_embeddings", False),
        rope_base=rope_base,
        rope_scaling=rope_scaling,
        window=window,
        window_from=window_from,
        norm_eps=theirs.number("rms_norm_eps", 1e-6),
        qkv_bias=attention_bias or kind == "qwen2",
        proj_bias=attention_bias,
        feed_forward_bias=kind == "llama" and theirs.boolean("mlp_bias", False),
        qk_norm=kind == "qwen3",
    )
    theirs.check_all_known(name, _ABSENT)
    return config


def _windows(kind: str, theirs: PublishedSettings, layers: int) -> tuple[int | None, int]:
    """Return the window of tokens, and the first block that has it."""
    types, window, first = theirs.names("layer_types"), None, 0
    if kind != "llama":
        default = None if "sliding_window" in theirs.values else _WINDOW
        window = theirs.integer("sliding_window", default)
    if kind.startswith("qwen"):
        first = min(theirs.integer("max_window_layers", _FULL_LAYERS), layers)
        if not theirs.boolean("use_sliding_window", False):
            window = None
    full, sliding = "full_attention", "sliding_attention"
    if types is not None:
        if kind.startswith("qwen") and window is not None:
            first = types.index(sliding) if sliding in types else len(types)
        before = layers if window is None else first
        if len(types) != layers or types != [full] * before + [sliding] * (layers - before):
            theirs.refuse("layer_types", f"{layers} of {full!r} or {sliding!r}, in this order")
    return (None, 0) if window is None or first >= layers else (window, first)


def _rope(theirs: PublishedSettings, context: int) -> tuple[float, nn.RopeScaling | None]:
    """Return the base of the rotary angles, and their scaling."""
    # `rope_parameters` since transformers 5; before, `rope_theta` beside `rope_scaling`, which it
    # prefers if both are there.
    parts = [theirs.part(key) for key in ("rope_scaling", "rope_parameters")]
    base = theirs.number("rope_theta", 10000.0)
    original = theirs.integer("original_max_position_embeddings", None)
    found = next((part for part in parts if part is not None and part.values), None)
    if found is None:
        return base, None
    base = found.number("rope_theta", base)
    found.only({"partial_rotary_factor": (1.0, None)})
    key = "rope_type" if "rope_type" in found.values else "type"
    kind = found.values.get(key, "default")
    found.ignore("rope_type", "type", *_OTHER_ROPE)
    found.check_known()
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, nn.RopeScaling("linear", found.number("factor"))
    if kind != "llama3":
        found.refuse(key, "'default', 'linear' or 'llama3'")
    if original is None:  # beside the part it counts more
        original = found.integer("original_max_position_embeddings", context)
    return base, nn.RopeScaling(
        "llama3",
        found.number("factor"),
        low_freq_factor=found.number("low_freq_factor"),
        high_freq_factor=found.number("high_freq_factor"),
        original_context=original,
    )


def _write(kind: str, config: TransformerLMConfig) -> dict[str, Any]:
    dropout = config.dropout if config.attention_dropout is None else config.attention_dropout
    values = {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}
    values |= {
        "intermediate_size": config.hidden_width,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.width_of_head,
        "hidden_act": "silu",
        "attention_dropout": dropout,
        "tie_word_embeddings": config.tied,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
    }
    scaling = config.rope_scaling
    if scaling is not None:
        values["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        values["rope_scaling"] |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    if kind in ("llama", "qwen3"):
        values["attention_bias"] = config.qkv_bias
    if kind == "llama":
        values["mlp_bias"] = config.feed_forward_bias
    else:
        values["sliding_window"] = config.window
    if kind.startswith("qwen"):
        values["use_sliding_window"] = config.window is not None
        values["max_window_layers"] = config.window_from
    return values


def _stored(config: TransformerLMConfig) -> Iterator[StoredArray]:
    """Yield the arrays, block by block."""
    width, hidden, head = config.width, config.hidden_width, config.width_of_head
    queries, keys = config.heads * head, config.kv_heads * head
    yield StoredArray("embed_tokens.weight", "tokens.weight", (config.vocab_size, width))
    yield StoredArray("norm.weight", "norm.weight", (width,))
    if not config.tied:
        yield StoredArray("lm_head.weight", "output.weight", (config.vocab_size, width))
    # Theirs, ours, the first of our rows, and the shape of the weight.
    linears = (
        ("self_attn.q_proj", "attention.qkv", 0, (queries, width), config.qkv_bias),
        ("self_attn.k_proj", "attention.qkv", queries, (keys, width), config.qkv_bias),
        ("self_attn.v_proj", "attention.qkv", queries + keys, (keys, width), config.qkv_bias),
        ("self_attn.o_proj", "attention.proj", 0, (width, queries), config.proj_bias),
        ("mlp.gate_proj", "feed_forward.gate", 0, (hidden, width), config.feed_forward_bias),
        ("mlp.up_proj", "feed_forward.up", 0, (hidden, width), config.feed_forward_bias),
        ("mlp.down_proj", "feed_forward.down", 0, (width, hidden), config.feed_forward_bias),
    )
    norms = [("input_layernorm", "norm1", width), ("post_attention_layernorm", "norm2", width)]
    if config.qk_norm:
        norms.append(("self_attn.q_norm", "attention.q_norm", head))
        norms.append(("self_attn.k_norm", "attention.k_norm", head))
    for number in range(config.layers):
        theirs, ours = f"layers.{number}", f"blocks.{number}"
        for name, own, size in norms:
            yield StoredArray(f"{theirs}.{name}.weight", f"{ours}.{own}.weight", (size,))
        for name, own, start, shape, bias in linears:
            yield StoredArray(f"{theirs}.{name}.weight", f"{ours}.{own}.weight", shape, start)
            if bias:
                yield StoredArray(f"{theirs}.{name}.bias", f"{ours}.{own}.bias", shape[:1], start)


def _architecture(name: str, kind: str) -> Architecture:
    return Architecture(
        name=name,
        model_type=kind,
        model=TransformerLM,
        config=TransformerLMConfig,
        prefix="model.",
        tokens="embed_tokens.weight",
        ignored=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),  # in old files
        read=partial(_read, kind, name),
        write=partial(_write, kind),
        stored=_stored,
    )


# The first that has all settings of a model is the one that it is written as.
LLAMA_ARCHITECTURES = (
    _architecture("LlamaForCausalLM", "llama"),
    _architecture("MistralForCausalLM", "mistral"),
    _architecture("Qwen2ForCausalLM", "qwen2"),
    _architecture("Qwen3ForCausalLM", "qwen3"),
)
