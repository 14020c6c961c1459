"""Greedy search and beam search for prompts of different lengths.

Prompts are padded on the left, so that their next tokens are in one column. Attention masks the
padding, and rotary positions depend on distances only, so the result of a row does not depend on
the others. A row that has ended is removed from the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, upcast
from tensorgrad.core.checks import check_between, check_integer
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.tensor import Tensor
from tensorgrad.models.language_model import check_tokens, checked_prompts
from tensorgrad.models.transformer_lm import TransformerLM
from tensorgrad.nn import evaluating
from tensorgrad.ops.reduce import argmax
from tensorgrad.ops.softmax import log_softmax

__all__ = ["LARGEST_PENALTY", "beam_search", "greedy_search"]

Tokens = np.ndarray[Any, Any]
Prompts = Sequence[Sequence[int] | Tokens] | Tokens

LARGEST_PENALTY = 10  # larger exponents overflow for long sequences


def greedy_search(
    model: TransformerLM, prompts: Prompts, end: int, max_new_tokens: int, *, use_cache: bool = True
) -> list[list[int]]:
    """Return the tokens after each prompt, each the most likely one, up to the token `end`.

    Args:
        model: dropout is off while this runs.
        prompts: token ids, of any lengths from 1 on.
        end: ends a sequence; not part of the result.
        max_new_tokens: the largest number of tokens to append; with the longest prompt they must
            fit into the model's context.
        use_cache: use a key-value cache; False recomputes all tokens in each step.

    Returns:
        A list of at most `max_new_tokens` tokens for each prompt.

    Raises:
        ArgumentError: max_new_tokens or a token is out of its range, or a prompt is empty or too
            long.
        ShapeError, DtypeError: a prompt is not a list of integers.

    Example:
        >>> from tensorgrad.models import TransformerLM, TransformerLMConfig, greedy_search
        >>> config = TransformerLMConfig(10, context=8, layers=1, heads=2, kv_heads=1, width=8)
        >>> rows = greedy_search(TransformerLM(config), [[1, 2], [3]], end=0, max_new_tokens=4)
        >>> len(rows), max(map(len, rows)) <= 4
        (2, True)
    """
    prompts = _checked(model, prompts, end, max_new_tokens)
    if not prompts:
        return []
    found: list[list[int]] = [[] for _ in prompts]
    with evaluating(model):
        rows = _SearchRows(model, prompts, max_new_tokens, use_cache)
        going = np.arange(len(prompts))
        for _ in range(max_new_tokens):
            tokens = backend.to_numpy(argmax(Tensor(rows.next_logits()), -1).data)
            keep = np.flatnonzero(tokens != end)
            going, tokens = going[keep], tokens[keep]
            for row, token in zip(going, tokens, strict=True):
                found[row].append(int(token))
            if not len(going):
                break
            rows.extend(tokens, keep)
    return found


def beam_search(
    model: TransformerLM,
    prompts: Prompts,
    end: int,
    max_new_tokens: int,
    beams: int = 4,
    length_penalty: float = 0.6,
    *,
    use_cache: bool = True,
) -> list[list[int]]:
    """Return the tokens after each prompt with the best score that beam search finds.

        score = log p(tokens, end | prompt) / ((5 + n) / 6)^length_penalty

    with n tokens, including the end. Each step extends the `beams` likeliest hypotheses of a prompt
    by every token. A prompt is done when `beams` hypotheses have ended; those that have not after
    `max_new_tokens` count as they are.

    Args:
        model, prompts, end, max_new_tokens: as for `greedy_search`.
        beams: the number of hypotheses of a prompt, 1 or more.
        length_penalty: 0 to LARGEST_PENALTY; larger values favour longer results.
        use_cache: as for `greedy_search`.

    Returns:
        A list of at most `max_new_tokens` tokens for each prompt.

    Raises:
        ArgumentError: an option or a token is out of its range, or a prompt is empty or too long.
        ShapeError, DtypeError: a prompt is not a list of integers.

    Source: Wu et al. 2016, arXiv:1609.08144, section 7, eq. 14.

    Example:
        >>> from tensorgrad.models import TransformerLM, TransformerLMConfig, beam_search
        >>> config = TransformerLMConfig(10, context=8, layers=1, heads=2, kv_heads=1, width=8)
        >>> rows = beam_search(TransformerLM(config), [[1, 2], [3]], 0, 4, beams=2)
        >>> len(rows), max(map(len, rows)) <= 4
        (2, True)
    """
    check_integer("beam_search", "beams", beams, 1)
    check_between("beam_search", "length_penalty", length_penalty, 0, LARGEST_PENALTY)
    prompts = _checked(model, prompts, end, max_new_tokens)
    if not prompts:
        return []
    searches = [_Search(beams, length_penalty, max_new_tokens) for _ in prompts]
    with evaluating(model):
        rows = _SearchRows(model, prompts, max_new_tokens, use_cache)
        going = searches
        first = np.where(np.arange(beams) == 0, 0.0, -np.inf)  # all beams begin equal: use one
        scores = np.tile(first, (len(prompts), 1))
        logits = rows.next_logits().repeat(beams, axis=0)
        # The row of each beam, (prompts, beams).
        parents: Any = np.arange(len(prompts)).repeat(beams).reshape(-1, beams)
        while True:
            best = _best(logits, scores, 2 * beams)
            kept = [
                search.advance(values, origins, tokens, end)
                for search, values, origins, tokens in zip(going, *best, strict=True)
            ]
            left = [number for number, search in enumerate(going) if not search.done]
            if not left:
                break
            picked = np.concatenate([parents[number][kept[number]] for number in left])
            going = [going[number] for number in left]
            scores = np.stack([search.scores for search in going])
            rows.extend(np.concatenate([search.tokens[:, -1] for search in going]), picked)
            logits = rows.next_logits()
            parents = np.arange(len(going) * beams).reshape(-1, beams)
    return [search.result() for search in searches]


def _checked(model: TransformerLM, prompts: Prompts, end: int, max_new_tokens: int) -> list[Tokens]:
    """Return the tokens of each prompt."""
    check_integer("search", "max_new_tokens", max_new_tokens, 1)
    check_integer("search", "end", end)
    check_tokens("search", "end", [end], model.vocab_size)
    tokens = checked_prompts("search", prompts, model)
    width = max(map(len, tokens), default=0)
    if width + max_new_tokens > model.context:
        raise ArgumentError(
            f"search: a prompt has {width} tokens and max_new_tokens is {max_new_tokens}, expected "
            f"at most {model.context} together (the context)"
        )
    return tokens


class _SearchRows:
    """Rows of tokens that grow by one a step, and their key-value cache."""

    def __init__(
        self, model: TransformerLM, prompts: list[Tokens], max_new_tokens: int, use_cache: bool
    ) -> None:
        width = max(map(len, prompts))
        tokens = np.zeros((len(prompts), width), np.int64)
        is_token = np.ones((len(prompts), 1, 1, width + max_new_tokens), bool)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) :] = prompt
            is_token[row, ..., : width - len(prompt)] = False
        self._model = model
        self._tokens = backend.to_device(tokens, model.device)
        self._mask = None if is_token.all() else backend.to_device(is_token, model.device)
        self._prompt = width
        self._cache = model.new_cache(len(prompts), width + max_new_tokens) if use_cache else None
        self._fresh = self._tokens  # tokens that the cache does not have yet

    def next_logits(self) -> Array:
        """Return (rows, V), on the model's device."""
        length = self._tokens.shape[1]
        mask = None if self._mask is None else self._mask[..., :length]
        if self._cache is None:  # no token attends to a later one; in the prompt, the model decides
            steps = backend.namespace(self._tokens).arange(length)
            causal = (steps <= steps[:, None]) | (steps < self._prompt)  # (T, T)
            mask = causal if mask is None else mask & causal
        fresh = self._tokens if self._cache is None else self._fresh
        return self._model.next_logits(Tensor(fresh), self._cache, mask).data

    def extend(self, tokens: Any, rows: Any) -> None:
        """Keep these rows, in this order, and append a token to each."""
        like = self._tokens
        if len(rows) != len(like) or (rows != np.arange(len(rows))).any():
            rows = backend.asarray_like(rows, like)
            like = like[rows]
            self._mask = None if self._mask is None else self._mask[rows]
            for cache in self._cache or ():
                cache.select(rows)
        self._fresh = backend.asarray_like(np.asarray(tokens, np.int64)[:, None], like)
        self._tokens = backend.namespace(like).concatenate([like, self._fresh], axis=1)


@dataclass
class _Search:
    """The beams of one prompt: tokens (beams, n) and their log-probabilities (beams,)."""

    beams: int
    length_penalty: float
    longest: int
    ended: list[tuple[float, list[int]]] = field(default_factory=list)
    done: bool = False

    def __post_init__(self) -> None:
        self.tokens = np.zeros((self.beams, 0), np.int64)
        self.scores = np.zeros(self.beams)

    def advance(self, scores: Any, origins: Any, tokens: Any, end: int) -> Any:
        """Take 2 * beams continuations, the best first; return the parents of the new beams.

        At most half of the continuations end, one of each beam.
        """
        length = self.tokens.shape[1] + 1
        for rank in np.flatnonzero(tokens[: self.beams] == end):
            if np.isfinite(scores[rank]):
                self._end(scores[rank], self.tokens[origins[rank]], length)
        live = np.flatnonzero(tokens != end)[: self.beams]
        self.tokens = np.column_stack([self.tokens[origins[live]], tokens[live]])
        self.scores = scores[live]
        if length == self.longest:
            for score, beam in zip(self.scores, self.tokens, strict=True):
                self._end(score, beam, length)
        ended = len(self.ended) >= self.beams or not len(live)  # the vocabulary has only the end
        self.done = length == self.longest or ended
        return origins[live]

    def result(self) -> list[int]:
        """Return the best hypothesis; of equals the one that ended first."""
        return max(self.ended, key=lambda each: each[0])[1]

    def _end(self, score: float, tokens: Any, length: int) -> None:
        penalty = float(((5 + length) / 6) ** self.length_penalty)
        self.ended.append((score / penalty, tokens.tolist()))


def _best(logits: Array, scores: Any, count: int) -> tuple[Any, Any, Any]:
    """Return the best continuations: scores, beams and tokens, each (prompts, count)."""
    prompts, beams = scores.shape
    xp = backend.namespace(logits)
    logp = log_softmax(Tensor(upcast(logits))).data  # (prompts * beams, V)
    logp = logp.reshape(prompts, -1)  # (prompts, beams * V)
    vocab = logp.shape[1] // beams
    total = logp + xp.asarray(scores, np.float32).repeat(vocab, axis=1)
    count = min(count, total.shape[1])
    picked = xp.argpartition(-total, count - 1, axis=1)[:, :count]
    found = backend.to_numpy(picked)
    values = backend.to_numpy(xp.take_along_axis(total, picked, 1)).astype(np.float64)
    order = np.lexsort((found, -values), axis=1)  # ties: the lowest index first
    found = np.take_along_axis(found, order, 1)
    return np.take_along_axis(values, order, 1), found // vocab, found % vocab
