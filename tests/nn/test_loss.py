"""Losses: derivatives, 16 bits, reductions and errors; values: tests/parity/test_losses.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn
from tensorgrad.errors import ArgumentError, DtypeError, GradError, ShapeError

F = nn.functional
RNG = np.random.default_rng(2)
PAIRS = [F.mse_loss, F.l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.kl_div]


@pytest.mark.parametrize("loss", PAIRS)
def test_gradients_of_both_operands(loss: Any) -> None:
    x, target = RNG.standard_normal((3, 4)), RNG.uniform(0.1, 0.9, (3, 4))
    tg.gradcheck(loss, (x, target))


def test_positive_targets_may_weigh_more() -> None:
    logits, target = RNG.standard_normal((4, 3)), RNG.integers(0, 2, (4, 3)).astype(float)
    weight, p = np.array([1.0, 2, 5]), 1 / (1 + np.exp(-logits))
    expected = -(weight * target * np.log(p) + (1 - target) * np.log(1 - p))
    found = F.binary_cross_entropy_with_logits(logits, target, pos_weight=weight, reduction="none")
    np.testing.assert_allclose(found.numpy(), expected)


@pytest.mark.parametrize("loss", PAIRS)
def test_sixteen_bits_give_a_float32_loss(loss: Any) -> None:
    x = Tensor(RNG.standard_normal(1000).astype("float16"), requires_grad=True)
    target = RNG.uniform(0, 1, 1000).astype("float16")
    y = loss(x, target)
    assert y.dtype == np.float32
    wide = loss(x.numpy().astype("float32"), target.astype("float32"))
    np.testing.assert_allclose(y.numpy(), wide.numpy(), rtol=1e-6)
    y.backward()
    assert x.grad is not None
    assert x.grad.dtype == np.float16


@pytest.mark.parametrize("loss", PAIRS)
def test_operands_that_do_not_fit(loss: Any) -> None:
    x = np.zeros((2, 3), "float32")
    with pytest.raises(ShapeError, match=r"target has shape \(3,\), expected \(2, 3\) like"):
        loss(x, np.zeros(3, "float32"))
    with pytest.raises(ArgumentError, match="reduction is 'max', expected one of"):
        loss(x, x, reduction="max")
    with pytest.raises(DtypeError, match="has dtype int64, expected a float"):
        loss(x.astype("int64"), x)


def test_binary_targets_may_be_bools_and_logits_large() -> None:
    logits = np.array([-1e4, 1e4, 0], "float32")
    losses = nn.BCEWithLogitsLoss(reduction="none")(logits, np.array([False, True, True]))
    np.testing.assert_allclose(losses.numpy(), [0, 0, np.log(2)], rtol=1e-6)


def test_weights_of_losses_move_with_the_module_and_are_not_saved() -> None:
    loss = nn.CrossEntropyLoss(np.ones(3, "float32")).to("float64")
    assert loss.weight is not None
    assert loss.weight.dtype == np.float64
    assert loss.state_dict() == {}
    with pytest.raises(GradError, match="BCEWithLogitsLoss: pos_weight requires a gradient"):
        nn.BCEWithLogitsLoss(pos_weight=tg.ones(3, requires_grad=True))
    with pytest.raises(ArgumentError, match="MSELoss: reduction is 'most', expected one of"):
        nn.MSELoss(reduction="most")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("name", "module", "expected"),
    [
        ("mse_loss", nn.MSELoss, [4, 0.25, 0.25]),
        ("l1_loss", nn.L1Loss, [2, 0.5, 0.5]),
        ("huber_loss", nn.HuberLoss, [1.5, 0.125, 0.125]),
        ("kl_div", nn.KLDivLoss, [0, 0.5 * (np.log(0.5) + 1), np.log(1) - 1.5]),
    ],
)
def test_values_by_hand(name: str, module: Any, expected: list[float], reduction: str) -> None:
    x, target = np.array([[2.0, -1, 1.5]]), np.array([[0, 0.5, 1]])
    if name != "kl_div":
        target = np.array([[0.0, -0.5, 1]])
    wanted = np.array([expected])
    if reduction != "none":
        wanted = getattr(wanted, reduction)()
    np.testing.assert_allclose(getattr(F, name)(x, target, reduction).numpy(), wanted)
    np.testing.assert_allclose(module(reduction=reduction)(x, target).numpy(), wanted)
    assert repr(module(reduction=reduction)) == f"{module.__name__}(reduction={reduction!r})"
    for loss in (getattr(F, name), module()):  # the default
        np.testing.assert_allclose(loss(x, target).numpy(), np.mean(expected))


def test_the_width_of_the_square_in_the_huber_loss() -> None:
    errors = np.array([0.2, 0.3, 0.5])
    expected = [0.02, 0.045, 0.3 * 0.35]
    found = F.huber_loss(errors, np.zeros(3), "none", 0.3)
    np.testing.assert_allclose(found.numpy(), expected)
    module = nn.HuberLoss(reduction="none", delta=0.3)
    np.testing.assert_array_equal(module(errors, np.zeros(3)).numpy(), found.numpy())
    for delta in (0, -1.0, float("nan")):
        with pytest.raises(ArgumentError, match=f"delta is {delta}, expected a number above 0"):
            F.huber_loss(errors, errors, delta=delta)
    with pytest.raises(ArgumentError, match="huber_loss: delta is 'x', expected a number"):
        F.huber_loss(errors, errors, delta="x")  # type: ignore[arg-type]


def test_the_divergence_of_a_batch() -> None:
    x, target = np.log(np.array([[0.25, 0.75], [0.5, 0.5]])), np.array([[0.5, 0.5], [1, 0]])
    each = np.array([np.log(2) / 2 + np.log(2 / 3) / 2, np.log(2)])
    np.testing.assert_allclose(F.kl_div(x, target, "batchmean").numpy(), each.mean())
    np.testing.assert_allclose(nn.KLDivLoss(reduction="batchmean")(x, target).numpy(), each.mean())
    logs = np.log(target[:1])
    found = nn.KLDivLoss(reduction="sum", log_target=True)(x[:1], logs).numpy()
    np.testing.assert_allclose(found, each[0])
    np.testing.assert_allclose(F.kl_div(x[:1], logs, "sum", True).numpy(), each[0])
    with pytest.raises(ArgumentError, match=r"'batchmean' for x of shape \(\), expected an axis"):
        F.kl_div(0.5, 0.5, "batchmean")


def test_the_binary_cross_entropy_by_hand() -> None:
    logits, target, weight = RNG.standard_normal((4, 3)), RNG.uniform(0, 1, (4, 3)), np.arange(3.0)
    p = 1 / (1 + np.exp(-logits))
    plain = -(target * np.log(p) + (1 - target) * np.log(1 - p))
    loss = F.binary_cross_entropy_with_logits
    np.testing.assert_allclose(loss(logits, target).numpy(), plain.mean())
    np.testing.assert_allclose(loss(logits, target, weight, "none").numpy(), plain * weight)
    np.testing.assert_allclose(loss(logits, target, 2, "sum").numpy(), 2 * plain.sum())
    module = nn.BCEWithLogitsLoss(weight, pos_weight=[1, 2, 3])
    assert module.pos_weight is not None
    assert module.pos_weight.dtype == np.float64
    expected = loss(logits, target, weight, pos_weight=np.array([1, 2, 3]))
    np.testing.assert_allclose(module(logits, target).numpy(), expected.numpy())


def test_modules_of_class_losses_have_the_settings_of_their_functions() -> None:
    x, targets = RNG.standard_normal((4, 3, 2)), np.array([[0, 1], [2, 7], [1, 1], [0, 2]])
    weight = np.array([1.0, 2, 3])
    entropy: dict[str, Any] = {"ignore_index": 7, "reduction": "sum", "axis": 1}
    nll = nn.NLLLoss(weight, **entropy)
    expected = F.nll_loss(x, targets, weight, **entropy)
    np.testing.assert_array_equal(nll(x, targets).numpy(), expected.numpy())
    entropy["label_smoothing"] = 0.2
    expected = F.cross_entropy(x, targets, weight=weight, **entropy)
    found = nn.CrossEntropyLoss(weight, **entropy)(x, targets)
    np.testing.assert_array_equal(found.numpy(), expected.numpy())
    last, targets = x[..., 0], np.array([0, 1, -100, 2])
    for module, function in ((nn.NLLLoss, F.nll_loss), (nn.CrossEntropyLoss, F.cross_entropy)):
        default = function(last, targets).numpy()
        np.testing.assert_array_equal(module()(last, targets).numpy(), default)
        np.testing.assert_allclose(default, function(last[[0, 1, 3]], targets[[0, 1, 3]]).numpy())
    for smoothing in (-0.1, 1.1):
        with pytest.raises(ArgumentError, match="CrossEntropyLoss: label_smoothing is"):
            nn.CrossEntropyLoss(label_smoothing=smoothing)
    assert nn.CrossEntropyLoss(label_smoothing=1).label_smoothing == 1
