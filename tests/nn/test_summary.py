"""Module.summary: counts that can be computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import nn
from tensorgrad.core import instrument


def test_layers_of_a_small_model() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
    model[0].weight.requires_grad = False  # type: ignore[attr-defined]
    found = model.summary(tg.zeros((5, 8)))
    assert [each.name for each in found.layers] == ["", "0", "1", "2", "3"]
    assert [each.shape for each in found.layers] == [(5, 3), (5, 32), (5, 32), (5, 32), (5, 3)]
    assert [each.parameters for each in found.layers] == [387, 288, 0, 0, 99]
    flops = [2 * 5 * 8 * 32, 2 * 5 * 32 * 3]
    assert [each.flops for each in found.layers] == [sum(flops), flops[0], 0, 0, flops[1]]
    assert (found.flops, found.parameters, found.trained) == (sum(flops), 387, 387 - 256)
    assert (found.parameter_bytes, found.buffer_bytes) == (4 * 387, 0)
    assert found.result_bytes >= 4 * 5 * (32 + 32 + 3)
    assert model.training
    text = str(found)
    assert "387 (131 trained)" in text
    assert "Linear      (5, 32)" in text


def test_a_transformer_block_and_shared_layers() -> None:
    block = nn.TransformerBlock(16, 2)
    found = block.summary(tg.zeros((2, 6, 16)))
    products = 2 * 2 * 6 * 16 * (4 * 16 + 8 * 16)
    attention = 4 * 2 * 6 * 6 * 16
    assert products < found.flops <= products + attention
    shared = nn.Linear(4, 4)
    twice = nn.Sequential(shared, shared).summary(np.zeros((1, 4), "float32"))
    assert twice.parameters == 20
    assert twice.layers[1].flops == twice.flops == 2 * 2 * 16


def test_without_inputs_and_after_an_error() -> None:
    model = nn.Linear(3, 2)
    found = model.summary()
    assert (found.parameters, found.flops, found.layers[0].shape) == (8, 0, None)
    with pytest.raises(tg.errors.ShapeError):
        model.summary(np.zeros((2, 5), "float32"))
    assert instrument.observer is None
