from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from tensorgrad import autocast, random
from tensorgrad.errors import TensorgradError
from tensorgrad.models.generation import beam_search, greedy_search, search
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.nn import TransformerBlock

END = 7


def make(vocab: int = 40, context: int = 64, spread: float = 0.3) -> TransformerLM:
    random.seed(0)
    model = TransformerLM(TransformerLMConfig(vocab, context, 2, 4, 2, 32))
    rng = np.random.default_rng(0)
    for parameter in model.parameters():  # far from uniform, so that wrong tokens show
        parameter.data[...] += rng.normal(0, spread, parameter.shape)
    return model


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    return make()


@pytest.fixture
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 40, length).tolist() for length in (3, 9, 1, 5, 5, 20)]


def test_greedy_takes_the_most_likely_token(model: TransformerLM, prompts: list[list[int]]) -> None:
    found = greedy_search(model, prompts, END, 12)
    for prompt, tokens in zip(prompts, found, strict=True):
        seen = list(prompt)
        for token in [*tokens, END][:12]:
            assert token == model(np.array([seen])).numpy()[0, -1].argmax()
            seen.append(token)
    assert len({len(tokens) for tokens in found}) > 2  # some end earlier than others


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("beams", [1, 4])
def test_cache_and_company_change_nothing(
    prompts: list[list[int]], beams: int, causal: bool, device: str
) -> None:
    """Without causality the tokens of a prompt attend to each other; new ones are causal."""
    model = make().to(device)
    for block in model.blocks:
        assert isinstance(block, TransformerBlock)
        block.attention.causal = causal

    def search(some: list[list[int]], **options: Any) -> list[list[int]]:
        if beams == 1:
            return greedy_search(model, some, END, 30, **options)
        return beam_search(model, some, END, 30, beams, **options)

    cached = search(prompts)
    assert len({len(tokens) for tokens in cached}) > 2
    assert search(prompts, use_cache=False) == cached
    assert [search([prompt])[0] for prompt in prompts] == cached
    assert search(prompts[::-1]) == cached[::-1]


def logp(model: TransformerLM, prompt: list[int], tokens: list[int]) -> float:
    """Return log p(tokens | prompt) from logits without cache, batch or mask."""
    logits = model(np.array([prompt + tokens])).numpy()[0].astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(sum(log_p[len(prompt) - 1 + i, token] for i, token in enumerate(tokens)))


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
def test_enough_beams_find_the_best_of_all_sequences(length_penalty: float) -> None:
    vocab, end, longest = 4, 2, 3
    model = make(vocab, 8, 0.5)
    prompts = [[1, 3], [0], [3, 3, 1]]
    others = [token for token in range(vocab) if token != end]
    ended = [[*t, end] for n in range(longest) for t in itertools.product(others, repeat=n)]
    all_of_them = ended + [list(t) for t in itertools.product(others, repeat=longest)]
    found = beam_search(model, prompts, end, longest, 64, length_penalty)
    for prompt, tokens in zip(prompts, found, strict=True):
        best = max(
            all_of_them, key=lambda t: logp(model, prompt, t) / ((5 + len(t)) / 6) ** length_penalty
        )
        assert tokens == [token for token in best if token != end]


def test_beams_find_what_is_likelier_than_greedy(
    model: TransformerLM, prompts: list[list[int]]
) -> None:
    def total(found: list[list[int]]) -> float:
        whole = [[*tokens, END][:10] for tokens in found]
        return sum(logp(model, p, t) for p, t in zip(prompts, whole, strict=True))

    greedy = greedy_search(model, prompts, END, 10)
    assert total(beam_search(model, prompts, END, 10, 8, 0.0)) > total(greedy)


@pytest.mark.parametrize("beams", [1, 3])
def test_16_bits_find_tokens_too(prompts: list[list[int]], beams: int, device: str) -> None:
    model = make().to(device, "bfloat16")
    for context in (nullcontext(), autocast("bfloat16")):
        with context:
            found = (
                greedy_search(model, prompts, END, 8)
                if beams == 1
                else beam_search(model, prompts, END, 8, beams)
            )
        assert [len(tokens) <= 8 for tokens in found] == [True] * len(prompts)
        assert max(map(len, found)) > 1


def test_a_larger_penalty_gives_longer_results(
    model: TransformerLM, prompts: list[list[int]]
) -> None:
    short, long = (
        sum(len(tokens) for tokens in beam_search(model, prompts, END, 30, 4, alpha))
        for alpha in (0.0, 3.0)
    )
    assert short < long


def test_dropout_is_off_and_the_mode_stays(prompts: list[list[int]]) -> None:
    random.seed(0)
    model = TransformerLM(TransformerLMConfig(40, 64, 1, 2, 2, 16, dropout=0.5))
    before = random.get_state()
    assert greedy_search(model, prompts, END, 5) == greedy_search(model, prompts, END, 5)
    assert model.training
    model.eval()
    beam_search(model, prompts, END, 5, 2)
    assert not model.training
    assert random.get_state() == before


def test_prompts_may_be_an_array(model: TransformerLM) -> None:
    array = np.array([[1, 2], [3, 4]])
    assert greedy_search(model, array, END, 5) == greedy_search(model, array.tolist(), END, 5)


@pytest.mark.parametrize("beams", [1, 2, 5])
def test_a_vocabulary_of_the_end_alone_ends_at_once(beams: int) -> None:
    model = make(vocab=1)
    assert beam_search(model, [[0], [0, 0]], 0, 5, beams) == [[], []]
    assert greedy_search(model, [[0]], 0, 5) == [[]]


def test_the_default_search_has_4_beams_and_a_penalty(
    model: TransformerLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    kind = search._Search

    def noted(*options: Any) -> Any:
        made.append(options)
        return kind(*options)

    monkeypatch.setattr(search, "_Search", noted)
    beam_search(model, [[1], [2, 3]], END, 6)
    assert made == [(4, 0.6, 6)] * 2
    beam_search(model, [[1]], END, 5, 1, search.LARGEST_PENALTY)
    assert len(greedy_search(model, [[1] * 59], 39, 5)[0]) <= 5  # the context and no more


def test_no_prompts_give_no_results(model: TransformerLM) -> None:
    assert greedy_search(model, [], END, 5) == beam_search(model, [], END, 5) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1], []], END, 5), r"search: prompt 1 has 0 tokens, expected 1 to 64 \(the context\)"),
        (([[1] * 60], END, 5), "has 60 tokens and max_new_tokens is 5, expected at most 64"),
        (([[40]], END, 5), "has the token 40, expected 0 to 39"),
        (([[1.5]], END, 5), "the prompt has dtype float64, expected integers"),
        (([[[1], [2, 3]]], END, 5), "the prompt is .*, expected one axis"),
        ((["a"], END, 5), "the prompt has type str, expected a tokenizer's tokens"),
        ((3, END, 5), "prompts has type int, expected a list of prompts"),
        (([[1]], 40, 5), "end has the token 40, expected 0 to 39"),
        (([[1]], None, 5), "end is None, expected an integer"),
        (([[1]], END, 0), "max_new_tokens is 0"),
        (([[1]], END, 5, 0), "beams is 0, expected 1 or more"),
        (([[1]], END, 5, 1.5), "beams is 1.5, expected an integer"),
        (([[1]], END, 5, 2, "x"), "length_penalty is 'x', expected a number"),
        (([[1]], END, "5", 2), "max_new_tokens is '5', expected an integer"),
        (([[1]], END, 5, 2, -1.0), r"length_penalty is -1\.0, expected 0 to 10"),
        (([[1]], END, 5, 2, float("nan")), "length_penalty is nan, expected 0 to 10"),
        (([[1]], END, 5, 2, 1e9), "length_penalty is 1000000000.0, expected 0 to 10"),
    ],
)
def test_bad_arguments_are_named(
    model: TransformerLM, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(TensorgradError, match=message):
        beam_search(model, *arguments)
    if len(arguments) == 3:
        with pytest.raises(TensorgradError, match=message):
            greedy_search(model, *arguments)
