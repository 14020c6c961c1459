"""The cache and the prepared step: the same tokens as without, and nothing for the host to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad import autocast, backend, random
from tensorgrad.models.generation import generate_batch
from tensorgrad.models.generation.decode_step import DecodeStep
from tensorgrad.models.generation.decoding_loop import Decoder, Recomputer
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.nn import Linear
from tensorgrad.ops.sampling import Sampling, new_state

PROMPTS = [[5, 3, 1, 9, 5, 2, 7], [7], list(range(20)), [2, 2, 8]]
HOWS = [Sampling(0.0), Sampling(0.8, 12, 0.9, 1.2)]


def on_gpu(kind: str) -> Any:
    return pytest.param(kind, marks=pytest.mark.gpu)


def make(kind: str, device: str = "cpu", dtype: str = "float32") -> LanguageModel:
    random.seed(0)
    model: LanguageModel
    if kind == "gpt2":
        model = GPT2(GPT2Config(61, context=40, layers=2, heads=2, width=64, vocab_multiple=16))
    elif kind == "odd":  # nothing that 16 bytes divide
        model = GPT2(GPT2Config(61, context=40, layers=2, heads=3, width=39))
    elif kind == "modern":
        model = TransformerLM(TransformerLMConfig(61, 40, 2, 6, 2, 96, 80))
    else:
        model = TransformerLM(TransformerLMConfig(61, 40, 2, 2, 2, 64, 48, tied=False))
    rng = np.random.default_rng(0)
    for parameter in model.parameters():  # far from uniform, so that wrong tokens show
        parameter.data[...] += rng.normal(0, 0.2, parameter.shape)
    return model.to(device, dtype)


def decoder(
    model: LanguageModel, more: int, how: Sampling, kind: type[Decoder | Recomputer] = Decoder
) -> Decoder | Recomputer:
    vocabulary = None if how.repetition_penalty == 1 else 61
    state = new_state(PROMPTS, more, [3, 1, 4, 1], [], vocabulary, model.device)
    return kind(model, PROMPTS, state, how)


def tokens(one: Decoder | Recomputer, steps: int) -> list[Any]:
    for _ in range(steps):
        one.step()
    found = backend.to_numpy(one.state.tokens)
    return [found[row, : len(p) + steps].tolist() for row, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "modern", *map(on_gpu, ["odd", "untied"])])
def test_the_cache_changes_no_token(kind: str, how: Sampling, device: str) -> None:
    """Sequences fill the context at different times and continue beyond it."""
    more = 28 if device == "cpu" else 55
    model = make(kind, device)
    assert DecodeStep.supports(model) == (device != "cpu")
    found = tokens(decoder(model, more, how), more)
    assert found == tokens(decoder(model, more, how, Recomputer), more)
    if device != "cpu":
        assert found == tokens(decoder(make(kind), more, how), more)
        model.train(False)
        vars(model.blocks)["forward"] = None  # a model that is not as expected: ordinary ops
        assert not DecodeStep.supports(model)
        assert found == tokens(decoder(model, more, how), more)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 32, 33, 70])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["gpt2", "odd", "modern"])
def test_a_prepared_step_has_the_logits_of_the_model(kind: str, dtype: str, rows: int) -> None:
    model = make(kind, "cuda", dtype)
    prompts = [PROMPTS[row % 4] for row in range(rows)]
    state = new_state(prompts, 1, list(range(rows)), [], None, "cuda")
    one = Decoder(model, prompts, state, Sampling(0.0))
    one.step()
    assert one._prepared is not None
    logits = backend.to_numpy(one._prepared._buffers["logits", 61])
    wide = make(kind)  # float32 on the CPU, with the rounded parameters
    wide.load_state_dict({n: backend.to_numpy(t.data) for n, t in model.state_dict().items()})
    for row, prompt in enumerate(prompts[:9]):
        expected = wide(np.array([prompt])).numpy()[0, -1]
        error = np.linalg.norm(logits[row] - expected) / np.linalg.norm(expected)
        assert error < {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}[dtype]


def refuse(size: int) -> Any:
    raise AssertionError(f"{size} bytes were allocated")


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gpt2", "modern"])
def test_a_step_neither_waits_nor_allocates(kind: str, dtype: str, how: Sampling) -> None:
    """A step is captured, which fails where the host waits, and replayed as it stands."""
    cupy = backend.cupy
    model = make(kind, "cuda", dtype)
    expected = tokens(decoder(model, 20, how), 20)
    one = decoder(model, 20, how)
    one.step()
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(refuse):
        stream.begin_capture()
        try:
            one.step()
        finally:
            graph = stream.end_capture()
        for _ in range(19):
            graph.launch(stream)
    stream.synchronize()
    found = backend.to_numpy(one.state.tokens)
    for row, prompt in enumerate(PROMPTS):
        assert found[row, : len(prompt) + 20].tolist() == expected[row]


@pytest.mark.gpu
def test_models_that_are_not_plain_take_the_ordinary_way() -> None:
    class Own(Linear):
        pass

    model = make("gpt2", "cuda")
    assert DecodeStep.supports(model)
    with autocast("bfloat16"):
        assert not DecodeStep.supports(model)
    assert not DecodeStep.supports(make("gpt2", "cuda", "float64"))
    block: Any = model.blocks[0]
    block.attention.proj = Own(64, 64).to("cuda")
    assert not DecodeStep.supports(model)
    assert len(generate_batch(model, PROMPTS, 3)) == 4


@pytest.mark.parametrize("kind", ["gpt2", "modern"])
def test_autocast_reaches_what_is_cached(kind: str, device: str) -> None:
    with autocast("bfloat16"):
        found = generate_batch(make(kind, device), PROMPTS, 5, temperature=0)
    assert [len(row) for row in found] == [5] * 4


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_types_write_as_many_tokens(dtype: str, device: str) -> None:
    found = generate_batch(make("modern", device, dtype), PROMPTS, 9, temperature=0)
    assert [len(row) for row in found] == [9] * 4
