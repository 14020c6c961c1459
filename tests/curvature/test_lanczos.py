"""Eigenpairs against numpy.linalg.eigh, on spectra that are hard for Lanczos."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad.curvature import Operator, eigenpairs
from tensorgrad.curvature.operators import chunked, dot
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tests.curvature.spectra import matrix_of, operator_of

BULK = np.linspace(-1, 1, 150)
# Eigenvalues, and how many of the largest and of the smallest.
SPECTRA: dict[str, tuple[Any, int, int]] = {
    "equal distances": (np.arange(150.0) - 50, 10, 10),
    "four equal values, then three": ([10] * 4 + [9] * 3 + [*BULK], 8, 8),
    "clusters": ([10, 10 - 1e-4, 10 - 2e-4, 5, *BULK], 4, 4),
    "one value": ([2] * 60, 5, 5),
    "zero": ([0] * 60, 5, 5),
    "rank 3": ([5, 3, 2] + [0] * 100, 6, 6),
    "all negative": (-np.arange(1, 100.0), 4, 4),
    "tiny": (1e-15 * np.arange(100.0), 3, 3),
    "1 x 1": ([-3], 1, 1),
    "4 x 4, all": ([3, 2, 2, 1], 4, 4),
    "as large as the basis": (np.arange(40.0), 20, 20),
    "larger than the basis by one": (np.arange(41.0), 20, 20),
    "few large ones": ([*np.geomspace(100, 5, 20), *BULK], 20, 2),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("which", ["largest", "smallest"])
@pytest.mark.parametrize("name", SPECTRA)
def test_eigenpairs_are_those_of_eigh(name: str, which: str, dtype: str) -> None:
    values, *ks = SPECTRA[name]
    k = ks[which == "smallest"]
    tolerance = 1e-6 if dtype == "float64" else 1e-4
    matrix, operator = matrix_of(values, dtype), operator_of(matrix_of(values, dtype))
    found = eigenpairs(operator, k, which, tolerance)
    wide = matrix.astype(np.float64)
    expected = np.linalg.eigvalsh(wide)
    expected = expected[::-1][:k] if which == "largest" else expected[:k]
    norm, rounding = float(np.linalg.norm(wide, 2)), 50 * float(np.finfo(dtype).eps)
    assert found.converged.all()
    assert found.products == operator.products
    np.testing.assert_allclose(found.values, expected, rtol=0, atol=tolerance * norm / 10)
    # The residuals are those of the pairs, and as small as promised.
    vectors = found.vectors.astype(np.float64)
    true = np.linalg.norm(vectors @ wide - found.values[:, None] * vectors, axis=1)
    assert (true <= found.residuals + rounding * norm).all()
    assert (np.abs(true - found.residuals) <= rounding * norm).all()
    limits = tolerance * np.maximum(np.abs(expected), norm / 100)
    assert (true <= limits + rounding * norm).all()
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(k), rtol=0, atol=rounding)


def test_few_products_suffice() -> None:
    values = [*np.geomspace(100, 5, 20), *(0.3 * np.random.default_rng(1).standard_normal(400))]
    matrix = matrix_of(values, "float32")
    assert eigenpairs(operator_of(matrix), 20).products < 65
    found = eigenpairs(operator_of(matrix))
    assert found.products < 15
    assert found.values[0] == pytest.approx(100, rel=1e-3)


def test_equal_seeds_give_equal_bits() -> None:
    matrix = matrix_of(np.arange(100.0), "float32")
    first, again, other = (eigenpairs(operator_of(matrix), 3, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.vectors, again.vectors)
    np.testing.assert_array_equal(first.residuals, again.residuals)
    assert (first.vectors != other.vectors).any()


def test_vectors_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorgrad.curvature.operators._CHUNK", 30)
    v = np.arange(100.0)
    assert chunked(v).shape == (4, 25)
    assert dot(chunked(v[:97]), chunked(v[:97])) == (v[:97] ** 2).sum()
    for size in (97, 100):
        found = eigenpairs(operator_of(matrix_of(np.arange(float(size)))), 4, tolerance=1e-6)
        np.testing.assert_allclose(found.values, size - 1 - np.arange(4.0), rtol=1e-10)
        assert found.vectors.shape == (4, size)


def test_pairs_that_have_not_converged_are_marked() -> None:
    matrix = matrix_of(np.arange(200.0))
    found = eigenpairs(operator_of(matrix), 3, tolerance=1e-8, max_products=20)
    assert found.products == 20
    assert not found.converged.any()
    true = np.linalg.norm(found.vectors @ matrix - found.values[:, None] * found.vectors, axis=1)
    np.testing.assert_allclose(found.residuals, true, rtol=1e-6)
    for value, residual in zip(found.values, found.residuals, strict=True):
        assert np.abs(np.arange(200.0) - value).min() <= residual


def test_an_operator_may_return_its_argument() -> None:
    operator = Operator(lambda v: v, 60, "float64")
    np.testing.assert_allclose(eigenpairs(operator, 3).values, 1)


def test_progress_counts_the_products() -> None:
    told: list[tuple[str, int, int]] = []
    operator = operator_of(matrix_of(np.arange(50.0)))
    found = eigenpairs(operator, 2, progress=lambda *done: told.append(done))
    assert [done for _, done, _ in told] == [*range(1, found.products + 1)]
    assert {told[0][0], told[-1][0]} == {"products"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 101}, "k is 101, expected at most 100, the size of the operator"),
        ({"k": 21}, "k is 21, expected at most 20: half of the basis, which is 40"),
        ({"k": 0}, "k is 0, expected 1 or more"),
        ({"which": "best"}, "which is 'best', expected one of 'largest', 'smallest'"),
        ({"tolerance": -1}, "tolerance is -1, expected a finite number from 0"),
        ({"basis": 3}, "basis is 3, expected 4 or more"),
        ({"k": 3, "max_products": 5}, "max_products is 5, expected 6 or more"),
        ({"seed": -1}, "seed is -1, expected"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    operator = operator_of(np.eye(100))
    with pytest.raises(ArgumentError, match=f"eigenpairs: {message}"):
        eigenpairs(operator, **options)
    assert operator.products == 0


def test_wrong_products_are_named() -> None:
    def apply(v: Any) -> Any:
        return np.full_like(v, np.nan) if operator.products > 2 else v * np.arange(9.0)

    operator = Operator(apply, 9, "float64")
    with pytest.raises(ArgumentError, match="Operator: product 3 has NaN or infinity"):
        eigenpairs(operator)
    with pytest.raises(DtypeError, match="apply returned float64, expected an array of float32"):
        eigenpairs(Operator(lambda v: v.astype("float64"), 9))
    with pytest.raises(DtypeError, match="apply returned list, expected an array of float32"):
        eigenpairs(Operator(lambda v: [*v], 9))
    with pytest.raises(ShapeError, match=r"apply returned \(9, 1\), expected \(9,\)"):
        eigenpairs(Operator(lambda v: v[:, None], 9))
    with pytest.raises(ArgumentError, match="size is 0, expected 1 or more"):
        Operator(lambda v: v, 0)
    with pytest.raises(DtypeError, match="dtype is float16, expected float32 or float64"):
        Operator(lambda v: v, 1, "float16")
    with pytest.raises(ArgumentError, match="apply is a ndarray, expected a function"):
        Operator(np.eye(2), 2)  # type: ignore[arg-type]
