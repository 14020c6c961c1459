"""Tangents and second derivatives of the cross entropies against differences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.functions import jvp
from tensorgrad.errors import GradError
from tests.derivatives import check_derivatives

TARGETS = np.array([0, 2, -100, 4, 1])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.3, "ignore_index": 2, "reduction": "sum"},
    {"z_loss": 0.3, "label_smoothing": 0.2, "reduction": "none"},
]
X, W = np.random.default_rng(1).standard_normal((2, 6, 3))


def values(*shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(4)
    return [rng.standard_normal(shape) for shape in shapes]


def counted(options: dict[str, Any]) -> Any:
    """Return targets of which one is ignored."""
    return np.where(TARGETS < 0, 2, TARGETS) if "ignore_index" in options else TARGETS


def squared_gradients(f: Callable[..., Tensor], *xs: Tensor) -> Tensor:
    """Return what has the third and fourth derivatives of f for its second ones."""
    each = [(g**2).sum() for g in tg.grad(f, tuple(range(len(xs))))(*xs)]
    return sum(each[1:], each[0])


losses = partial(tg.linear_cross_entropy, reduction="none")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cross_entropy(options: dict[str, Any]) -> None:
    loss = partial(tg.cross_entropy, targets=counted(options), **options)
    check_derivatives(loss, *values((5, 6)))


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (lambda x: tg.cross_entropy(x, TARGETS[:4].reshape(2, 2), axis=1), [(2, 5, 2)]),
        (lambda x: tg.cross_entropy(x, 1), [(5,)]),
        (lambda x: tg.cross_entropy(x.T, TARGETS), [(5, 5)]),
        (lambda x: tg.cross_entropy(x, [-100, -100]), [(2, 3)]),
        (
            lambda x, w: tg.cross_entropy(x, TARGETS, w, label_smoothing=0.1) + 0 * w.sum(),
            [(5, 6), (6,)],
        ),
        (lambda x, p: tg.cross_entropy(x, tg.softmax(p)), [(4, 3), (4, 3)]),
        (lambda x: tg.nn.functional.nll_loss(tg.log_softmax(x), TARGETS), [(5, 6)]),
        (
            partial(squared_gradients, partial(tg.cross_entropy, targets=TARGETS, z_loss=0.1)),
            [(5, 6)],
        ),
    ],
)
def test_forms_of_cross_entropy(f: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    check_derivatives(f, *values(*shapes))


@pytest.mark.parametrize("chunk", [None, 8, 5])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_linear_cross_entropy(options: dict[str, Any], chunk: int | None) -> None:
    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return tg.linear_cross_entropy(
            x, weight, counted(options), bias, chunk=chunk, vocab_size=5, **options
        )

    check_derivatives(loss, *values((5, 3), (6, 3), (6,)))


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (lambda x: tg.linear_cross_entropy(x, W, TARGETS), [(5, 3)]),
        (lambda w: tg.linear_cross_entropy(X, w, [*TARGETS, 0], chunk=2), [(6, 3)]),
        (lambda b: tg.linear_cross_entropy(X, W, [*TARGETS, 0], b), [(6,)]),
        (
            lambda x, w: tg.linear_cross_entropy(x, w, [[0, 1]], reduction="none"),
            [(1, 2, 3), (4, 3)],
        ),
        (lambda x, w: tg.linear_cross_entropy(x, w, 1, reduction="none"), [(3,), (4, 3)]),
        (
            partial(
                squared_gradients,
                lambda x, w: tg.linear_cross_entropy(x, w, TARGETS, z_loss=0.1, chunk=4),
            ),
            [(5, 3), (6, 3)],
        ),
    ],
)
def test_operands_of_linear_cross_entropy(
    f: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    check_derivatives(f, *values(*shapes))


def test_the_tangent_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__("tensorgrad.ops.linear_cross_entropy", fromlist=["_TangentOfLoss"])
    sizes: list[int] = []
    product = module.product

    def noted(a: Any, b: Any, *rest: Any) -> Any:
        y = product(a, b, *rest)
        sizes.append(y.size)
        return y

    monkeypatch.setattr(module, "product", noted)
    leaves = [Tensor(a, requires_grad=True) for a in values((64, 3), (50, 3))]
    tangents = tuple(Tensor(a) for a in values((64, 3), (50, 3)))
    ids = np.arange(64) % 50
    loss = partial(tg.linear_cross_entropy, targets=ids, chunk=16)
    _, slope = jvp(loss, tuple(leaves), tangents)
    slope.backward()
    assert max(sizes) == 16 * 50
    whole = [Tensor(leaf.data, requires_grad=True) for leaf in leaves]
    _, expected = jvp(lambda x, w: tg.cross_entropy(x @ w.T, ids), tuple(whole), tangents)
    expected.backward()
    assert slope.item() == pytest.approx(expected.item())
    for leaf, other in zip(leaves, whole, strict=True):
        np.testing.assert_allclose(leaf.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_logits_that_were_assigned_to_are_named() -> None:
    logits, targets = tg.ones((2, 3)), tg.tensor([0, 1])

    def gradient(x: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            y = tg.cross_entropy(x, targets)
            targets[0] = 2
            return y

        return tg.grad(loss)(x).sum()

    assert gradient(logits).item() == pytest.approx(0, abs=1e-6)
    with pytest.raises(GradError, match="cross_entropy: the logits or the targets were assigned"):
        tg.grad(gradient)(logits)
