"""Scales of products in 8 bits: which layers have them, what they follow, and that they resume."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import autocast, no_grad
from tensorgrad.core import backend
from tensorgrad.errors import CheckpointError
from tensorgrad.models import GPT2, GPT2Config
from tensorgrad.optim import AdamW, Fp8Scales

TOKENS = (np.arange(8)[:, None] * 5 + np.arange(33) * 3) % 64
NAMES = [f"blocks.1.{name}.weight" for name in (
    "attention.qkv", "attention.proj", "feed_forward.up", "feed_forward.down"
)]  # fmt: skip


class Run:
    """A small GPT-2 in training."""

    def __init__(self, device: str, steps: int = 0, history: int = 16) -> None:
        tg.random.seed(0)
        model = GPT2(GPT2Config(vocab_size=64, context=32, layers=3, heads=2, width=32))
        self.model = model.to(device, "bfloat16")
        self.scales = Fp8Scales(self.model.named_parameters(), history=history)
        self.optimizer = AdamW(self.model.named_parameters(), lr=1e-2)
        self.batch = [backend.to_device(t, device) for t in (TOKENS[:, :-1], TOKENS[:, 1:])]
        self.losses = [self.step() for _ in range(steps)]

    def loss(self) -> Any:
        with autocast("fp8", scales=self.scales):
            return self.model(*self.batch)

    def step(self, factor: float = 1.0) -> float:
        self.optimizer.zero_grad()
        loss = self.loss()
        (loss * factor).backward()
        self.optimizer.step(1.0, scaler=self.scales)
        return float(loss.item())

    def parameters(self) -> bytes:
        return backend.to_numpy(self.optimizer.flat.data).tobytes()


def test_inner_blocks_compute_in_8_bits() -> None:
    run = Run("cpu", 1)
    assert list(run.scales.names) == NAMES
    few = GPT2(GPT2Config(vocab_size=64, context=32, layers=3, heads=2, width=24))
    assert Fp8Scales(few.named_parameters()).names == ()
    every = Fp8Scales(run.model.named_parameters(), lambda name, weight: True)
    assert "tokens.weight" in every.names


def test_it_learns_as_in_16_bits(device: str) -> None:
    run, plain = Run(device, 12), Run(device)
    losses = []
    for _ in range(12):
        plain.optimizer.zero_grad()
        loss = plain.model(*plain.batch)
        loss.backward()
        plain.optimizer.step(1.0)
        losses.append(float(loss.item()))
    assert losses[-1] < 0.6 * losses[0]
    np.testing.assert_allclose(run.losses, losses, rtol=0.02)
    assert run.losses[1:] != losses[1:]


def test_scales_bring_peaks_within_the_formats(device: str) -> None:
    run = Run(device, 3)
    state = run.scales.state_dict()
    assert state["updates"] == 3
    for scales, _, peaks in state["layers"].values():
        for scale, own, limit in zip(scales, peaks, (448, 448, 57344), strict=True):
            assert math.frexp(scale)[0] == 0.5
            assert limit / 2 < max(own) * scale <= limit
            assert sum(peak > 0 for peak in own) == 3


def test_only_steps_count(device: str) -> None:
    run = Run(device)
    with no_grad():
        before = run.loss().item()  # measured, as nothing is known
    assert run.step() == pytest.approx(before, abs=1e-3)
    state = run.scales.state_dict()
    with no_grad():
        run.loss()
    run.scales.reduce(lambda peaks: None)
    assert run.scales.state_dict() == state
    peaks = backend.to_numpy(run.scales.scale_on(run.optimizer.hyper))
    assert peaks == 1


def test_a_resumed_run_has_the_same_bits(device: str) -> None:
    whole, first, second = Run(device, 4, 2), Run(device, 2, 2), Run(device, 0, 2)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.model.load_state_dict(first.model.state_dict())
    second.scales.load_state_dict(json.loads(json.dumps(first.scales.state_dict())))
    assert [second.step(), second.step()] == whole.losses[2:]
    assert second.parameters() == whole.parameters()
    assert second.scales.state_dict() == whole.scales.state_dict()
    broken = first.scales.state_dict()
    changes: list[dict[str, Any]] = [
        {"updates": "x"}, {"layers": {}}, {"layers": {name: [] for name in NAMES}}
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(CheckpointError, match=r"Fp8Scales\.load_state_dict"):
            first.scales.load_state_dict({**broken, **change})
    assert first.scales.state_dict() == broken


def test_a_step_that_8_bits_would_hide_is_skipped(device: str) -> None:
    run = Run(device, 2)
    before, updates = run.parameters(), run.optimizer.state_dict()["step"]
    scales = {name: own[0] for name, own in run.scales.state_dict()["layers"].items()}
    run.step(math.inf)
    assert run.parameters() == before
    assert run.optimizer.state_dict()["step"] == updates
    assert {name: own[0] for name, own in run.scales.state_dict()["layers"].items()} == scales
    run.step()
    assert run.parameters() != before


def test_what_lies_beyond_the_format_is_counted(device: str) -> None:
    run = Run(device, 1)
    run.step(1024.0)
    clipped = run.scales.clipped()
    assert list(clipped) == NAMES
    assert all(dy > 0 for _, _, dy in clipped.values())
    run.scales.reduce(lambda peaks: peaks.__setitem__(slice(None), peaks + 1))
    assert run.scales.clipped() == clipped


@pytest.mark.gpu
def test_captured_steps_have_the_same_bits() -> None:
    eager, run = Run("cuda:0", 5), Run("cuda:0")
    step = tg.graph.capture(lambda: _captured(run))
    losses = [float(step().item()) for _ in range(5)]
    assert step.graphs == 1
    assert losses == eager.losses
    assert run.parameters() == eager.parameters()
    assert run.scales.state_dict() == eager.scales.state_dict()


def _captured(run: Run) -> Any:
    run.optimizer.zero_grad()
    loss = run.loss()
    loss.backward()
    run.optimizer.step(1.0, scaler=run.scales)
    return loss
