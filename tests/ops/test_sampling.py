"""Choosing tokens: temperature, top-k, top-p and penalties, the same on both devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError
from tensorgrad.ops.sampling import (
    BROKEN,
    STOPPED,
    Sampling,
    State,
    _weights,
    choose,
    extend,
    new_state,
)

OPTIONS = [
    Sampling(0.0),
    Sampling(1.0),
    Sampling(0.7, top_k=1),
    Sampling(1.3, top_k=40),
    Sampling(1.0, top_p=0.9),
    Sampling(2.0, top_p=1e-9),
    Sampling(1.5, top_k=60, top_p=0.5),
    Sampling(0.8, repetition_penalty=1.7),
    Sampling(0.0, repetition_penalty=2.0),
    Sampling(1e-320),
    Sampling(1.0, top_k=10**6, top_p=1.0),
]


def allowed(logits: Any, how: Sampling, seen: Any) -> set[int]:
    """Return the tokens that may come, found in another way: one after the other."""
    x = logits.astype(np.float64)
    x[seen] = np.where(
        x[seen] > 0, x[seen] / how.repetition_penalty, x[seen] * how.repetition_penalty
    )
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))[: how.top_k]
    p = np.exp((x[order] - x[order[0]]) / max(how.temperature, 1e-9))
    p /= p.sum()
    kept, mass = set(), 0.0
    for token, share in zip(order, p, strict=True):
        if share > 1e-12:
            kept.add(token)
        mass += share
        if mass >= (how.top_p or 1) or how.temperature == 0:
            break
    return kept


@pytest.mark.parametrize("how", OPTIONS, ids=str)
def test_only_likely_tokens_are_taken(how: Sampling) -> None:
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal(300)).astype(np.float32)
    logits[5:40] = logits[4]  # equal ones
    seen = np.zeros(300, np.uint8)
    seen[[int(logits.argmax()), 7, 9]] = 1
    kept = allowed(logits, how, seen.nonzero()[0])
    words = [int(word) for word in rng.integers(0, 2**64, 400, np.uint64, endpoint=False)]
    found = {choose(logits, word, how, seen) for word in [0, 2**64 - 1, *words]}
    assert found <= kept
    assert len(found) >= min(len(kept), 25)


def test_weights_are_those_of_the_exponential() -> None:
    x = np.linspace(-27, 0, 10001)
    np.testing.assert_allclose(_weights(x) / 2.0**40, np.exp(x), rtol=1e-12, atol=2.0**-40)
    assert _weights(np.array([0.0, -1e300, -np.inf])).tolist() == [2**40, 0, 0]


def state_of(batch: int, device: str, how: Sampling, vocabulary: int) -> State:
    prompts = [list(range(1, 2 + row % 3)) for row in range(batch)]
    seen = None if how.repetition_penalty == 1 else vocabulary
    return new_state(prompts, 6, [7 * row for row in range(batch)], [3, 11], seen, device)


def grow(state: State, logits: Any, how: Sampling) -> list[Any]:
    """Return the state after a step for each of some logits (steps, B, V)."""
    for step in logits:
        extend(state, step, how)
    return [None if a is None else backend.to_numpy(a) for a in vars(state).values()]


@pytest.mark.parametrize("vocabulary", [None, 7])
@pytest.mark.parametrize("stops", [[], [5, 2]])
def test_a_state_begins_in_the_memory_of_another(
    vocabulary: int | None, stops: list[int], device: str
) -> None:
    def state(prompts: list[list[int]], more: int, seed: int, on: str) -> State:
        return new_state(prompts, more, [seed, 2**64 - 1, 3], stops, vocabulary, on)

    mine = state([[1, 2, 3], [4], [5]], 1, 9, device)
    tokens = mine.tokens
    mine.load(state([[6, 0], [1], [2, 2]], 2, 8, "cpu"))
    assert mine.tokens is tokens
    for source in ("cpu", device):
        mine.load(state([[6, 0], [1], [2, 2]], 2, 8, source))
        assert tokens.tolist() == [[6, 0, 0, 0], [1, 0, 0, 0], [2, 2, 0, 0]]
        assert mine.counts.tolist() == [2, 1, 2]
        assert mine.lengths.tolist() == [1, 0, 1]
        assert mine.latest.tolist() == [0, 1, 2]
        assert mine.flags.tolist() == [0, 0, 0]
        assert mine.seeds.tolist() == [8, 2**64 - 1, 3]
        assert mine.stops.tolist() == sorted(stops)
        if vocabulary is None:
            assert mine.seen is None
        else:
            assert mine.seen is not None
            assert [row.nonzero()[0].tolist() for row in mine.seen] == [[0, 6], [1], [2]]
        for array in (mine.tokens, mine.counts, mine.flags, mine.seeds):
            array.fill(1)


@pytest.mark.parametrize("how", OPTIONS, ids=str)
def test_a_step_writes_down_what_it_chose(how: Sampling) -> None:
    rng = np.random.default_rng(1)
    logits = (4 * rng.standard_normal((6, 3, 13))).astype(np.float32)
    logits[3, 1, 11] = 99  # a stop token for sure
    state = state_of(3, "cpu", how, 13)
    _, tokens, counts, lengths, latest, flags, *_, seen = grow(state, logits, how)
    assert counts.tolist() == [7, 8, 9]
    assert lengths.tolist() == [6, 7, 8]
    for row in range(3):
        came = tokens[row, row + 1 : row + 7]
        assert latest[row] == came[-1]
        assert bool(flags[row] & STOPPED) == bool({3, 11} & set(came.tolist()))
        if seen is not None:
            assert set(seen[row].nonzero()[0]) == set(tokens[row, : row + 7].tolist())
    assert tokens[1, 2 + 3] == 11


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [4, 33, 1023, 50257])
@pytest.mark.parametrize("how", OPTIONS, ids=str)
def test_both_devices_take_the_same_tokens(how: Sampling, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = (3 * rng.standard_normal((6, 5, vocabulary))).astype(np.float32)
    logits[:, 2] = logits[:, 2].astype(np.float16)  # with many equal ones
    logits[:, 3] = 0
    logits[:, 4, vocabulary // 3 :] = -np.inf
    logits[..., 0] = np.maximum(logits[..., 0], -9)
    found = [
        grow(state_of(5, device, how, vocabulary), backend.to_device(logits, device), how)
        for device in ("cpu", "cuda", "cuda")
    ]
    for one, *others in zip(*found, strict=True):
        for other in others:
            assert one is None or one.tobytes() == other.tobytes()


def test_logits_that_are_no_numbers_are_flagged(device: str) -> None:
    logits = np.zeros((4, 9), np.float32)
    logits[0, 3], logits[1, 2], logits[2, :] = np.nan, np.inf, -np.inf
    for how in (Sampling(0), Sampling(1.0, top_k=3)):
        state = state_of(4, device, how, 9)
        extend(state, backend.to_device(logits, device), how)
        flags = backend.to_numpy(state.flags)
        assert [bool(flag & BROKEN) for flag in flags] == [True, True, True, False]
        assert backend.to_numpy(state.latest)[:3].tolist() == [3, 2, 0]


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], "float32"))
    words = [int(share * 2**64) for share in (np.arange(200) + 0.5) / 200]

    def shares(**options: Any) -> list[float]:
        drawn = [choose(logits, word, Sampling(**options)) for word in words]
        return [float(share) for share in np.bincount(drawn, minlength=4) / 200]

    assert shares() == [0.5, 0.3, 0.15, 0.05]
    assert shares(top_k=2) == [0.625, 0.375, 0, 0]
    assert shares(top_k=9) == [0.5, 0.3, 0.15, 0.05]
    assert shares(top_p=0.79) == [0.625, 0.375, 0, 0]
    assert shares(top_p=0.81) == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0], abs=5e-3)
    assert shares(top_p=1.0) == [0.5, 0.3, 0.15, 0.05]
    squares = np.array([0.25, 0.09, 0.0225, 0.0025])
    assert shares(temperature=0.5) == pytest.approx(list(squares / squares.sum()), abs=5e-3)
    assert shares(temperature=0) == [1, 0, 0, 0]


def test_penalties_lower_what_occurred() -> None:
    logits, seen = np.array([2.0, -1.0, 1.5, -1.2], "float32"), np.array([1, 1, 0, 0], "uint8")
    how = Sampling(0.0, repetition_penalty=1.5)
    assert choose(logits, 0, how) == 0
    assert choose(logits, 0, how, seen) == 2  # 2 / 1.5 is below 1.5
    assert choose(logits - np.float32(3), 0, how, np.array([0, 0, 1, 0], "uint8")) == 0
    both = np.array([-1.0, -1.2], "float32")  # -1 times 1.5 is below -1.2
    assert choose(both, 0, how, np.array([1, 0], "uint8")) == 1
    assert choose(np.array([-0.0, 0.0], "float32"), 0, Sampling(1.0, top_k=1)) == 0


def test_the_memory_of_a_state_holds_all_of_it() -> None:
    state = state_of(3, "cpu", Sampling(repetition_penalty=2), 13)
    arrays = [array for name, array in vars(state).items() if name != "memory"]
    places = [array.ctypes.data - state.memory.ctypes.data for array in arrays]
    assert all(place % 16 == 0 for place in places)
    assert places == sorted(places)
    ends = [place + array.nbytes for place, array in zip(places, arrays, strict=True)]
    assert all(end <= after for end, after in zip(ends, places[1:], strict=False))
    assert 0 <= state.memory.nbytes - ends[-1] < 16
    assert state.on("cpu") is state


def test_no_rounding_draws_a_token_that_was_left_out() -> None:
    one = np.array([0.1, 0.2, -np.inf, 0.3], "float32")
    alike, highest = np.zeros(4, "float32"), 2**64 - 1
    for logits in (one, alike, one[::-1]):
        assert choose(logits, highest, Sampling()) == 3
        assert choose(logits, 0, Sampling()) == 0
    assert choose(one, highest, Sampling(top_p=0.5)) == 3
    assert choose(alike, highest, Sampling(top_p=0.5)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("nan")}, "temperature is nan, expected a finite number from 0"),
        ({"temperature": -0.1}, r"temperature is -0\.1, expected a finite number from 0"),
        ({"temperature": float("inf")}, "temperature is inf, expected a finite number from 0"),
        ({"top_p": 0}, "top_p is 0, expected above 0 and at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected a finite number above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf, expected a finite"),
        ({"top_k": 0}, "top_k is 0, expected 1 or more"),
        ({"top_p": 1.1}, "top_p is 1.1, expected above 0 and at most 1"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0, expected a finite number"),
        ({"temperature": "a"}, "generate: temperature is 'a', expected a number"),
        ({"top_k": 1.5}, "generate: top_k is 1.5, expected an integer"),
        ({"top_p": "x"}, "generate: top_p is 'x', expected a number"),
        ({"repetition_penalty": None}, "generate: repetition_penalty is None, expected a number"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Sampling(**options)
