"""Lanczos: an orthonormal basis of a Krylov space, and eigenpairs from it.

Each step multiplies the newest vector of the basis, takes off its parts along all others (again
where much was taken off), and appends the rest. The operator projected on the basis is a small
matrix, whose eigenvectors give those of the operator. A full basis is replaced by the best of
these, and the newest vector: a thick restart. Tests: tests/curvature/test_lanczos.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorgrad.core.backend import Array, asarray_like
from tensorgrad.core.checks import check_choice, check_integer, check_range, check_seed
from tensorgrad.core.errors import ArgumentError
from tensorgrad.curvature.operators import Operator, Progress, Values, chunked, dot, dots, norm
from tensorgrad.random import Generator

__all__ = ["Eigenpairs", "eigenpairs"]

# Fraction of the largest absolute value; smaller values are as accurate as this one.
_FRACTION = 0.01
_CHECKED = 10  # products from a new vector, at least, that look for a value that was missed


class Krylov:
    """An orthonormal basis with the projection of an operator.

    Args:
        operator: the operator.
        rows: vectors that are stored, at most N.
        rng: of the start vector, and of those that continue a basis whose space is invariant.
        start: another start vector, (N,).

    Attributes:
        count: vectors whose products are known; one more is stored where there is space.
        projection: the operator along these, (rows, rows).
        beta: the part of the last product along the newest vector.
        leak: norms of the parts of products along vectors that were dropped.
    """

    def __init__(
        self, operator: Operator, rows: int, rng: Generator, start: Array | None = None
    ) -> None:
        self.operator, self.rows, self._rng = operator, rows, rng
        w = chunked(self._random() if start is None else start)
        # By chunks, each (rows, elements): products with the first few vectors need no copy.
        shape = len(w), rows, w.shape[1]
        self._blocks: Array = operator.namespace.empty(shape, operator.dtype)
        self._rounding = 10 * float(np.finfo(operator.dtype).eps)
        self.projection = np.zeros((rows, rows))
        self.count, self.beta, self.leak = 0, 0.0, np.zeros(rows)
        self._append(w, norm(w))

    def vector(self, index: int) -> Array:
        """Return a vector of the basis, (N,)."""
        flat: Array = self._blocks[:, index].reshape(-1)
        return flat[: self.operator.size]

    def step(self) -> None:
        """Multiply the newest vector, and append the part that is orthogonal to the basis."""
        last, projection = self.count, self.projection
        w = chunked(self.operator(self.vector(last)))
        self.beta, along = self._orthogonalize(w, last + 1)
        projection[last, : last + 1] = projection[: last + 1, last] = along
        self.count += 1
        if self.beta <= self._rounding * np.abs(projection).max():
            self.beta = 0.0
        if self.count < self.rows:
            if self.beta:
                self._append(w, self.beta)
            else:
                self._append_random()

    def ritz(self) -> tuple[Values, Values]:
        """Return the eigenvalues of the projection and its eigenvectors, in columns."""
        values, vectors = np.linalg.eigh(self.projection[: self.count, : self.count])
        return values, vectors

    def residuals(self, vectors: Values) -> Values:
        """Return bounds of ||A x - value x|| for the vectors x of `ritz`, but for rounding."""
        bounds: Values = np.abs(vectors).T @ self.leak[: self.count]
        bounds += self.beta * np.abs(vectors[-1])
        return bounds

    def rotate(self, vectors: Values, values: Values) -> None:
        """Replace the first vectors of the basis by combinations of them.

        Args:
            vectors, values: columns and values of `ritz`.
        """
        kept, leak = len(values), np.abs(vectors).T @ self.leak[: self.count]
        columns = asarray_like(vectors.T.astype(self.operator.dtype), self._blocks)
        for block in self._blocks:
            block[:kept] = columns @ block[: self.count]
        self.leak[...], self.projection[...] = 0, 0
        self.leak[:kept] = leak
        np.fill_diagonal(self.projection[:kept, :kept], values)
        self.count = kept

    def restart(self, vectors: Values, values: Values) -> None:
        """Go on with combinations of the vectors, see `rotate`, and the newest one."""
        newest = self._blocks[:, self.count].copy()
        self.rotate(vectors, values)
        self._blocks[:, self.count] = newest

    def restart_anew(self, vectors: Values, values: Values) -> None:
        """Go on with combinations of the vectors, see `rotate`, and a random one."""
        residuals = self.residuals(vectors)
        self.rotate(vectors, values)
        self.leak[: self.count] = residuals
        self._append_random()

    def measured(self, v: Array) -> tuple[float, float]:
        """Return the Rayleigh quotient of a vector, and the norm of A v - quotient v."""
        x, w = chunked(v), chunked(self.operator(v))
        value = dot(x, w) / dot(x, x)
        w -= x * self.operator.dtype.type(value)
        return value, norm(w)

    def _random(self) -> Array:
        operator = self.operator
        drawn = self._rng.standard_normal(operator.size, operator.dtype, device=operator.device)
        return drawn.data

    def _append(self, w: Array, length: float) -> None:
        self._blocks[:, self.count] = w / self.operator.dtype.type(length)

    def _append_random(self) -> None:
        w = chunked(self._random())
        self.beta = 0.0
        self._append(w, self._orthogonalize(w, self.count)[0])

    def _orthogonalize(self, w: Array, count: int) -> tuple[float, Values]:
        """Take off the parts along the first vectors in place; return the norm, and the parts.

        Source: Daniel et al. 1976, doi:10.1090/S0025-5718-1976-0431641-8: again where less than
            0.7 of the norm is left. What shrinks more often is rounding.
        """
        total, length = np.zeros(count), norm(w)
        for _ in range(4):
            before, along = length, dots(self._blocks[:, :count], w)
            narrow = asarray_like(along.astype(self.operator.dtype), w)
            for block, part in zip(self._blocks, w, strict=True):
                part -= narrow @ block[:count]
            total += along
            length = norm(w)
            if length > 0.7 * before:
                break
        return length, total


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues and eigenvectors with their errors.

    Attributes:
        values: (k,) float64, the Rayleigh quotients of the vectors: falling from the largest, or
            rising from the smallest. The operator has an eigenvalue within the residual of each.
        vectors: (k, N), an orthonormal row each, on the operator's device.
        residuals: (k,) float64, the norms of A x - value x, each measured with a product.
        converged: (k,) bool, whether the residual is within the tolerance.
        products: how often the operator was applied.

    Example:
        >>> from tensorgrad.curvature import Eigenpairs, Operator, eigenpairs
        >>> found: Eigenpairs = eigenpairs(Operator(lambda v: 3 * v, size=2), k=2)
        >>> found.values.round(4), bool(found.converged.all())
        (array([3., 3.]), True)
    """

    values: Values
    vectors: Array
    residuals: Values
    converged: NDArray[np.bool_]
    products: int


def eigenpairs(
    operator: Operator,
    k: int = 1,
    which: str = "largest",
    tolerance: float = 1e-2,
    *,
    basis: int = 40,
    max_products: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Eigenpairs:
    """Return the k largest or smallest eigenvalues of a symmetric operator, with their vectors.

    Lanczos with full reorthogonalization and thick restarts. An eigenvalue that occurs several
    times is found as often: after k pairs have converged, ten or more products with a new random
    vector look for one that was missed.

    Args:
        operator: symmetric, but for rounding.
        k: how many; of an operator larger than the basis at most half of the basis.
        which: "largest" or "smallest", with their signs.
        tolerance: a pair has converged where its residual is at most this fraction of the value, or
            of 1 % of the largest absolute value where that is more.
        basis: vectors that are stored, beside the results and a few more.
        max_products: the number of products after which pairs are returned as they are.
        seed: of the start vector. Equal seeds give equal bits.
        progress: called as progress("products", done, 0) after each product.

    Returns:
        The pairs; `converged` says which residuals are within the tolerance.

    Raises:
        ArgumentError: k is larger than the operator or than half of the basis, an option is out of
            its range, or a product is not finite.
    Source: Wu and Simon 2000, doi:10.1137/S0895479898334605.

    Example:
        >>> from tensorgrad.curvature import Operator, eigenpairs
        >>> matrix = np.diag(np.arange(100.0))
        >>> operator = Operator(lambda v: matrix @ v, size=100, dtype="float64")
        >>> eigenpairs(operator, k=3, tolerance=1e-6).values.round(6)
        array([99., 98., 97.])
    """
    op = "eigenpairs"
    check_integer(op, "k", k, 1)
    check_integer(op, "basis", basis, 4)
    check_choice(op, "which", which, ("largest", "smallest"))
    check_range(op, "tolerance", tolerance)
    check_seed(op, seed)
    size = operator.size
    if k > size:
        raise ArgumentError(f"{op}: k is {k}, expected at most {size}, the size of the operator")
    if size > basis < 2 * k:
        raise ArgumentError(
            f"{op}: k is {k}, expected at most {basis // 2}: half of the basis, which is {basis}"
        )
    check_integer(op, "max_products", max_products, 2 * k)
    sign, start = 1 if which == "largest" else -1, operator.products
    space = Krylov(operator, min(basis, size), Generator(seed))
    checked: Values | None = None  # the k values when a new vector began to look for another
    since, scale = 0, 0.0  # the products when it began; the largest absolute value so far
    while True:
        space.step()
        done = operator.products - start
        if progress is not None:
            progress("products", done, 0)
        values, vectors = space.ritz()
        residuals, order = space.residuals(vectors), np.argsort(-sign * values, kind="stable")
        wanted, scale = order[:k], max(scale, float(np.abs(values).max()))
        limits = _limits(values, tolerance / 2, scale)
        if space.count == size or done + k >= max_products:
            break
        if len(wanted) == k and (residuals <= limits)[wanted].all():
            if k == 1:
                break
            moved = np.inf if checked is None else np.abs(values[wanted] - checked)
            if (moved > limits[wanted]).any():
                checked, since = values[wanted], done
                space.restart_anew(vectors[:, wanted], checked)
                continue
            last, following = wanted[-1], order[k : k + 1]
            above = sign * (values[following] - values[last]) + residuals[following]
            if done - since >= _CHECKED and (above <= limits[last]).all():
                break
        if space.count == space.rows - 1 < size - 1:
            kept = order[: k + (space.count - k) // 2]
            space.restart(vectors[:, kept], values[kept])
    space.rotate(vectors[:, wanted], values[wanted])
    values, vectors, residuals = _measured(space, sign, progress, start)
    converged = residuals <= _limits(values, tolerance, scale)
    return Eigenpairs(values, vectors, residuals, converged, operator.products - start)


def _limits(values: Values, tolerance: float, scale: float) -> Values:
    """Return the largest residual of each value with which it has converged.

    Args:
        values: eigenvalues.
        tolerance: see `eigenpairs`.
        scale: the largest absolute value that is known.
    """
    limits: Values = tolerance * np.maximum(np.abs(values), _FRACTION * scale)
    return limits


def _measured(
    space: Krylov, sign: int, progress: Progress | None, start: int
) -> tuple[Values, Array, Values]:
    """Return the values, vectors and residuals of a basis, from a product for each vector."""
    operator, count = space.operator, space.count
    values, residuals = np.empty((2, count))
    vectors = operator.namespace.empty((count, operator.size), operator.dtype)
    for number in range(count):
        vectors[number] = space.vector(number)
        values[number], residuals[number] = space.measured(vectors[number])
        if progress is not None:
            progress("products", operator.products - start, 0)
    order = np.argsort(-sign * values, kind="stable")
    if (np.diff(order) != 1).any():
        values, vectors, residuals = values[order], vectors[order], residuals[order]
    return values, vectors, residuals
