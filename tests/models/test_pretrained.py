from __future__ import annotations

import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad import nn
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.io.weights import ArrayFile, load_arrays, save_arrays
from tensorgrad.models.architecture import PublishedSettings
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.pretrained import ARCHITECTURES as ARCHITECTURE_TYPES
from tensorgrad.models.pretrained import (
    _files_of,
    from_pretrained,
    is_pretrained,
    pretrained_folder,
    save_pretrained,
)
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.nn import RopeScaling
from tests.disk import full_disk

CONFIG = GPT2Config(vocab_size=23, context=9, layers=2, heads=2, width=8)
LLAMA = TransformerLMConfig(23, 16, 2, 4, 2, 16, 24, tied=False)
# Settings that make a model another architecture than Llama, and what each of them may have.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "rope_base": 5e5,
        "rope_scaling": RopeScaling(
            "llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8
        ),
        "tied": True,
        "qkv_bias": True,
        "proj_bias": True,
        "feed_forward_bias": True,
    },
    "MistralForCausalLM": {"window": 4, "head_width": 6, "norm_eps": 1e-5},
    "Qwen2ForCausalLM": {"qkv_bias": True, "window": 4, "window_from": 1},
    "Qwen3ForCausalLM": {"qk_norm": True, "rope_scaling": RopeScaling("linear", 2.5)},
}
TOKENS = np.random.default_rng(0).integers(0, 23, (2, 9))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_pretrained(GPT2(CONFIG), tmp_path / "model")
    return tmp_path / "model"


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    if path.suffix == ".json":
        values = json.loads(path.read_text())
        edit(values)
        path.write_text(json.dumps(values))
    else:
        arrays: dict[str, Any] = dict(load_arrays(path))
        edit(arrays)
        save_arrays(path, arrays)


@pytest.mark.parametrize(("vocab_multiple", "hidden"), [(1, None), (8, None), (1, 12)])
def test_weights_come_back_as_they_were(
    tmp_path: Path, vocab_multiple: int, hidden: int | None
) -> None:
    model = GPT2(GPT2Config(23, 9, 2, 2, 8, vocab_multiple=vocab_multiple, hidden=hidden))
    save_pretrained(model, tmp_path)
    for multiple in (1, 8):
        loaded = from_pretrained(tmp_path, vocab_multiple=multiple)
        sizes = {"vocab_multiple": multiple, "hidden": hidden}
        assert loaded.config == GPT2Config(23, 9, 2, 2, 8, **sizes)  # type: ignore[arg-type]
        np.testing.assert_allclose(loaded(TOKENS).numpy(), model(TOKENS).numpy(), atol=1e-6)


def test_names_and_shapes_are_those_of_transformers(folder: Path) -> None:
    arrays = load_arrays(folder / "model.safetensors")
    assert arrays["transformer.wte.weight"].shape == (23, 8)
    assert arrays["transformer.h.1.attn.c_attn.weight"].shape == (8, 24)
    assert arrays["transformer.h.0.mlp.c_proj.weight"].shape == (32, 8)
    assert arrays["transformer.ln_f.bias"].shape == (8,)
    assert len(arrays) == 2 + 2 * 12 + 2


def test_a_config_of_other_weights_is_refused(folder: Path) -> None:
    """Four heads fit the shapes of two: nothing else would notice."""
    change(folder / "config.json", lambda values: values.update(n_head=4))
    with pytest.raises(CheckpointError, match=r"\"n_head\": 2.*the header of model.safetensors"):
        from_pretrained(folder)


def test_the_written_text_is_indented_and_the_header_names_the_sizes(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    assert text.startswith('{\n  "architectures": [\n    "GPT2LMHeadModel"\n  ],\n  "model_type')
    assert text.endswith('  "torch_dtype": "float32"\n}\n')
    values = json.loads(text)
    with ArrayFile(folder / "model.safetensors") as file:
        (written,) = [v for v in file.metadata.values() if v.startswith("{")]
    header = json.loads(written)
    assert header == {key: value for key, value in values.items() if type(value) is int}
    assert header["n_head"] == 2


def test_headers_that_do_not_fit_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model.safetensors"
    arrays = dict(load_arrays(path))
    with ArrayFile(path) as file:
        (key,) = [key for key, value in file.metadata.items() if value.startswith("{")]
    save_arrays(path, arrays, {"format": "pt"})
    assert from_pretrained(folder).config == CONFIG
    for header, message in (
        ("[", r"the header of .*model\.safetensors cannot be read as JSON"),
        ('{"n_head": 3}', r"""config\.json has {"n_head": 2}, expected {"n_head": 3}, the sizes"""),
    ):
        save_arrays(path, arrays, {key: header})
        with pytest.raises(CheckpointError, match=message):
            from_pretrained(folder)
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 1}.get)
    save_arrays(path, arrays)
    with pytest.raises(CheckpointError, match=r"config\.json: the model has .* parameters, which"):
        from_pretrained(folder)


def test_what_cannot_be_read_or_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"save_pretrained: cannot write .*file/x: .*Not a d"):
        save_pretrained(GPT2(CONFIG), tmp_path / "file" / "x")
    with pytest.raises(ArgumentError, match="max_file_bytes is 0, expected 1 or more"):
        save_pretrained(GPT2(CONFIG), tmp_path / "x", max_file_bytes=0)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text("[")
    with pytest.raises(CheckpointError, match=r"index\.json: .*cannot be read as JSON"):
        from_pretrained(folder)
    index.unlink()
    index.mkdir()
    with pytest.raises(CheckpointError, match=r"from_pretrained: .*index\.json: "):
        from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json: No such file"):
        from_pretrained(folder)


def test_a_folder_is_pretrained_by_its_files(folder: Path, tmp_path: Path) -> None:
    assert is_pretrained(str(folder))
    (folder / "model.safetensors").rename(folder / "model.safetensors.index.json")
    assert is_pretrained(folder)
    (folder / "model.safetensors.index.json").rename(folder / "x.safetensors")
    assert not is_pretrained(folder)
    (folder / "x.pt").write_bytes(b"PK")
    assert is_pretrained(folder)
    (folder / "config.json").unlink()
    assert not is_pretrained(folder)
    assert not is_pretrained(tmp_path / "none")
    assert pretrained_folder(folder) == folder


def test_a_part_of_a_model_is_not_saved(tmp_path: Path) -> None:
    model = GPT2(CONFIG)
    block: Any = model.blocks[0]
    block.attention.qkv = nn.Linear(8, 12)
    with pytest.raises(
        ArgumentError, match=r"has shape \(8, 12\) for .*expected \(8, 24\): the who"
    ):
        save_pretrained(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_files_of_older_versions_are_read(folder: Path) -> None:
    def edit(arrays: dict[str, Any]) -> None:
        for name in list(arrays):
            arrays[name.removeprefix("transformer.")] = arrays.pop(name)
        arrays["h.0.attn.bias"] = np.ones((1, 1, 9, 9), np.bool_)
        arrays["h.0.attn.masked_bias"] = np.ones((), np.float32)
        arrays["lm_head.weight"] = arrays["wte.weight"]

    expected = from_pretrained(folder)(TOKENS).numpy()
    change(folder / "model.safetensors", edit)
    np.testing.assert_array_equal(from_pretrained(folder)(TOKENS).numpy(), expected)


def test_weights_are_converted(folder: Path) -> None:
    assert {str(p.dtype) for p in from_pretrained(folder, "bfloat16").parameters()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        ("config.json", lambda v: v.update(activation_function="relu"), "activation_function is"),
        ("config.json", lambda v: v.update(n_inner=0), "hidden is 0, expected 1 or more"),
        ("config.json", lambda v: v.pop("n_embd"), "n_embd"),
        ("config.json", lambda v: v.update(n_head=3), "expected a multiple of heads"),
        ("config.json", lambda v: v.update(n_positions=10), r"wpe\.weight has shape \(9, 8\)"),
        ("config.json", lambda v: v.update(vocab_size=20), r"wte\.weight has shape \(23, 8\)"),
        ("config.json", lambda v: v.update(vocab_size=30), r"wte\.weight has shape \(23, 8\)"),
        (
            "model.safetensors",
            lambda v: v.update({"transformer.wte.weight": np.ones(3, np.float32)}),
            r"wte\.weight has shape \(3,\), expected \(23, 8\)",
        ),
        (
            "model.safetensors",
            lambda v: v.update({"lm_head.weight": np.ones((23, 8), np.float32)}),
            r"has a lm_head\.weight that differs",
        ),
        (
            "model.safetensors",
            lambda v: v.update({"transformer.ln_f.bias": np.ones(8, np.int32)}),
            r"ln_f\.bias has dtype int32, expected a float",
        ),
        ("config.json", lambda v: v.update(n_layer=3), r"lacks \['h\.2\.ln_1\.weight'"),
        ("config.json", lambda v: v.update(n_layer=1), r"has \['h\.1\."),
        ("model.safetensors", lambda v: v.pop("transformer.ln_f.bias"), r"lacks \['ln_f\.bias'\]"),
    ],
)
def test_what_does_not_fit_is_named(folder: Path, file: str, edit: Any, message: str) -> None:
    change(folder / file, edit)
    with pytest.raises(CheckpointError, match=message):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("change_of", "message"),
    [
        ({"n_layer": 10**9}, r"model\.safetensors lacks \['h\.2\.ln_1\.weight'"),
        ({"n_layer": 2**63 - 1}, r"model\.safetensors lacks \['h\.2\.ln_1\.weight'"),
        ({"vocab_size": 10**12}, r"wte\.weight has shape \(23, 8\), expected \(1000000000000, 8\)"),
        ({"n_positions": 10**12}, r"wpe\.weight has shape \(9, 8\), expected \(1000000000000, 8\)"),
        ({"n_embd": 10**12}, r"wte\.weight has shape \(23, 8\), expected \(23, 1000000000000\)"),
        ({"n_embd": 10**12, "n_layer": 10**9}, "lacks"),
        ({"n_layer": True}, "n_layer is True, expected an integer"),
        ({"n_layer": 2.0}, "n_layer is 2.0, expected an integer"),
        ({"n_layer": "2"}, "n_layer is '2', expected an integer"),
        ({"n_layer": [2]}, r"n_layer is \[2\], expected an integer"),
        ({"n_layer": None}, "n_layer is None, expected an integer"),
        ({"n_layer": 0}, "layers is 0, expected 1 or more"),
        ({"n_layer": -1}, "layers is -1, expected 1 or more"),
        ({"n_layer": 10**30}, "has 31 digits, expected 64 bits"),
        ({"n_inner": [[]]}, r"n_inner is \[\[\]\], expected an integer"),
    ],
)
def test_sizes_that_the_file_does_not_have_take_no_memory(
    folder: Path, change_of: dict[str, Any], message: str
) -> None:
    change(folder / "config.json", lambda values: values.update(change_of))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            from_pretrained(folder)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
    assert str(folder) in str(caught.value)


def test_a_renamed_or_doubled_array_is_named(folder: Path) -> None:
    def rename(arrays: dict[str, Any]) -> None:
        arrays["transformer.h.1.ln_1.gain"] = arrays.pop("transformer.h.1.ln_1.weight")

    def double(arrays: dict[str, Any]) -> None:
        arrays["wte.weight"] = arrays["transformer.wte.weight"]

    whole = (folder / "model.safetensors").read_bytes()
    change(folder / "model.safetensors", rename)
    with pytest.raises(CheckpointError, match=r"lacks \['h.1.ln_1.weight'\] and has \['h.1.ln_1.g"):
        from_pretrained(folder)
    (folder / "model.safetensors").write_bytes(whole)
    change(folder / "model.safetensors", double)
    with pytest.raises(CheckpointError, match=r"both with and without 'transformer\.'"):
        from_pretrained(folder)
    for name in ("h.#.ln_1.weight", "h.1e5.ln_1.weight", f"h.{'1' * 5000}.ln_1.weight"):
        (folder / "model.safetensors").write_bytes(whole)
        arrays = load_arrays(folder / "model.safetensors")
        arrays[f"transformer.{name}"] = np.ones(8, np.float32)
        save_arrays(folder / "model.safetensors", arrays)
        with pytest.raises(CheckpointError, match=r"lacks \[\] and has \['h\."):
            from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_fifo_or_device_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=rf"{folder / name} is a FIFO or a device"):
        from_pretrained(folder)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        from_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        from_pretrained(tmp_path / "nowhere")


def test_a_config_of_another_kind_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: .*holds a list, expected a mapping"):
        from_pretrained(folder)


def test_a_full_disk_leaves_the_model_that_was_there(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with full_disk(1 << 10), pytest.raises(CheckpointError, match="cannot write"):
        save_pretrained(GPT2(GPT2Config(99, 99, 1, 1, 8)), folder)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_pretrained(TransformerLM(LLAMA), tmp_path / "sharded", max_file_bytes=4000)
    return tmp_path / "sharded"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_architecture_comes_back_as_it_was(name: str, tmp_path: Path, device: str) -> None:
    model = TransformerLM(replace(LLAMA, **ARCHITECTURES[name]))
    save_pretrained(model, tmp_path, max_file_bytes=4000)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == [name]
    loaded = from_pretrained(tmp_path)
    assert isinstance(loaded, TransformerLM)
    for setting, value in ARCHITECTURES[name].items():
        assert getattr(loaded.config, setting) == value
    for theirs, ours in zip(loaded.parameters(), model.parameters(), strict=True):
        np.testing.assert_array_equal(theirs.numpy(), ours.numpy())
    for parameter in (*loaded.parameters(), *model.parameters()):
        parameter.data *= 3  # far from uniform
    found = loaded.to(device)(backend.to_device(TOKENS, device))
    np.testing.assert_allclose(found.numpy(), model(TOKENS).numpy(), 1e-5, 1e-5)


def test_settings_that_no_architecture_has_are_named(tmp_path: Path) -> None:
    mixed = TransformerLM(replace(LLAMA, qk_norm=True, feed_forward_bias=True))
    with pytest.raises(ArgumentError, match=r"'qk_norm': True.*expected those of LlamaFor"):
        save_pretrained(mixed, tmp_path)
    with pytest.raises(ArgumentError, match="model is a int, expected a GPT2 or TransformerLM"):
        save_pretrained(3, tmp_path)  # type: ignore[arg-type]
    save_pretrained(TransformerLM(LLAMA), tmp_path)
    with pytest.raises(ArgumentError, match="vocab_multiple is 8 for a LlamaForCausalLM"):
        from_pretrained(tmp_path, vocab_multiple=8)


def test_weights_in_several_files_are_as_those_in_one(sharded: Path, tmp_path: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert files == {path.name for path in sharded.glob("*.safetensors")}
    assert len(files) > 3
    model = from_pretrained(sharded)
    save_pretrained(model, tmp_path)
    assert set(load_arrays(tmp_path / "model.safetensors")) == set(index["weight_map"])
    np.testing.assert_array_equal(from_pretrained(tmp_path)(TOKENS).numpy(), model(TOKENS).numpy())
    for size in (4000, 10**9):
        with pytest.raises(CheckpointError, match=r"exists, expected a folder without it"):
            save_pretrained(model, sharded, max_file_bytes=size)


def test_a_file_may_be_as_large_as_allowed() -> None:
    arrays = {name: np.zeros(2, "float32") for name in "abc"}
    assert list(_files_of(arrays, 24)) == ["model.safetensors"]
    assert list(_files_of(arrays, 16)) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    for most, expected in ((24, ["abc"]), (23, ["ab", "c"]), (16, ["ab", "c"]), (1, [*"abc"])):
        assert ["".join(part) for part in _files_of(arrays, most).values()] == expected


def test_damage_of_weights_in_several_files_is_named(sharded: Path) -> None:
    index, second = sharded / "model.safetensors.index.json", sorted(sharded.glob("*.saf*"))[1]
    (name, *_), data = load_arrays(second), second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match=rf"{second} does not exist"):
        from_pretrained(sharded)
    second.write_bytes(data)
    change(second, lambda arrays: arrays.update({name: arrays[name][..., :1]}))
    with pytest.raises(CheckpointError, match=rf"{second}: {name[6:]} has shape"):
        from_pretrained(sharded)
    change(second, lambda arrays: arrays.pop(name))
    with pytest.raises(CheckpointError, match=rf"lacks \['{name[6:]}'\]"):
        from_pretrained(sharded)
    for wrong in ("../a.safetensors", "/etc/passwd", "a.bin", 3):
        values = json.loads(index.read_text())
        values["weight_map"]["norm.weight"] = wrong
        index.write_text(json.dumps(values))
        with pytest.raises(CheckpointError, match=f"weight_map has '{wrong}', expected the name"):
            from_pretrained(sharded)
    change(index, lambda values: values.pop("weight_map"))
    with pytest.raises(CheckpointError, match="weight_map has None, expected the name"):
        from_pretrained(sharded)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba', expected one of gpt2, llama, mistral"),
        ({"model_type": None}, "model_type is None, expected one of"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn', expected"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None, expected a number"),
        ({"rope_scaling": 3}, "rope_scaling is 3, expected a mapping"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*, expected None"),
        ({"num_key_value_heads": 3}, "heads is 4, expected a multiple of 3"),
        ({"head_dim": 5}, "head_width is 5, expected a multiple of 2"),
        ({"hidden_size": 32}, r"has shape \(\d+, 16\), expected \(\d+, 32\)"),
        ({"attention_bias": True}, r"lacks \['layers\.0\.self_attn\.q_proj\.bias'"),
        ({"attention_bias": 1}, "attention_bias is 1, expected true or false"),
        ({"tie_word_embeddings": True}, r"has a lm_head\.weight that differs"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types is .*, expected 2 of 'full_attention' or 'sliding_attention', in",
        ),
    ],
)
def test_settings_that_are_not_supported_are_named(
    sharded: Path, values: dict[str, Any], message: str
) -> None:
    change(sharded / "config.json", lambda found: found.update(values))
    with pytest.raises(CheckpointError, match=message) as caught:
        from_pretrained(sharded)
    assert str(sharded) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (kind, {"is_causal": wrong}, f"is_causal is {wrong}, expected True")
        for kind in ("llama", "mistral", "qwen2", "qwen3", "gpt2")
        for wrong in (False, None)
    ]
    + [
        ("llama", {"attention_multiplier": 0.5}, r"attention_multiplier is 0\.5, expected no such"),
        ("llama", {"per_layer_config": {"0": {}}}, "per_layer_config is .*, expected None or {}"),
        ("llama", {"architectures": ["LlamaForTokenClassification"]}, "'LlamaModel' among them"),
        ("llama", {"architectures": "LlamaModel"}, "expected a list of names"),
        ("llama", {"sliding_window": 4}, "sliding_window is 4, expected None"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "x": 1}}, "x is 1, expected no"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "full_attention is {}, expected no"),
        ("mistral", {"attention_bias": True}, "attention_bias is True, expected False"),
        ("mistral", {"use_sliding_window": False, "mlp_bias": True}, "mlp_bias is True"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ("qwen2", {"use_mrope": True}, "use_mrope is True, expected False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is"),
        ("gpt2", {"hidden_size": 16}, "n_embd is 8, expected 16"),
        ("gpt2", {"rope_theta": 10000.0}, r"rope_theta is 10000\.0, expected no such entry"),
    ],
)
def test_entries_that_change_the_mathematics_are_refused(
    folder: Path, sharded: Path, kind: str, values: dict[str, Any], message: str
) -> None:
    place = folder if kind == "gpt2" else sharded
    change(place / "config.json", lambda found: found.update(architectures=None, model_type=kind))
    change(place / "config.json", lambda found: found.update(values))
    with pytest.raises(CheckpointError, match=message):
        from_pretrained(place)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("gpt2", {"n_inner": 32, "n_ctx": 9, "reorder_and_upcast_attn": True, "num_labels": 3}),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh", "hidden_size": 8, "layers": None}),
        ("gpt2", {"task_specific_params": {"text-generation": {"max_length": 50}}}),
        ("llama", {"hidden_act": "swish", "architectures": ["LLaMAForCausalLM"], "dtype": "x"}),
        ("llama", {"pretraining_tp": 2, "rope_interleaved": False, "is_llama_config": True}),
        ("llama", {"rope_scaling": {"rope_theta": 10000, "factor": 3.0}, "rope_theta": 5.0}),
        ("llama", {"layer_types": ["full_attention"] * 2, "attention_dropout": 0.5}),
    ],
)
def test_entries_without_effect_are_accepted(
    folder: Path, sharded: Path, kind: str, values: dict[str, Any]
) -> None:
    place = folder if kind == "gpt2" else sharded
    expected = from_pretrained(place)(TOKENS).numpy()
    change(place / "config.json", lambda found: found.update(values))
    np.testing.assert_array_equal(from_pretrained(place)(TOKENS).numpy(), expected)


@pytest.mark.parametrize(
    ("kind", "values", "setting", "expected"),
    [
        ("mistral", {"sliding_window": None}, "window", None),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None}, "window", None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "window", 4096),
        ("mistral", {"num_key_value_heads": None}, "kv_heads", 4),
        (
            "llama",
            {
                "original_max_position_embeddings": 4,
                "rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 1,
                                 "high_freq_factor": 4, "original_max_position_embeddings": 8},
            },
            "rope_scaling",
            RopeScaling(
                "llama3", 2, low_freq_factor=1, high_freq_factor=4, original_context=4
            ),
        ),
        (
            "llama",
            {
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"rope_type": "linear", "factor": 2},
            },
            "rope_scaling", RopeScaling("linear", 2),
        ),
    ],
)  # fmt: skip
def test_defaults_are_those_of_transformers(
    kind: str, values: dict[str, Any], setting: str, expected: Any
) -> None:
    sizes = {
        "vocab_size": 23, "max_position_embeddings": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 24,
        "num_key_value_heads": 2,
    }  # fmt: skip
    (architecture,) = (each for each in ARCHITECTURE_TYPES if each.model_type == kind)
    config = architecture.read(PublishedSettings({**sizes, **values}, "config.json"))
    assert getattr(config, setting) == expected


@pytest.mark.parametrize("wrap", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrapped_models_are_read(folder: Path, wrap: str) -> None:
    def edit(arrays: dict[str, Any]) -> None:
        for name in list(arrays):
            inner = name.replace("h.1.", "h.1._orig_mod.")
            arrays[wrap + inner] = arrays.pop(name)

    expected = from_pretrained(folder)(TOKENS).numpy()
    change(folder / "model.safetensors", edit)
    np.testing.assert_array_equal(from_pretrained(folder)(TOKENS).numpy(), expected)
    change(
        folder / "model.safetensors",
        lambda arrays: arrays.update({"transformer.wte.weight": np.ones((23, 8), np.float32)}),
    )
    with pytest.raises(CheckpointError, match=r"wte\.weight a second time"):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pytorch_model.bin"], "has pytorch_model.bin, which may run any code, expected model"),
        (
            ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"],
            "has pytorch_model-00001-of-00002.bin, which may run any code.*transformers converts",
        ),
        (["consolidated.00.pth"], "has consolidated.00.pth, which may run any code"),
        (["model.gguf"], r"has model\.gguf, expected model\.safetensors: transformers converts"),
        (["model-00001-of-00002.safetensors"], "expected model.safetensors.index.json beside it"),
    ],
)
def test_weights_in_another_format_are_named(folder: Path, names: list[str], message: str) -> None:
    (folder / "model.safetensors").unlink()
    for name in names:
        (folder / name).write_bytes(b"PK")
    assert is_pretrained(folder)
    with pytest.raises(CheckpointError, match=message):
        from_pretrained(folder)


def test_a_loaded_model_has_no_dropout_until_it_trains(sharded: Path) -> None:
    change(sharded / "config.json", lambda found: found.update(attention_dropout=0.5))
    model = from_pretrained(sharded)
    np.testing.assert_array_equal(model(TOKENS).numpy(), model(TOKENS).numpy())
    assert not np.array_equal(model.train()(TOKENS).numpy(), model(TOKENS).numpy())


def test_a_name_is_downloaded_only_when_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append((name, options["revision"]))
        if name == "no/such":
            raise ValueError("404: there is no such model")
        return str(folder)

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(CheckpointError, match=r"a/model is not a folder.*only with download=True"):
        from_pretrained("a/model")
    assert calls == []
    model = from_pretrained("a/model", download=True, revision="v1")
    assert calls == [("a/model", "v1")]
    assert model.config == CONFIG
    with pytest.raises(CheckpointError, match="no/such cannot be downloaded: 404: there is no"):
        from_pretrained("no/such", download=True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="needs the huggingface_hub package: pip install"):
        from_pretrained("a/model", download=True)


@pytest.mark.parametrize("name", ["a\0b.safetensors", "a" * 300 + ".safetensors"])
def test_an_index_may_name_no_file_at_all(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"wte.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"is not the name of a file|File name too long"):
        from_pretrained(folder)
