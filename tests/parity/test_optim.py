"""Optimizers, clipping and schedules against PyTorch, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad import optim
from tests.optim import toy

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

SHAPES = {name: shape for name, shape in toy.SHAPES.items() if name != "empty"}
SHAPES["experts"] = 3, 5, 7
STEPS = 12
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adafactor", {}),
    ("Adafactor", {"lr": 0.05, "weight_decay": 0.1, "beta2_decay": -0.5}),
    ("Adafactor", {"lr": 0.1, "eps": (1e-4, 0.5), "d": 2.0}),
    ("AdamW", {}),
    ("AdamW", {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "betas": (0.0, 0.5), "eps": 0.01, "weight_decay": 0.0}),
]


def peers(dtype: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return equal parameters, ours and PyTorch's."""
    ours = toy.parameters(dtype, shapes=SHAPES)
    theirs = {
        name: torch.nn.Parameter(torch.tensor(tensor.numpy().copy()))
        for name, tensor in ours.items()
    }
    return ours, theirs


def set_gradients(ours: dict[str, Any], theirs: dict[str, Any], step: int) -> None:
    toy.set_gradients(ours, step)
    for name, parameter in theirs.items():
        parameter.grad = torch.tensor(np.array(ours[name].grad))


def compare(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    for name, tensor in ours.items():
        expected = theirs[name].detach().numpy()
        np.testing.assert_allclose(tensor.numpy(), expected, tolerance, tolerance, err_msg=name)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: str(value))
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-13), (np.float32, 1e-6)])
def test_steps(kind: str, options: dict[str, Any], dtype: Any, tolerance: float) -> None:
    ours, theirs = peers(dtype)
    optimizer = getattr(optim, kind)(ours.items(), **options)
    peer = getattr(torch.optim, kind)(theirs.values(), **options)
    for step in range(STEPS):
        set_gradients(ours, theirs, step)
        optimizer.step()
        peer.step()
        compare(ours, theirs, tolerance)


@pytest.mark.parametrize("in_step", [False, True])
def test_decay_groups_and_clipping(in_step: bool) -> None:
    ours, theirs = peers(np.float32)
    rule = optim.decays_matrices
    optimizer = optim.AdamW(ours.items(), lr=0.01, weight_decay=0.1, decay=rule)
    groups = [
        {"params": [p for p in theirs.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    peer = torch.optim.AdamW(groups, lr=0.01)
    for step in range(STEPS):
        set_gradients(ours, theirs, step)
        expected = torch.nn.utils.clip_grad_norm_(theirs.values(), 10.0)
        if in_step:
            norm = optimizer.step(max_norm=10.0)
        else:
            norm = optim.clip_grad_norm(optimizer.flat, 10.0)
            optimizer.step()
        peer.step()
        assert norm is not None
        assert float(norm) == pytest.approx(float(expected), rel=1e-6)
        compare(ours, theirs, 1e-6)


@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_clip_grad_norm(max_norm: float) -> None:
    ours, theirs = peers(np.float64)
    flat = optim.FlatParameters(ours.items())
    set_gradients(ours, theirs, 0)
    expected = torch.nn.utils.clip_grad_norm_(theirs.values(), max_norm)
    assert float(optim.clip_grad_norm(flat, max_norm)) == pytest.approx(float(expected), rel=1e-13)
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor.grad, theirs[name].grad.numpy(), rtol=1e-12)


def test_cosine_schedule() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    peer = torch.optim.SGD([parameter], lr=0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(peer, T_max=40, eta_min=0.01)
    for step in range(40):
        rate = optim.schedule.cosine(step, 0.3, 40, minimum=0.01)
        assert rate == pytest.approx(peer.param_groups[0]["lr"], rel=1e-9)
        peer.step()
        schedule.step()


def test_loss_scaling() -> None:
    """The scale moves as PyTorch's does."""
    peer = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    theirs = torch.nn.Parameter(torch.ones(3))
    peer_optimizer = torch.optim.SGD([theirs], lr=0.1)
    ours = toy.parameters(shapes={"w": (3,)})
    ours["w"].data[...] = 1
    optimizer = optim.SGD(ours.items(), lr=0.1)
    scaler = optim.LossScaler(64.0, interval=2)
    for finite in (True, False, True, True, True, False, False, True, True):
        loss = peer.scale((theirs * (1.0 if finite else float("inf"))).sum())
        peer_optimizer.zero_grad()
        loss.backward()
        peer.step(peer_optimizer)
        peer.update()
        optimizer.zero_grad()
        scaler.scale(toy.total(ours["w"] * (1.0 if finite else float("inf")))).backward()
        optimizer.step(scaler=scaler)
        assert scaler.state_dict()["scale"] == peer.get_scale()
        np.testing.assert_allclose(ours["w"].numpy(), theirs.detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize("match", [False, True])
def test_muon(match: bool) -> None:
    """PyTorch orthogonalizes in bfloat16."""
    ours, theirs = peers(np.float32)
    ours = {name: each for name, each in ours.items() if each.ndim == 2}
    theirs = {name: theirs[name] for name in ours}
    optimizer = optim.Muon(ours.items(), lr=0.01, match_adamw=match)
    how = "match_rms_adamw" if match else "original"
    peer = torch.optim.Muon(theirs.values(), lr=0.01, adjust_lr_fn=how)
    for step in range(3):
        set_gradients(ours, theirs, step)
        optimizer.step()
        peer.step()
    compare(ours, theirs, 2e-3)
