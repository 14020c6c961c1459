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
    assert found.layers[1].kind == "Linear"
    assert (
        str(found)
        == repr(found)
        == (
            "layer    kind        output   parameters  FLOPs\n"
            "(model)  Sequential  (5, 3)          387  3,520\n"
            "0        Linear      (5, 32)         288  2,560\n"
            "1        ReLU        (5, 32)           0\n"
            "2        Dropout     (5, 32)           0\n"
            "3        Linear      (5, 3)           99    960\n"
            "\n"
            "parameters 387 (131 trained), 0.0 MiB; buffers 0.0 MiB\n"
            "forward 3,520 FLOPs in matrix products; results of ops 0.0 MiB"
        )
    )


def test_memory_is_in_mib() -> None:
    layer = nn.LayerNorm(2**18)
    layer.register_buffer("mean", tg.zeros(2**18))
    model = nn.Sequential(nn.Sequential(layer))
    found = model.summary(np.ones((2, 2**18), "float32"))
    assert (found.parameter_bytes, found.buffer_bytes) == (2**21, 2**20)
    assert found.result_bytes == 2**21
    lines = str(found).splitlines()
    assert [line.split(" ")[0] for line in lines[1:3]] == ["(model)", "0"]
    assert lines[3].startswith("  0.0    LayerNorm   (2, 262144)     524,288")
    assert lines[-2].endswith("2.0 MiB; buffers 1.0 MiB")
    assert lines[-1].endswith("results of ops 2.0 MiB")


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
    assert (found.result_bytes, found.layers[0].flops) == (0, 0)
    assert str(found).splitlines()[-1] == "parameters 8 (8 trained), 0.0 MiB; buffers 0.0 MiB"
    with pytest.raises(tg.errors.ShapeError):
        model.summary(np.zeros((2, 5), "float32"))
    assert instrument.observer is None
