"""The sizes in an untrusted config.json, which are compared before a model is built."""

from __future__ import annotations

import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.restore import restore
from tensorgrad.train.checkpoint import list_checkpoints
from tensorgrad.train.sizes import check_sizes, newest_entry
from tests.train.tiny_run import MODEL, make_trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sizes") / "run"
    make_trainer(folder, steps=2, warmup=0, checkpoint_every=1).run()
    return folder


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"layers": 10**9}, "train: layers is 1,000,000,000, expected at most 1,000"),
        ({"width": 10**9}, "train: the model has .* expected a model for the .* GB of this"),
        ({"vocab_size": 10**12}, "train: the model has .* parameters, which need"),
        ({"context": 10**12}, "train: the model has .* parameters, which need"),
        (
            {"layers": 500},
            r"step-00000002 was saved from a different model: its arrays have 3,952 elements",
        ),
        ({"vocab_multiple": 1000}, "as config.json and the tokenizer say"),
        ({"width": 18}, "as config.json and the tokenizer say"),
    ],
)
def test_untrusted_sizes_are_refused(run: Path, change: dict[str, Any], problem: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((ArgumentError, CheckpointError), match=problem):
            check_sizes(replace(MODEL, **change), run)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_sizes_of_the_run_and_of_a_new_one_are_allowed(run: Path, tmp_path: Path) -> None:
    check_sizes(MODEL, run)
    check_sizes(replace(MODEL, layers=3), tmp_path)
    assert newest_entry(run, "model")["layers"] == MODEL.layers
    assert newest_entry(run, "none") is newest_entry(tmp_path, "model") is None
    (list_checkpoints(run / "checkpoints")[0] / "state.json").write_text("{}")
    check_sizes(MODEL, run)  # the one before is compared
    with pytest.raises(CheckpointError, match="step-00000001 was saved from a different model"):
        check_sizes(replace(MODEL, layers=3), run)


def test_many_layers_of_few_parameters_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2Config(vocab_size=3, context=1, layers=100_000, heads=1, width=1)
    arrays = {"tokens.weight": np.zeros(config.parameters, np.int8)}
    monkeypatch.setattr(GPT2, "__init__", None)
    with pytest.raises(CheckpointError, match="file: layers is 100,000, expected at most 1,000"):
        restore(GPT2, GPT2Config, asdict(config), arrays, "file")
