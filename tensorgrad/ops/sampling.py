"""The next token of each sequence, from its logits. Kernel: kernels/sampling.cu.

Equal logits give equal tokens on both devices: the weights exp((logit - largest) / temperature)
are whole numbers of 2^-40, made with operations that round alike everywhere, and sums of whole
numbers do not depend on their order. What is drawn depends on the seed of a sequence and on how
many tokens it has, not on the others of the batch. Tests: tests/ops/test_sampling.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.checks import check_integer, check_number, check_range
from tensorgrad.errors import ArgumentError
from tensorgrad.kernels.prepared import Launch, now
from tensorgrad.kernels.random import Key
from tensorgrad.kernels.sampling import sample_tokens
from tensorgrad.philox import fill_words

STOPPED, BROKEN = 1, 2  # of State.flags
_FACTORIALS = [float(math.factorial(n)) for n in range(13, -1, -1)]
_LOG2_HIGH, _LOG2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Args:
        temperature: divides the logits; 0 takes the most likely token each time (greedy).
        top_k: draw from the k most likely tokens only; of equals the one with the lowest number.
        top_p: then, from the fewest tokens that together have this share of what is left.
        repetition_penalty: before all this, the logit of a token that has occurred is divided by
            it where it is above 0, and multiplied where it is below; 1 does nothing.
    Raises:
        ArgumentError: a number is out of its range.
    Source: top-p: Holtzman et al. 2019, arXiv:1904.09751, section 3.1; penalty: Keskar et al.
        2019, arXiv:1909.05858, section 4.1.
    """

    temperature: float = 1.0
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
    """Sequences that grow, on one device. A step changes the arrays and nothing else.

    Attributes:
        tokens: (B, room), int64; counts[b] of sequence b are known.
        counts: (B,), int32.
        lengths: (B,), int32: how many tokens the cache holds; counts - 1 unless some were dropped.
        latest: (B,), int64: the newest token of each.
        flags: (B,), uint8: STOPPED once a stop token came, BROKEN where logits were not finite.
        seeds: (B,), uint64.
        stops: (n,), int64.
        seen: (B, V), uint8: 1 for tokens that occurred; None without a penalty.
    """

    tokens: Array
    counts: Array
    lengths: Array
    latest: Array
    flags: Array
    seeds: Array
    stops: Array
    seen: Array | None


def new_state(
    prompts: Sequence[Any],
    more: int,
    seeds: Sequence[int],
    stops: Collection[int],
    vocabulary: int | None,
    device: str,
) -> State:
    """Return the state of prompts to which up to `more` tokens will be added.

    Args:
        prompts: integers, one or more each.
        more: 0 or more.
        seeds: one for each prompt, 0 to 2^64 - 1.
        stops: tokens that end a sequence.
        vocabulary: V, where it shall be known which tokens occurred.
        device: where the arrays shall be.
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
    arrays = (tokens, counts, counts - 1, latest, flags, np.array(seeds, np.uint64), ends, seen)
    return State(*(None if a is None else backend.to_device(a, device) for a in arrays))


def extend(state: State, logits: Array, how: Sampling, launch: Launch = now) -> None:
    """Add a token to each sequence, drawn from its logits, (B, V) float32, contiguous."""
    if backend.is_numpy(logits):
        _extend_numpy(state, logits, how)
        return
    s = state
    sample_tokens(
        launch,
        logits,
        (s.tokens, s.counts, s.lengths, s.latest, s.flags),
        (s.seen, s.seeds, s.stops),
        how.repetition_penalty,
        how.temperature,
        how.top_k or 0,
        how.top_p or 1,
    )


def choose(logits: Array, word: int, how: Sampling, seen: Array | None = None) -> int:
    """Return the token that a random word takes from logits, (V,) float32, on the CPU.

    Tokens are ranked by falling logit, equal ones by their number. Of those that are left, in the
    order of their numbers, the one is taken into whose weight floor(word * sum / 2^64) falls.
    """
    logits = logits + np.float32(0)  # -0 becomes 0
    if seen is not None:
        penalty = np.float32(how.repetition_penalty)
        punished = np.where(logits > 0, logits / penalty, logits * penalty)
        logits = np.where(seen != 0, punished, logits)
    if how.temperature == 0 or not np.isfinite(logits.max()):
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # by a temperature close to 0: the weight is 0
        weights = _weights((logits.astype(np.float64) - np.float64(logits.max())) / how.temperature)
    if how.top_k is not None or (how.top_p or 1) < 1:
        ranked = _ranked(logits)
        left = weights[ranked[: how.top_k]]
        if how.top_p is not None and how.top_p < 1:
            total = np.cumsum(left)
            share = np.uint64(np.ceil(how.top_p * np.float64(total[-1])))
            count = int(np.searchsorted(total, min(max(share, np.uint64(1)), total[-1]))) + 1
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
    """Return the tokens by falling logit, equal ones by their number.

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
    """Return exp(x) for x <= 0 as whole numbers of 2^-40, uint64."""
    x = np.where(x > -27.7, x, -100.0)
    n = np.rint(x * 1.4426950408889634)
    r = (x - n * _LOG2_HIGH) - n * _LOG2_LOW
    y = np.full_like(x, 1 / _FACTORIALS[0])
    for factorial in _FACTORIALS[1:]:
        y *= r
        y += 1 / factorial
    power = ((np.maximum(n, -40).astype(np.int64) + 1063) << 52).view(np.float64)  # 2^(40 + n)
    y *= power
    y[x == -100.0] = 0
    return y.astype(np.uint64)
