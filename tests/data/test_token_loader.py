from __future__ import annotations

import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tensorgrad.data import TokenFile, TokenLoader
from tensorgrad.data.token_loader import TokenBatch, _keys, _shuffle
from tensorgrad.errors import ArgumentError, DataError, DtypeError, ShapeError

SEEDS = st.integers(0, (1 << 64) - 1)
CONTEXTS = st.integers(1, 20)


def counting(size: int) -> np.ndarray[Any, Any]:
    """Return tokens that say their own position."""
    return np.arange(size, dtype=np.uint32)


def starts(loader: TokenLoader, steps: int, first: int = 0) -> list[int]:
    return [int(x) for step in range(first, first + steps) for x in loader.batch(step)[0][:, 0]]


def equal(one: TokenBatch, other: TokenBatch) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@given(size=st.integers(2, 300), context=CONTEXTS, seed=SEEDS, step=st.integers(0, 1 << 40))
def test_rows_are_windows_and_the_tokens_after_them(
    size: int, context: int, seed: int, step: int
) -> None:
    assume(size > context)
    x, y = TokenLoader(counting(size), 3, context, seed).batch(step)
    assert x.shape == y.shape == (3, context)
    assert x.dtype == y.dtype == np.int32
    assert x.flags.c_contiguous
    assert y.flags.c_contiguous
    assert np.array_equal(x, x[:, :1] + np.arange(context))
    assert np.array_equal(y, x + 1)


@given(
    rows=st.integers(1, 4),
    ranks=st.sampled_from([1, 2, 3, 4, 6]),
    seed=SEEDS,
    step=st.integers(0, 1000),
)
def test_the_ranks_share_the_batch_of_one_process(
    rows: int, ranks: int, seed: int, step: int
) -> None:
    tokens = counting(500)
    whole = TokenLoader(tokens, rows * 12, 8, seed).batch(step)
    parts = [TokenLoader(tokens, rows * 12, 8, seed, r, ranks).batch(step) for r in range(ranks)]
    joint = (np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]))
    assert equal(joint, whole)


@given(size=st.integers(2, 200), context=CONTEXTS, batch=st.integers(5, 60), seed=SEEDS)
def test_an_epoch_visits_each_window_once(size: int, context: int, batch: int, seed: int) -> None:
    assume(size > context)
    loader = TokenLoader(counting(size), batch, context, seed)
    windows = loader.windows
    visited = starts(loader, -(-3 * windows // batch))
    for epoch in range(3):
        seen = sorted(visited[epoch * windows : (epoch + 1) * windows])
        assert seen == [seen[0] + i * context for i in range(windows)]
        assert 0 <= seen[0] <= size - 1 - windows * context
    assert windows * context > size - 1 - 2 * context
    assert loader.epoch(3 * windows) == 3 * batch


def test_epochs_differ_in_order_and_borders() -> None:
    loader = TokenLoader(counting(4000), 198, 20)
    assert loader.windows == 198
    epochs = [starts(loader, 1, first=epoch) for epoch in range(40)]
    assert len({min(epoch) for epoch in epochs}) > 15
    assert len({tuple(np.argsort(epoch)) for epoch in epochs}) == 40
    assert starts(TokenLoader(counting(4000), 198, 20, seed=1), 1) not in epochs


def test_every_token_of_a_short_corpus_is_seen() -> None:
    loader = TokenLoader(counting(45), 1, 20)
    seen = {int(t) for step in range(200) for t in loader.batch(step)[0].ravel()}
    assert seen == set(range(44))


@given(length=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, (1 << 64) - 1))
def test_the_shuffle_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    epochs = np.full(length, epoch, np.uint64)
    order = _shuffle(np.arange(length, dtype=np.uint64), length, _keys(seed, epochs))
    assert sorted(order.tolist()) == list(range(length))


@pytest.mark.parametrize("length", [7, 64, 97])
def test_every_place_is_equally_likely(length: int) -> None:
    trials = 4000
    position = np.tile(np.arange(length, dtype=np.uint64), trials)
    epochs = np.repeat(np.arange(trials, dtype=np.uint64), length)
    order = _shuffle(position, length, _keys(0, epochs)).astype(np.int64).reshape(trials, length)
    first, second, middle, last = order[:, [0, 1, length // 2, -1]].T
    for values, kinds in (
        (first, length),
        ((second - first) % length - 1, length - 1),  # neighbours do not stay neighbours
        ((middle - last) % length - 1, length - 1),
    ):
        expected = trials / kinds
        chi_square = float(((np.bincount(values, minlength=kinds) - expected) ** 2).sum())
        assert chi_square / expected < kinds + 5 * np.sqrt(2 * kinds)


def test_the_order_never_changes() -> None:
    loader = TokenLoader(counting(10_000), 4, 16, seed=1234)
    assert starts(loader, 2) == [9465, 1689, 921, 857, 8809, 121, 2537, 8361]
    assert starts(loader, 2, first=1_000_000) == [7012, 5220, 7444, 4820, 1124, 9540, 1444, 8740]


def test_iterating_gives_the_batches_from_any_step() -> None:
    loader = TokenLoader(counting(200), 4, 8)
    for start in (0, 17):
        for step, batch in enumerate(islice(loader.iterate(start), 9), start):
            assert equal(batch, loader.batch(step))


def reading() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("read_ahead")]


def test_closing_ends_the_thread() -> None:
    batches = TokenLoader(counting(200), 4, 8).iterate()
    next(batches)
    assert len(reading()) == 1
    batches.close()  # type: ignore[attr-defined]  # the iterator is a generator
    assert reading() == []
    batches = TokenLoader(counting(200), 4, 8).iterate()
    next(batches)
    del batches
    assert reading() == []


def test_what_goes_wrong_in_the_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = TokenLoader(counting(200), 4, 8)
    read = loader.batch

    def broken(step: int) -> TokenBatch:
        if step == 5:
            raise OSError("the disk is gone")
        return read(step)

    monkeypatch.setattr(loader, "batch", broken)
    batches = loader.iterate(2)
    assert [int(next(batches)[0][0, 0]) for _ in range(3)] == [
        int(read(step)[0][0, 0]) for step in (2, 3, 4)
    ]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert reading() == []


def test_where_no_thread_can_be_started_batches_are_read_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = TokenLoader(counting(200), 4, 8)
    expected = [loader.batch(step) for step in (2, 3, 4)]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for found, batch in zip(loader.iterate(2), expected, strict=False):
        np.testing.assert_array_equal(found, batch)


def test_only_two_batches_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = TokenLoader(counting(200), 4, 8)
    read, asked = loader.batch, []

    def noting(step: int) -> TokenBatch:
        asked.append(step)
        return read(step)

    monkeypatch.setattr(loader, "batch", noting)
    batches = loader.iterate()
    for _ in range(3):
        next(batches)
    batches.close()  # type: ignore[attr-defined]  # the iterator is a generator
    assert asked in ([0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4])


@given(size=st.integers(2, 300), context=CONTEXTS, batch=st.integers(1, 5))
def test_evaluation_predicts_each_token_once_in_order(size: int, context: int, batch: int) -> None:
    assume(size > context)
    loader = TokenLoader(counting(size), batch, context)
    batches = list(loader.evaluation_batches())
    x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    counted = y != -100
    assert y[counted].tolist() == list(range(1, size))
    assert np.array_equal(x[counted] + 1, y[counted])
    assert counted[:-1].all()
    assert all(len(x) == batch for x, _ in batches[:-1])
    limited = list(loader.evaluation_batches(2))
    assert len(limited) == min(2, len(batches))
    if len(limited) == len(batches):
        assert all(map(equal, limited, batches))
    numbers, rest = np.divmod(np.concatenate([x for x, _ in limited])[:, 0], context)
    assert not rest.any()  # they are windows of all
    assert np.ptp(np.diff(numbers)) <= 1 if len(numbers) > 2 else True  # evenly spread
    most = len(x) / len(numbers) / 2
    assert numbers[0] <= most
    assert len(x) - 1 - numbers[-1] <= most


def test_a_limit_above_the_text_takes_no_memory() -> None:
    loader = TokenLoader(np.broadcast_to(np.uint16(0), 10**7), 4, 8)
    tracemalloc.start()
    try:
        next(loader.evaluation_batches(10**9))
        assert tracemalloc.get_traced_memory()[1] < 10**5
    finally:
        tracemalloc.stop()


@given(size=st.integers(9, 400), limit=st.none() | st.integers(1, 5))
def test_the_ranks_share_the_evaluation(size: int, limit: int | None) -> None:
    def rows(rank: int, ranks: int) -> Iterator[int]:
        loader = TokenLoader(counting(size), 6, 8, 0, rank, ranks)
        return (int(row[0]) for x, _ in loader.evaluation_batches(limit) for row in x)

    whole = Counter(rows(0, 1))
    assert sum((Counter(rows(rank, 3)) for rank in range(3)), Counter()) == whole
    assert set(whole.values()) == {1}


def test_a_token_file_is_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", counting(100).astype(np.uint16))
    file = TokenFile.open(tmp_path / "a.npy", 100)
    loader = TokenLoader(file, 2, 10, seed=3)
    assert repr(loader) == (
        "TokenLoader(tokens=100, windows=8, batch=2, context=10, seed=3, rank=0, ranks=1)"
    )
    assert (loader.epoch(3), len(file)) == (0.75, 100)
    assert equal(loader.batch(7), TokenLoader(counting(100), 2, 10, seed=3).batch(7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch is 0, expected 1 or more"),
        ({"context": 0}, "context is 0, expected 1 or more"),
        ({"ranks": 0}, "ranks is 0, expected 1 or more"),
        ({"batch": 1.5}, "batch is 1.5, expected an integer"),
        ({"context": "x"}, "context is 'x', expected an integer"),
        ({"rank": 0.5}, "rank is 0.5, expected an integer"),
        ({"seed": None}, "seed is None, expected an integer"),
        ({"rank": 2, "ranks": 2}, "rank has 2, expected 0 to 1"),
        ({"rank": -1}, "rank has -1, expected 0 to 0"),
        ({"seed": -1}, "seed is -1, expected 0 to"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616, expected 0 to"),
        ({"batch": 5, "ranks": 2}, "batch has 5, expected a multiple of the 2 ranks"),
    ],
)
def test_bad_arguments_are_errors(change: dict[str, int], message: str) -> None:
    arguments = {"batch": 4, "context": 8, **change}
    with pytest.raises(ArgumentError, match=message):
        TokenLoader(counting(100), **arguments)


def test_a_corpus_shorter_than_a_window_is_an_error() -> None:
    TokenLoader(counting(1025), 4, 1024)
    with pytest.raises(
        DataError, match=r"tokens has 1,024 tokens, expected 1,025 or more .context"
    ):
        TokenLoader(counting(1024), 4, 1024)


def test_what_is_not_a_row_of_integers_is_an_error() -> None:
    with pytest.raises(DtypeError, match="tokens is a list, expected an array of integers"):
        TokenLoader([1, 2, 3], 1, 1)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="tokens has dtype float64, expected integers"):
        TokenLoader(np.zeros(100), 4, 8)
    with pytest.raises(ShapeError, match=r"tokens has shape \(10, 10\), expected one axis"):
        TokenLoader(np.zeros((10, 10), np.uint16), 4, 8)


def test_steps_and_limits_out_of_range_are_errors() -> None:
    loader = TokenLoader(counting(100), 4, 8)
    with pytest.raises(ArgumentError, match="step has -1, expected 0 or more"):
        loader.batch(-1)
    with pytest.raises(ArgumentError, match="step has -1, expected 0 or more"):
        next(loader.iterate(-1))
    end = (1 << 63) // 4
    with pytest.raises(ArgumentError, match=f"step has {end}, .* below 2.63 rows"):
        loader.batch(end)
    assert loader.batch(end - 1)[0].shape == (4, 8)
    with pytest.raises(ArgumentError, match="limit is 0, expected 1 or more"):
        next(loader.evaluation_batches(0))


@pytest.mark.parametrize("step", [1.5, "1", None, 1 << 63, 1 << 70])
def test_a_step_that_is_none_is_named(step: Any) -> None:
    loader = TokenLoader(counting(100), 4, 8)
    with pytest.raises(ArgumentError, match=r"TokenLoader\.batch: step (is|has) "):
        loader.batch(step)
    with pytest.raises(ArgumentError, match=r"evaluation_batches: limit is 1\.5, expected an int"):
        next(loader.evaluation_batches(1.5))  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="tokens is a list, expected an array of integers"):
        TokenLoader([1, 2, 3], 1, 1)  # type: ignore[arg-type]
