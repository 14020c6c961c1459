"""Second derivatives of softmax, the norms and the cross entropies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.functions import jvp
from tensorgrad.core.modes import mode, replaced
from tensorgrad.errors import GradError
from tests.derivatives import check_derivatives

RNG = np.random.default_rng(4)
X, CUBE, ROW = (RNG.standard_normal(shape) for shape in [(3, 5), (2, 3, 4), (5,)])
LOGITS, FEATURES, HEAD, BIAS = (RNG.standard_normal(s) for s in [(5, 6), (5, 3), (6, 3), (6,)])
MASK = np.array([[True, False, True, True], [False] * 4, [True] * 4])
TARGETS = [0, 2, -100, 4, 1]
EMPTY = np.zeros((0, 4))
SMOOTH: dict[str, Any] = {"z_loss": 0.3, "label_smoothing": 0.2}


def squared_gradients(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function whose second derivatives are the third and fourth of f."""

    def loss(*xs: Tensor) -> Tensor:
        y = f(*xs)
        weights = tg.sin(tg.cumsum(tg.ones_like(y)))  # no sum of them times y is constant
        return (y.reshape(-1) * weights).sum()

    def squares(*xs: Tensor) -> Tensor:
        each = [(g * g).sum() for g in tg.grad(loss, tuple(range(len(xs))))(*xs)]
        return sum(each[1:], each[0])

    return squares


def chained(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Use both results of a norm with a residual add, and both of another one."""
    total, y = tg.add_rms_norm(x, residual, weight)
    return tg.add_layer_norm(total * total, y * residual, weight)


def recomputed(x: Tensor, weight: Tensor) -> Tensor:
    with replaced(mode, recompute_norms=True):
        return tg.linear(tg.rms_norm(x, weight), X)


def entropy(**options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: tg.cross_entropy(x, targets_of(options), **options)


def linear_entropy(**options: Any) -> Callable[..., Tensor]:
    return lambda x, w, b: tg.linear_cross_entropy(x, w, targets_of(options), b, **options)


def targets_of(options: dict[str, Any]) -> list[int]:
    """Return targets of which one is ignored."""
    return [0, 2, 1, 4, 1] if "ignore_index" in options else TARGETS


# (function, its inputs)
CASES: dict[str, tuple[Any, ...]] = {
    "softmax": (tg.softmax, X),
    "softmax with a scale": (lambda x: tg.softmax(x, 0, scale=0.7), X),
    "softmax of an axis of a view": (lambda x: tg.softmax(x.swapaxes(0, 2), 1), CUBE),
    "softmax, causal": (lambda x: tg.softmax(x, causal=True), CUBE),
    "softmax with a mask": (lambda x: tg.softmax(x, mask=MASK, scale=3.0), CUBE),
    "softmax with a float mask": (lambda x: tg.softmax(x, mask=CUBE[:1]), CUBE),
    "softmax of nothing": (tg.softmax, EMPTY),
    "softmax, third order": (squared_gradients(tg.softmax), X[:2]),
    "softmax with a scale, third order": (
        squared_gradients(lambda x: tg.softmax(x, 0, scale=0.7)),
        X[:2],
    ),
    "log_softmax": (tg.log_softmax, X),
    "log_softmax of a vector": (lambda x: tg.log_softmax(x, 0), ROW),
    "log_softmax of another axis": (lambda x: tg.log_softmax(x, 1), CUBE),
    "log_softmax, third order": (squared_gradients(tg.log_softmax), X[:2]),
    "layer_norm": (tg.layer_norm, X),
    "layer_norm with weight and bias": (tg.layer_norm, CUBE, CUBE[0, 0], CUBE[1, 1]),
    "layer_norm with a bias": (lambda x, b: tg.layer_norm(x, None, b), X, ROW),
    "layer_norm by the weight": (lambda w: tg.layer_norm(X, w), ROW),
    "layer_norm by the bias": (lambda b: tg.layer_norm(X, ROW, b), ROW),
    "layer_norm by the bias alone": (lambda b: tg.layer_norm(X, None, b), ROW),
    "layer_norm of a view": (lambda x: tg.layer_norm(x.T, eps=1.0), X),
    "layer_norm of a vector": (lambda x: tg.layer_norm(x, X[0]), ROW),
    "layer_norm of nothing": (tg.layer_norm, EMPTY),
    "layer_norm, third order": (squared_gradients(tg.layer_norm), X[:2]),
    "rms_norm": (tg.rms_norm, X),
    "rms_norm with a weight": (lambda x, w: tg.rms_norm(x, w, eps=0.5), X, ROW),
    "rms_norm, third order": (squared_gradients(tg.rms_norm), X[:2]),
    "rms_norm, recomputed": (recomputed, X, ROW),
    "add_layer_norm": (tg.add_layer_norm, X, X[::-1] + 1, ROW, X[0]),
    "add_layer_norm without a residual": (lambda x, w: tg.add_layer_norm(x, None, w), X, ROW),
    "add_rms_norm": (tg.add_rms_norm, X, X[::-1] + 1, ROW),
    "add_rms_norm by the residual": (lambda r: tg.add_rms_norm(X, r), X[::-1] + 1),
    "norms in a chain": (chained, X, X[::-1] + 1, ROW),
    "group_norm": (
        lambda x, w, b: tg.nn.functional.group_norm(x, 2, w, b),
        *(CUBE.swapaxes(1, 2), CUBE[0, 0], CUBE[1, 0]),
    ),
    "cross_entropy, unreduced": (entropy(**SMOOTH, reduction="none"), LOGITS),
    "cross_entropy": (entropy(), LOGITS),
    "cross_entropy with label_smoothing": (entropy(label_smoothing=0.1), LOGITS),
    "cross_entropy with z_loss": (entropy(z_loss=0.3, ignore_index=2, reduction="sum"), LOGITS),
    "cross_entropy of another axis": (
        lambda x: tg.cross_entropy(x, [[0, 2, 1, 1], [-100, 2, 0, 1]], axis=1),
        CUBE,
    ),
    "cross_entropy of a vector": (lambda x: tg.cross_entropy(x, 1), ROW),
    "cross_entropy of a view": (lambda x: tg.cross_entropy(x.T, TARGETS), X[[0, 1, 2, 1, 0]].T.T),
    "cross_entropy, all ignored": (lambda x: tg.cross_entropy(x, [-100] * 3), X),
    "cross_entropy with weights": (
        lambda x: tg.cross_entropy(x, TARGETS, BIAS**2, label_smoothing=0.1),
        LOGITS,
    ),
    "cross_entropy of probabilities": (
        lambda x, p: tg.cross_entropy(x, tg.softmax(p)),
        *(LOGITS, LOGITS[::-1]),
    ),
    "cross_entropy, third order": (squared_gradients(entropy(**SMOOTH, reduction="none")), LOGITS),
    "nll_loss": (lambda x: tg.nn.functional.nll_loss(tg.log_softmax(x), TARGETS), LOGITS),
    "linear_cross_entropy, unreduced": (
        linear_entropy(**SMOOTH, reduction="none", chunk=6),
        *(FEATURES, HEAD, BIAS),
    ),
    "linear_cross_entropy": (linear_entropy(), FEATURES, HEAD, BIAS),
    "linear_cross_entropy in chunks": (linear_entropy(**SMOOTH, chunk=4), *(FEATURES, HEAD, BIAS)),
    "linear_cross_entropy with a padded vocabulary": (
        linear_entropy(z_loss=0.3, ignore_index=2, reduction="sum", vocab_size=5, chunk=2),
        *(FEATURES, HEAD, BIAS),
    ),
    "linear_cross_entropy by x": (lambda x: tg.linear_cross_entropy(x, HEAD, TARGETS), FEATURES),
    "linear_cross_entropy by the weight": (
        lambda w: tg.linear_cross_entropy(FEATURES, w, TARGETS, chunk=2),
        HEAD,
    ),
    "linear_cross_entropy by the bias": (
        lambda b: tg.linear_cross_entropy(FEATURES, HEAD, TARGETS, b),
        BIAS,
    ),
    "linear_cross_entropy of sequences": (
        lambda x, w: tg.linear_cross_entropy(x, w, [[0, 1, 2], [2, 1, -100]], reduction="none"),
        *(CUBE, CUBE[0]),
    ),
    "linear_cross_entropy of a vector": (
        lambda x, w: tg.linear_cross_entropy(x, w, 1, reduction="none"),
        *(ROW, X),
    ),
    "linear_cross_entropy, third order": (
        squared_gradients(linear_entropy(**SMOOTH, reduction="none", chunk=4)),
        *(FEATURES, HEAD, BIAS),
    ),
    "linear_cross_entropy of nothing": (
        lambda x, w: tg.linear_cross_entropy(x, w, [], reduction="sum"),
        *(EMPTY, CUBE[0]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_derivatives_match_differences(name: str) -> None:
    function, *inputs = CASES[name]
    check_derivatives(function, *inputs)


@pytest.mark.parametrize(
    "f",
    [
        tg.softmax,
        tg.log_softmax,
        lambda x: tg.layer_norm(x, x[0]),
        lambda x: tg.cross_entropy(x, [0, 1, 2, 3], reduction="none"),
        lambda x: tg.linear_cross_entropy(x, x[:3], [0, 1, 2, 0], reduction="none"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tangents_of_narrow_floats_are_rounded_once(
    f: Callable[[Tensor], Tensor], dtype: str
) -> None:
    rng = np.random.default_rng(1)
    x, t = (tg.tensor(rng.standard_normal((4, 100)), dtype) for _ in range(2))
    y, found = jvp(f, (x,), (t,))
    _, exact = jvp(f, (x.astype("float64"),), (t.astype("float64"),))
    assert found.dtype == y.dtype
    error = abs(found.astype("float64") - exact).numpy().max()
    step = 2.0 ** (-19 if y.dtype == "float32" else -8)
    assert error <= 2 * step * abs(exact).numpy().max()


def test_the_tangent_of_a_linear_loss_never_holds_all_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, sizes = import_module("tensorgrad.ops.linear_cross_entropy"), list[int]()
    product_into = module.product_into

    def noted(y: Any, a: Any, b: Any, *rest: Any, **options: Any) -> None:
        sizes.append(y.size)
        product_into(y, a, b, *rest, **options)

    monkeypatch.setattr(module, "product_into", noted)
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(shape) for shape in 2 * [(64, 3), (50, 3)]]
    ids = np.arange(64) % 50

    def slope_and_gradients(loss: Callable[..., Tensor]) -> tuple[float, list[Any]]:
        leaves = [Tensor(a, requires_grad=True) for a in arrays[:2]]
        _, slope = jvp(loss, leaves, list(map(Tensor, arrays[2:])))
        slope.backward()
        return slope.item(), [leaf.grad for leaf in leaves]

    found = slope_and_gradients(partial(tg.linear_cross_entropy, targets=ids, chunk=16))
    assert sizes
    assert max(sizes) <= 16 * 50
    slope, gradients = slope_and_gradients(lambda x, w: tg.cross_entropy(x @ w.T, ids))
    assert found[0] == pytest.approx(slope)
    for a, b in zip(found[1], gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_targets_that_were_assigned_to_are_named() -> None:
    targets = tg.tensor([0, 1])

    def gradient(x: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            y = tg.cross_entropy(x, targets)
            targets[0] = 2
            return y

        return tg.grad(loss)(x).sum()

    logits = tg.ones((2, 3))
    assert gradient(logits).item() == pytest.approx(0, abs=1e-6)  # the gradient needs no targets
    with pytest.raises(GradError, match="cross_entropy: the logits or the targets were assigned"):
        tg.grad(gradient)(logits)


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy in chunks"])
def test_the_gradient_of_a_loss_that_has_a_tangent(name: str) -> None:
    loss, *arrays = CASES[name]
    leaves = [Tensor(a, requires_grad=True) for a in arrays]
    y, _ = jvp(loss, leaves, list(map(Tensor, arrays)))
    y.backward()
    expected = tg.grad(loss, tuple(range(len(arrays))))(*map(Tensor, arrays))
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(leaf.grad, gradient.numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_rows_that_are_ignored_may_hold_anything(name: str) -> None:
    loss, *arrays = CASES[name]
    rows = TARGETS.index(-100)
    assert np.isfinite(arrays[0][rows]).all()
    arrays[0] = arrays[0].copy()
    found = []
    for value in (1.0, np.nan):
        arrays[0][rows] = value
        leaf = Tensor(arrays[0], requires_grad=True)
        tangents = [Tensor(np.ones_like(a)) for a in arrays]
        _, slope = jvp(loss, [leaf, *map(Tensor, arrays[1:])], tangents)
        slope.backward()
        assert leaf.grad is not None
        found.append((slope.item(), leaf.grad.tolist()))
    assert found[0] == found[1]
