from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.errors import CheckpointError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.pretrained import from_pretrained, save_pretrained
from tensorgrad.weights import load_arrays, save_arrays
from tests.disk import full_disk

CONFIG = GPT2Config(vocab_size=23, context=9, layers=2, heads=2, width=8)
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


@pytest.mark.parametrize("vocab_multiple", [1, 8])
def test_weights_come_back_as_they_were(tmp_path: Path, vocab_multiple: int) -> None:
    model = GPT2(GPT2Config(23, 9, 2, 2, 8, vocab_multiple=vocab_multiple))
    save_pretrained(model, tmp_path)
    for multiple in (1, 8):
        loaded = from_pretrained(tmp_path, vocab_multiple=multiple)
        assert loaded.config == GPT2Config(23, 9, 2, 2, 8, vocab_multiple=multiple)
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


def test_files_of_older_versions_are_read(folder: Path) -> None:
    def edit(arrays: dict[str, Any]) -> None:
        for name in list(arrays):
            arrays[name.removeprefix("transformer.")] = arrays.pop(name)
        arrays["h.0.attn.bias"] = np.ones((1, 1, 9, 9), np.float32)
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
        ("config.json", lambda v: v.update(n_inner=7), "n_inner is 7, expected None"),
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
        ({"n_inner": [[]]}, r"n_inner is \[\[\]\], expected None"),
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
