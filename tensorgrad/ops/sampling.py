"""Sampling of the next token from logits: temperature, top-k, top-p. Kernel: kernels/sampling.cu.

Equal logits give equal tokens on both devices: the weights exp((logit - largest) / temperature)
are integer multiples of 2^-40, computed with operations that round alike everywhere, and sums of
integers do not depend on their order. The random number depends on the seed of a sequence and its
number of tokens, not on the rest of the batch. Tests: tests/ops/test_sampling.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_integer, check_number, check_range
from tensorgrad.core.errors import ArgumentError
from tensorgrad.kernels.random import Key
from tensorgrad.kernels.sampling import sample_tokens
from tensorgrad.kernels.special import polynomial
from tensorgrad.ops.philox import LOG2_HIGH, LOG2_LOW, fill_words

STOPPED, BROKEN = 1, 2  # bits of State.flags
_EXP_TAYLOR = [1 / math.factorial(n) for n in range(13, -1, -1)]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: divides the logits; 0 takes the most likely token each time (greedy).
        top_k: sample from the k most likely tokens only; among equal logits the lowest ids.
        top_p: of these, sample from the fewest tokens whose probabilities add up to this fraction.
        repetition_penalty: applied first: the logit of a token that has occurred is divided by it
            where it is above 0, and multiplied where it is below; 1 does nothing.
    Raises:
        ArgumentError: a number is out of its range.
    Source: top-p: Holtzman et al. 2019, arXiv:1904.09751, section 3.1; penalty: Keskar et al.
        2019, arXiv:1909.05858, section 4.1.

    Example:
        >>> from tensorgrad.ops.sampling import Sampling
        >>> Sampling(0.8, top_k=40).top_k
        40
    """

    temperature: float = 1.0
    _: KW_ONLY
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        op, top_p, penalty = "generate", self.top_p, self.repetition_penalty
        check_range(op, "temperature", self.temperature)
        if self.top_k is not None:
            check_integer(op, "top_k", self.top_k, 1)
        if top_p is not None:
            check_number(op, "top_p", top_p)
            if not 0 < top_p <= 1:
                raise ArgumentError(f"{op}: top_p is {top_p}, expected above 0 and at most 1")
        check_number(op, "repetition_penalty", penalty)
        if not 0 < penalty < math.inf:
            expected = "expected a finite number above 0"
            raise ArgumentError(f"{op}: repetition_penalty is {penalty}, {expected}")


@dataclass
class State:
    """The sequences of a batch during generation, on one device; a step changes the arrays only.

    A captured step has their addresses: `load` begins others in the same arrays.

    Attributes:
        memory: (n,), uint8: the others are views of it, so that one copy moves them all.
        tokens: (B, capacity), int64; the first counts[b] of sequence b are known.
        counts: (B,), int32.
        lengths: (B,), int32: number of tokens in the cache; counts - 1 unless some were dropped.
        latest: (B,), int64: the newest token of each.
        flags: (B,), uint8: STOPPED once a stop token came, BROKEN where logits were not finite.
        seeds: (B,), uint64.
        stops: (n,), int64.
        seen: (B, V), uint8: 1 for tokens that occurred; None without a penalty.
    """

    memory: Array
    tokens: Array
    counts: Array
    lengths: Array
    latest: Array
    flags: Array
    seeds: Array
    stops: Array
    seen: Array | None

    def on(self, device: str) -> State:
        """Return the state on a device: itself if it is there."""
        if backend.device_of(self.memory) == device:
            return self
        return _state_in(backend.to_device(self.memory, device), _arrays(self))

    def load(self, other: State) -> None:
        """Copy a state of the same shapes, on the CPU or on this device."""
        if backend.is_numpy(other.memory) and not backend.is_numpy(self.memory):
            self.memory.set(other.memory, stream=backend.cupy.cuda.get_current_stream())
        else:
            self.memory[...] = other.memory


def new_state(
    prompts: Sequence[Any],
    more: int,
    seeds: Sequence[int],
    stops: Collection[int],
    vocabulary: int | None,
    device: str,
) -> State:
    """Return the state of prompts with capacity for `more` tokens each.

    Args:
        prompts: integers, one or more each.
        more: from 0; of the longest prompt.
        seeds: one for each prompt, 0 to 2^64 - 1.
        stops: tokens that end a sequence.
        vocabulary: V, to track which tokens occurred; None where no penalty needs it.
        device: of the arrays.
    """
    counts = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), counts.max() + more), np.int64)
    seen = None if vocabulary is None else np.zeros((len(prompts), vocabulary), np.uint8)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        if seen is not None:
            seen[row, prompt] = 1
    latest = tokens[np.arange(len(prompts)), counts - 1]
    flags = np.zeros(len(prompts), np.uint8)
    ends = np.array(sorted(stops), np.int64)
    arrays = tokens, counts, counts - 1, latest, flags, np.array(seeds, np.uint64), ends, seen
    state = _state_in(np.zeros(sum(map(_room, arrays)), np.uint8), arrays)
    for mine, array in zip(_arrays(state), arrays, strict=True):
        if array is not None:
            mine[...] = array
    return state.on(device)


def _state_in(memory: Array, like: Sequence[Any]) -> State:
    """Return a state in a memory, with the shapes and dtypes of other arrays."""
    views: list[Any] = []
    start = 0
    for array in like:
        if array is None:
            views.append(None)
        else:
            part = memory[start : start + array.nbytes]
            views.append(part.view(array.dtype).reshape(array.shape))
        start += _room(array)
    return State(memory, *views)


def _arrays(state: State) -> list[Any]:
    """Return the arrays of a state, in the order of its memory."""
    return [getattr(state, field.name) for field in fields(state)[1:]]


def _room(array: Any) -> int:
    """Return the bytes that an array takes in the memory of a state: a multiple of 16."""
    return 0 if array is None else -(-array.nbytes // 16) * 16


def extend(state: State, logits: Array, how: Sampling) -> None:
    """Add a token to each sequence, drawn from its logits.

    Args:
        state: changed.
        logits: (B, V), float32, the elements of a row side by side.
        how: the options.
    """
    if backend.is_numpy(logits):
        _extend_numpy(state, logits, how)
        return
    s = state
    sample_tokens(
        logits,
        (s.tokens, s.counts, s.lengths, s.latest, s.flags),
        (s.seen, s.seeds, s.stops),
        how.repetition_penalty,
        how.temperature,
        how.top_k or 0,
        how.top_p or 1,
    )


def choose(logits: Array, word: int, how: Sampling, seen: Array | None = None) -> int:
    """Return the token that a random word selects by its logits, (V,) float32, on the CPU.

    Tokens are ranked by descending logit, equal ones by id. Of those that top-k and top-p keep, in
    the order of their ids, it is the one whose interval of weights holds floor(word * sum / 2^64).
    """
    logits = logits + np.float32(0)  # -0 becomes 0
    if seen is not None:
        penalty = np.float32(how.repetition_penalty)
        penalized = np.where(logits > 0, logits / penalty, logits * penalty)
        logits = np.where(seen != 0, penalized, logits)
    if how.temperature == 0 or not np.isfinite(logits.max()):
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # a temperature near 0: the weight becomes 0
        weights = _weights((logits.astype(np.float64) - np.float64(logits.max())) / how.temperature)
    if how.top_k is not None or (how.top_p or 1) < 1:
        ranked = _ranked(logits)
        left = weights[ranked[: how.top_k]]
        if how.top_p is not None and how.top_p < 1:
            total = np.cumsum(left)
            part = np.uint64(np.ceil(how.top_p * np.float64(total[-1])))
            count = int(np.searchsorted(total, min(max(part, np.uint64(1)), total[-1]))) + 1
            left = left[:count]
        weights[ranked[len(left) :]] = 0
    total = np.cumsum(weights)
    drawn = word * int(total[-1]) >> 64
    return int(np.searchsorted(total, np.uint64(drawn), side="right"))


def _extend_numpy(state: State, logits: Array, how: Sampling) -> None:
    for b, row in enumerate(logits):
        count, word = int(state.counts[b]), np.empty(1, np.uint64)
        fill_words(word, Key(int(state.seeds[b]), count))
        seen = None if state.seen is None else state.seen[b]
        token = choose(row, int(word[0]), how, seen)
        state.flags[b] |= STOPPED * (token in state.stops)
        state.flags[b] |= BROKEN * (not np.isfinite(row.max()))
        if seen is not None:
            seen[token] = 1
        state.tokens[b, count] = state.latest[b] = token
    state.counts += 1
    state.lengths += 1


def _ranked(logits: Array) -> Array:
    """Return the tokens by descending logit, equal ones by id.

    Sorting keys that hold both takes a third of the time of a stable argsort.
    """
    bits = logits.view(np.uint32)
    order = np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(0x80000000)).astype(np.uint64)
    last = np.uint64(0xFFFFFFFF)
    keys = order << np.uint64(32) | (last - np.arange(len(logits), dtype=np.uint64))
    keys.sort()
    ranked: Array = (last - (keys[::-1] & last)).astype(np.int64)
    return ranked


def _weights(x: Array) -> Array:
    """Return exp(x) for x <= 0 as multiples of 2^-40, uint64."""
    x = np.where(x > -27.7, x, -100.0)
    n = np.rint(x * 1.4426950408889634)
    r = (x - n * LOG2_HIGH) - n * LOG2_LOW
    y = polynomial(_EXP_TAYLOR, r)
    power = ((np.maximum(n, -40).astype(np.int64) + 1063) << 52).view(np.float64)  # 2^(40 + n)
    y *= power
    y[x == -100.0] = 0
    return y.astype(np.uint64)
