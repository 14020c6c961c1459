from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.models.generation import generate, generate_batch, sampling, stream
from tensorgrad.models.generation.decoding_loop import Decoder, Recomputer
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig

VOCAB = 37


@pytest.fixture(scope="module", params=["gpt2", "modern"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    if request.param == "gpt2":
        found: LanguageModel = GPT2(GPT2Config(VOCAB, context=10, layers=2, heads=2, width=16))
    else:
        found = TransformerLM(TransformerLMConfig(VOCAB, 10, 2, 2, 1, 16))
    rng = np.random.default_rng(0)
    for parameter in found.parameters():  # far from uniform, so that wrong tokens show
        parameter.data[...] += rng.normal(0, 0.3, parameter.shape)
    return found


def test_greedy_takes_the_most_likely_token(model: LanguageModel) -> None:
    seen = [1, 2, 3]
    for token in generate(model, [1, 2, 3], 7, temperature=0):
        assert token == model(np.array([seen])).numpy()[0, -1].argmax()
        seen.append(token)
    assert len(seen) == 10


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_cache_changes_no_token(model: LanguageModel, temperature: float) -> None:
    prompts = [[1, 2, 3], [4, 5, 6]]
    one, two = (
        generate_batch(model, prompts, 25, temperature=temperature, seed=5, use_cache=cached)
        for cached in (True, False)
    )
    assert one == two
    assert [len(row) for row in one] == [25, 25]  # more than twice the context


def test_a_batch_gives_what_each_prompt_gives_alone(model: LanguageModel) -> None:
    prompts = np.random.default_rng(1).integers(0, VOCAB, (4, 6))
    together = generate_batch(model, prompts, 20, temperature=0)
    assert together == [generate(model, prompt, 20, temperature=0) for prompt in prompts]


def test_a_full_context_drops_its_older_half(model: LanguageModel) -> None:
    tokens = generate(model, range(10), 2, temperature=0)
    assert tokens[0] == model(np.arange(10)[None]).numpy()[0, -1].argmax()
    kept = [*range(6, 10), tokens[0]]
    assert tokens[1] == model(np.array([kept])).numpy()[0, -1].argmax()


def test_seeds_decide(model: LanguageModel) -> None:
    draws = [generate(model, [1], 15, seed=seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_top_k_of_one_is_greedy(model: LanguageModel) -> None:
    greedy = generate(model, [1], 15, temperature=0)
    assert generate(model, [1], 15, top_k=1) == greedy
    assert generate(model, [1], 15, top_p=1e-9) == greedy
    assert generate(model, [1], 15, temperature=1e-320) == greedy


def test_a_stop_token_ends_its_sequence(model: LanguageModel) -> None:
    prompts = [[1, 2], [5, 9]]
    free = generate_batch(model, prompts, 30, seed=3)
    stop = free[0][4]
    expected = [row[: row.index(stop)] if stop in row else row for row in free]
    accepted: list[Any] = [[stop], {stop}, np.array([stop]), iter([stop])]
    for stops in accepted:
        assert generate_batch(model, prompts, 30, seed=3, stop_tokens=stops) == expected


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_ends_soon_after_the_last_sequence(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, use_cache: bool
) -> None:
    taken: list[Any] = []
    kind: Any = Decoder if use_cache else Recomputer
    step = kind.step

    def counted(decoder: Any) -> None:
        taken.append(decoder)
        step(decoder)

    monkeypatch.setattr(kind, "step", counted)
    free = generate_batch(model, [[1, 2], [5, 9]], 60, seed=3, use_cache=use_cache)
    assert len(taken) == 60
    taken.clear()
    stops = range(VOCAB)  # any token
    found = generate_batch(
        model, [[1, 2], [5, 9]], 60, seed=3, stop_tokens=stops, use_cache=use_cache
    )
    assert found == [[], []]
    assert len(taken) == 2 * sampling._CHECK_EVERY  # flags are read one check later
    for length in (1, 7, 8, 9, 16, 17):
        found = generate_batch(model, [[1, 2], [5, 9]], length, seed=3, use_cache=use_cache)
        assert found == [row[:length] for row in free]


def test_steps_have_a_cache_unless_told_otherwise(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [generate(model, [1, 2], 5), *generate_batch(model, [[1, 2]], 5)]
    plain += [[int(each[0]) for each in stream(model, [[1, 2]], 5)]]
    options = {"temperature": 1.0, "repetition_penalty": 1.0, "seed": 0, "use_cache": False}
    assert plain == [generate(model, [1, 2], 5, **options)] * 3  # type: ignore[arg-type]

    def refuse(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Recomputer, "step", refuse)
    generate(model, [1, 2], 1)
    generate_batch(model, [[1, 2]], 1)
    next(stream(model, [[1, 2]], 1))
    with pytest.raises(ZeroDivisionError):
        next(stream(model, [[1, 2]], 1, use_cache=False))


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    model = TransformerLM(TransformerLMConfig(VOCAB, 10, 2, 2, 1, 16))
    model.attention_layers()[1].causal = False
    with pytest.raises(ArgumentError, match="model attends to later tokens, expected causal atten"):
        generate(model, [1], 3)


def test_seeds_go_on_from_0_after_the_last() -> None:
    assert sampling._checked_seeds(2**64 - 1, 2) == [2**64 - 1, 0]
    assert sampling._checked_seeds([0, 2**64 - 1], 2) == [0, 2**64 - 1]
    for seeds in ([0, 2**64], [-1, 0], [0], [0, 1.5]):
        with pytest.raises(
            ArgumentError, match=r"seed is \[.*, or 2 of them \(one for each prompt"
        ):
            sampling._checked_seeds(seeds, 2)  # type: ignore[arg-type]


def test_nothing_is_added_when_nothing_is_asked_for(model: LanguageModel) -> None:
    assert generate_batch(model, [[1], [2]], 0) == [[], []]


def test_tokens_come_one_by_one_and_the_mode_is_kept(model: LanguageModel) -> None:
    assert model.training
    steps = stream(model, [[1], [2]], 3, temperature=0)
    first = next(steps)
    assert first.shape == (2,)
    assert model.training
    rest = np.stack([first, *steps], 1)
    assert rest.tolist() == generate_batch(model, [[1], [2]], 3, temperature=0)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, ArgumentError, r"the prompt has 0 tokens, expected 1 to 10 \(the context\)"),
        ([1] * 11, {}, ArgumentError, "the prompt has 11 tokens, expected 1 to 10"),
        ([VOCAB], {}, ArgumentError, "the prompt has the token 37, expected 0 to 36"),
        ([-1], {}, ArgumentError, "the token -1"),
        ([0.5], {}, DtypeError, "dtype float64, expected integers"),
        ([[1]], {}, ShapeError, "prompt has 2 axes, expected one"),
        ([[1], [2, 3]], {}, ShapeError, "the prompt is .*, expected one axis"),
        ([1], {"max_new_tokens": -1}, ArgumentError, "max_new_tokens is -1"),
        ([1, 1], {"max_new_tokens": 2**31 - 2}, ArgumentError, "expected 2147483645 or less after"),
        ([1], {"temperature": -0.1}, ArgumentError, "temperature is -0.1"),
        ([1], {"temperature": math.nan}, ArgumentError, "temperature is nan"),
        ([1], {"temperature": math.inf}, ArgumentError, "temperature is inf"),
        ([1], {"top_k": 0}, ArgumentError, "top_k is 0, expected 1 or more"),
        ([1], {"top_p": 0.0}, ArgumentError, "top_p is 0.0, expected above 0 and at most 1"),
        ([1], {"top_p": 1.5}, ArgumentError, "top_p is 1.5"),
        ([1], {"repetition_penalty": 0.0}, ArgumentError, "repetition_penalty is 0.0, expected"),
        ([1], {"max_new_tokens": "3"}, ArgumentError, "max_new_tokens is '3', expected an integer"),
        ([1], {"max_new_tokens": 1.5}, ArgumentError, "max_new_tokens is 1.5, expected an integer"),
        ([1], {"seed": 1.5}, ArgumentError, "seed is 1.5, expected an integer from 0"),
        ([1], {"seed": "a"}, ArgumentError, "seed is 'a', expected an integer from 0"),
        ([1], {"stop_tokens": 3}, ArgumentError, "stop_tokens is 3, expected a list of tokens"),
        ([1], {"stop_tokens": ["a"]}, ArgumentError, r"stop_tokens is \['a'\], expected a list"),
        ([1], {"stop_tokens": [VOCAB]}, ArgumentError, "stop_tokens has the token 37, expected 0"),
        (
            [1],
            {"stop_tokens": [-(2**70)]},
            ArgumentError,
            "stop_tokens has the token -1180591620717411303424",
        ),
        ("a", {}, DtypeError, "the prompt has type str, expected a tokenizer's tokens"),
    ],
)
def test_bad_input_is_named(
    model: LanguageModel, prompt: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        generate(model, prompt, **{"max_new_tokens": 3, **options})


def test_no_prompts_are_refused(model: LanguageModel) -> None:
    for prompts in ("text", 1, None):
        with pytest.raises(DtypeError, match=r"prompts has type .*, expected a list of prompts"):
            generate_batch(model, prompts, 3)  # type: ignore[arg-type]  # a user may do it
    with pytest.raises(ArgumentError, match="prompts is empty"):
        generate_batch(model, [], 3)
    with pytest.raises(ArgumentError, match="prompt 1 has 0 tokens"):
        generate_batch(model, [[1], []], 3)
    with pytest.raises(ArgumentError, match=r"seed is \[1\], expected .* or 2 of them"):
        generate_batch(model, [[1], [2]], 3, seed=[1])
    for seed in (-1, 2**64):
        with pytest.raises(ArgumentError, match=f"seed is {seed}, expected an integer from 0"):
            generate(model, [1], 3, seed=seed)


OPTIONS = [
    {"temperature": 0},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_company_changes_no_token(model: LanguageModel, options: dict[str, Any]) -> None:
    """Prompts of all lengths, which fill the context at different times."""
    prompts = [[5, 3, 1, 9], [7], list(range(10)), [2, 2, 8]]
    together = generate_batch(model, prompts, 14, seed=[9, 8, 7, 6], **options)
    for prompt, seed, tokens in zip(prompts, (9, 8, 7, 6), together, strict=True):
        assert generate(model, prompt, 14, seed=seed, **options) == tokens


def test_one_seed_gives_each_prompt_its_own(model: LanguageModel) -> None:
    found = generate_batch(model, [[1], [1]], 12, seed=4)
    assert found == [generate(model, [1], 12, seed=seed) for seed in (4, 5)]
    assert found[0] != found[1]


def test_a_penalty_makes_repetition_rarer(model: LanguageModel) -> None:
    plain, punished = (
        generate(model, [1, 2], 20, temperature=0, repetition_penalty=p) for p in (1.0, 3.0)
    )
    assert len(set(punished)) > len(set(plain))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["norm.weight", "blocks.0.attention.qkv.bias", "tokens.weight"])
def test_a_model_gone_wrong_is_an_error(name: str, value: float, dtype: str, device: str) -> None:
    broken = GPT2(GPT2Config(VOCAB, context=10, layers=1, heads=2, width=16)).to(device, dtype)
    dict(broken.named_parameters())[name].data[-1] = value
    for use_cache in (True, False):
        with np.errstate(all="ignore"), pytest.raises(ArgumentError, match="logits are not finite"):
            generate(broken, [1, 2], 3, use_cache=use_cache)
