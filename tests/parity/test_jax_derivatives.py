"""Derivatives of functions beside JAX's: structures and values under the same names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor

jax: Any = pytest.importorskip("jax", reason="JAX is not installed")

pytestmark = pytest.mark.slow  # JAX compiles

RNG = np.random.default_rng(0)
P = {"w": [RNG.standard_normal((2, 3)), RNG.standard_normal(3)], "none": None}
T = {"w": [RNG.standard_normal((2, 3)), RNG.standard_normal(3)], "none": None}
X, DX = RNG.standard_normal(2), RNG.standard_normal(2)


def outputs(lib: Any, p: Any, x: Any) -> dict[str, Any]:
    hidden = lib.tanh(x @ p["w"][0]) * p["w"][1]
    return {"y": (hidden, hidden.sum()), "z": lib.sin(x)}


def loss(lib: Any, p: Any, x: Any) -> Any:
    out = outputs(lib, p, x)
    return (out["y"][0] ** 2).sum() + out["z"].sum() * out["y"][1]


def with_aux(lib: Any, p: Any, x: Any) -> Any:
    return loss(lib, p, x), {"hidden": outputs(lib, p, x)["y"][0]}


# Calls of a library, `tg` or `jax`, its functions, and its arrays.
CALLS: dict[str, Any] = {
    "grad": lambda lib, f, of: lib.grad(f(loss), (1, 0))(of(P), of(X)),
    "value_and_grad": lambda lib, f, of: lib.value_and_grad(f(with_aux), has_aux=True)(
        of(P), of(X)
    ),
    "grad with aux": lambda lib, f, of: lib.grad(f(with_aux), has_aux=True)(of(P), of(X)),
    "jvp": lambda lib, f, of: lib.jvp(f(outputs), (of(P), of(X)), (of(T), of(DX))),
    "jvp with aux": lambda lib, f, of: lib.jvp(
        f(with_aux), (of(P), of(X)), (of(T), of(DX)), has_aux=True
    ),
    "vjp": lambda lib, f, of: lib.vjp(f(outputs), of(P), of(X))[1](
        {"y": (of(T)["w"][1], of(DX)[0]), "z": of(DX)}
    ),
    "vjp with aux": lambda lib, f, of: lib.vjp(f(with_aux), of(P), of(X), has_aux=True)[::2],
    "linearize": lambda lib, f, of: lib.linearize(f(outputs), of(P), of(X))[1](of(T), of(DX)),
    "jacobian": lambda lib, f, of: lib.jacobian(f(outputs), (0, 1))(of(P), of(X)),
    "jacobian by one": lambda lib, f, of: lib.jacobian(f(outputs), 1)(of(P), of(X)),
    "hessian": lambda lib, f, of: lib.hessian(f(loss), (0, 1))(of(P), of(X)),
    "hessian of several": lambda lib, f, of: lib.hessian(f(outputs))(of(P), of(X)),
    "forward over reverse": lambda lib, f, of: lib.jvp(
        lib.grad(f(loss), (0, 1)), (of(P), of(X)), (of(T), of(DX))
    )[1],
    "third order": lambda lib, f, of: lib.jacobian(lib.hessian(f(loss), 1), 1)(of(P), of(X)),
}


@pytest.mark.parametrize("name", CALLS)
def test_structures_and_values_are_those_of_jax(name: str) -> None:
    with jax.enable_x64(True):
        expected = CALLS[name](
            jax,
            lambda f: lambda *args: f(jax.numpy, *args),
            lambda tree: jax.tree.map(jax.numpy.asarray, tree),
        )
        expected = jax.tree.map(np.asarray, expected)
    found = CALLS[name](
        tg, lambda f: lambda *args: f(tg, *args), lambda tree: jax.tree.map(Tensor, tree)
    )
    found = jax.tree.map(Tensor.numpy, found)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12, strict=True)
