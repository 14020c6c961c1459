from __future__ import annotations

import numpy as np
import pytest

from tensorgrad.train.curves import Column, smoothed, smoothing_span, thinned


def noise(count: int, seed: int = 0) -> Column:
    return Column(np.arange(count), np.random.default_rng(seed).standard_normal(count))


@pytest.mark.parametrize("limit", [8, 9, 100, 4500])
@pytest.mark.parametrize("count", [1, 8, 9, 101, 10_000])
def test_thinned_curves_keep_ends_and_extremes(count: int, limit: int) -> None:
    whole = noise(count)
    whole.values[count // 3], whole.values[count // 2] = 50, -50
    few = thinned(whole, limit)
    assert len(few) <= limit
    assert (np.diff(few.steps) > 0).all()
    assert {0, count - 1} <= set(few.steps.tolist())
    assert few.values.max() == whole.values.max()
    assert few.values.min() == whole.values.min()
    np.testing.assert_array_equal(few.values, whole.values[few.steps])


def test_thinned_curves_keep_gaps() -> None:
    whole = noise(1000)
    whole.values[[400, 700]] = np.nan
    whole.values[800:900] = np.nan
    few = thinned(whole, 50)
    assert len(few) <= 50
    broken = set(few.steps[np.isnan(few.values)].tolist())
    assert {400, 700} <= broken
    assert any(800 <= step < 900 for step in broken)


def test_smoothed_values_are_means_around_a_step() -> None:
    whole = noise(1000)
    half = smoothing_span(1000) // 2
    assert half == 5
    expected = [whole.values[max(0, i - half) : i + half + 1].mean() for i in range(1000)]
    np.testing.assert_allclose(smoothed(whole).values, expected, atol=1e-12)
    whole.values[500] = np.nan
    assert np.isfinite(smoothed(whole).values).all()
    assert 500 not in smoothed(whole).steps
    assert len(smoothed(noise(0))) == 0
    assert smoothed(noise(1)).values == noise(1).values
