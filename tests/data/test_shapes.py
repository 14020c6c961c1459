from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from tensorgrad.data.shapes import few_shapes


def rows(count: int, longest: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths, short ones more often, and first counted columns below them."""
    rng = np.random.default_rng(seed)
    lengths = 1 + (longest * rng.beta(2, 5, count)).astype(np.int64)
    return lengths, (lengths * rng.uniform(0, 1, count)).astype(np.int64)


def cost(shapes: list[tuple[int, int]], lengths: np.ndarray, firsts: np.ndarray) -> int:
    """Return the sum of 4 T + n over the rows, each in the cheapest shape that fits."""
    total = 0
    for length, first in zip(lengths.tolist(), firsts.tolist(), strict=True):
        total += min(4 * t + n for t, n in shapes if length <= t and t - n <= first)
    return total


@pytest.mark.parametrize("longest", [40, 2000])
@pytest.mark.parametrize("most", [1, 5, 16])
def test_each_row_fits_its_shape_which_is_the_cheapest(longest: int, most: int) -> None:
    lengths, firsts = rows(1000, longest)
    shapes, index = few_shapes(lengths, firsts, 0, most)
    assert len(shapes) == most
    assert [t for t, _ in shapes] == sorted({t for t, _ in shapes})
    assert set(index.tolist()) == set(range(most))
    assert max(t for t, _ in shapes) == lengths.max()
    columns, counted = np.array(shapes)[index].T
    assert (lengths <= columns).all()
    assert (columns - counted <= firsts).all()
    if longest == 40:  # otherwise a row may be rounded to a length that is none of the shapes'
        assert (4 * columns + counted).sum() == cost(shapes, lengths, firsts)


@pytest.mark.parametrize("seed", range(5))
def test_few_shapes_cost_hardly_more_than_the_best(seed: int) -> None:
    lengths, firsts = rows(60, 7, seed)
    found, _ = few_shapes(lengths, firsts, 0, 3)
    ends, begins = np.unique(lengths), np.unique(firsts)
    each = [(int(t), int(t - first)) for t in ends[:-1] for first in begins if first < t]
    whole = (int(ends[-1]), int(ends[-1] - begins[0]))
    best = min(
        cost([whole, *two], lengths, firsts)
        for two in combinations(each, 2)
        if two[0][0] != two[1][0]
    )
    assert cost(found, lengths, firsts) <= 1.02 * best


def test_a_shape_must_save_as_much_as_it_costs() -> None:
    lengths, firsts = np.array([8] * 10 + [16] * 10), np.zeros(20, np.int64)
    assert few_shapes(lengths, firsts, 80)[0] == [(8, 8), (16, 16)]
    shapes, index = few_shapes(lengths, firsts, 81)
    assert shapes == [(16, 16)]
    assert index.tolist() == [0] * 20


def test_a_column_costs_four_times_what_a_counted_one_does() -> None:
    lengths, firsts = np.array([8] * 10 + [16] * 10), np.array([4] * 10 + [0] * 10)
    assert few_shapes(lengths, firsts, 88)[0] == [(8, 4), (16, 16)]  # saves 10 (4 * 8 + 12)
    assert few_shapes(lengths, firsts, 89)[0] == [(16, 16)]


def test_rows_of_one_kind_have_one_shape() -> None:
    shapes, index = few_shapes(np.array([5, 5]), np.array([2, 2]), 0)
    assert (shapes, index.tolist()) == ([(5, 3)], [0, 0])
