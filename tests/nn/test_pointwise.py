"""Activations and losses of PyTorch against NumPy; see also tests/parity/test_op_db.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, gradcheck
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.nn import functional as F

RNG = np.random.default_rng(8)
X, Y = RNG.standard_normal((2, 3, 4)) * 3
SIGNS = np.where(RNG.standard_normal((3, 4)) > 0, 1.0, -1.0)
P = RNG.uniform(0.1, 0.9, (3, 4))


def distance(x: Any, y: Any) -> Any:
    return np.sqrt(((x - y + 1e-6) ** 2).sum(-1))


def cosine(x: Any, y: Any) -> Any:
    return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


def softplus(x: Any) -> Any:
    return np.logaddexp(0, x)


def softmin(x: Any) -> Any:
    return np.exp(-x) / np.exp(-x).sum(-1, keepdims=True)


# ours, NumPy's, operands
CALLS: list[tuple[Callable[..., Tensor], Callable[..., Any], tuple[Any, ...]]] = [
    (F.celu, lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), (X,)),
    (F.selu, lambda x: 1.0507009873554805 * np.where(
        x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0))), (X,)),
    (F.hardtanh, lambda x: np.clip(x, -1, 1), (X,)),
    (F.relu6, lambda x: np.clip(x, 0, 6), (X,)),
    (F.hardsigmoid, lambda x: np.clip(x + 3, 0, 6) / 6, (X,)),
    (F.hardswish, lambda x: x * np.clip(x + 3, 0, 6) / 6, (X,)),
    (F.hardshrink, lambda x: np.where(abs(x) > 0.5, x, 0), (X,)),
    (F.softshrink, lambda x: np.sign(x) * np.maximum(abs(x) - 0.5, 0), (X,)),
    (F.tanhshrink, lambda x: x - np.tanh(x), (X,)),
    (F.softsign, lambda x: x / (1 + abs(x)), (X,)),
    (F.logsigmoid, lambda x: -softplus(-x), (X,)),
    (F.mish, lambda x: x * np.tanh(softplus(x)), (X,)),
    (lambda x: F.threshold(x, 0.1, 20.0), lambda x: np.where(x > 0.1, x, 20), (X,)),
    (F.prelu, lambda x, w: np.where(x < 0, x * w, x), (X, Y[0])),
    (F.prelu, lambda x, w: np.where(x < 0, x * w, x), (X, Y[0, :1])),
    (F.glu, lambda x: x[:, :2] / (1 + np.exp(-x[:, 2:])), (X,)),
    (F.softmin, softmin, (X,)),
    (F.normalize, lambda x: x / np.sqrt((x * x).sum(1, keepdims=True)), (X,)),
    (F.cosine_similarity, lambda x, y: (x * y).sum(1) / np.sqrt(
        (x * x).sum(1) * (y * y).sum(1)), (X, Y)),
    (F.pairwise_distance, distance, (X, Y)),
    (F.cdist, lambda x, y: np.sqrt(((x[:, None] - y) ** 2).sum(-1)), (X, Y[:2])),
    (lambda x, y: F.cdist(x, y, 1.0), lambda x, y: abs(x[:, None] - y).sum(-1), (X, Y)),
    (lambda x, v: F.gaussian_nll_loss(x, Y, v), lambda x, v: (
        0.5 * (np.log(v) + (x - Y) ** 2 / v)).mean(), (X, P)),
    (lambda x, v: F.gaussian_nll_loss(x, Y, v, True, reduction="none"), lambda x, v: 0.5 * (
        np.log(v[:, None]) + (x - Y) ** 2 / v[:, None] + np.log(2 * np.pi)), (X, P[:, 0].copy())),
    (lambda x, y: F.cosine_embedding_loss(x, y, np.array([1, -1, -1]), -0.5, "none"),
     lambda x, y: np.where([True, False, False], 1 - cosine(x, y),
                           np.maximum(0, cosine(x, y) + 0.5)), (X, Y)),
    (F.smooth_l1_loss, lambda x, y: np.where(
        abs(x - y) < 1, (x - y) ** 2 / 2, abs(x - y) - 0.5).mean(), (X, Y)),
    (F.soft_margin_loss, lambda x, y: softplus(-x * y).mean(), (X, SIGNS)),
    (lambda x, y: F.margin_ranking_loss(x, y, SIGNS, 0.5, "sum"),
     lambda x, y: np.maximum(0, 0.5 - SIGNS * (x - y)).sum(), (X, Y)),
    (lambda x: F.hinge_embedding_loss(x, SIGNS, reduction="none"),
     lambda x: np.where(SIGNS == 1, x, np.maximum(0, 1 - x)), (X,)),
    (lambda x: F.poisson_nll_loss(x, abs(Y)), lambda x: (np.exp(x) - abs(Y) * x).mean(), (X,)),
    # Stirling's formula above 1 alone
    (lambda x: F.poisson_nll_loss(x, np.ones((3, 4)), full=True),
     lambda x: (np.exp(x) - x).mean(), (X,)),
    (F.binary_cross_entropy, lambda x, t: -(t * np.log(x) + (1 - t) * np.log(1 - x)).mean(),
     (P, P[::-1].copy())),
    (lambda a, p: F.triplet_margin_loss(a, p, P), lambda a, p: np.maximum(
        0, 1 + distance(a, p) - distance(a, P)).mean(), (X, Y)),
]  # fmt: skip


@pytest.mark.parametrize("row", CALLS, ids=range(len(CALLS)))
def test_values_and_gradients(row: Any, device: str) -> None:
    ours, numpys, operands = row
    arrays = [backend.to_device(each, device) for each in operands]
    if device != "cpu" and ours not in vars(F).values():
        pytest.skip("holds arrays of the CPU")
    np.testing.assert_allclose(ours(*map(Tensor, arrays)).numpy(), numpys(*operands), 1e-10, 1e-12)
    assert gradcheck(ours, arrays)


def test_16_bits_and_no_elements(device: str) -> None:
    for f in (F.celu, F.selu, F.relu6, F.hardswish, F.mish, F.softsign, F.logsigmoid, F.softshrink):
        half = Tensor(backend.to_device(X.astype("float16"), device))
        assert f(half).dtype == np.float16
        wide = f(half.astype("float32")).numpy()
        np.testing.assert_allclose(f(half).numpy(), wide, 4e-3, 4e-3)
        assert f(half[:0]).shape == (0, 4)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ArgumentError, match="hardtanh: min_val is 1, expected less than max_val 1"):
        F.hardtanh(X, 1, 1)
    with pytest.raises(ArgumentError, match="celu: alpha is 0, expected more than 0"):
        F.celu(X, 0)
    with pytest.raises(
        ShapeError, match=r"prelu: weight has shape \(3,\), expected \(1,\) or \(4,\)"
    ):
        F.prelu(X, Y[:, 0])
    with pytest.raises(ShapeError, match="glu: axis 0 of x has length 3, expected an even one"):
        F.glu(X, 0)
    with pytest.raises(ShapeError, match=r"soft_margin_loss: target has shape \(4,\), expected"):
        F.soft_margin_loss(X, SIGNS[0])
    with pytest.raises(ShapeError, match=r"cosine_embedding_loss: target has shape \(1,\)"):
        F.cosine_embedding_loss(X, Y, SIGNS[0, :1])
    with pytest.raises(ShapeError, match=r"gaussian_nll_loss: var has shape \(4,\), expected"):
        F.gaussian_nll_loss(X, Y, P[0])
    with pytest.raises(ShapeError, match=r"cdist: y has shape \(3, 3\), expected rows as long as"):
        F.cdist(X, Y[:, :3])
    with pytest.raises(DtypeError, match="mish: x has dtype int64, expected a float"):
        F.mish(np.arange(3))
    with pytest.raises(ArgumentError, match="reduction is 'no'"):
        F.binary_cross_entropy(P, P, reduction="no")
