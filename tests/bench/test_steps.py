from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad import graph, nn
from tensorgrad.bench import steps
from tensorgrad.bench.options import Sizes
from tensorgrad.bench.steps import RankTimer, model_case, settings_of, sized, step_of
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2Config
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.handle import Handle
from tensorgrad.profile.training_step import TrainingStep, language_step
from tensorgrad.train.settings import DTYPES

TINY = GPT2Config(vocab_size=64, context=8, layers=2, heads=2, width=16)


def made(device: str = "cpu", config: GPT2Config = TINY, **case: Any) -> TrainingStep:
    return language_step(*settings_of({"batch": 2, **case}, config), device)


def test_a_step_has_the_options_of_its_case() -> None:
    model = made(config=replace(TINY, hidden=24), attention="unfused", recompute=True).model
    for block in model.blocks:
        assert isinstance(block, nn.TransformerBlock)
        assert isinstance(block.feed_forward, nn.FeedForward)
        assert block.feed_forward.up.weight.shape == (24, 16)
        assert block.attention.kernel == "unfused"
    assert model.recompute
    wide = made(dtype="bfloat16-parameters").model
    assert {str(each.dtype) for each in wide.parameters()} == {"bfloat16"}


def test_sizes_of_a_case_replace_those_of_its_preset() -> None:
    sizes = {"layers": 1, "width": 16, "heads": 4, "context": 8, "vocab": 64}
    for preset, rows in (("gpt2-124M", 128), ("llama-124M", 64)):
        step = language_step(*settings_of({"preset": preset, **sizes, "batch": 2}), "cpu")
        assert step.model.tokens.weight.shape == (rows, 16)
        assert len(step.model.blocks) == 1


def test_a_case_of_a_preset_has_its_sizes() -> None:
    case = model_case("gpt2-124M", 2, "float32", Sizes(layers=1, width=16, heads=2))
    assert case == {
        "preset": "gpt2-124M", "layers": 1, "width": 16, "heads": 2, "context": 1024,
        "vocab": 50257, "batch": 2, "dtype": "float32",
    }  # fmt: skip
    assert sized("gpt2-124M").rows == 50304
    assert sized("char", Sizes(vocab=5)) == GPT2Config(5, 256, 6, 6, 384, vocab_multiple=128)
    with pytest.raises(ArgumentError, match="--batch: got 0"):
        model_case("char", 0, "float32")
    settings, config = settings_of({"batch": 2, "layers": 1, "seed": 3})
    assert (settings.lr, settings.seed, settings.model) == (6e-4, 3, "gpt2")
    assert config == replace(GPT2Config(), layers=1)
    assert step_of({**case, "context": 8, "vocab": 64}, "cpu").settings.batch == 2


class Ranks(Comm):
    """Two ranks, of which the other is 1 larger in everything."""

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value, value + 1]


def test_the_median_window_of_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter((0, 6, 10, 12, 20, 24))  # windows of 6, 2 and 4 seconds
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    calls: list[None] = []
    timer = RankTimer(Ranks(), "cpu", 3)
    assert timer.seconds(lambda: calls.append(None), 2) == 4 / 2 + 1
    assert len(calls) == 1 + 3 * 2
    assert timer.largest(-3) == -2


def test_a_rank_is_idle_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter((0, 1, 3, 5, 6, 10))  # begin, waits of 2 and of 1 seconds, end
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    wait = Handle.wait
    assert RankTimer(Ranks(), "cpu", 1).idle(lambda: Handle().wait(), 2) == [0.3, 1.3]
    assert Handle.wait is wait


def test_the_peak_is_that_of_the_fullest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = nullcontext(SimpleNamespace(bytes=3_000_000))
    monkeypatch.setattr(steps, "peak_memory", lambda device: memory)
    row: dict[str, float] = {}
    with RankTimer(Ranks(), "cpu", 1).peak(row):
        pass
    assert row == {"peak_mb": 4.0}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_is_timed_and_its_memory_measured(dtype: str, device: str) -> None:
    timer = RankTimer(Comm(), device, 1)
    row: dict[str, float] = {}
    with timer.peak(row):
        step = made(device, dtype=dtype, micro_batches=2)
        step()
    assert row["peak_mb"] > 0
    assert ("device_mb" in row) == (device != "cpu")
    assert timer.seconds(step, 1) > 0


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [*((each, "float32") for each in DTYPES), ("bfloat16-parameters", "bfloat16")],
)
def test_captured_steps_train_as_eager_ones(dtype: str, grad_dtype: str, device: str) -> None:
    states = []
    for captured in (False, True):
        step = made(device, dtype=dtype, micro_batches=2, grad_dtype=grad_dtype)
        call = graph.capture(step, device) if captured else step
        losses = [float(call()) for _ in range(4)]
        if isinstance(call, graph.Captured):
            assert call.graphs == (device != "cpu")
        assert step.optimizer.flat.grad_dtype == grad_dtype
        states.append({**step.optimizer.state_dict(), "losses": np.array(losses)})
    eager, replayed = states
    assert eager.keys() == replayed.keys()
    assert eager.pop("step") == replayed.pop("step") == 4
    assert eager.pop("lr") == replayed.pop("lr")
    for name, value in eager.items():
        same = np.array_equal(backend.to_numpy(value), backend.to_numpy(replayed[name]))
        assert same, name


def test_a_step_takes_a_batch_and_can_be_called_in_phases() -> None:
    trained = [made(micro_batches=1) for _ in range(3)]
    for step in trained[:2]:
        step(*(step.parts[0] if step is trained[0] else ()))
    forward, backward, update = trained[2].phases()
    backward(forward())
    update()
    first, *others = (step.optimizer.flat.data for step in trained)
    assert all(np.array_equal(first, other) for other in others)


def test_an_optimizer_is_made_at_once_unless_it_may_wait() -> None:
    given: tuple[dict[str, Any], ...] = ({}, {"lazy": True})
    for options in given:
        step = made()
        again = TrainingStep(step.settings, step.model, step.loss, step.parts, **options)
        assert ("optimizer" in vars(again)) is (not options)
        again()
        assert again.optimizer.numbers()["step"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "--batch: got 0, expected 1 or more"),
        ({"dtype": "int8"}, "--dtype: got 'int8'"),
        ({"batch": 3, "micro_batches": 2}, "--micro-batches: got 2, expected a divisor of the 3"),
        ({"grad_dtype": "bfloat16"}, "--grad-dtype: got bfloat16 with --dtype float32"),
    ],
)
def test_bad_settings_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        made(**arguments)
