"""Curves of a run: smoothed, and thinned to what a picture can show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SMOOTH_FROM = 20  # points: fewer are drawn as they are


@dataclass(frozen=True)
class Column:
    """A value of a run over its steps.

    Attributes:
        steps: (N,) int64, increasing.
        values: (N,) float64; NaN where the value was not finite.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> Column:
        """The part with finite values."""
        kept = np.isfinite(self.values)
        return Column(self.steps[kept], self.values[kept])


def smoothing_span(count: int) -> int:
    """Return the number of points that smoothing averages: odd, 1 % of all, from 5 to 501."""
    return 2 * min(250, max(2, count // 200)) + 1


def smoothed(values: Column) -> Column:
    """Return the mean of the finite values around each step.

        y[i] = mean(x[i - h], ..., x[i + h]),  2 h + 1 = span, without what is before or after all

    A mean to both sides does not lag behind a loss that falls. See `smoothing_span`.
    """
    values = values.finite
    count, half = len(values), smoothing_span(len(values)) // 2
    sums = np.concatenate([[0.0], np.cumsum(values.values)])
    place = np.arange(count)
    start, end = np.maximum(place - half, 0), np.minimum(place + half + 1, count)
    return Column(values.steps, (sums[end] - sums[start]) / (end - start))


def thinned(values: Column, limit: int) -> Column:
    """Return at most `limit` points that keep every minimum and maximum one can see.

    Points are divided into equal ranges; of each remain the smallest, the largest and the first
    that is not finite, and of all the first and the last.

    Args:
        values: (N,) points.
        limit: 8 or more.
    """
    count = len(values)
    if count <= limit:
        return values
    edges = np.linspace(0, count, (limit - 2) // 3 + 1).astype(int)
    low = np.nan_to_num(values.values, nan=np.inf)
    high = np.nan_to_num(values.values, nan=-np.inf)
    broken = np.isnan(values.values)
    kept = {0, count - 1}
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        kept.add(start + int(low[start:end].argmin()))
        kept.add(start + int(high[start:end].argmax()))
        if broken[start:end].any():
            kept.add(start + int(broken[start:end].argmax()))
    chosen = np.array(sorted(kept))
    return Column(values.steps[chosen], values.values[chosen])
