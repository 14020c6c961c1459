"""Memory that is kept from batch to batch: who gets it, and when it is dropped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tensorgrad import random
from tensorgrad.core import backend
from tensorgrad.core.tensor import Tensor
from tensorgrad.errors import GraphError
from tensorgrad.models.generation import buffers as buffers_module
from tensorgrad.models.generation import generate_batch, stream
from tensorgrad.models.generation.buffers import BatchBuffers, give_back, take
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.nn import Linear, evaluating
from tensorgrad.ops.sampling import Sampling, State, new_state

PROMPTS = [[5, 3, 1, 9], [7]]
GREEDY = Sampling(0.0)


def make(kind: str = "gpt2", device: str = "cpu") -> Any:
    random.seed(0)
    if kind == "gpt2":
        model: Any = GPT2(GPT2Config(31, context=40, layers=1, heads=2, width=16))
    else:
        model = TransformerLM(TransformerLMConfig(31, 40, 1, 2, 1, 16))
    rng = np.random.default_rng(0)
    for parameter in model.parameters():  # far from uniform, so that wrong tokens show
        parameter.data[...] += rng.normal(0, 0.3, parameter.shape)
    return model.to(device)


def state_of(prompts: Any = PROMPTS, more: int = 6) -> State:
    return new_state(prompts, more, range(len(prompts)), [], None, "cpu")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep buffers on the CPU as on a GPU."""
    monkeypatch.setattr(BatchBuffers, "is_captured", True)
    monkeypatch.setattr(BatchBuffers, "release", lambda self: None)
    yield
    buffers_module._kept.clear()


@pytest.mark.usefixtures("kept")
def test_buffers_have_one_user_at_a_time() -> None:
    model = make()
    one, two = (take(model, state_of(), 16, GREEDY) for _ in range(2))
    assert one is not two
    give_back(model, one)
    other = state_of([[1, 2], [3]], 8)
    assert take(model, state_of([[1], [2], [3]]), 16, GREEDY) is not one
    assert take(model, state_of(), 32, GREEDY) is not one
    assert take(model, state_of(), 16, Sampling(1.0)) is not one
    assert take(make(), state_of(), 16, GREEDY) is not one
    assert take(model, other, 16, GREEDY) is one
    assert (one.state.tokens == other.tokens).all()
    assert one.state.latest.tolist() == [2, 3]
    for each in (one, two, *(take(model, state_of(), 16, GREEDY) for _ in range(4))):
        give_back(model, each)
    assert len(buffers_module._kept[id(model)]) == 4


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("kind", ["gpt2", "modern"])
def test_a_changed_model_gets_new_buffers(kind: str) -> None:
    def replace_layer(model: Any) -> None:
        model.blocks[0].attention.proj = Linear(16, 16)

    def replace_array(model: Any) -> None:
        model.norm.weight.data = model.norm.weight.data.copy()

    def set_option(model: Any) -> None:
        model.blocks[0].attention.window = 3

    model = make(kind)
    for change in (replace_layer, replace_array, set_option, lambda model: model.to("float64")):
        first = take(model, state_of(), 16, GREEDY)
        give_back(model, first)
        assert take(model, state_of(), 16, GREEDY) is first
        give_back(model, first)
        model.norm.weight.data[...] = 0.5  # in place
        with evaluating(model):
            assert take(model, state_of(), 16, GREEDY) is first
        give_back(model, first)
        change(model)
        assert take(model, state_of(), 16, GREEDY) is not first
        assert not buffers_module._kept[id(model)]


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", ["norm.bias", "blocks.0.attention.scale_by", "blocks.0.dropout"])
def test_what_is_gone_is_not_taken_for_none(name: str) -> None:
    model = make()
    owner, _, attribute = name.rpartition(".")
    module = dict(model.named_modules())[owner]
    module.scale_by = lambda: 3  # a function, which a weak reference can refer to
    first = take(model, state_of(), 16, GREEDY)
    give_back(model, first)
    setattr(module, attribute, None)
    gc.collect()
    assert take(model, state_of(), 16, GREEDY) is not first


@pytest.mark.usefixtures("kept")
def test_names_of_attributes_count() -> None:
    model = make()
    model.norm.one = model.norm.other = None
    first = take(model, state_of(), 16, GREEDY)
    for name in ("one", "other"):
        give_back(model, first)
        value = vars(model.norm).pop(name)
        assert take(model, state_of(), 16, GREEDY) is not first
        vars(model.norm)[f"{name}_moved"] = value
        first = take(model, state_of(), 16, GREEDY)


@pytest.mark.usefixtures("kept")
def test_all_buffers_of_a_model_are_checked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    hold = buffers_module._Parts.hold

    def counted(parts: Any) -> bool:
        calls.append(parts)
        return hold(parts)

    monkeypatch.setattr(buffers_module._Parts, "hold", counted)
    model = make()
    first = take(model, state_of(), 16, GREEDY)
    give_back(model, first)
    for temperature in (0.5, 1.0, 2.0):
        give_back(model, take(model, state_of(), 16, Sampling(temperature)))
    calls.clear()
    assert take(model, state_of(), 16, GREEDY) is first
    assert len(calls) == 1
    assert len(buffers_module._kept[id(model)]) == 3


@pytest.mark.usefixtures("kept")
def test_buffers_die_with_their_model() -> None:
    model = make()
    give_back(model, take(model, state_of(), 16, GREEDY))
    (own,) = buffers_module._kept[id(model)]
    keys, module = weakref.ref(own.cache[0].arrays[0]), weakref.ref(model.blocks[0])
    del own
    gc.disable()
    try:
        del model
        assert keys() is None
        assert module() is None
    finally:
        gc.enable()


def test_a_step_that_cannot_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise GraphError("graph.capture: norm at line 3 cannot be captured")

    model = make()
    own = take(model, state_of([[5], [7]]), 16, GREEDY)  # an empty cache
    own.step.captured = fails  # type: ignore[assignment]
    with caplog.at_level("INFO", "tensorgrad"), evaluating(model):
        own.step()
        own.step()
    assert own.state.counts.tolist() == [3, 3]
    (record,) = caplog.records
    assert record.message.startswith("generation: steps are not captured: graph.capture: norm at")
    assert not own.is_captured


def test_a_captured_step_runs_alone() -> None:
    calls = []
    own = take(make(), state_of([[5], [7]]), 16, GREEDY)
    own.step.captured = lambda *given: calls.append(given)  # type: ignore[assignment]
    own.step()
    assert calls == [()]
    assert own.state.counts.tolist() == [1, 1]
    assert own.is_captured


def test_prompts_are_read_into_the_cache() -> None:
    model = make("modern")
    own = take(model, state_of([[5, 3, 1], [7, 2, 4]]), 16, GREEDY)
    with evaluating(model):
        own.read(2)
        expected = model.new_cache(2)
        model.next_logits(np.array([[5, 3], [7, 2]]), expected)
    for found, wanted in zip(own.cache[0].arrays, expected[0].arrays, strict=True):
        np.testing.assert_array_equal(found[:, :, :2], wanted[:, :, :2])
    assert own.cache[0].lengths is own.state.lengths


def test_logits_may_be_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    expected = generate_batch(model, PROMPTS, 5, temperature=0)
    plain = model.next_logits

    def turned(*given: Any) -> Tensor:
        logits = plain(*given).data
        return Tensor(np.ascontiguousarray(logits.T).T)

    monkeypatch.setattr(model, "next_logits", turned)
    assert generate_batch(model, PROMPTS, 5, temperature=0) == expected


@pytest.mark.usefixtures("kept")
def test_kept_memory_is_given_up_where_there_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = make(), make()
    for each in (model, other):
        give_back(each, take(each, state_of(), 16, GREEDY))
    new_cache, tries = model.new_cache, []

    def full(*given: Any) -> Any:
        tries.append(sum(map(len, buffers_module._kept.values())))
        if tries[-1]:
            raise MemoryError
        return new_cache(*given)

    monkeypatch.setattr(model, "new_cache", full)
    found = take(model, state_of(), 32, GREEDY)
    assert tries == [1, 0]  # a changed model had its own dropped already
    assert found.cache[0].steps == 32


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "modern"])
def test_calls_share_a_graph(kind: str) -> None:
    expected, model = make(kind), make(kind, "cuda")
    for number in range(5):
        prompts = [[1 + number, 2], [3] * (1 + number)]
        options: dict[str, Any] = {"temperature": 0.9, "seed": number}
        if number == 3:
            random.seed(7)  # a seed of another generator
        found = generate_batch(model, prompts, 50, **options)  # beyond the context
        assert found == generate_batch(expected, prompts, 50, **options)
    (own,) = buffers_module._kept[id(model)]
    assert own.step.captured is not None
    assert own.read.captured is not None
    assert own.step.captured.graphs == own.read.captured.graphs == 1
    for each in (model, expected):
        each.blocks[0].attention.proj.weight.data[...] *= -1
    assert generate_batch(model, PROMPTS, 9) == generate_batch(expected, PROMPTS, 9)
    for each in (model, expected):
        each.norm.weight.data = each.norm.weight.data * 3
    assert generate_batch(model, PROMPTS, 9) == generate_batch(expected, PROMPTS, 9)


@pytest.mark.gpu
def test_streams_take_turns() -> None:
    model = make(device="cuda")
    alone = [generate_batch(model, [prompt], 20, temperature=0)[0] for prompt in PROMPTS]
    for _ in range(3):  # the third time both are replays
        steps = zip(
            *(stream(model, [prompt], 20, temperature=0) for prompt in PROMPTS), strict=True
        )
        found = [[int(one[0]) for one in both] for both in steps]
        assert [list(row) for row in zip(*found, strict=True)] == alone


@pytest.mark.gpu
def test_streams_that_stop_and_other_cuda_streams() -> None:
    cupy = backend.cupy
    model = make(device="cuda")
    expected = generate_batch(model, PROMPTS, 30, temperature=0)
    for stop in (0, 1, 3, 7):
        steps = stream(model, PROMPTS, 30, temperature=0)
        found = [next(steps) for _ in range(stop)]
        steps.close()  # type: ignore[attr-defined]  # a generator
        assert [[int(one[row]) for one in found] for row in (0, 1)] == [
            row[:stop] for row in expected
        ]
        with cupy.cuda.Stream(non_blocking=True):
            assert generate_batch(model, PROMPTS, 30, temperature=0) == expected


@pytest.mark.gpu
def test_memory_of_graphs_is_free_once_the_model_is_gone() -> None:
    generate_batch(make(device="cuda"), PROMPTS, 9)  # objects that live as long as the process
    gc.collect()
    used, _ = backend.memory_bytes()
    model = make(device="cuda")
    for _ in range(3):
        generate_batch(model, PROMPTS, 9)
    assert backend.memory_bytes()[0] > used
    gc.disable()
    try:
        del model
        assert backend.memory_bytes()[0] == used
    finally:
        gc.enable()
