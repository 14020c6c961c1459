from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorgrad.errors import ArgumentError, ShapeError
from tensorgrad.train import placement
from tensorgrad.train.placement import (
    ArrayPiece,
    Placement,
    assign_writers,
    copies,
    cut_box,
    divide,
    paste_box,
)
from tests.parallel.whole_arrays import assemble, cut

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def numbered(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Placement:
    if not shape or draw(st.booleans()):
        return Placement("w", shape)
    axis = draw(st.integers(0, len(shape) - 1))
    edges = sorted(draw(st.lists(st.integers(0, shape[axis]), max_size=6)))
    ranges = tuple(zip(edges[::2], edges[1::2], strict=False))
    return Placement("w", shape, axis, ranges)


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...]) -> ArrayPiece:
    placement = draw(boxes(shape))
    start = draw(st.integers(0, placement.size))
    return ArrayPiece(placement, start, draw(st.integers(start, placement.size)))


def elements(piece: ArrayPiece) -> list[int]:
    """Return the indices of a piece's elements in the full array, computed naively."""
    box = piece.placement
    rows = range(box.shape[box.axis]) if box.shape else range(1)
    if box.ranges is not None:
        rows = [row for start, stop in box.ranges for row in range(start, stop)]  # type: ignore
    full = numbered(box.shape).astype(int)
    taken = full if box.ranges is None else np.take(full, np.array(rows, int), box.axis)
    return [int(each) for each in taken.reshape(-1)[piece.start : piece.stop]]


@given(st.data())
def test_a_piece_is_divided_like_an_index_mask(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    piece = data.draw(pieces(shape))
    found = cut(numbered(shape), piece)
    assert found.shape == (piece.size,)
    assert found.astype(int).tolist() == elements(piece)
    box = cut_box(numbered(shape), piece.placement)
    assert box.shape == piece.placement.box
    pasted = np.full(shape, -1, np.float32)
    paste_box(box, pasted, piece.placement)
    assert sorted(pasted[pasted >= 0]) == sorted(box.reshape(-1))
    assert np.array_equal(cut_box(pasted, piece.placement), box)
    assert ArrayPiece.from_json(json.loads(json.dumps(piece.to_json()))) == piece


@settings(max_examples=300)
@given(st.data())
def test_a_piece_is_made_of_any_others_that_have_its_elements(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    target = data.draw(pieces(shape))
    sources = data.draw(st.lists(pieces(shape), min_size=1, max_size=4))
    full = numbered(shape)
    parts = [(source, cut(full, source)) for source in sources]
    for source in sources:  # all of their common elements, in ascending runs
        runs = placement._intersect(target, source).tolist()
        common = [(a + i, b + i) for a, b, length in runs for i in range(length)]
        places = {element: place for place, element in enumerate(elements(source))}
        assert common == [
            (place, places[element])
            for place, element in enumerate(elements(target))
            if element in places
        ]
        assert all(length > 0 for _, _, length in runs)
    there = {place for source in sources for place in elements(source)}
    wanted = elements(target)
    if not there.issuperset(wanted):
        missing = next(place for place, each in enumerate(wanted) if each not in there)
        with pytest.raises(ShapeError, match=rf"no piece of w .* has element {missing} of the "):
            assemble(target, parts)
        return
    found = assemble(target, parts)
    assert found.dtype == np.float32
    assert found.astype(int).tolist() == wanted
    runs = copies(target, sources)
    assert runs[:, 3].sum() == target.size
    assert (runs[:, 3] > 0).all()
    if target.size:
        assert copies(target, [target, target]).tolist() == [[0, 0, 0, target.size]]


@given(st.data())
def test_everything_that_is_held_is_written_once(data: st.DataObject) -> None:
    placement = data.draw(boxes((3, 4)))
    spans = st.tuples(st.integers(0, placement.size), st.integers(0, placement.size))
    held = [
        [
            ArrayPiece(placement, min(span), max(span))
            for span in data.draw(st.lists(spans, max_size=2))
        ]
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    written = assign_writers(held)
    taken = [place for mine in written for piece in mine for place in elements(piece)]
    assert sorted(taken) == sorted({p for mine in held for piece in mine for p in elements(piece)})
    for mine, here in zip(written, held, strict=True):
        assert {p for piece in mine for p in elements(piece)} <= {
            p for piece in here for p in elements(piece)
        }


def test_replicas_are_divided_among_writers() -> None:
    whole = [Placement(f"w{i}", (100,)).piece for i in range(8)]
    alone = Placement("alone", (300,)).piece
    written = assign_writers([[*whole, alone], whole, whole])
    assert [sum(piece.size for piece in mine) for mine in written] == [400, 400, 300]
    sizes = [[Placement(f"w{size}", (size,)).piece for size in (1, 5, 2, 4)]] * 2
    found = [[piece.size for piece in mine] for mine in assign_writers(sizes)]
    assert found == [[5, 1], [4, 2]]  # the largest first
    empty = Placement("empty", (0, 3)).piece
    assert assign_writers([[], [empty], [empty]]) == [[], [empty], []]


def test_parts_of_a_joint_weight_have_some_of_each_section() -> None:
    full = numbered((12, 2))  # 4 rows of queries, 4 of keys, 4 of values
    part = divide("qkv", (12, 2), 0, 1, 2, (4, 4, 4))
    assert part.ranges == ((2, 4), (6, 8), (10, 12))
    assert cut_box(full, part)[:, 0].tolist() == [4, 6, 12, 14, 20, 22]
    assert divide("qkv", (12, 2), 0, 0, 1, (4, 4, 4)) == Placement("qkv", (12, 2))
    uneven = divide("qkv", (8, 2), 0, 1, 2, (4, 2, 2))  # fewer heads of keys and values
    assert uneven.ranges == ((2, 4), (5, 6), (7, 8))
    shares = [divide("qkv", (20, 2), 0, i, 3, (10, 5, 5), units=5).ranges for i in range(3)]
    assert shares == [  # 5 heads of keys and values, 2 queries each: 1, 2 and 2
        ((0, 2), (10, 11), (15, 16)),
        ((2, 6), (11, 13), (16, 18)),
        ((6, 10), (13, 15), (18, 20)),
    ]
    assert divide("w", (4, 6), 1, 2, 3) == Placement("w", (4, 6), 1, ((4, 6),))
    parts = [(p.piece, cut(full, p.piece)) for p in (divide("qkv", (12, 2), 0, i, 4, (4, 4, 4))
                                                     for i in range(4))]  # fmt: skip
    np.testing.assert_array_equal(
        assemble(Placement("qkv", (12, 2)).piece, parts).reshape(12, 2), full
    )


def test_equal_boxes_are_equal() -> None:
    assert Placement("w", (4, 2), 0, ((0, 2), (2, 4))) == Placement("w", (4, 2))
    assert Placement("w", (4, 2), 1, ((0, 2),)) == Placement("w", (4, 2))
    assert Placement("w", (4, 2), 0, ((0, 1), (1, 1), (1, 3))).ranges == ((0, 3),)
    assert Placement("w", (4, 2), 0, ()).box == (0, 2)
    assert Placement("w", (4, 2), 1) == Placement("w", (4, 2))
    assert ArrayPiece.from_json(["w", [2**31, 2**31], 0, None, 0, 2**62]).size == 2**62


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Placement("w", (4,), 1, ((0, 1),)), r"axis of w is 1, expected one of \(4,\)"),
        (lambda: Placement("w", (4,), 0, ((2, 1),)), "ascending and disjoint ones in 0 to 4"),
        (lambda: Placement("w", (4,), 0, ((0, 2), (1, 3))), "ascending and disjoint"),
        (lambda: Placement("w", (4,), 0, ((0, 5),)), "in 0 to 4"),
        (lambda: Placement("w", (4,), -1, ((0, 1),)), r"axis of w is -1, expected"),
        (lambda: Placement("w", (4,), 0, ((-1, 1),)), "in 0 to 4"),
        (lambda: divide("w", (4, 2), 0, 2, 2), "part 2 of 2, expected"),
        (lambda: divide("w", (4, 2), 0, -1, 2), "part -1 of 2, expected"),
        (lambda: divide("w", (4, 2), -1, 0, 2), "axis -1 and part 0"),
        (lambda: divide("w", (4, 2), 2, 0, 2), "axis 2"),
        (lambda: divide("w", (5, 2), 0, 0, 2), "w has 5 rows on axis 0, expected a multiple of"),
        (lambda: divide("w", (4, 2), 0, 0, 2, units=3), "expected a multiple of the 3 units"),
        (lambda: divide("w", (4, 2), 0, 0, 2, (2, 1)), r"are \(2, 1\), expected a sum of 4"),
        (lambda: cut_box(np.zeros(3), Placement("w", (4,))), r"w has shape \(3,\), expected"),
        (
            lambda: paste_box(np.zeros(3), np.zeros(4), Placement("w", (4,))),
            r"and \(3,\), expected",
        ),
        (
            lambda: copies(Placement("w", (4,)).piece, [Placement("v", (4,)).piece]),
            r"v \(4,\) is not a part of w",
        ),
        (lambda: ArrayPiece.from_json(["w", [4], 0, None, 0]), "expected what to_json gives"),
        (lambda: ArrayPiece.from_json(["w", [4], 0, None, 0, 5]), "expected some of 0 to 4"),
        (lambda: ArrayPiece.from_json(["w", [4], 0, None, 3, 2]), "elements 3 to 2, expected"),
        (lambda: ArrayPiece.from_json(["w", [4], 0, None, -1, 2]), "expected what to_json gives"),
        (lambda: ArrayPiece.from_json(["w", [4], True, None, 0, 2]), "expected what to_json gives"),
        (lambda: ArrayPiece.from_json(["w", [4], 0, [[0, 1, 2]], 0, 1]), "expected what to_json"),
        (lambda: ArrayPiece.from_json(["w", [2**63], 0, None, 0, 1]), "expected what to_json"),
        (lambda: ArrayPiece.from_json(["w", [2**32, 2**31], 0, None, 0, 1]), "expected what to_j"),
        (lambda: ArrayPiece.from_json([3, [4], 0, None, 0, 1]), "expected what to_json gives"),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_numbers(call: Any, message: str) -> None:
    with pytest.raises((ArgumentError, ShapeError), match=message):
        call()
