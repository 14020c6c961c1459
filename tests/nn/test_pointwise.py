"""Activations and losses of PyTorch against NumPy; see also tests/parity/test_op_db.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, gradcheck
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, DtypeError, GradError, ShapeError
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
    (lambda x, y: F.cdist(x, y, p=1.0), lambda x, y: abs(x[:, None] - y).sum(-1), (X, Y)),
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
    (lambda x: F.celu(x, 2.0), lambda x: np.where(x > 0, x, 2 * np.expm1(np.minimum(x, 0) / 2)),
     (X,)),
    (lambda x: F.hardtanh(x, -0.5, 2), lambda x: np.clip(x, -0.5, 2), (X,)),
    (lambda x: F.hardshrink(x, 1.0), lambda x: np.where(abs(x) > 1, x, 0), (X,)),
    (lambda x: F.softshrink(x, 1.0), lambda x: np.sign(x) * np.maximum(abs(x) - 1, 0), (X,)),
    (lambda x: F.glu(x.T, 0), lambda x: x.T[:2] / (1 + np.exp(-x.T[2:])), (X,)),
    (lambda x: F.softmin(x, 0), lambda x: softmin(x.T).T, (X,)),
    (F.prelu, lambda x, w: np.where(x < 0, x * w[:, None], x), (X[None], Y[:, 0].copy())),
    (F.prelu, lambda x, w: np.where(x < 0, x * w, x), (X[0], Y[0, :1])),
    (lambda x: F.normalize(x, 1.0, 0), lambda x: x / abs(x).sum(0), (X,)),
    (lambda x: F.normalize(x, axis=0, eps=50.0), lambda x: x / 50, (X,)),
    (lambda x: F.normalize(x * 1e-14), lambda x: x * 1e-2, (X,)),
    (lambda x: F.cosine_similarity(x, Y[0], 0, 7.0), lambda x: (x * Y[0]).sum(0) / np.maximum(
        7, np.sqrt((x * x).sum(0))) / np.maximum(7, np.sqrt(3 * Y[0] ** 2)), (X,)),
    (lambda x, y: F.cosine_similarity(x * 1e-10, y), lambda x, y: (x * 1e-2 * y).sum(1) / np.sqrt(
        (y * y).sum(1)), (X, Y)),
    (lambda x, y: F.pairwise_distance(x, y, 1.0, 0.5, True),
     lambda x, y: abs(x - y + 0.5).sum(-1, keepdims=True), (X, Y)),
    (lambda x, y: F.smooth_l1_loss(x, y, "none", 2.0), lambda x, y: np.where(
        abs(x - y) < 2, (x - y) ** 2 / 4, abs(x - y) - 1), (X, Y)),
    (lambda x: F.hinge_embedding_loss(x, SIGNS, 2.0),
     lambda x: np.where(SIGNS == 1, x, np.maximum(0, 2 - x)).mean(), (X,)),
    (lambda x: F.hinge_embedding_loss(x, SIGNS * 0, reduction="none"),
     lambda x: x + np.maximum(0, 1 - x), (X,)),
    (lambda x, y: F.margin_ranking_loss(x, y, SIGNS),
     lambda x, y: np.maximum(0, -SIGNS * (x - y)).mean(), (X, Y)),
    (lambda x, t: F.poisson_nll_loss(x, t, False, eps=0.5, reduction="none"),
     lambda x, t: x - t * np.log(x + 0.5), (P, abs(Y))),
    (lambda x: F.poisson_nll_loss(x, P * 3, full=True, reduction="sum"), lambda x: (
        np.exp(x) - 3 * P * x + np.where(P * 3 > 1, 3 * P * np.log(3 * P) - 3 * P + 0.5 * np.log(
            6 * np.pi * P), 0)).sum(), (X,)),
    (lambda x, w: F.binary_cross_entropy(x, P, w, "none"),
     lambda x, w: -w * (P * np.log(x) + (1 - P) * np.log(1 - x)), (P[::-1].copy(), abs(Y))),
    (lambda v: F.gaussian_nll_loss(X, Y, v, eps=0.5), lambda v: 0.5 * (
        np.log(np.maximum(v, 0.5)) + (X - Y) ** 2 / np.maximum(v, 0.5)).mean(), (2 * P + 0.6,)),
    (lambda x: F.gaussian_nll_loss(x, Y, 2.0, reduction="sum"), lambda x: 0.5 * (
        np.log(2) + (x - Y) ** 2 / 2).sum(), (X,)),
    (lambda x, y: F.cosine_embedding_loss(x, y, np.array([1, -1, -1])), lambda x, y: np.where(
        [True, False, False], 1 - cosine(x, y), np.maximum(0, cosine(x, y))).mean(), (X, Y)),
    (lambda a, p: F.triplet_margin_loss(a, p, P, 2.0, 1.0, 0.25, True, "none"),
     lambda a, p: np.maximum(0, 2 + abs(a - p + 0.25).sum(-1) - np.minimum(
         abs(a - P + 0.25).sum(-1), abs(p - P + 0.25).sum(-1))), (X, Y)),
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


def test_points_where_the_slope_changes() -> None:
    for f, x, expected, slopes in (
        (F.hardtanh, [-1, 1], [-1, 1], [0, 0]),
        (F.relu6, [0, 6], [0, 6], [0, 0]),
        (F.celu, [0], [0], [1]),
        (F.hardshrink, [-0.5, 0.5], [0, 0], [0, 0]),
        (lambda x: F.threshold(x, 1, 3), [1], [3], [0]),
    ):
        given = Tensor(np.array(x, "float64"), requires_grad=True)
        y = f(given)
        y.sum().backward()
        assert y.tolist() == expected
        assert given.grad is not None
        assert given.grad.tolist() == slopes
    small = F.gaussian_nll_loss(X[0], Y[0], np.zeros(4)).item()
    np.testing.assert_allclose(small, 0.5 * (np.log(1e-6) + (X[0] - Y[0]) ** 2 / 1e-6).mean())
    zero = np.zeros(2)
    sure = Tensor(np.array([0.0, 1, 0, 1]), requires_grad=True)
    losses = F.binary_cross_entropy(sure, np.array([0.0, 1, 1, 0]), reduction="none")
    losses.sum().backward()
    assert losses.tolist() == [0, 0, 100, 100]
    assert sure.grad is not None
    assert sure.grad.tolist() == [1, -1, -1e12, 1e12]
    unknown = F.binary_cross_entropy(np.array([np.nan, 0.5]), zero, reduction="none").tolist()
    assert np.isnan(unknown[0])  # a NaN stays visible
    assert unknown[1] == pytest.approx(np.log(2))
    assert F.poisson_nll_loss(zero, zero + 1, False).item() == pytest.approx(-np.log(1e-8))
    assert F.softmin(X.astype("float32"), dtype="float64").dtype == np.float64
    row = F.cosine_embedding_loss(X[0], Y[0], 1).item()
    assert row == pytest.approx(1 - cosine(X[0], Y[0]))


def test_what_does_not_fit_is_named() -> None:
    for name, options in (
        ("hardtanh", ("min_val", "max_val")),
        ("hardshrink", ("lambd",)),
        ("threshold", ("threshold", "value")),
        ("celu", ("alpha",)),
    ):
        for option in options:
            values: dict[str, Any] = {"threshold": 1.0, "value": 1.0} if name == "threshold" else {}
            with pytest.raises(ArgumentError, match=f"{name}: {option} is 'a', expected a number"):
                getattr(F, name)(X, **{**values, option: "a"})
    with pytest.raises(ArgumentError, match="poisson_nll_loss: eps is 'a', expected a number"):
        F.poisson_nll_loss(X, Y, eps="a")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="smooth_l1_loss: beta is 0, expected more than 0"):
        F.smooth_l1_loss(X, Y, beta=0)
    with pytest.raises(ShapeError, match=r"prelu: weight has shape \(1, 1\), expected \(1,\)"):
        F.prelu(X, Y[:1, :1])
    with pytest.raises(ShapeError, match=r"cdist: y has shape \(4,\), expected \(..., N, 4\)"):
        F.cdist(X, Y[0])
    with pytest.raises(ShapeError, match=r"cdist: x has shape \(4,\), expected \(..., M, C\)"):
        F.cdist(X[0], Y)
    labelled: tuple[Any, ...] = F.hinge_embedding_loss, partial(F.cosine_embedding_loss, Y)
    for f in labelled:
        with pytest.raises(GradError, match=r"target requires a gradient, .*labels have none"):
            f(X, Tensor(SIGNS if f is F.hinge_embedding_loss else SIGNS[:, 0], True))
    with pytest.raises(
        DtypeError, match="gaussian_nll_loss: var has dtype int64, expected a float"
    ):
        F.gaussian_nll_loss(X, Y, np.ones(3, int))
    with pytest.raises(ShapeError, match=r"margin_ranking_loss: y has shape \(4,\), expected"):
        F.margin_ranking_loss(X, Y[0], SIGNS)
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
    with pytest.raises(ShapeError, match=r"cdist: y has shape \(3, 3\), expected \(..., N, 4\)"):
        F.cdist(X, Y[:, :3])
    with pytest.raises(DtypeError, match="mish: x has dtype int64, expected a float"):
        F.mish(np.arange(3))
    with pytest.raises(ArgumentError, match="reduction is 'no'"):
        F.binary_cross_entropy(P, P, reduction="no")  # type: ignore[arg-type]
