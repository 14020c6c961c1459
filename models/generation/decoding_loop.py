"""The decoding loop: sequences that grow by one token a step, and their key-value cache.

A step computes the latest token of each sequence, adds its keys and values to the cache, and
samples the next token. The prefill computes all tokens of a prompt but the last, which the first
step does. Sequences may differ in length: padding is on the right, where a causal model does not
attend, and its entries in the cache are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.models.generation.decode_step import DecodeStep
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.nn import evaluating
from tensorgrad.ops.sampling import Sampling, State, extend
from tensorgrad.tensor import Tensor

__all__ = ["Decoder", "Recomputer"]

_PREFILL = 1 << 16  # tokens of a forward pass


class Decoder:
    """A model, its cache, and sequences that grow.

    A step has fixed shapes and keeps its state on the device (see `State`), so the host does not
    wait for it. When a sequence fills the model's context, the older half of its window is dropped
    and the rest is read again; the host counts the steps until then.

    Args:
        model: a language model.
        prompts: token ids, one or more each, none longer than the model's context.
        state: of these prompts, on the model's device.
        how: the sampling options.
    """

    def __init__(
        self, model: LanguageModel, prompts: Sequence[Any], state: State, how: Sampling
    ) -> None:
        self.model, self.state, self.how = model, state, how
        steps = min(model.context, state.tokens.shape[1])
        self._cache = model.new_cache(len(prompts), steps)
        self._counts = np.array([len(prompt) for prompt in prompts])
        self._held = self._counts - 1
        self._until_full = steps - int(self._held.max())  # steps
        self._read(slice(None), state.tokens[:, : int(self._held.max())])
        for cache in self._cache:
            if cache is not None:  # other ranks have this layer
                cache.lengths = state.lengths
        self._prepared = None
        if DecodeStep.supports(model):
            self._prepared = DecodeStep(model, self._cache, state, how)

    def step(self) -> None:
        """Append a token to each sequence."""
        if self._until_full == 0:
            self._drop_older_half()
        if self._prepared is not None:
            self._prepared()
        else:
            with evaluating(self.model):
                tokens = Tensor(self.state.latest[:, None])
                logits = self.model.next_logits(tokens, self._cache).data
            extend(self.state, backend.contiguous(logits.astype(np.float32, copy=False)), self.how)
        self._counts += 1
        self._held += 1
        self._until_full -= 1

    def _drop_older_half(self) -> None:
        """Drop the older half of the window of each sequence that fills the context."""
        kept = max(1, self.model.context // 2)
        for row in np.flatnonzero(self._held == self.model.context):
            rows, count = slice(row, row + 1), int(self._counts[row])
            self._read(rows, self.state.tokens[rows, count - kept : count - 1])
            self.state.lengths[rows] = kept - 1
            self._held[row] = kept - 1
        self._until_full = self.model.context - int(self._held.max())

    def _read(self, rows: slice, tokens: Any) -> None:
        """Fill the cache of these sequences with the keys and values of tokens (B, T)."""
        if not tokens.size:
            return
        count = max(1, _PREFILL // tokens.shape[1])
        first = rows.start or 0
        with evaluating(self.model):
            for start in range(0, len(tokens), count):
                part = tokens[start : start + count]
                own = slice(first + start, first + start + len(part))
                caches: Any = [None if cache is None else cache.part(own) for cache in self._cache]
                self.model.next_logits(Tensor(part), caches)


class Recomputer:
    """A Decoder without a cache: each step recomputes all tokens.

    Args:
        model, prompts, state, how: as for Decoder.
    """

    def __init__(
        self, model: LanguageModel, prompts: Sequence[Any], state: State, how: Sampling
    ) -> None:
        self.model, self.state, self.how = model, state, how
        self._counts = np.array([len(prompt) for prompt in prompts])
        self._first = np.zeros_like(self._counts)  # token of the window

    def step(self) -> None:
        """Append a token to each sequence."""
        full = self._counts - self._first > self.model.context
        self._first[full] = self._counts[full] - max(1, self.model.context // 2)
        logits = []
        with evaluating(self.model):
            for row, (first, count) in enumerate(zip(self._first, self._counts, strict=True)):
                tokens = Tensor(self.state.tokens[row : row + 1, first:count])
                logits.append(self.model.next_logits(tokens).data.astype(np.float32))
        extend(self.state, backend.namespace(logits[0]).concatenate(logits), self.how)
        self._counts += 1
