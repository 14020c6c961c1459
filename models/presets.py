"""The language models by name, and the sizes of published and of small ones.

Tests: tests/train/test_task.py.
"""

from __future__ import annotations

from typing import Any

from tensorgrad.models import gpt2
from tensorgrad.models.gpt2 import GPT2
from tensorgrad.models.language_model import LanguageModel, model_of
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.nn import RopeScaling

__all__ = ["MODELS", "PRESETS", "SIZES", "model_name"]

MODELS: dict[str, type[LanguageModel]] = {"gpt2": GPT2, "transformer-lm": TransformerLM}

# Sizes for any model, which takes those that its config has.
SIZES: dict[str, dict[str, int]] = {
    # Small enough for two CPU cores and a few minutes.
    "small": {
        "vocab_size": 1024, "context": 128, "layers": 2, "heads": 4, "kv_heads": 4, "width": 192,
    },
    # The characters of nanoGPT: a token for each byte, and no merges.
    "char": {
        "vocab_size": 257, "context": 256, "layers": 6, "heads": 6, "kv_heads": 6, "width": 384,
    },
}  # fmt: skip

# The configs of models, which their classes know.
PRESETS: dict[str, Any] = {
    **gpt2.PRESETS,
    # The layers, width and vocabulary of GPT-2 124M in a Llama's blocks.
    "llama-124M": TransformerLMConfig(
        50304, context=1024, layers=12, heads=12, kv_heads=4, width=768, hidden=2048
    ),
    # Grattafiori et al. 2024, arXiv:2407.21783; the 1B model of Llama 3.2, with its tied head.
    "llama-1B": TransformerLMConfig(
        128256,
        context=131072,
        layers=16,
        heads=32,
        kv_heads=8,
        width=2048,
        hidden=8192,
        rope_base=500000.0,
        rope_scaling=RopeScaling(
            "llama3", 32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
        ),
        norm_eps=1e-5,
    ),
    # Yang et al. 2025, arXiv:2505.09388.
    "qwen3-0.6B": TransformerLMConfig(
        151936,
        context=40960,
        layers=28,
        heads=16,
        kv_heads=8,
        width=1024,
        hidden=3072,
        head_width=128,
        rope_base=1000000.0,
        qk_norm=True,
    ),
}


def model_name(config: Any) -> str:
    """Return the name in MODELS of the model whose sizes a config is.

    Args:
        config: the sizes of a model.

    Returns:
        The name; "" for other models.

    Example:
        >>> from tensorgrad.models.presets import model_name
        >>> model_name(tg.models.GPT2Config())
        'gpt2'
    """
    kind = model_of(config)
    return next((name for name, model in MODELS.items() if model is kind), "")
