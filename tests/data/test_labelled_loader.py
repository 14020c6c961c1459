from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tensorgrad.data.labelled_loader import LabelledLoader, pad
from tensorgrad.errors import ArgumentError, DataError, DtypeError, ShapeError

ROWS = [[number + 1] * (number * 7 % 12) for number in range(45)]
LABELS = [number % 3 for number in range(45)]


def texts_of(batch: tuple[Any, Any, Any]) -> list[tuple[tuple[int, ...], int]]:
    """Return the rows of a batch without padding, with their labels; check the padding."""
    tokens, lengths, labels = batch
    assert [array.dtype for array in batch] == [np.int32] * 3
    assert tokens.shape[0] == len(lengths)
    assert tokens.shape[1] >= max(1, lengths.max())
    for row, length in zip(tokens, lengths, strict=True):
        assert not row[length:].any()
    return [
        (tuple(row[:length].tolist()), int(label))
        for row, length, label in zip(tokens, lengths, labels, strict=True)
    ]


ALL = Counter(zip(map(tuple, ROWS), LABELS, strict=True))


def test_rows_are_padded_and_cut() -> None:
    tokens, lengths = pad([[5, 6, 7], [], [8]], longest=2)
    assert tokens.tolist() == [[5, 6], [0, 0], [8, 0]]
    assert lengths.tolist() == [2, 0, 1]
    assert pad([[]])[0].shape == (1, 1)
    assert pad([])[0].shape == (0, 1)
    assert pad([[5, 6]], longest=1)[0].tolist() == [[5]]
    with pytest.raises(ArgumentError, match="pad: longest is 0, expected 1 or more"):
        pad([[5, 6]], longest=0)


@pytest.mark.parametrize("size", [1, 9, 45])
def test_an_epoch_visits_every_text_once(size: int) -> None:
    loader = LabelledLoader(ROWS, LABELS, size)
    assert loader.batches == 45 // size
    orders = []
    for epoch in range(2):
        steps = range(epoch * loader.batches, (epoch + 1) * loader.batches)
        seen = [text for step in steps for text in texts_of(loader.batch(step))]
        assert Counter(seen) == ALL
        orders.append(seen)
    assert orders[0] != orders[1]


def test_the_last_batch_of_an_epoch_is_filled_up() -> None:
    for size in (7, 100):
        loader = LabelledLoader(ROWS, LABELS, size)
        batches = [texts_of(loader.batch(step)) for step in range(loader.batches)]
        assert {len(batch) for batch in batches} == {size}
        assert {text for batch in batches for text in batch} == set(ALL)


def test_a_batch_depends_on_its_number_alone() -> None:
    loader, other = LabelledLoader(ROWS, LABELS, 6), LabelledLoader(ROWS, LABELS, 6)
    wanted = [texts_of(loader.batch(step)) for step in range(30)]
    assert [texts_of(other.batch(step)) for step in reversed(range(30))] == wanted[::-1]
    batches = loader.iterate(11)
    assert [texts_of(next(batches)) for _ in range(4)] == wanted[11:15]
    assert texts_of(LabelledLoader(ROWS, LABELS, 6, seed=1).batch(0)) != wanted[0]


def test_similar_lengths_share_a_batch() -> None:
    lengths = np.random.default_rng(0).integers(1, 41, 4000)
    loader = LabelledLoader([[1] * length for length in lengths], [0] * 4000, 16)
    padded = sum(loader.batch(step)[0].size for step in range(loader.batches))
    assert padded < 1.1 * lengths.sum()
    assert loader.tokens == pytest.approx(16 * lengths.mean())


def test_batches_have_few_widths() -> None:
    lengths = np.random.default_rng(0).gamma(2, 8, 4000).astype(int)
    loader = LabelledLoader([[1] * length for length in lengths], [0] * 4000, 16, longest=60)
    assert len(loader.widths) == 16
    assert loader.widths[-1] == 60
    tokens = [loader.batch(step)[0] for step in range(2 * loader.batches)]
    assert {array.shape for array in tokens} == {(16, width) for width in loader.widths}
    needed = sum(16 * max(1, (array > 0).sum(1).max()) for array in tokens)
    assert sum(array.size for array in tokens) < 1.08 * needed
    assert LabelledLoader([[], []], [0, 1], 2).batch(0)[0].shape == (2, 1)


def test_evaluation_visits_every_text_once_and_repeats_none() -> None:
    loader = LabelledLoader(ROWS, LABELS, 7, longest=100)
    batches = [texts_of(batch) for batch in loader.evaluation_batches()]
    assert Counter(text for batch in batches for text in batch) == ALL
    lengths = [len(tokens) for batch in batches for tokens, _ in batch]
    assert lengths == sorted(lengths)
    assert repr(loader) == (
        f"LabelledLoader(texts=45, batches=7, widths={len(loader.widths)}, batch=7, longest=100, "
        "seed=0)"
    )
    parts = [LabelledLoader(ROWS, LABELS, 8, rank=rank, ranks=2) for rank in (0, 1)]
    both = [Counter(t for b in part.evaluation_batches() for t in texts_of(b)) for part in parts]
    assert both[0] + both[1] - Counter({((), -100): 9}) >= ALL
    assert [len(batch) for batch in batches] == [7] * 6 + [3]


def test_long_texts_are_cut() -> None:
    loader = LabelledLoader([[1, 2, 3], [4]], [0, 1], 2, longest=2)
    assert Counter(texts_of(loader.batch(0))) == {((1, 2), 0): 1, ((4,), 1): 1}
    assert loader.tokens == 3


def test_ids_are_never_cut() -> None:
    wrong: list[Any] = [[1.5], [np.float32(1)], "ab"]
    for ids in wrong:
        with pytest.raises(DtypeError, match=r"pad: rows has dtype .*, expected integers"):
            LabelledLoader([[1], ids], [0, 1], 2).batch(0)
    large: Any = np.array([2**32 + 1])
    with pytest.raises(ArgumentError, match="pad: rows has 4294967297"):
        pad([large])


def test_rows_may_be_an_array() -> None:
    rows: Any = np.array([[1, 2], [3, 4]])
    loader = LabelledLoader(rows, [0, 1], 2)
    assert Counter(texts_of(loader.batch(0))) == {((1, 2), 0): 1, ((3, 4), 1): 1}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch": 0}, ArgumentError, "batch is 0"),
        ({"batch": 1.5}, ArgumentError, "batch is 1.5, expected an integer"),
        ({"longest": "x"}, ArgumentError, "longest is 'x', expected an integer"),
        ({"longest": 0}, ArgumentError, "longest is 0"),
        ({"seed": -1}, ArgumentError, "seed is -1"),
        ({"rows": []}, DataError, "rows is empty"),
        ({"labels": [1]}, ShapeError, r"labels has shape \(1,\), expected \(45,\)"),
        ({"labels": [[1]] * 45}, ShapeError, r"labels has shape \(45, 1\), expected \(45,\)"),
        ({"labels": [[0], [1, 2]]}, ShapeError, "labels is .*, expected equal lengths"),
        ({"labels": [0.5] * 45}, DtypeError, "labels has dtype float64, expected integers"),
        ({"labels": [2**32] * 45}, ArgumentError, r"labels has 4294967296, expected -2\^31 to"),
    ],
)
def test_bad_arguments_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LabelledLoader(**{"rows": ROWS, "labels": LABELS, "batch": 4, **options})
    with pytest.raises(ArgumentError, match="step is -1"):
        LabelledLoader(ROWS, LABELS, 4).batch(-1)
    with pytest.raises(ArgumentError, match=r"LabelledLoader\.batch: step is 1\.5, expected an"):
        LabelledLoader(ROWS, LABELS, 4).batch(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("longest", [None, 5])
def test_a_token_attends_to_the_tokens_of_its_text(longest: int | None) -> None:
    found = LabelledLoader(ROWS, LABELS, 9, longest=longest)
    lengths = [len(row[:longest]) for row in ROWS]
    assert found.keys == pytest.approx(np.mean([n for n in lengths for _ in range(n)]))
    assert LabelledLoader([[]], [0], 1).keys == 0
