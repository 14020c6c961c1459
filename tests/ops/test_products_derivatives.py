"""Tangents and second derivatives of products, dropout, rotary embeddings and lookups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tests.derivatives import check_derivatives

rng = np.random.default_rng(0)
IDS = np.array([[2, 0, 2], [1, 4, 4]])


def values(*shape: int) -> Any:
    return rng.standard_normal(shape)


def seeded(f: Any) -> Any:
    """Return a function with the same random numbers in each call."""

    def run(*xs: Tensor) -> Tensor:
        tg.manual_seed(5)
        y: Tensor = f(*xs)
        return y

    return run


X, W, B, R = values(2, 3, 4), values(5, 4), values(5), values(2, 3, 5)
UP, UP_BIAS, DOWN, DOWN_BIAS = values(6, 4), values(6), values(4, 6), values(4)
ANGLES = values(3, 1, 2), values(3, 1, 2)
CASES: dict[str, tuple[Any, ...]] = {
    "matmul": (tg.matmul, values(3, 4), values(4, 5)),
    "matmul batch": (tg.matmul, values(2, 1, 3, 4), values(3, 4, 2)),
    "matmul one matrix": (tg.matmul, values(2, 3, 4), values(4, 5)),
    "matmul vectors": (tg.matmul, values(4), values(4)),
    "matmul vector left": (tg.matmul, values(4), values(2, 4, 3)),
    "matmul vector right": (tg.matmul, values(2, 3, 4), values(4)),
    "matmul empty": (tg.matmul, values(3, 0), values(0, 2)),
    "matmul twice": (lambda a: a @ (a @ a), values(3, 3)),
    "matmul views": (lambda a, b: tg.matmul(a, b) @ W[::-1, ::2], values(3, 5).T, values(3, 5)),
    "matmul left": (lambda a: a @ UP.T, values(3, 4)),
    "matmul right": (lambda b: Tensor(UP) @ b, values(4, 3)),
    "einsum": (lambda a, b: tg.einsum("bik,bkj->bij", a, b), values(2, 3, 4), values(2, 4, 2)),
    "einsum outer": (lambda a, b: tg.einsum("i,j->ij", a, b), values(3), values(2)),
    "einsum three": (lambda a, b, c: tg.einsum("ij,jk,kl->l", a, b, c),
                     values(2, 3), values(3, 4), values(4, 2)),
    "einsum one": (lambda a: tg.einsum("iij->j", a) ** 2, values(3, 3, 2)),
    "einsum ellipsis": (lambda a, b: tg.einsum("...i,...ij->...j", a, b),
                        values(2, 3), values(3, 4)),
    "einsum length 1": (lambda a, b: tg.einsum("ij,ij->i", a, b), values(3, 1), values(3, 4)),
    "einsum right": (lambda b: tg.einsum("ij,jk->ki", X[0], b), values(4, 2)),
    "tensordot": (tg.tensordot, values(2, 3, 4), values(3, 4, 2)),
    "outer": (tg.outer, values(2, 2), values(3)),
    "dot": (tg.dot, values(2, 3), values(4, 3, 2)),
    "dot scalar": (tg.dot, values(), values(3)),
    "linear": (tg.linear, X, W),
    "linear all": (lambda x, w, b, r: tg.linear(x, w, b, residual=r), X, W, B, R),
    "linear vector": (tg.linear, values(4), W, B),
    "linear x": (lambda x: tg.linear(x, W, B) ** 2, X),
    "linear weight": (lambda w: tg.linear(X, w, B) ** 2, W),
    "linear bias": (lambda b: tg.linear(X, W, b) ** 2, B),
    "linear residual": (lambda r: tg.linear(X, W, residual=r) ** 2, R),
    "linear bias residual": (lambda b, r: tg.linear(X, W, b, residual=r) ** 2, B, R),
    "linear_gelu": (tg.linear_gelu, X, W, B),
    "linear_gelu exact": (lambda x, w: tg.linear_gelu(x, w, approximate="none"), X, W),
    "feed_forward": (tg.feed_forward, X, UP, UP_BIAS, DOWN, DOWN_BIAS, X / 2),
    "feed_forward up": (lambda u: tg.feed_forward(X, u, UP_BIAS, DOWN, None), UP),
    "gated_linear": (tg.gated_linear, X, UP, UP[::-1], UP_BIAS, UP_BIAS[::-1]),
    "gated_linear no bias": (tg.gated_linear, X, UP, UP[::-1]),
    "gated_linear x": (lambda x: tg.gated_linear(x, UP, UP + 1), X),
    "gated_linear gate": (lambda g: tg.gated_linear(X, g, UP), UP),
    "gated_linear up bias": (lambda c: tg.gated_linear(X, UP, UP, None, c) ** 2, UP_BIAS),
    "gated_linear dropout": (seeded(lambda *xs: tg.gated_linear(*xs, dropout=0.4)),
                             X, UP, UP[::-1], UP_BIAS, UP_BIAS),
    "dropout": (seeded(lambda x: tg.dropout(x * x, 0.4)), values(5, 7)),
    "dropout_add": (seeded(lambda x, r, b: tg.dropout_add(x * x, r * r, p=0.4, bias=b * b)),
                    X, X + 1, values(4)),
    "dropout_add bias": (seeded(lambda b: tg.dropout_add(X, X, p=0.4, bias=b * b)), values(4)),
    "dropout_add residual": (seeded(lambda r: tg.dropout_add(X, r * r, p=0.4)), X),
    "dropout_add x": (seeded(lambda x: tg.dropout_add(x * x, X, p=0.4, bias=X[0, 0])), X),
    "rotary": (lambda x: tg.rotary(x, *ANGLES) ** 2, values(2, 3, 2, 4)),
    "rotary angles": (tg.rotary, values(2, 3, 2, 4), *ANGLES),
    "rotary some heads": (lambda *xs: tg.rotary(*xs, heads=2, interleaved=True),
                          values(3, 3, 4), *ANGLES),
    "rotary cos": (lambda c: tg.rotary(values_of_x, c, ANGLES[1], heads=1) ** 2, ANGLES[0]),
    "rotary no heads": (lambda *xs: tg.rotary(*xs, heads=0) ** 2, values(3, 2, 4), *ANGLES),
    "embedding": (lambda w: tg.embedding(w, IDS) ** 2, values(5, 4)),
    "embedding positions": (lambda w, p: tg.embedding(w, IDS, p, start=1) ** 2,
                            values(5, 4), values(6, 4)),
    "embedding starts": (lambda w, p: tg.embedding(w, IDS, p, start=np.array([2, 0])) ** 2,
                         values(5, 4), values(6, 4)),
    "positions": (lambda p: tg.embedding(UP, IDS, p, start=2) ** 2, values(5, 4)),
    "positions starts": (lambda p: tg.embedding(UP, IDS, p, start=np.array([1, 2])) ** 2,
                         values(5, 4)),
}  # fmt: skip
values_of_x = values(3, 2, 4)


@pytest.mark.parametrize("name", CASES)
def test_derivatives(name: str) -> None:
    check_derivatives(*CASES[name])
