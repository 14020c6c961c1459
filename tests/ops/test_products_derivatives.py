"""Second derivatives of matrix products, linear layers, embeddings, rotations and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, random
from tensorgrad.ops.dropout import dropout_add
from tests.derivatives import check_derivatives

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return np.asarray(RNG.standard_normal(shape))


def drawn(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return f with the same random numbers each time."""

    def call(*xs: Any) -> Any:
        random.seed(3)
        return f(*xs)

    return call


X, W, B, LINE = normal(2, 3, 4), normal(5, 4), normal(5), normal(4)
GATES = normal(3, 4), normal(3, 4), normal(3), normal(3)
ANGLES, HEADS = normal(3, 1, 2), normal(2, 3, 2, 4)
IDS = np.array([[2, 0, 2], [1, 1, 4]])

# (function, its inputs)
CASES: dict[str, tuple[Any, ...]] = {
    "matmul": (tg.matmul, normal(3, 4), normal(4, 2)),
    "matmul of batches that broadcast": (tg.matmul, normal(2, 1, 3, 4), normal(3, 4, 2)),
    "matmul by one matrix": (tg.matmul, X, normal(4, 2)),
    "matmul of vectors": (tg.matmul, LINE, normal(4)),
    "a vector by matrices": (tg.matmul, LINE, normal(2, 4, 3)),
    "matrices by a vector": (tg.matmul, X, LINE),
    "matmul by a constant": (lambda x: (x @ X[0].T) ** 2, X),
    "a square by matmul": (lambda x: x @ x.swapaxes(-1, -2), X),
    "matmul of no rows": (lambda x: (x @ LINE) ** 2, np.zeros((0, 4))),
    "einsum of two": (lambda a, b: tg.einsum("bij,kj->bik", a, b), X, W),
    "einsum of three": (lambda a, b, c: tg.einsum("ij,jk,kl->il", a, b, c),
                        normal(2, 3), normal(3, 4), normal(4, 2)),
    "einsum of a diagonal": (lambda a, b: tg.einsum("ii,i->i", a, b), normal(3, 3), normal(3)),
    "einsum of one": (lambda a: tg.einsum("...ij->...j", a) ** 2, X),
    "tensordot": (lambda a, b: tg.tensordot(a, b, 1), X, W.T),
    "linear": (tg.linear, X, W, B),
    "linear with a residual": (lambda x, w, b, r: tg.linear(x, w, b, residual=r), X, W, B, normal(2, 3, 5)),
    "linear without a bias": (tg.linear, X, W),
    "linear of a constant": (lambda w, b: tg.linear(X, w, b) ** 2, W, B),
    "linear by a constant": (lambda x, r: tg.linear(x, W, residual=r) ** 2, X, normal(2, 3, 5)),
    "a bias": (lambda b: tg.linear(X, W, b) ** 2, B),
    "linear_gelu": (tg.linear_gelu, X, W, B),
    "exact linear_gelu": (lambda x, w: tg.linear_gelu(x, w, approximate="none"), X, W),
    "feed_forward": (lambda x, u, b, d, c: tg.feed_forward(x, u, b, d, c, residual=x),
                     X, normal(6, 4), normal(6), normal(4, 6), LINE),
    "gated_linear": (tg.gated_linear, X, *GATES),
    "gated_linear without biases": (tg.gated_linear, X, *GATES[:2]),
    "gated_linear with dropout": (
        drawn(lambda x, *w: tg.gated_linear(x, *w, dropout=0.4)), X, *GATES),
    "embedding": (lambda w: tg.embedding(w, IDS) ** 2, normal(5, 3)),
    "embedding with positions": (lambda w, p: tg.embedding(w, IDS, p, start=1) ** 2,
                                 normal(5, 3), normal(6, 3)),
    "positions": (lambda p: tg.embedding(W, IDS, p) ** 2, normal(3, 4)),
    "positions from an array": (lambda p: tg.embedding(W, IDS, p, start=np.array([0, 2])) ** 2,
                                normal(6, 4)),
    "rotary": (lambda x: tg.rotary(x, ANGLES, ANGLES - 1) ** 2, HEADS),
    "rotary and its angles": (tg.rotary, HEADS, ANGLES, ANGLES - 1),
    "rotary angles": (lambda c, s: tg.rotary(HEADS, c, s) ** 2, ANGLES, ANGLES - 1),
    "a cosine": (lambda c: tg.rotary(HEADS, c, ANGLES) ** 2, ANGLES),
    "rotary of some heads": (
        lambda x, c, s: tg.rotary(x, c, s, heads=1, interleaved=True), HEADS, ANGLES, ANGLES - 1),
    "dropout": (drawn(lambda x: tg.dropout(x, 0.4) ** 2), X),
    "dropout_add": (drawn(lambda x, r, b: dropout_add(x, r, p=0.4, bias=b) ** 2),
                    X, normal(2, 3, 4), LINE),
    "dropout_add of a bias": (drawn(lambda b: dropout_add(Tensor(X), Tensor(X), p=0.4, bias=b) ** 2),
                              LINE),
    "dropout_add of a residual": (
        drawn(lambda r: dropout_add(Tensor(X), r, p=0.4) ** 2), normal(2, 3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_derivatives_match_differences(name: str) -> None:
    function, *inputs = CASES[name]
    check_derivatives(function, *inputs)


def test_products_under_autocast_have_tangents_in_its_dtype() -> None:
    x, w = (Tensor(array.astype("float32")) for array in (X, W))
    with tg.autocast("bfloat16"):
        y, dy = tg.autograd.jvp(tg.linear, (x, w), (x, w))
    assert y.dtype == dy.dtype == "bfloat16"
    np.testing.assert_allclose(dy.numpy().astype("float64"), 2 * X @ W.T, rtol=0.05, atol=0.1)
    leaf = Tensor(w.data, requires_grad=True)
    with tg.autocast("bfloat16"):
        _, slope = tg.autograd.jvp(lambda w: (tg.linear(x, w) ** 2).sum(), (leaf,), (w,))
    slope.backward()
    exact = 2 * np.einsum("bti,bto->oi", X, X @ W.T)
    np.testing.assert_allclose(leaf.grad, exact, rtol=0.05, atol=0.05 * np.abs(exact).max())
