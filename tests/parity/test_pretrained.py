"""Models in folders of transformers, against transformers: the same logits and the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.data import PublishedTokenizer, Tokenizer
from tensorgrad.errors import CheckpointError
from tensorgrad.models.generation import generate
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.pretrained import from_pretrained, save_pretrained
from tests.data.test_published_tokenizer import (
    MESSAGES,
    TEXT,
    byte_level,
    gpt2_words,
    sentence_piece,
    write,
)

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
GPT2_SIZES = {
    "vocab_size": 101, "n_positions": 128, "n_embd": 48, "n_layer": 3, "n_head": 4,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
QWEN2 = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2_SIZES),
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


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_tokens_and_conversations_are_those_of_transformers(make: Any, tmp_path: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(write(tmp_path, make()))
    ours = PublishedTokenizer.load(tmp_path)
    for text in (*TEXT[:1], "Größe\t<|im_start|>x </s> 世界 \U0001f600", "", "  \n\n 1234567"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        for part in (ids, ids[1:]):
            assert ours.decode(part) == theirs.decode(part)
            assert ours.decode(part, True) == theirs.decode(part, skip_special_tokens=True)
    found = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(MESSAGES) == found


@pytest.mark.parametrize("prefix", [None, True, False])
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "GPT2TokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("make", [lambda: gpt2_words(False), lambda: gpt2_words(True), byte_level])
def test_a_space_before_a_text_is_that_of_transformers(
    make: Any, kind: str, prefix: bool | None, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {} if prefix is None else {"add_prefix_space": prefix}
    write(tmp_path, make(), **{"tokenizer_config.json": json.dumps(settings)})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = PublishedTokenizer.load(tmp_path)
    for text in ("the cat", " the cat", "the </s> cat"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)


def test_an_exported_model_writes_the_same_text_in_transformers(tmp_path: Path) -> None:
    own = Tokenizer.train(TEXT, 300)
    model = GPT2(GPT2Config(own.vocab_size, 64, layers=2, heads=2, width=32))
    for parameter in model.parameters():
        parameter.data *= 4
    save_pretrained(model, tmp_path)
    PublishedTokenizer.of(own).save(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    prompt = tokenizer("the cat", return_tensors="pt")
    text = theirs.generate(**prompt, max_new_tokens=30, do_sample=False, pad_token_id=0)
    ids = generate(model, own.encode("the cat"), 30, temperature=0, stop_tokens=own.end_tokens)
    assert tokenizer.decode(text[0], skip_special_tokens=True) == "the cat" + own.decode(ids)


KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**GPT2_SIZES, "n_layer": 2}),
    "llama": ("LlamaForCausalLM", {**SIZES, "num_hidden_layers": 2}),
    "mistral": ("MistralForCausalLM", {**SIZES, "num_hidden_layers": 2, "sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, **QWEN2, "num_hidden_layers": 2}),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, **QWEN2, "num_hidden_layers": 2, "head_dim": 16}),
}
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = [[FULL, FULL], [SLIDING, SLIDING], [FULL, SLIDING], [SLIDING, FULL]]
ROPE = [{}, {"type": "linear", "factor": 2.0}, {"rope_theta": 50.0}, LLAMA3, {"rope_type": "yarn"}]
# Other values of entries, which may be missing. The rest gets one of its type.
OTHER: dict[str, list[Any]] = {
    "activation_function": ["gelu_pytorch_tanh", "gelu_fast", "gelu", "relu"],
    "architectures": [None, ["Other"]],
    "attention_dropout": [0.5],
    "hidden_act": ["swish", "gelu"],
    "is_causal": [False],
    "layer_types": WINDOWS,
    "n_inner": [192, 96],
    "original_max_position_embeddings": [16],
    "partial_rotary_factor": [0.5],
    "per_layer_config": [{"0": {"rms_norm_eps": 0.1}}],
    "rope_parameters": ROPE,
    "rope_scaling": ROPE,
    "rope_theta": [300.0],
    "sliding_window": [None, 4, 200],
    "unknown": [1],
}
NOT_CHANGED = {"model_type", "dtype", "transformers_version", "id2label", "label2id"}
# Settings that change no logit, and must be read.
READ = {
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"),
    *("output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward"),
}


def others(key: str, value: Any) -> list[Any]:
    """Return other values of an entry of a config.json."""
    if key in OTHER:
        return OTHER[key]
    if isinstance(value, bool):
        return [not value]
    return [value + 1] if isinstance(value, int | float) else [1, True]


@pytest.mark.parametrize("kind", KEYS)
def test_a_changed_entry_of_a_config_gives_the_logits_of_transformers_or_an_error(
    kind: str, tmp_path: Path
) -> None:
    name, sizes = KEYS[kind]
    torch.manual_seed(0)
    make = getattr(transformers, name)
    model = make(make.config_class(**sizes))
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    x = np.random.default_rng(0).integers(0, 101, (2, 40))
    compared = set()
    known = {**model.config.to_dict(), **values}
    for key in sorted({**known, **OTHER}.keys() - NOT_CHANGED):
        for value in others(key, known.get(key)):
            path.write_text(json.dumps({**values, key: value}))
            try:
                ours = from_pretrained(tmp_path)
            except CheckpointError:
                continue
            compared.add(key)
            try:
                theirs = make.from_pretrained(tmp_path, dtype="float32")
                with torch.no_grad():
                    expected = theirs(torch.from_numpy(x)).logits.numpy()
            except Exception:  # it does not accept the value
                continue
            error = np.abs(ours(x).numpy() - expected).max()
            assert error < 2e-5 * np.abs(expected).max(), {key: value}
    assert compared >= READ
    assert "is_causal" not in compared
