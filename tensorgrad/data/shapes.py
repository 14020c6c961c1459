"""Few shapes for batches of texts of many lengths, since a CUDA graph serves one shape."""

from __future__ import annotations

from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int64]]

MOST_SHAPES = 16  # shapes of a loader
_BODY, _HEAD = 4, 1  # cost of a column in the blocks, and in the head
_CHOICES = 64  # lengths to choose from, so that the search takes a few seconds at most
_ROUNDS = 4  # rounds of exchanges


def few_shapes(
    lengths: Numbers, firsts: Numbers, least: int, most: int = MOST_SHAPES
) -> tuple[list[tuple[int, int]], Numbers]:
    """Return a few shapes for rows, and the index of the cheapest that fits each row.

    A row fits into T columns, of which the last n are counted, if it ends before column T and its
    first counted column is T - n or a later one. The shapes minimize the sum over the rows of
    4 T + n: greedily, then by exchanging one at a time. No two have the same T: with two n for one
    T, a batch holds pairs of one kind (short sources, say), and on the synthetic phrases the
    validation loss after 3 epochs was 0.39 instead of 0.34 (means of 3 seeds).

    Args:
        lengths: (N,) of the rows, in columns.
        firsts: (N,) the first counted column of each row, below its length.
        least: columns that one more shape must save.
        most: the largest number of shapes.
    Returns:
        (T, n) of each shape, by rising T, and (N,) indices into them.
    """
    widths, starts = _choices(lengths), -_choices(-firsts)[::-1]  # both rising
    width = widths[np.searchsorted(widths, lengths)]
    start = starts[np.searchsorted(starts, firsts, "right") - 1]
    kinds, kind, count = np.unique(
        np.stack([width, start], 1), axis=0, return_inverse=True, return_counts=True
    )
    ends, begins = (grid.ravel() for grid in np.meshgrid(widths, starts, indexing="ij"))
    ends, begins = ends[begins < ends], begins[begins < ends]
    prices = _BODY * ends + _HEAD * (ends - begins)
    whole = int(prices.argmax())  # every row fits
    fits = (kinds[:, 0] <= ends[:, None]) & (kinds[:, 1] >= begins[:, None])
    costs = np.where(fits, prices[:, None], np.inf)  # (shapes, kinds)
    chosen, weights = [whole], count.astype(np.float64)  # float64: exact sums of integers
    while len(chosen) < min(most, len(widths)):
        best = costs[chosen].min(0)
        totals = np.minimum(costs, best) @ weights
        totals[np.isin(ends, ends[chosen])] = np.inf  # a single shape for each length
        if best @ weights - totals.min() < max(1, (_BODY + _HEAD) * least):
            break
        chosen.append(int(totals.argmin()))
    for _ in range(_ROUNDS):
        before = list(chosen)
        for number in range(1, len(chosen)):
            others = chosen[:number] + chosen[number + 1 :]
            totals = np.minimum(costs, costs[others].min(0)) @ weights
            totals[np.isin(ends, ends[others])] = np.inf
            if totals.min() < totals[chosen[number]]:
                chosen[number] = int(totals.argmin())
        if chosen == before:
            break
    chosen.sort(key=lambda each: ends[each])
    used, nearest = np.unique(costs[chosen].argmin(0), return_inverse=True)
    found = [chosen[number] for number in used]
    shapes = [(int(ends[place]), int(ends[place] - begins[place])) for place in found]
    return shapes, nearest[kind.reshape(-1)]


def _choices(values: Numbers) -> Numbers:
    """Return at most _CHOICES of the values, rising, with the largest."""
    found = np.unique(values)
    return found[:: -len(found) // _CHOICES][::-1]
