"""Second derivatives of linear algebra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, linalg
from tensorgrad.autograd.functions import jvp
from tensorgrad.errors import GradError
from tests.derivatives import check_derivatives

RNG = np.random.default_rng(0)
SQUARE, BATCH, TALL, VECTOR = (
    RNG.standard_normal(shape) for shape in [(3, 3), (2, 3, 3), (4, 3), (3,)]
)
WIDE, THIN = TALL.T.copy(), RNG.standard_normal((4, 2))
SIX = RNG.standard_normal((6, 6)) + 4 * np.eye(6)
EYE = np.eye(3)


def symmetric(x: Tensor) -> Tensor:
    return x + linalg.matrix_transpose(x)


def positive(x: Tensor) -> Tensor:
    return x @ linalg.matrix_transpose(x) + EYE


def product(u: Tensor, s: Tensor, vh: Tensor) -> Tensor:
    """Return a matrix that depends on all factors."""
    s = s[..., None]
    return u @ (vh * s * s) + (u * u) @ (vh * s)


# (function, its inputs)
CASES: dict[str, tuple[Any, ...]] = {
    "inv": (lambda x: linalg.inv(x) ** 2, SQUARE),
    "inv of a batch": (linalg.inv, BATCH),
    "inv of a view": (lambda x: linalg.inv(linalg.matrix_transpose(x)) ** 2, BATCH),
    "matrix_power": (lambda x: linalg.matrix_power(x, -3), SQUARE),
    "tensorinv": (lambda x: linalg.tensorinv(x, 1), SIX.reshape(6, 2, 3)),
    "solve": (lambda a, b: linalg.solve(a, b) ** 2, SQUARE, BATCH),
    "solve with a batch": (linalg.solve, BATCH, SQUARE),
    "solve by the matrix": (lambda a: linalg.solve(a, SQUARE), BATCH),
    "solve by the right side": (lambda b: linalg.solve(BATCH, b) ** 2, SQUARE),
    "solve with a vector": (linalg.solve, SQUARE, VECTOR),
    "tensorsolve": (linalg.tensorsolve, SIX.reshape(2, 3, 6), TALL[:2]),
    "det": (linalg.det, BATCH),
    "det of one matrix": (lambda x: linalg.det(x) ** 2, SQUARE),
    "slogdet": (lambda x: linalg.slogdet(x).logabsdet ** 2, BATCH),
    "cholesky": (lambda x: linalg.cholesky(positive(x)) ** 2, BATCH),
    "upper cholesky": (
        lambda x: linalg.cholesky(symmetric(x) + 8 * EYE, upper=True), SQUARE),
    "eigvalsh": (lambda x: linalg.eigvalsh(symmetric(x)), BATCH),
    "eigenvectors": (lambda x: linalg.eigh(symmetric(x)).eigenvectors ** 2, SQUARE),
    "eigh": (lambda x: (lambda e: e[0][..., None] * e[1] * e[1])(linalg.eigh(symmetric(x))), BATCH),
    "eigh of the upper triangle": (lambda x: linalg.eigh(symmetric(x), "U"), SQUARE),
    "Q": (lambda x: linalg.qr(x).Q ** 2, TALL),
    "R": (lambda x: linalg.qr(x).R ** 2, BATCH),
    "qr": (lambda x: (lambda f: f[0] @ (f[1] * f[1]))(linalg.qr(x)), TALL),
    "complete qr": (lambda x: linalg.qr(x, "complete"), SQUARE),
    "svd of a tall matrix": (lambda x: product(*linalg.svd(x, False)), TALL),
    "svd of a wide matrix": (lambda x: product(*linalg.svd(x, False)), WIDE),
    "svd of a batch": (lambda x: product(*linalg.svd(x)), BATCH),
    "U": (lambda x: linalg.svd(x, False).U ** 2, TALL),
    "Vh": (lambda x: linalg.svd(x, False).Vh ** 2, WIDE),
    "svdvals": (lambda x: linalg.svdvals(x) ** 2, BATCH),
    "pinv of a tall matrix": (linalg.pinv, TALL),
    "pinv of a wide matrix": (lambda x: linalg.pinv(x) ** 2, WIDE),
    "pinv of constant rank": (
        lambda x: linalg.pinv(x @ linalg.matrix_transpose(x)), THIN),
    "nuclear norm": (lambda x: linalg.matrix_norm(x, ord="nuc"), BATCH),
    "spectral norm": (lambda x: linalg.matrix_norm(x, ord=2), TALL),
    "cond": (linalg.cond, TALL),
    "cond of order 1": (lambda x: linalg.cond(x, 1), SQUARE),
    "vector_norm": (lambda x: linalg.vector_norm(x, axis=0, ord=3), TALL),
    "of size 1": (lambda x: linalg.cholesky(linalg.inv(x * x + 1)) * linalg.det(x), [[0.5]]),
    "without elements": (lambda x: linalg.inv(x) * linalg.cholesky(x), np.zeros((0, 2, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_derivatives_match_differences(name: str) -> None:
    function, *inputs = CASES[name]
    check_derivatives(lambda *xs: _listed(function(*xs)), *inputs)


def _listed(y: Any) -> Any:
    return list(y) if isinstance(y, tuple) else y


def test_tangents_of_equal_eigenvalues_are_finite() -> None:
    t = np.diag([1.0, 2.0, 3.0])
    _, dy = jvp(linalg.eigvalsh, [Tensor(EYE)], [Tensor(t)])
    np.testing.assert_allclose(dy.numpy(), [1, 2, 3])


@pytest.mark.parametrize(
    "function",
    [linalg.svd, lambda x: linalg.qr(x, "complete"), lambda x: linalg.qr(x[:2])],
    ids=["svd", "complete qr", "wide qr"],
)
def test_factors_without_a_gradient_have_no_tangent(function: Callable[..., Any]) -> None:
    with pytest.raises(GradError, match="gradient"):
        jvp(lambda x: function(x)[0], [Tensor(TALL)], [Tensor(TALL)])


def test_singular_values_of_full_matrices_have_second_derivatives() -> None:
    def products(full: bool) -> Any:
        def slope(x: Tensor) -> Tensor:
            gradient = tg.grad(lambda x: (linalg.svd(x, full).S ** 3).sum())(x)
            return (gradient * THIN[:, :1]).sum()

        return tg.grad(slope)(Tensor(TALL)).numpy()

    np.testing.assert_allclose(products(True), products(False), rtol=1e-10)


@pytest.mark.parametrize("function", [linalg.inv, linalg.det, lambda x: linalg.svdvals(x)])
def test_tangent_of_16_bits_is_rounded_once(function: Callable[[Tensor], Tensor]) -> None:
    x, t = (Tensor(a.astype("f2")) for a in (SQUARE, BATCH[0]))
    y, dy = jvp(function, [x], [t])
    _, exact = jvp(function, [x.astype("float64")], [t.astype("float64")])
    assert dy.dtype == y.dtype == "float16"
    np.testing.assert_allclose(dy.numpy(), exact.numpy(), rtol=1e-3, atol=1e-3)


def test_autocast_leaves_tangents_as_exact_as_results() -> None:
    with tg.autocast("bfloat16"):
        y, dy = jvp(linalg.inv, [Tensor(SQUARE.astype("f4"))], [Tensor(EYE.astype("f4"))])
    np.testing.assert_allclose(dy.numpy(), -y.numpy() @ y.numpy(), rtol=1e-5)
