"""Estimates from products with random vectors: trace, diagonal, spectral density.

The elements of these vectors are 1 or -1 with equal probability (Rademacher). The error of an
estimate is its standard error over the vectors. Tests: tests/curvature/test_estimates.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_integer, check_number, check_seed
from tensorgrad.core.errors import ArgumentError
from tensorgrad.curvature.lanczos import Krylov
from tensorgrad.curvature.operators import Operator, Progress, Values, chunked, dot
from tensorgrad.random import Generator

__all__ = ["Density", "MonteCarloEstimate", "density", "diagonal", "trace"]


@dataclass(frozen=True)
class MonteCarloEstimate:
    """The mean over random vectors, and its standard error.

    Attributes:
        value: the mean: a number or, of a diagonal, an array.
        error: the standard error, of an array that of each element.
        products: how often the operator was applied.

    Example:
        >>> from tensorgrad.curvature import MonteCarloEstimate, Operator, trace
        >>> estimate: MonteCarloEstimate = trace(Operator(lambda v: 3 * v, size=2), samples=4)
        >>> estimate
        MonteCarloEstimate(value=6.0, error=0.0, products=4)
    """

    value: Any
    error: Any
    products: int


def trace(
    operator: Operator, samples: int = 32, *, seed: int = 0, progress: Progress | None = None
) -> MonteCarloEstimate:
    """Return an estimate of the trace, the sum of all eigenvalues: the mean of v A v.

    Args:
        operator: symmetric.
        samples: random vectors v, with a product each; 2 or more.
        seed: of the vectors. Equal seeds give equal bits.
        progress: called as progress("products", done, samples) after each product.

    Returns:
        Two numbers. The error falls with the square root of `samples`.

    Raises:
        ArgumentError: samples is below 2, or a product is not finite.
    Source: Hutchinson 1990, doi:10.1080/03610919008812866.

    Example:
        >>> from tensorgrad.curvature import Operator, trace
        >>> values = np.arange(4.0)
        >>> trace(Operator(lambda v: values * v, size=4, dtype="float64")).value
        6.0
    """
    values = [
        dot(chunked(v), chunked(product))
        for v, product in _products("trace", operator, samples, seed, progress)
    ]
    return _estimate(np.array(values), samples)


def diagonal(
    operator: Operator, samples: int = 32, *, seed: int = 0, progress: Progress | None = None
) -> MonteCarloEstimate:
    """Return an estimate of the diagonal: the mean of v * (A v), element by element.

    Args:
        operator: symmetric.
        samples: random vectors v, with a product each; 2 or more.
        seed: of the vectors. Equal seeds give equal bits.
        progress: called as progress("products", done, samples) after each product.

    Returns:
        Two arrays (N,), in the operator's dtype and on its device. An error is the norm of the
        row without its diagonal, divided by the square root of `samples`.

    Raises:
        ArgumentError: samples is below 2, or a product is not finite.
    Source: Bekas et al. 2007, doi:10.1016/j.apnum.2007.01.003.

    Example:
        >>> from tensorgrad.curvature import Operator, diagonal
        >>> values = np.arange(4.0)
        >>> diagonal(Operator(lambda v: values * v, size=4, dtype="float64")).value
        array([0., 1., 2., 3.])
    """
    xp, kind = operator.namespace, operator.dtype.type
    mean, squares = xp.zeros((2, operator.size), operator.dtype)
    pairs = _products("diagonal", operator, samples, seed, progress)
    for done, (v, product) in enumerate(pairs, 1):  # Welford's recurrence
        away = v * product - mean
        mean += away / kind(done)
        squares += away * (away * kind((done - 1) / done))
    return MonteCarloEstimate(mean, xp.sqrt(squares / kind(samples * (samples - 1))), samples)


@dataclass(frozen=True)
class Density:
    """A spectral density: the fraction of the eigenvalues around each value.

    Each random vector gives points (nodes) with weights, whose sum is 1. The weighted sum of a
    smooth function over the nodes estimates its mean over the eigenvalues.

    Attributes:
        nodes: (samples, steps) float64, rising in each row.
        weights: (samples, steps) float64; 0 where a vector gave fewer nodes.
        size: N, the number of eigenvalues.
        products: how often the operator was applied.

    Example:
        >>> from tensorgrad.curvature import Density, Operator, density
        >>> found: Density = density(Operator(lambda v: 3 * v, size=2), samples=2, steps=1)
        >>> found.nodes.ravel(), found.weights.ravel()
        (array([3., 3.]), array([1., 1.]))
    """

    nodes: Values
    weights: Values
    size: int
    products: int

    def moment(self, power: int) -> MonteCarloEstimate:
        """Return an estimate of the mean of the eigenvalues to a power.

        Args:
            power: 0 or more. Up to twice the steps, less one, the only error is the standard error.

        Returns:
            Two numbers. N times the first moment is the trace, as `trace` estimates it.

        Raises:
            ArgumentError: power is not an integer from 0.
        """
        check_integer("moment", "power", power, 0)
        return _estimate((self.weights * self.nodes**power).sum(1), self.products)

    def curve(self, width: float | None = None, points: int = 256) -> tuple[Values, Values, Values]:
        """Return the density as a curve: each node is widened to a normal distribution.

        Args:
            width: the standard deviation; default: 1 % of the range of the nodes.
            points: of the curve, 2 or more.

        Returns:
            (points,) each: the eigenvalue, the density there, whose integral is 1, and its standard
            error.

        Raises:
            ArgumentError: width is not a positive number, or points is below 2.
        """
        check_integer("curve", "points", points, 2)
        low, high = self.nodes.min(), self.nodes.max()
        if width is None:
            width = 0.01 * float(high - low) or 0.01 * abs(float(high)) or 0.01
        check_number("curve", "width", width)
        if not 0 < width < math.inf:
            raise ArgumentError(f"curve: width is {width}, expected a positive number")
        grid = np.linspace(low - 4 * width, high + 4 * width, points)
        curves = np.empty((len(self.nodes), points))
        for curve, nodes, weights in zip(curves, self.nodes, self.weights, strict=True):
            distances = (grid[:, None] - nodes) / width
            curve[:] = np.exp(-(distances**2) / 2) @ weights / (width * math.sqrt(2 * math.pi))
        mean: Values = curves.mean(0)
        return grid, mean, curves.std(0, ddof=1) / math.sqrt(len(curves))


def density(
    operator: Operator,
    samples: int = 8,
    steps: int = 32,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Density:
    """Return an estimate of the spectral density: stochastic Lanczos quadrature.

    Args:
        operator: symmetric.
        samples: random vectors; 2 or more.
        steps: products with each, and vectors that are stored: how fine the density is.
        seed: of the vectors. Equal seeds give equal bits.
        progress: called as progress("products", done, samples * steps) after each product.

    Returns:
        The density. Of an operator with fewer distinct eigenvalues than steps it is exact, but for
        the weights.

    Raises:
        ArgumentError: samples is below 2, steps below 1, or a product is not finite.
    Source: Ubaru et al. 2017, doi:10.1137/16M1104974; of neural networks: Ghorbani et al. 2019,
        arXiv:1901.10159.

    Example:
        >>> from tensorgrad.curvature import Operator, density
        >>> values = np.arange(100.0)
        >>> found = density(Operator(lambda v: values * v, size=100, dtype="float64"), steps=10)
        >>> round(found.moment(2).value, 6), float((values**2).mean())
        (3283.5, 3283.5)
    """
    check_integer("density", "steps", steps, 1)
    start, rng = operator.products, _generator("density", samples, seed)
    steps = min(steps, operator.size)
    nodes, weights = np.zeros((2, samples, steps))
    for sample in range(samples):
        space = Krylov(operator, steps, rng, _signs(operator, rng))
        while space.count < steps and (space.beta or not space.count):
            space.step()
            if progress is not None:
                progress("products", sample * steps + space.count, samples * steps)
        values, vectors = space.ritz()
        nodes[sample], weights[sample, : space.count] = values[-1], vectors[0] ** 2
        nodes[sample, : space.count] = values
    return Density(nodes, weights, operator.size, operator.products - start)


def _generator(op: str, samples: int, seed: int) -> Generator:
    check_integer(op, "samples", samples, 2)
    check_seed(op, seed)
    return Generator(seed)


def _signs(operator: Operator, rng: Generator) -> Array:
    """Return a vector whose elements are 1 or -1."""
    kind, drawn = operator.dtype.type, rng.bernoulli(0.5, operator.size, device=operator.device)
    signs: Array = kind(2) * drawn.data.astype(operator.dtype) - kind(1)
    return signs


def _products(
    op: str, operator: Operator, samples: int, seed: int, progress: Progress | None
) -> Iterator[tuple[Array, Array]]:
    """Yield random vectors and the operator's products with them."""
    rng = _generator(op, samples, seed)
    for done in range(1, samples + 1):
        v = _signs(operator, rng)
        yield v, operator(v)
        if progress is not None:
            progress("products", done, samples)


def _estimate(values: Values, products: int) -> MonteCarloEstimate:
    """Return the mean of numbers, and its standard error."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return MonteCarloEstimate(float(values.mean()), error, products)
