"""Autoregressive generation: greedy or sampled tokens after one prompt or a batch of prompts."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.checks import check_integer
from tensorgrad.core.errors import ArgumentError
from tensorgrad.models.generation.decoding_loop import Decoder, Recomputer, capacity
from tensorgrad.models.language_model import LanguageModel, check_tokens, checked_prompts
from tensorgrad.nn import evaluating
from tensorgrad.ops.sampling import BROKEN, STOPPED, Sampling, new_state

__all__ = ["generate", "generate_batch", "stream"]

Tokens = np.ndarray[Any, Any]
_MOST_TOKENS = 2**31 - 1  # the longest sequence: the device counts its tokens in 32 bits
_CHECK_EVERY = 8  # steps between checks whether all sequences had ended at the check before


def generate(
    model: LanguageModel,
    prompt: Sequence[int] | Tokens,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
    use_cache: bool = True,
) -> list[int]:
    """Return the tokens after one prompt, up to the first stop token.

    Args:
        model: a language model; dropout is off while this runs.
        prompt: the tokens of the sequence, from 1 up to the model's context.
        max_new_tokens: the largest number of tokens to append.
        temperature: divides the logits; 0: greedy, the most likely token.
        top_k: sample from the k most likely tokens only; default: from all.
        top_p: sample from the fewest tokens that together have this probability (nucleus).
        repetition_penalty: above 1 makes earlier tokens less likely; see `Sampling`.
        seed: equal seeds and logits give equal tokens, 0 to 2^64 - 1.
        stop_tokens: end the sequence; not part of the result.
        use_cache: use a key-value cache; False recomputes all tokens in each step.

    Returns:
        At most `max_new_tokens` tokens.

    Raises:
        ArgumentError, ShapeError, DtypeError: as for `generate_batch`.

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config, generate
        >>> model = GPT2(GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8))
        >>> len(generate(model, [1, 2], 3, temperature=0.8))
        3
    """
    return generate_batch(
        model,
        [prompt],
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop_tokens=stop_tokens,
        use_cache=use_cache,
    )[0]


def generate_batch(
    model: LanguageModel,
    prompts: Sequence[Sequence[int] | Tokens] | Tokens,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop_tokens: Collection[int] = (),
    use_cache: bool = True,
) -> list[list[int]]:
    """Return the tokens after each prompt, up to the first stop token.

    When a sequence fills the model's context, the older half of its window is dropped. The tokens
    of a prompt do not depend on the other prompts.

    Args:
        model: a language model; dropout is off while this runs.
        prompts: the tokens of each sequence, from 1 up to the model's context.
        max_new_tokens: the largest number of tokens to append.
        temperature: divides the logits; 0: greedy, the most likely token.
        top_k: sample from the k most likely tokens only.
        top_p: sample from the fewest tokens that together have this probability (nucleus).
        repetition_penalty: above 1 makes earlier tokens less likely; see `Sampling`.
        seed: equal seeds and logits give equal tokens on every device; the global generator is not
            used. One for each prompt, or s: prompt i then has the seed s + i.
        stop_tokens: end a sequence; not part of the result.
        use_cache: use a key-value cache; False recomputes all tokens in each step, with the same
            result up to rounding.

    Returns:
        B lists of at most `max_new_tokens` tokens.

    Raises:
        ArgumentError: an option or a token is out of its range, a prompt is empty or longer than
            the context, or the logits are not finite.
        ShapeError: a prompt has more than one axis.
        DtypeError: the prompts are not integers.

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config, generate_batch
        >>> model = GPT2(GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8))
        >>> rows = generate_batch(model, [[1, 2], [3]], 3, temperature=0)
        >>> [len(row) for row in rows]
        [3, 3]
    """
    how = Sampling(temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty)
    stops = _checked_stops(stop_tokens, model.vocab_size)
    with evaluating(model):
        decoder, lengths = _begin(model, prompts, max_new_tokens, how, seed, stops, use_cache)
        if not max_new_tokens:
            return [[] for _ in lengths]
        with closing(decoder):
            earlier = None  # flags: the GPU still has steps to run when the host reads them
            for number in range(1, max_new_tokens + 1):
                decoder.step()
                if number == max_new_tokens:
                    _check_flags(backend.to_numpy(decoder.state.flags))
                elif number % _CHECK_EVERY == 0:
                    if earlier is not None and (_check_flags(earlier()) & STOPPED).all():
                        break
                    earlier = backend.to_numpy_later(decoder.state.flags)
            found = backend.to_numpy(decoder.state.tokens)
    results = []
    for row, length in zip(found, lengths, strict=True):
        tokens = row[length : length + number]
        ends = np.flatnonzero(np.isin(tokens, stops))
        results.append(tokens[: ends[0] if len(ends) else number].tolist())
    return results


def stream(
    model: LanguageModel,
    prompts: Sequence[Sequence[int] | Tokens] | Tokens,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | Sequence[int] = 0,
    use_cache: bool = True,
) -> Iterator[Tokens]:
    """Yield the next token of every sequence, step by step; the caller decides when to stop.

    Args:
        model, prompts, max_new_tokens: as for `generate_batch`.
        temperature, top_k, top_p, repetition_penalty, seed, use_cache: as for `generate_batch`.

    Yields:
        (B,) int64.

    Raises:
        ArgumentError, ShapeError, DtypeError: as for `generate_batch`.

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config, stream
        >>> model = GPT2(GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8))
        >>> for tokens in stream(model, [[1, 2], [3]], 2):
        ...     print(tokens.shape)
        (2,)
        (2,)
    """
    how = Sampling(temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty)
    with evaluating(model):
        decoder, _ = _begin(model, prompts, max_new_tokens, how, seed, (), use_cache)
    return _steps(decoder, max_new_tokens)


def _steps(decoder: Decoder | Recomputer, count: int) -> Iterator[Tokens]:
    with closing(decoder):
        for _ in range(count):
            with evaluating(decoder.model):
                decoder.step()
            _check_flags(backend.to_numpy(decoder.state.flags))
            yield backend.to_numpy(decoder.state.latest).copy()


def _begin(
    model: LanguageModel,
    prompts: Any,
    max_new_tokens: int,
    how: Sampling,
    seed: int | Sequence[int],
    stops: Sequence[int],
    use_cache: bool,
) -> tuple[Decoder | Recomputer, list[int]]:
    """Return the decoder and the lengths of the prompts."""
    if not model.causal:
        raise ArgumentError(
            "generate: model attends to later tokens, expected causal attention; for a translation "
            "model with a prefix use models.translation.generate"
        )
    tokens = checked_prompts("generate", prompts, model)
    if not tokens:
        raise ArgumentError("generate: prompts is empty, expected at least one")
    check_integer("generate", "max_new_tokens", max_new_tokens, 0)
    most = _MOST_TOKENS - max(map(len, tokens))
    if max_new_tokens > most:
        raise ArgumentError(
            f"generate: max_new_tokens is {max_new_tokens}, expected {most} or less after these "
            "prompts"
        )
    vocabulary = None if how.repetition_penalty == 1 else model.vocab_size
    seeds = _checked_seeds(seed, len(tokens))
    longest = max(map(len, tokens))
    more = capacity(longest + max_new_tokens) - longest
    state = new_state(tokens, more, seeds, stops, vocabulary, "cpu")
    kind = Decoder if use_cache else Recomputer
    return kind(model, tokens, state, how), [len(prompt) for prompt in tokens]


def _check_flags(flags: Any) -> Any:
    """Return the flags of all sequences; raise where logits were not finite."""
    if (flags & BROKEN).any():
        raise ArgumentError("generate: the model's logits are not finite, expected numbers")
    return flags


def _checked_stops(stop_tokens: Collection[int], vocab_size: int) -> list[int]:
    try:
        stops = [operator.index(token) for token in stop_tokens]
    except TypeError as error:
        raise ArgumentError(
            f"generate: stop_tokens is {stop_tokens!r}, expected a list of tokens"
        ) from error
    check_tokens("generate", "stop_tokens", stops, vocab_size)
    return stops


def _checked_seeds(seed: int | Sequence[int], count: int) -> list[int]:
    try:
        if isinstance(seed, int | np.integer):
            seeds = [(int(seed) + number) % 2**64 for number in range(count)]
            seeds = seeds if 0 <= seed < 2**64 else [-1]
        else:
            seeds = [operator.index(value) for value in seed]
    except TypeError:
        seeds = []
    if len(seeds) != count or not all(0 <= value < 2**64 for value in seeds):
        raise ArgumentError(
            f"generate: seed is {seed!r}, expected an integer from 0 to 2^64 - 1, or {count} of "
            "them (one for each prompt)"
        )
    return seeds
