from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.models.gpt2 import GPT2, PRESETS, GPT2Config
from tensorgrad.models.restore import check_building, config_of, restore
from tensorgrad.models.sentiment import (
    MeanClassifier,
    MeanConfig,
    TransformerClassifier,
    TransformerConfig,
)
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.models.translation import TranslationConfig, TranslationModel
from tensorgrad.nn import Module, RopeScaling

GPT = GPT2Config(23, 9, 2, 2, 8, vocab_multiple=8)
MODELS: list[tuple[Callable[[Any], Module], Any]] = [
    (GPT2, GPT),
    (GPT2, GPT2Config(23, 9, 1, 1, 6)),
    (TransformerLM, TransformerLMConfig(23, layers=2, heads=4, kv_heads=2, width=16)),
    (TransformerLM, TransformerLMConfig(23, layers=1, heads=2, kv_heads=1, width=8, tied=False)),
    (TransformerLM, TransformerLMConfig(23, 7, 3, 3, 3, width=24, hidden=5)),
    (
        TransformerLM,
        TransformerLMConfig(
            *(23, 7, 1, 4, 2, 10),
            head_width=6,
            rope_scaling=RopeScaling("linear", 2.0),
            qkv_bias=True,
            proj_bias=True,
            feed_forward_bias=True,
            qk_norm=True,
        ),
    ),
    (TranslationModel, TranslationConfig(23, 7, 1, 2, 1, width=8, label_smoothing=0.1)),
    (MeanClassifier, MeanConfig(11, classes=3, width=5, layers=0)),
    (MeanClassifier, MeanConfig(11, classes=3, width=5, layers=1, hidden=7)),
    (MeanClassifier, MeanConfig(11, classes=3, width=5, layers=3, hidden=7)),
    (TransformerClassifier, TransformerConfig(11, 3, 8, context=5, layers=2, heads=2)),
]


def arrays_of(model: Module) -> dict[str, Any]:
    return {name: tensor.data for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("make", "config"), MODELS)
def test_a_model_is_restored(make: Callable[[Any], Module], config: Any) -> None:
    model = make(config)
    assert sum(p.size for p in model.parameters()) == config.parameters
    found = restore(make, type(config), asdict(config), arrays_of(model), "file")
    for name, array in arrays_of(found).items():
        np.testing.assert_array_equal(array, model.state_dict()[name].data)


def test_a_model_that_no_memory_here_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PRESETS["gpt2-124M"]
    for pages, fits in ((4 * config.parameters, True), (4 * config.parameters - 1, False)):
        sizes = {"SC_PHYS_PAGES": pages, "SC_PAGE_SIZE": 1}
        monkeypatch.setattr("os.sysconf", sizes.get)
        if fits:
            check_building(config)
            continue
        with pytest.raises(ArgumentError, match="124,439,808 parameters, which need 0 GB"):
            check_building(config)


def test_published_sizes_are_counted() -> None:
    assert PRESETS["gpt2-124M"].parameters == 124_439_808


@pytest.mark.parametrize(("make", "config"), MODELS)
@pytest.mark.parametrize("size", [10**9, 2**63 - 1])
def test_sizes_that_the_arrays_do_not_have_take_no_memory(
    make: Callable[[Any], Module], config: Any, size: int
) -> None:
    arrays = arrays_of(make(config))
    for name, value in asdict(config).items():
        # No parameter depends on the longest sequence or on the windows of a TransformerLM.
        unused = isinstance(config, TransformerLMConfig) and name in ("context", "window_from")
        unused |= isinstance(config, MeanConfig) and name == "hidden" and not config.layers
        if type(value) is int and not unused:
            tracemalloc.start()
            try:
                with pytest.raises(CheckpointError, match=r"load: file(:| has arrays of)"):
                    restore(make, type(config), {**asdict(config), name: size}, arrays, "file")
                assert tracemalloc.get_traced_memory()[1] < 1 << 20, name
            finally:
                tracemalloc.stop()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], r"has the sizes \[\], expected a mapping"),
        ({**asdict(GPT), "rope": 1}, r"expected a GPT2: its sizes lack \[\] and have \['rope'\]"),
        ({**asdict(GPT), "layers": True}, "layers is True, expected int"),
        ({**asdict(GPT), "layers": 2.0}, "layers is 2.0, expected int"),
        ({**asdict(GPT), "layers": None}, "layers is None, expected int"),
        ({**asdict(GPT), "dropout": "0"}, "dropout is '0', expected float or int"),
        ({**asdict(GPT), "dropout": 2}, "dropout is 2, expected 0 <= dropout < 1"),
        ({**asdict(GPT), "heads": 3}, "width is 8, expected a multiple of heads, 3"),
        ({**asdict(GPT), "layers": 0}, "layers is 0, expected 1 or more"),
    ],
)
def test_sizes_of_another_form_are_named(sizes: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"load: file.* {message}"):
        config_of(GPT2Config, sizes, "file")


def test_arrays_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = arrays_of(GPT2(GPT))
    name = next(iter(arrays))
    turned = {**arrays, name: arrays[name].T}
    with pytest.raises(CheckpointError, match=f"load: file: load_state_dict: wrong: {name} is"):
        restore(GPT2, GPT2Config, asdict(GPT), turned, "file")
    with pytest.raises(CheckpointError, match="load: file has arrays of 0 elements in all, expect"):
        restore(GPT2, GPT2Config, asdict(GPT), {}, "file")
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 1}.get)
    with pytest.raises(
        CheckpointError, match=r"load: file: the model has .* parameters, which need"
    ):
        restore(GPT2, GPT2Config, asdict(GPT), arrays, "file")

    def unknown(_: str) -> int:
        raise ValueError

    monkeypatch.setattr("os.sysconf", unknown)
    check_building(PRESETS["gpt2-124M"])


def test_a_model_has_1000_layers_at_most() -> None:
    check_building(replace(GPT, layers=1000))
    with pytest.raises(ArgumentError, match="layers is 1,001, expected at most 1,000"):
        check_building(replace(GPT, layers=1001))


def test_the_memory_that_is_missing_is_in_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 10**6, "SC_PAGE_SIZE": 3000}.get)
    with pytest.raises(ArgumentError, match="which need 6 GB; expected a model for the 3 GB of th"):
        check_building(PRESETS["gpt2-1558M"])


def test_what_a_kind_of_model_needs_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"TransformerLM: its sizes lack \['vocab_size'\]"):
        config_of(TransformerLMConfig, {"layers": 2}, "file")
    whole = config_of(TransformerLMConfig, {"vocab_size": 9, "hidden": None, "dropout": 0}, "file")
    assert whole == TransformerLMConfig(9)
