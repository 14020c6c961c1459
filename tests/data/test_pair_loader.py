from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tensorgrad.data import PairLoader
from tensorgrad.data.pair_loader import EncodedPair
from tensorgrad.errors import ArgumentError, DataError, DtypeError

SEPARATOR, END = 1, 0


def pairs(count: int = 200, longest: int = 20) -> list[EncodedPair]:
    """Return pairs of numbered tokens; the first of each target says which pair it is."""
    rng = np.random.default_rng(0)
    return [
        (
            rng.integers(2, 50, rng.integers(1, longest)).tolist(),
            [1000 + number, *rng.integers(2, 50, rng.integers(0, longest)).tolist()],
        )
        for number in range(count)
    ]


def loader(found: Sequence[EncodedPair] | None = None, **options: Any) -> PairLoader:
    settings = {"batch_tokens": 256, "context": 48, **options}
    return PairLoader(pairs() if found is None else found, SEPARATOR, END, **settings)


def read_back(tokens: Any, targets: Any) -> list[EncodedPair]:
    """Return the pairs of a batch, after checking every mask in it."""
    found = []
    first = tokens.shape[1] - targets.shape[1]
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        if set(row) == {END}:
            assert set(wanted) == {-100}, "a loss on a row of padding"
            continue
        middle = row.index(SEPARATOR)
        full = [-100] * first + wanted
        assert full[:middle] == [-100] * middle, "a loss on the source"
        end = full.index(END)
        assert set(full[end + 1 :]) <= {-100}, "a loss on the padding"
        # From the separator on each place asks for the token after it.
        assert row[middle + 1 : end + 1] == full[middle:end]
        found.append((row[:middle], full[middle:end]))
    return found


def test_an_epoch_holds_every_pair_once() -> None:
    batches = loader()
    expected = sorted(pairs(), key=lambda pair: pair[1][0])
    for epoch in range(3):
        steps = range(epoch * batches.batches, (epoch + 1) * batches.batches)
        found = [pair for step in steps for pair in read_back(*batches.batch(step))]
        assert sorted(found, key=lambda pair: pair[1][0]) == expected
    found = [pair for batch in batches.evaluation_batches() for pair in read_back(*batch)]
    assert sorted(found, key=lambda pair: pair[1][0]) == expected
    assert batches.tokens == sum(len(source) + 1 + len(target) for source, target in expected)


def test_epochs_have_equal_shapes_and_other_batches() -> None:
    batches = loader()
    epochs = [
        [batches.batch(epoch * batches.batches + number) for number in range(batches.batches)]
        for epoch in range(2)
    ]
    shapes = [sorted(tokens.shape for tokens, _ in epoch) for epoch in epochs]
    assert shapes[0] == shapes[1]
    assert {tokens.tobytes() for tokens, _ in epochs[0]} != {t.tobytes() for t, _ in epochs[1]}


def shape_of(batch: Any) -> tuple[int, int, int]:
    tokens, targets = batch
    assert len(tokens) == len(targets)
    return tokens.shape[1], targets.shape[1], len(tokens)


@pytest.mark.parametrize("count", [1, 7, 200, 3000])
@pytest.mark.parametrize("batch_tokens", [256, 2000])
def test_batches_have_few_shapes_and_at_most_one_row_of_padding(
    count: int, batch_tokens: int
) -> None:
    batches = loader(pairs(count, 100), context=200, batch_tokens=batch_tokens)
    assert len(batches.shapes) == len(set(batches.shapes)) <= 16
    epoch = [batches.batch(step) for step in range(batches.batches)]
    assert {shape_of(batch) for batch in epoch} == set(batches.shapes)
    for tokens, targets in epoch:
        assert tokens.size <= batch_tokens
        assert ((targets == -100).all(1)).sum() <= 1
    for tokens, targets in batches.evaluation_batches():
        assert tokens.size <= batch_tokens
        assert (targets != -100).any(1).all()
    lengths = [-(-(len(source) + 1 + len(target)) // 8) * 8 for source, target in pairs(count, 100)]
    if count == 3000:
        assert sum(tokens.size for tokens, _ in epoch) < 1.08 * sum(lengths)
    if count == 3000 and batch_tokens == 2000:
        assert batches.batches < 1.2 * sum(lengths) / batch_tokens


def test_few_pairs_have_few_shapes() -> None:
    batches = loader([([5] * n, [6] * n) for n in (3, 4, 7, 9, 20)])
    assert batches.shapes == [(48, 48, 5)]  # all in one batch, without padding
    assert batches.batches == 1


def test_batches_are_full_and_hold_similar_lengths() -> None:
    batches = loader(pairs(3000))
    found = [batches.batch(step)[0] for step in range(batches.batches)]
    assert all(tokens.size <= 256 for tokens in found)
    assert sum(tokens.size for tokens in found) < 1.3 * batches.tokens
    assert np.mean([tokens.size for tokens in found]) > 200
    assert all(tokens.shape[1] % 8 == 0 for tokens in found)


def test_a_batch_depends_on_its_number_alone() -> None:
    one, two = loader(), loader()
    steps = [0, 5, one.batches + 3, 5, 2 * one.batches, 1]
    expected = {step: [array.tobytes() for array in two.batch(step)] for step in sorted(set(steps))}
    for step in steps:
        assert [array.tobytes() for array in one.batch(step)] == expected[step]
    ahead = one.iterate(5)
    assert [array.tobytes() for array in next(ahead)] == expected[5]
    other = loader(seed=1)
    assert any(other.batch(step)[0].tobytes() != one.batch(step)[0].tobytes() for step in range(10))


def test_long_pairs_lose_their_ends_and_long_sources_are_skipped() -> None:
    found = [([5] * 3, [6] * 20), ([5] * 7, [6]), ([5] * 8, [6]), ([5] * 2, [6])]
    batches = loader(found, context=8, batch_tokens=8)
    assert (batches.skipped, batches.cut, batches.batches) == (1, 2, 3)
    assert repr(batches) == (
        f"PairLoader(pairs=3, shapes={len(batches.shapes)}, batches=3, tokens=20, skipped=1, "
        "cut=2, seed=0)"
    )
    assert loader(found[3:], context=4, batch_tokens=4).cut == 0
    assert loader(found[3:], context=3, batch_tokens=3).cut == 1
    assert loader([([5], [6])], context=2, batch_tokens=2).tokens == 2
    rows = [batch for batch in batches.evaluation_batches()]
    seen = [(tokens[0].tolist(), targets[0].tolist()) for tokens, targets in rows]
    cut = [5, 5, 5, 1, 6, 6, 6, 6], [-100, -100, -100, 6, 6, 6, 6, 6]  # no false end
    assert cut in seen
    assert ([5] * 7 + [1], [-100] * 7 + [6]) in seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 1}, "context is 1, expected 2 or more"),
        ({"batch_tokens": 47}, "batch_tokens has 47, expected 48 or more"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1.5}, "seed is 1.5, expected an integer"),
        ({"batch_tokens": "x"}, "batch_tokens is 'x', expected an integer"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        loader(**options)


def test_tokens_are_never_cut() -> None:
    wrong: list[Any] = [([5.5], [6]), ([5], [np.float32(6)]), ("a", "b")]
    for pair in wrong:
        with pytest.raises(DtypeError, match=r"PairLoader: pairs has dtype .*, expected integers"):
            loader([([5], [6]), pair])
    with pytest.raises(ArgumentError, match="PairLoader: pairs has 4294967296, expected"):
        loader([([2**32], [6])])


def test_nothing_to_read_is_named() -> None:
    with pytest.raises(DataError, match="of 0 pairs none has a source shorter"):
        loader([])
    with pytest.raises(DataError, match="of 1 pairs none"):
        loader([([5] * 48, [6])])
    with pytest.raises(ArgumentError, match="step is -1"):
        loader().batch(-1)
    with pytest.raises(
        ArgumentError, match=r"PairLoader\.batch: step is 1\.5, expected an integer"
    ):
        loader().batch(1.5)  # type: ignore[arg-type]


def test_work_of_an_epoch_is_counted_without_padding() -> None:
    found = loader(context=24)
    tokens = targets = causal = prefix = 0
    for x, y in found.evaluation_batches():
        for row, wanted in zip(x.tolist(), y.tolist(), strict=True):
            counted = [place for place, target in enumerate(wanted) if target != -100]
            source = row.index(SEPARATOR) + 1  # with the separator
            length = len(row) - len(wanted) + counted[-1] + 1
            tokens, targets = tokens + length, targets + len(counted)
            causal += length**2 // 2
            prefix += source**2 + (length**2 - source**2) // 2
    assert (found.tokens, found.targets) == (tokens, targets)
    assert found.mean_keys(prefix=False) == pytest.approx(causal / tokens, rel=0.01)
    assert found.mean_keys(prefix=True) == pytest.approx(prefix / tokens, rel=0.01)
