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
    with pytest.raises(ShapeError, match=r"target has shape \(3,\), expected \(2, 3\) as"):
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
        nn.MSELoss("most")
