"""The FLOPs of training, against the parameters that multiply a token."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tensorgrad import nn
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.sentiment import (
    MeanClassifier,
    MeanConfig,
    TransformerClassifier,
    TransformerConfig,
)
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig


def matrices(module: nn.Module, prefix: str = "") -> int:
    """Return the elements of the matrices whose names begin so."""
    found = module.named_parameters()
    return sum(p.size for name, p in found if p.ndim == 2 and name.startswith(prefix))


@pytest.mark.parametrize("hidden", [None, 40])
def test_gpt2(hidden: int | None) -> None:
    sizes = {"vocab_size": 60, "context": 16, "layers": 3, "heads": 4, "width": 24}
    config = GPT2Config(**sizes, vocab_multiple=64, hidden=hidden)
    model = GPT2(config)
    assert config.parameters == sum(parameter.size for parameter in model.parameters())
    products = matrices(model, "blocks") + matrices(model, "tokens")
    assert config.training_flops() == 3 * (2 * products + 3 * 2 * 16 * 24)


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_with_grouped_keys(tied: bool) -> None:
    config = TransformerLMConfig(
        60, context=16, layers=3, heads=4, kv_heads=2, width=24, hidden=40, tied=tied
    )
    model = TransformerLM(config)
    blocks, head = matrices(model, "blocks"), 60 * 24
    assert config.training_flops() == 3 * (2 * (blocks + head) + 3 * 4 * 24 * 8)
    assert config.training_flops(keys=5, targets=0.25) == pytest.approx(
        3 * (2 * (blocks + head / 4) + 3 * 4 * 24 * 5)
    )


@pytest.mark.parametrize("layers", [0, 2])
def test_the_mean_of_word_vectors_multiplies_a_text_once(layers: int) -> None:
    config = MeanConfig(vocab_size=60, width=24, layers=layers, hidden=10)
    widths = [24] + [10] * layers + [2]
    products = sum(a * b for a, b in pairwise(widths))
    assert products == matrices(MeanClassifier(config)) - 60 * 24
    assert config.training_flops(9, 9) == config.training_flops(90, 90) == 3 * 2 * products


def test_a_transformer_classifier_attends_in_both_directions() -> None:
    config = TransformerConfig(vocab_size=60, width=24, context=16, layers=3, heads=4)
    blocks = matrices(TransformerClassifier(config), "blocks")
    attention = 3 * 4 * 24 * 11
    assert config.training_flops(9, 11) == 3 * (9 * (2 * blocks + attention) + 2 * 24 * 2)
