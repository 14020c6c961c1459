"""Models in folders of transformers, against transformers: the same logits and the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.models.generation import generate
from tensorgrad.models.pretrained import from_pretrained, save_pretrained

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}
GPT2 = {
    "vocab_size": 101, "n_positions": 128, "n_embd": 48, "n_layer": 3, "n_head": 4,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
QWEN2 = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "smollm": ("LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    "llama-2": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama-3": ("LlamaForCausalLM", {**SIZES, "rope_parameters": LLAMA3}),
    "llama-linear": ("LlamaForCausalLM", {**SIZES, "rope_parameters": LINEAR}),
    "llama-biases": ("LlamaForCausalLM", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {**SIZES, "sliding_window": 8, "head_dim": 16}),
    "qwen-2": ("Qwen2ForCausalLM", SIZES),
    "qwen-2-windows": ("Qwen2ForCausalLM", {**SIZES, **QWEN2, "tie_word_embeddings": True}),
    "qwen-3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 16}),
}


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_greedy_text_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    name, sizes = MODELS[kind]
    torch.manual_seed(0)
    make = getattr(transformers, name)
    theirs = make(make.config_class(**sizes)).eval()
    for parameter in theirs.parameters():  # biases and norms too, which begin as 0 and 1
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    x = np.random.default_rng(0).integers(0, 101, (2, 100))

    def logits(model: Any) -> Any:
        with torch.no_grad():
            return model(torch.from_numpy(x)).logits.numpy()

    ours, expected = from_pretrained(tmp_path / "theirs"), logits(theirs)
    assert np.abs(ours(x).numpy() - expected).max() < 1e-5 * np.abs(expected).max()
    prompt = x[:1, :20]
    text = theirs.generate(torch.from_numpy(prompt), max_new_tokens=50, do_sample=False)
    assert generate(ours, prompt[0], 50, temperature=0) == text[0, 20:].tolist()

    save_pretrained(ours, tmp_path / "ours", max_file_bytes=60_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(theirs)
    np.testing.assert_array_equal(logits(again), expected)
