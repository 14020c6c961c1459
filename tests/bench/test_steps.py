from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensorgrad import backend, nn, optim
from tensorgrad.bench.options import PRECISIONS
from tensorgrad.bench.steps import RankTimer, StepSettings, training_step
from tensorgrad.errors import ArgumentError
from tensorgrad.graph import Captured
from tensorgrad.models.gpt2 import GPT2Config
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.train.strategy import OneProcess

TINY = GPT2Config(vocab_size=64, context=8, layers=2, heads=2, width=16)


def test_the_width_of_feed_forward_layers_can_be_chosen() -> None:
    model = StepSettings(replace(TINY, hidden=24), 2, attention="unfused", recompute=True).model(
        "cpu"
    )
    for block in model.blocks:
        assert isinstance(block, nn.TransformerBlock)
        assert isinstance(block.feed_forward, nn.FeedForward)
        assert block.feed_forward.up.weight.shape == (24, 16)
        assert block.attention.kernel == "unfused"
    assert model.recompute
    wide = StepSettings(TINY, 2, "bfloat16-parameters").model("cpu")
    assert {str(each.dtype) for each in wide.parameters()} == {"bfloat16"}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_is_timed_and_its_memory_measured(precision: str, device: str) -> None:
    timer = RankTimer(Comm(), device, 1)
    line: dict[str, float] = {}
    with timer.peak(line):
        step = training_step(
            StepSettings(TINY, 2, precision, micro_batches=2), OneProcess(), device
        )
        step()
    assert line["peak MB"] > 0
    assert ("device MB" in line) == (device != "cpu")
    assert timer.seconds(step, 1) > 0


@pytest.mark.parametrize(
    ("precision", "grad_dtype"),
    [*((each, "float32") for each in PRECISIONS), ("bfloat16-parameters", "bfloat16")],
)
def test_captured_steps_train_as_eager_ones(
    precision: str, grad_dtype: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[optim.AdamW] = []

    def kept(settings: StepSettings, parameters: Any) -> optim.AdamW:
        made.append(make(settings, parameters))
        return made[-1]

    make = StepSettings.optimizer
    monkeypatch.setattr(StepSettings, "optimizer", kept)
    settings = StepSettings(TINY, 2, precision, micro_batches=2, grad_dtype=grad_dtype)
    for captured in (False, True):
        step = training_step(settings, OneProcess(), device, captured)
        for _ in range(4):
            step()
        assert isinstance(step, Captured) == captured
        if isinstance(step, Captured):
            assert step.graphs == (device != "cpu")
    assert all(each.flat.grad_dtype == grad_dtype for each in made)
    eager, replayed = (each.state_dict() for each in made)
    assert eager.keys() == replayed.keys()
    assert eager.pop("step") == replayed.pop("step") == 4
    assert eager.pop("lr") == replayed.pop("lr")
    for name, value in eager.items():
        same = np.array_equal(backend.to_numpy(value), backend.to_numpy(replayed[name]))
        assert same, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"precision": "int8"}, "precision is 'int8'"),
        ({"batch": 3, "micro_batches": 2}, "expected a divisor of the batch, 3"),
    ],
)
def test_bad_settings_are_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        StepSettings(TINY, **arguments)  # type: ignore[arg-type]
