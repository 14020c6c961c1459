"""Third derivatives: of repeated inputs, and of ops with several outputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, linalg
from tensorgrad.autograd import record
from tensorgrad.autograd.functions import jvp
from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tests.derivatives import check_derivatives

RNG = np.random.default_rng(0)
X, WEIGHTS = RNG.standard_normal((3, 3)), RNG.standard_normal((3, 3))


def _two_backward(dys: list[np.ndarray | None], saved: Saved, needs: Needs) -> Gradients:
    parts = [dy * y * k for dy, y, k in zip(dys, saved, (1, 2), strict=True) if dy is not None]
    return (sum(parts),)


@tangent_of(_two_backward)
def _two_tangent(op: Op, t: Tensor) -> tuple[Tensor, Tensor]:
    once, twice = map(op.output, op.saved, range(2))
    return once * t, 2 * twice * t


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(x) and exp(2 x) as the outputs of one op."""
    outputs = np.exp(x.data), np.exp(2 * x.data)
    once, twice = record("two", outputs, (x,), _two_backward, outputs)
    return once, twice


def one(x: Tensor) -> tuple[Tensor, Tensor]:
    return tg.exp(x), tg.exp(2 * x)


def factors(x: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = linalg.eigh(x + x.T)
    return values, vectors * WEIGHTS * vectors


def mixed(a: Tensor, b: Tensor) -> Tensor:
    return (a * a).sum() + (b * b * a * WEIGHTS).sum()


def of_singular_vectors(u: Tensor, s: Tensor, vh: Tensor) -> Tensor:
    return (u * u * s * WEIGHTS @ vh * vh).sum()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "a factor twice": lambda x: (x * x * x).sum(),
    "a result twice": lambda x: (tg.exp(x) * x[0] * x[0]).sum(),
    "two ops": lambda x: mixed(*one(x)),
    "two outputs": lambda x: mixed(*two(x)),
    "one of two outputs": lambda x: (two(x)[1] ** 2 * WEIGHTS).sum(),
    "eigh": lambda x: mixed(*factors(x)),
    "svd": lambda x: of_singular_vectors(*linalg.svd(x)),
    "qr": lambda x: mixed(*linalg.qr(x)),
    "std": lambda x: (tg.std(x, 0) * tg.norm(x, 1)).sum(),
    "prod": lambda x: (tg.prod(x, 1) + tg.cumprod(x, 0)).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_derivatives_of_gradients_match_differences(name: str) -> None:
    check_derivatives(tg.grad(LOSSES[name]), X)


@pytest.mark.parametrize("name", LOSSES)
def test_derivatives_of_tangents_match_differences(name: str) -> None:
    check_derivatives(lambda x: jvp(LOSSES[name], [x], [Tensor(WEIGHTS)])[1], X)


@pytest.mark.parametrize("name", LOSSES)
def test_forward_over_forward_matches_reverse_over_forward(name: str) -> None:
    x, v = Tensor(X), Tensor(WEIGHTS)

    def slope(x: Tensor) -> Tensor:
        y: Tensor = jvp(LOSSES[name], [x], [v])[1]
        return y

    _, curvature = jvp(slope, [x], [v])
    expected = float((tg.grad(slope)(x).numpy() * WEIGHTS).sum())
    np.testing.assert_allclose(curvature.item(), expected, rtol=1e-9)
