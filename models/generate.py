"""Tokens out of a model, one after the other: greedy or sampled, one prompt or a batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.autograd import no_grad
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.tensor import Tensor

Tokens = np.ndarray[Any, Any]
Values = np.ndarray[Any, np.dtype[np.float64]]


def generate(
    model: LanguageModel,
    prompt: Sequence[int] | Tokens,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
    use_cache: bool = True,
) -> list[int]:
    """Return the tokens that follow one prompt; see `generate_batch`."""
    if np.ndim(prompt) != 1:
        raise ShapeError(f"generate: prompt has {np.ndim(prompt)} axes, expected one")
    return generate_batch(
        model,
        np.asarray(prompt)[None],
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_tokens=stop_tokens,
        use_cache=use_cache,
    )[0]


def generate_batch(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]] | Tokens,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
    use_cache: bool = True,
) -> list[list[int]]:
    """Return for each prompt the tokens that follow it, up to its first stop token.

    Args:
        model: a language model; dropout is off while this runs.
        prompts: (B, T) integers, all of one length, 1 to the model's context.
        max_new_tokens: how many tokens to add at most.
        temperature: divides the logits; 0 takes the most likely token each time (greedy).
        top_k: draw from the k most likely tokens only.
        top_p: draw from the fewest tokens that together have this probability.
        seed: equal seeds draw equal tokens; nothing else that is random is touched.
        stop_tokens: end a sequence; not part of the result.
        use_cache: keep keys and values from token to token; False computes all anew each time,
            with the same result up to rounding.
    Returns:
        B lists of at most `max_new_tokens` tokens.
    Raises:
        ArgumentError: an option or a token is out of its range, a prompt is empty or longer than
            the context, or the logits are not finite.
        ShapeError: the prompts have different lengths.
        DtypeError: the prompts are not integers.
    """
    steps = stream(
        model,
        prompts,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        use_cache=use_cache,
    )
    found: list[list[int]] = [[] for _ in range(len(prompts))]
    going = set(range(len(prompts)))
    for tokens in steps:
        for row in sorted(going):
            if tokens[row] in stop_tokens:
                going.remove(row)
            else:
                found[row].append(int(tokens[row]))
        if not going:
            break
    return found


def stream(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]] | Tokens,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> Iterator[Tokens]:
    """Yield the next token of every sequence, (B,), as soon as it is known.

    When the context is full, the older half of what the model sees is dropped, and the rest is
    read again. Arguments and errors are those of `generate_batch`.
    """
    tokens = _checked_prompts(prompts, model.context, model.vocab_size)
    _check_options(max_new_tokens, temperature, top_k, top_p)
    return _stream(model, tokens, max_new_tokens, temperature, top_k, top_p, seed, use_cache)


def _stream(
    model: LanguageModel,
    seen: Tokens,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    use_cache: bool,
) -> Iterator[Tokens]:
    random = np.random.Generator(np.random.Philox(seed))
    cache = model.new_cache(len(seen)) if use_cache else None
    fresh = seen  # what the cache does not hold yet
    for _ in range(max_new_tokens):
        logits = _next_logits(model, fresh if use_cache else seen, cache)
        tokens = sample(logits, random.random(len(seen)), temperature, top_k, top_p)
        yield tokens
        seen = np.concatenate([seen, tokens[:, None]], axis=1)
        fresh = seen[:, -1:]
        if seen.shape[1] > model.context:
            fresh = seen = seen[:, -max(1, model.context // 2) :]
            cache = model.new_cache(len(seen)) if use_cache else None


def _next_logits(model: LanguageModel, tokens: Tokens, cache: Any) -> Values:
    mode = model.training
    model.train(False)
    try:
        with no_grad():
            device_tokens = Tensor(backend.to_device(tokens, model.device))
            logits = backend.to_numpy(model.next_logits(device_tokens, cache).data)
    finally:
        model.train(mode)
    if not np.isfinite(logits.max(-1)).all():
        raise ArgumentError("generate: the model's logits are not finite, expected numbers")
    return np.asarray(logits, np.float64)


def sample(
    logits: Values,
    uniform: Values,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tokens:
    """Draw one token per row from softmax(logits / temperature), cut to top_k and top_p.

    Tokens are sorted by falling logit (equal ones by their number); those beyond the first k, or
    after the first few that together reach the probability p, are left out; the row's uniform
    number picks one of the rest by their cumulative probabilities.

    Args:
        logits: (B, V).
        uniform: (B,), from [0, 1).
        temperature: 0 takes the largest logit.
        top_k: at least 1, or None.
        top_p: above 0 and at most 1, or None.
    Returns:
        (B,) int64.
    Source: top-p: Holtzman et al. 2019, arXiv:1904.09751, section 3.1.
    """
    tokens: Tokens
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]
    falling = np.take_along_axis(logits, order, -1)
    with np.errstate(over="ignore"):  # by a temperature close to 0: the weight is 0
        weights = np.exp((falling - falling[:, :1]) / temperature)
    weights /= weights.sum(-1, keepdims=True)
    total = np.cumsum(weights, axis=-1)
    if top_p is not None:
        weights[total - weights >= top_p] = 0
        total = np.cumsum(weights, axis=-1)
    # Counts the tokens whose cumulative weight the number has passed; rounding cannot pass all.
    picked = (total <= uniform[:, None] * total[:, -1:]).sum(-1)
    last = (weights > 0).sum(-1) - 1
    tokens = np.take_along_axis(order, np.minimum(picked, last)[:, None], -1)[:, 0]
    return tokens


def _checked_prompts(prompts: Any, context: int, vocab_size: int) -> Tokens:
    lengths = sorted({len(prompt) for prompt in prompts})
    if not lengths:
        raise ArgumentError("generate: prompts is empty, expected at least one")
    if len(lengths) > 1:
        raise ShapeError(
            f"generate: prompts have {lengths[0]} to {lengths[-1]} tokens, expected all alike"
        )
    if not 1 <= lengths[0] <= context:
        raise ArgumentError(
            f"generate: the prompt has {lengths[0]} tokens, expected 1 to {context} (the context)"
        )
    tokens = np.asarray(prompts)
    if tokens.dtype.kind not in "iu":
        raise DtypeError(f"generate: prompts have dtype {tokens.dtype}, expected integers")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ArgumentError(
            f"generate: the prompt has the token {wrong}, expected 0 to {vocab_size - 1} "
            f"(a vocabulary of {vocab_size})"
        )
    return tokens.astype(np.int64)


def _check_options(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    wrong: tuple[str, float, str] | None = None
    if max_new_tokens < 0:
        wrong = ("max_new_tokens", max_new_tokens, "0 or more")
    elif not 0 <= temperature < math.inf:
        wrong = ("temperature", temperature, "a finite number from 0")
    elif top_k is not None and top_k < 1:
        wrong = ("top_k", top_k, "1 or more")
    elif top_p is not None and not 0 < top_p <= 1:
        wrong = ("top_p", top_p, "above 0 and at most 1")
    if wrong:
        raise ArgumentError(f"generate: {wrong[0]} is {wrong[1]}, expected {wrong[2]}")
