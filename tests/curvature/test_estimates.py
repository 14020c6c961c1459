"""Trace, diagonal and density against the eigenvalues of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad.curvature import density, diagonal, trace
from tensorgrad.errors import ArgumentError
from tests.curvature.spectra import matrix_of, operator_of

VALUES = np.concatenate([np.linspace(-1, 1, 80), [5.0, 9.0, 20.0]])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_trace_is_within_four_standard_errors(dtype: str) -> None:
    matrix = matrix_of(VALUES, dtype)
    found = [trace(operator_of(matrix), 32, seed=seed) for seed in range(20)]
    away = np.array([(one.value - np.trace(matrix)) / one.error for one in found])
    assert (np.abs(away) < 4).all()
    assert 0.5 < away.std() < 1.6  # the errors are neither too small nor too large
    # The variance of v A v is twice the sum of the squares beside the diagonal.
    expected = np.sqrt(2 * (matrix**2).sum() - 2 * (np.diag(matrix) ** 2).sum())
    assert np.mean([one.error for one in found]) == pytest.approx(expected / 32**0.5, rel=0.1)
    assert found[0].products == 32


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_diagonal_is_within_its_standard_errors(dtype: str) -> None:
    matrix = matrix_of(VALUES, dtype)
    found = diagonal(operator_of(matrix), 64)
    assert found.value.dtype == found.error.dtype == dtype
    away = (found.value - np.diag(matrix)) / found.error
    assert (np.abs(away) < 5).all()
    assert 0.8 < away.std() < 1.25
    beside = np.sqrt((matrix**2).sum(1) - np.diag(matrix) ** 2)
    np.testing.assert_allclose(found.error, beside / 8, rtol=0.5)


def test_a_diagonal_matrix_has_no_error() -> None:
    found = diagonal(operator_of(np.diag(VALUES)), 3)
    np.testing.assert_allclose(found.value, VALUES, rtol=1e-15)
    np.testing.assert_allclose(found.error, 0, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_moments_of_a_density(dtype: str) -> None:
    operator = operator_of(matrix_of(VALUES, dtype))
    found = density(operator, 16, 12)
    assert found.nodes.shape == found.weights.shape == (16, 12)
    assert found.products == operator.products == 16 * 12
    np.testing.assert_allclose(found.weights.sum(1), 1)
    for power in range(6):
        moment = found.moment(power)
        assert abs(moment.value - (VALUES**power).mean()) <= 4 * moment.error + 1e-12
    # The moments of a vector are exact up to the power 2 steps - 1.
    few = density(operator, 16, 3)
    for power in range(6):
        rtol = 1e-4 if dtype == "float32" else 1e-9
        assert few.moment(power).value == pytest.approx(found.moment(power).value, rel=rtol)
    assert few.moment(6).value != pytest.approx(found.moment(6).value, rel=1e-4)
    # The first moment is the trace, from the same vectors.
    assert found.moment(1).value * len(VALUES) == pytest.approx(trace(operator, 16).value, rel=1e-4)


def test_the_curve_of_a_density() -> None:
    found = density(operator_of(matrix_of(VALUES)), 32, 40)
    grid, curve, error = found.curve(width=0.5, points=400)
    exact = np.exp(-(((grid[:, None] - VALUES) / 0.5) ** 2) / 2).mean(1) / (
        0.5 * (2 * np.pi) ** 0.5
    )
    assert np.trapezoid(curve, grid) == pytest.approx(1, abs=1e-3)
    assert (np.abs(curve - exact) <= 4 * error + 2e-3).all()
    assert error.max() < 0.1 * curve.max()
    assert len(found.curve()[0]) == 256


@pytest.mark.parametrize(("values", "nodes"), [([2.0] * 50, 1), ([2.0, 1.0] * 25, 2), ([-3.0], 1)])
def test_a_density_of_few_distinct_values_is_exact(values: list[float], nodes: int) -> None:
    found = density(operator_of(matrix_of(values)), 2, 10)
    assert found.products == 2 * nodes
    distinct = np.broadcast_to(np.unique(values), (2, nodes))
    np.testing.assert_allclose(found.nodes[:, :nodes], distinct)
    assert (found.weights[:, nodes:] == 0).all()
    assert np.isfinite(found.curve()[1]).all()


def test_equal_seeds_give_equal_bits() -> None:
    operator = operator_of(matrix_of(VALUES, "float32"))
    for estimate in (trace, diagonal):
        first, again, other = (estimate(operator, 4, seed=seed) for seed in (1, 1, 2))
        np.testing.assert_array_equal(first.value, again.value)
        assert np.any(first.value != other.value)
    nodes = [density(operator, 2, 5, seed=seed).nodes for seed in (1, 1, 2)]
    np.testing.assert_array_equal(nodes[0], nodes[1])
    assert (nodes[0] != nodes[2]).any()


def test_progress_counts_the_products() -> None:
    told: list[tuple[Any, ...]] = []
    operator = operator_of(matrix_of(VALUES))
    trace(operator, 3, progress=lambda *done: told.append(done))
    density(operator, 2, 4, progress=lambda *done: told.append(done))
    assert told == [("products", n, 3) for n in (1, 2, 3)] + [
        ("products", n, 8) for n in range(1, 9)
    ]


def test_wrong_options_are_named() -> None:
    operator = operator_of(np.eye(9))
    for name, estimate in (("trace", trace), ("diagonal", diagonal), ("density", density)):
        with pytest.raises(ArgumentError, match=f"{name}: samples is 1, expected 2 or more"):
            estimate(operator, 1)
        with pytest.raises(ArgumentError, match=f"{name}: seed is -1"):
            estimate(operator, seed=-1)
    with pytest.raises(ArgumentError, match="density: steps is 0, expected 1 or more"):
        density(operator, steps=0)
    found = density(operator, 2, 2)
    with pytest.raises(ArgumentError, match="moment: power is -1, expected 0 or more"):
        found.moment(-1)
    with pytest.raises(ArgumentError, match="curve: width is 0, expected a positive number"):
        found.curve(width=0)
    with pytest.raises(ArgumentError, match="curve: points is 1, expected 2 or more"):
        found.curve(points=1)
