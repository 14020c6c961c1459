"""Losses, activations and GroupNorm against PyTorch: values and gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from tests.parity.test_layers import compare, normal  # noqa: E402

RNG = np.random.default_rng(9)
F = nn.functional
KINDS = ("mean", "sum", "none")


@pytest.mark.parametrize("kind", KINDS)
def test_elementwise_losses(kind: Any) -> None:
    f = torch.nn.functional
    x, target = normal(5, 33) * 2, normal(5, 33)
    for name in ("mse_loss", "l1_loss", "huber_loss"):
        ours, theirs = getattr(F, name), getattr(f, name)
        compare(lambda x, t, g=ours: g(x, t, kind), lambda x, t, g=theirs: g(x, t, reduction=kind),
                x, target)  # fmt: skip
    compare(
        lambda x, t: F.huber_loss(x, t, kind, delta=0.3),
        lambda x, t: f.huber_loss(x, t, reduction=kind, delta=0.3),
        x,
        target,
    )


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("kind", [*KINDS, "batchmean"])
def test_divergence(kind: Any) -> None:
    f = torch.nn.functional
    logits = normal(4, 9)
    target = RNG.dirichlet(np.ones(9), 4).astype("float32")
    target[0, :3] = 0
    constant, tensor = Tensor(target), torch.from_numpy(target)
    compare(
        lambda x: F.kl_div(F.log_softmax(x), constant, kind),
        lambda x: f.kl_div(f.log_softmax(x, -1), tensor, reduction=kind),
        logits,
    )
    compare(
        lambda x, t: F.kl_div(x, t, kind, log_target=True),
        lambda x, t: f.kl_div(x, t, reduction=kind, log_target=True),
        logits,
        normal(4, 9),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_binary_cross_entropy(kind: Any) -> None:
    f = torch.nn.functional
    logits, target = normal(6, 5) * 30, RNG.uniform(0, 1, (6, 5)).astype("float32")
    weight = RNG.uniform(0.5, 3, 5).astype("float32")
    ours, theirs = F.binary_cross_entropy_with_logits, f.binary_cross_entropy_with_logits
    weights = [(None, None), (weight, None), (None, weight), (weight, 2 * weight)]
    for given, positive in weights:
        a, b = (None if w is None else torch.from_numpy(w) for w in (given, positive))
        compare(
            partial(ours, target=Tensor(target), weight=given, reduction=kind, pos_weight=positive),
            partial(
                theirs, target=torch.from_numpy(target), weight=a, reduction=kind, pos_weight=b
            ),
            logits,
        )
        module = nn.BCEWithLogitsLoss(given, reduction=kind, pos_weight=positive)
        expected = ours(logits, Tensor(target), given, reduction=kind, pos_weight=positive)
        np.testing.assert_array_equal(module(logits, Tensor(target)).numpy(), expected.numpy())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_with_weights_and_probabilities(kind: str, smoothing: float) -> None:
    """Classes on axis 1, as PyTorch has them."""
    x, weight = normal(4, 7, 3) * 3, RNG.uniform(0.5, 2, 7).astype("float32")
    targets = RNG.integers(0, 7, (4, 3))
    targets[1, 2] = -100
    soft = np.moveaxis(RNG.dirichlet(np.ones(7), (4, 3)).astype("float32"), -1, 1).copy()
    for target in (targets, soft):
        for given in (weight, None):
            ours = nn.CrossEntropyLoss(given, reduction=kind, label_smoothing=smoothing, axis=1)
            theirs = torch.nn.CrossEntropyLoss(
                None if given is None else torch.from_numpy(given),
                reduction=kind,
                label_smoothing=smoothing,
            )
            compare(lambda x, f=ours, t=target: f(x, Tensor(t)),
                    lambda x, f=theirs, t=target: f(x, torch.from_numpy(t)), x)  # fmt: skip
    ours_nll = nn.NLLLoss(weight, reduction=kind, axis=1)
    theirs_nll = torch.nn.NLLLoss(torch.from_numpy(weight), reduction=kind)
    compare(lambda x: ours_nll(x, targets), lambda x: theirs_nll(x, torch.from_numpy(targets)), x)


def test_activations() -> None:
    x = normal(9, 33) * 4
    t = torch.nn
    pairs: list[tuple[Any, Any]] = [
        (nn.ReLU(), t.ReLU()),
        (nn.LeakyReLU(0.2), t.LeakyReLU(0.2)),
        (nn.ELU(0.7), t.ELU(0.7)),
        (nn.GELU(), t.GELU()),
        (nn.GELU("tanh"), t.GELU("tanh")),
        (nn.SiLU(), t.SiLU()),
        (nn.Sigmoid(), t.Sigmoid()),
        (nn.Tanh(), t.Tanh()),
        (nn.Softmax(0), t.Softmax(0)),
        (nn.Flatten(0), t.Flatten(0)),
        (nn.Identity(), t.Identity()),
    ]
    for ours, theirs in pairs:
        compare(ours, theirs, x)


@pytest.mark.parametrize("shape", [(3, 32), (2, 8, 5), (2, 8, 3, 7)])
def test_group_norm(shape: tuple[int, ...]) -> None:
    compare(lambda x, w, b: tg.group_norm(x, 4, w, b),
            lambda x, w, b: torch.nn.functional.group_norm(x, 4, w, b),
            normal(*shape), normal(shape[1]), normal(shape[1]))  # fmt: skip
