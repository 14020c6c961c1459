"""The cache and the captured step: the same tokens as without, and nothing for the host to do."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tensorgrad import autocast, random
from tensorgrad.core import backend
from tensorgrad.core.tensor import Tensor
from tensorgrad.models.generation import decoding_loop, generate_batch
from tensorgrad.models.generation.decoding_loop import Decoder, Recomputer
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.nn import LayerNorm, Linear, RopeScaling, evaluating
from tensorgrad.ops.sampling import Sampling, new_state

PROMPTS = [[5, 3, 1, 9, 5, 2, 7], [7], list(range(20)), [2, 2, 8]]
HOWS = [Sampling(0.0), Sampling(0.8, top_k=12, top_p=0.9, repetition_penalty=1.2)]


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
    elif kind == "published":  # all settings that published models have
        model = TransformerLM(
            TransformerLMConfig(
                *(61, 40, 2, 6, 2, 40, 80),
                head_width=16,
                rope_scaling=RopeScaling(
                    "llama3", 4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16
                ),
                window=6,
                window_from=1,
                qkv_bias=True,
                proj_bias=True,
                feed_forward_bias=True,
                qk_norm=True,
            )
        )
    else:
        model = TransformerLM(TransformerLMConfig(61, 40, 2, 2, 2, 64, 48, tied=False))
    rng = np.random.default_rng(0)
    for parameter in model.parameters():  # far from uniform, so that wrong tokens show
        parameter.data[...] += rng.normal(0, 0.2, parameter.shape)
    return model.to(device, dtype)


def decoder(
    model: LanguageModel,
    more: int,
    how: Sampling,
    kind: type[Decoder | Recomputer] = Decoder,
    prompts: list[list[int]] = PROMPTS,
) -> Decoder | Recomputer:
    vocabulary = None if how.repetition_penalty == 1 else 61
    seeds = [3 + row for row in range(len(prompts))]
    state = new_state(prompts, more, seeds, [], vocabulary, model.device)
    with evaluating(model):
        return kind(model, prompts, state, how)


def tokens(one: Decoder | Recomputer, steps: int) -> list[Any]:
    with evaluating(one.model):
        for _ in range(steps):
            one.step()
    found = backend.to_numpy(one.state.tokens)
    return [found[row, : len(p) + steps].tolist() for row, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "modern", "published", *map(on_gpu, ["odd", "untied"])])
def test_the_cache_changes_no_token(kind: str, how: Sampling, device: str) -> None:
    """Sequences fill the context at different times and continue beyond it."""
    more = 28 if device == "cpu" else 55
    model = make(kind, device)
    found = tokens(decoder(model, more, how), more)
    assert found == tokens(decoder(model, more, how, Recomputer), more)
    if device != "cpu":
        assert found == tokens(decoder(make(kind), more, how), more)


def test_long_prompts_are_read_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt2")
    expected = tokens(decoder(model, 3, HOWS[0]), 3)
    read: list[tuple[int, ...]] = []
    next_logits = model.next_logits

    def noted(given: Any, cache: Any = None, mask: Any = None) -> Tensor:
        read.append(given.shape)
        return next_logits(given, cache, mask)

    monkeypatch.setattr(model, "next_logits", noted)
    for most, shapes in ((60, [(3, 19), (1, 19)]), (38, [(2, 19)] * 2), (5, [(1, 19)] * 4)):
        monkeypatch.setattr(decoding_loop, "_PREFILL", most)
        read.clear()
        one = decoder(model, 3, HOWS[0])
        assert read == shapes
        assert tokens(one, 3) == expected
    read.clear()
    decoder(model, 3, HOWS[0], prompts=[[1], [2]])
    assert read == []  # a token each is that of the first step


def test_memory_is_for_a_power_of_two_of_tokens() -> None:
    found = [decoding_loop.capacity(count) for count in (1, 128, 129, 256, 257)]
    assert found == [128, 128, 256, 256, 512]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 32, 33, 70])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["gpt2", "odd", "modern", "published"])
def test_a_step_has_the_logits_of_the_model(kind: str, dtype: str, rows: int) -> None:
    model = make(kind, "cuda", dtype)
    prompts = [PROMPTS[row % 4] for row in range(rows)]
    one: Any = decoder(model, 1, Sampling(0.0), prompts=prompts)
    with evaluating(model):
        newest = Tensor(one.state.latest[:, None])
        logits = model.next_logits(newest, one._cache)
    assert logits.dtype == "float32"
    wide = make(kind)  # float32 on the CPU, with the rounded parameters
    wide.load_state_dict({n: backend.to_numpy(t.data) for n, t in model.state_dict().items()})
    for row, prompt in enumerate(prompts[:9]):
        expected = wide(np.array([prompt])).numpy()[0, -1]
        error = np.linalg.norm(logits.numpy()[row] - expected) / np.linalg.norm(expected)
        assert error < {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}[dtype]


def kernels_of(one: Any) -> int:
    """Return the number of nodes of the one graph of a decoder."""
    (variant,) = one._buffers.step.captured._variants
    count = ctypes.c_size_t()
    graph = ctypes.c_void_p(variant.graph.graph)
    assert not ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(graph, None, ctypes.byref(count))
    return count.value


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gpt2", "modern", "published"])
def test_captured_steps_have_the_bits_of_eager_ones(kind: str, dtype: str, how: Sampling) -> None:
    model = make(kind, "cuda", dtype)
    found = []
    for captures in (False, True):
        model.captures = captures
        one: Any = decoder(model, 20, how)
        written = tokens(one, 20)
        lengths = backend.to_numpy(one.state.lengths)
        cached = [
            backend.to_numpy(array)[row, :, :length].tobytes()
            for cache in one._cache
            for array in cache.arrays
            for row, length in enumerate(lengths)
        ]
        found.append((written, cached))
        assert one._buffers.is_captured == captures
    assert found[0] == found[1]
    # Embedding, last norm, logits and sampling; a block of GPT-2 is norm, qkv, attention, proj,
    # norm, up and down, one of LLaMA has a gate too.
    if kind != "published":  # whose norms of queries and keys are kernels of their own
        assert kernels_of(one) == 4 + 2 * (7 if kind == "gpt2" else 8)


@pytest.mark.gpu
def test_any_model_is_captured() -> None:
    class Own(Linear):
        def forward(self, x: Any, residual: Any = None) -> Tensor:
            y: Tensor = super().forward(x, residual) * 2.0
            return y

    class Shifted(LayerNorm):
        def forward(self, x: Any) -> Tensor:
            return super().forward(x) + 0.5

    class Mine(GPT2):
        def finish(self, x: Tensor, targets: Any = None, dtype: Any = None) -> Tensor:
            return super().finish(x, targets, dtype) * 0.5

    found = []
    for device in ("cpu", "cuda"):
        random.seed(0)
        model = Mine(GPT2Config(61, context=40, layers=2, heads=2, width=64))
        block: Any = model.blocks[0]
        block.attention.proj, block.norm2 = Own(64, 64), Shifted(64)
        one: Any = decoder(model.to(device), 9, HOWS[0])
        found.append(tokens(one, 9))
    assert found[0] == found[1]
    assert one._buffers.step.captured.graphs == 1


@pytest.mark.gpu
def test_what_cannot_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    class Waits(LayerNorm):
        def forward(self, x: Any) -> Tensor:
            y = super().forward(x)
            return y * (2.0 if float((y * y).sum()) > 0 else 1.0)

    found = []
    for device in ("cpu", "cuda"):
        model = make("gpt2")
        random.seed(1)
        block: Any = model.blocks[1]
        block.norm1 = Waits(64)
        with caplog.at_level("INFO", "tensorgrad"):
            found.append(generate_batch(model.to(device), PROMPTS, 9, temperature=0))
    assert found[0] == found[1]
    assert sum("steps are not captured: " in each.message for each in caplog.records) == 1


@pytest.mark.parametrize("kind", ["gpt2", "modern"])
def test_autocast_reaches_what_is_cached(kind: str, device: str) -> None:
    with autocast("bfloat16"):
        found = generate_batch(make(kind, device), PROMPTS, 5, temperature=0)
    assert [len(row) for row in found] == [5] * 4


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_types_write_as_many_tokens(dtype: str, device: str) -> None:
    found = generate_batch(make("modern", device, dtype), PROMPTS, 9, temperature=0)
    assert [len(row) for row in found] == [9] * 4
