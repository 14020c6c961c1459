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

from tensorgrad.core import backend
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.rows import power_of_two
from tensorgrad.models.generation.buffers import give_back, take
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.ops.sampling import Sampling, State, extend

__all__ = ["Decoder", "Recomputer", "capacity"]

_PREFILL = 1 << 16  # tokens of a forward pass
_REPLAYED = 8192  # tokens of a forward pass up to which the host takes longer than the GPU
_LEAST = 128  # tokens of a sequence that there is memory for


def capacity(tokens: int) -> int:
    """Return a number of tokens to have memory for: a power of two, so that few shapes occur.

    Args:
        tokens: the number of tokens of the longest sequence.

    Returns:
        The next power of two, 128 or more.

    Example:
        >>> from tensorgrad.models.generation.decoding_loop import capacity
        >>> capacity(5), capacity(300)
        (128, 512)
    """
    return max(_LEAST, power_of_two(tokens))


class Decoder:
    """A model, its cache, and sequences that grow.

    A step has fixed shapes and keeps its state on the device (see `State`), so the host does not
    wait for it. On a GPU steps are a CUDA graph from the third one on. So are prompts, which are
    filled up to one of few lengths (see buffers.py). When a sequence fills the model's context, the
    older half of its window is dropped and the rest is read again; the host counts the steps until
    then.

    Args:
        model: a language model, in evaluation mode and under `no_grad` here and in each step; see
            `evaluating`.
        prompts: token ids, one or more each, none longer than the model's context.
        state: the state of these prompts, on any device.
        how: the sampling options.

    Attributes:
        state: the state on the model's device.

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config
        >>> from tensorgrad.models.generation.decoding_loop import Decoder
        >>> from tensorgrad.ops.sampling import Sampling, new_state
        >>> model = GPT2(GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8))
        >>> prompts = [[1, 2], [3]]
        >>> state = new_state(prompts, 6, seeds=[0, 1], stops=[], vocabulary=None, device="cpu")
        >>> with tg.nn.evaluating(model):
        ...     decoder = Decoder(model, prompts, state, Sampling())
        ...     decoder.step()
        >>> decoder.state.counts.tolist()
        [3, 2]
    """

    def __init__(
        self, model: LanguageModel, prompts: Sequence[Any], state: State, how: Sampling
    ) -> None:
        self.model = model
        steps = min(model.context, capacity(state.tokens.shape[1]))
        self._buffers = take(model, state, steps, how)
        self.state, self._cache = self._buffers.state, self._buffers.cache
        self._counts = np.array([len(prompt) for prompt in prompts])
        self._held = self._counts - 1
        self._until_full = steps - int(self._held.max())  # steps
        self._read_prompts(int(self._held.max()), steps)

    def step(self) -> None:
        """Append a token to each sequence."""
        if self._until_full == 0:
            self._drop_older_half()
        self._buffers.step()
        self._counts += 1
        self._held += 1
        self._until_full -= 1

    def close(self) -> None:
        """Leave the memory to the next batch; the decoder and its state are not used again."""
        give_back(self.model, self._buffers)

    def _read_prompts(self, count: int, steps: int) -> None:
        """Fill the cache with the keys and values of the first `count` tokens of all sequences."""
        piece = 16 if count <= 128 else 128
        padded = min(-(-count // piece) * piece, steps)
        replayed = len(self._counts) * padded <= _REPLAYED
        if count and self.model.device != "cpu" and replayed:
            self._buffers.read(padded)
        else:
            self._read(slice(None), self.state.tokens[:, :count])

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
        for start in range(0, len(tokens), count):
            part = tokens[start : start + count]
            own = slice(first + start, first + start + len(part))
            caches: Any = [None if cache is None else cache.part(own) for cache in self._cache]
            self.model.next_logits(Tensor(part), caches)


class Recomputer:
    """A Decoder without a cache: each step recomputes all tokens.

    Args:
        model, prompts, state, how: as for Decoder.

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config
        >>> from tensorgrad.models.generation.decoding_loop import Recomputer
        >>> from tensorgrad.ops.sampling import Sampling, new_state
        >>> model = GPT2(GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8))
        >>> state = new_state([[1, 2]], 6, seeds=[0], stops=[], vocabulary=None, device="cpu")
        >>> with tg.nn.evaluating(model):
        ...     Recomputer(model, [[1, 2]], state, Sampling()).step()
        >>> state.counts.tolist()
        [3]
    """

    def __init__(
        self, model: LanguageModel, prompts: Sequence[Any], state: State, how: Sampling
    ) -> None:
        self.model, self.state, self.how = model, state.on(model.device), how
        self._counts = np.array([len(prompt) for prompt in prompts])
        self._first = np.zeros_like(self._counts)  # token of the window

    def step(self) -> None:
        """Append a token to each sequence."""
        full = self._counts - self._first > self.model.context
        self._first[full] = self._counts[full] - max(1, self.model.context // 2)
        logits = []
        for row, (first, count) in enumerate(zip(self._first, self._counts, strict=True)):
            tokens = Tensor(self.state.tokens[row : row + 1, first:count])
            logits.append(self.model.next_logits(tokens).data.astype(np.float32))
        extend(self.state, backend.namespace(logits[0]).concatenate(logits), self.how)
        self._counts += 1

    def close(self) -> None:
        """Do nothing: there is no memory to keep."""
