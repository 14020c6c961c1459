"""Optimizers, schedules, clipping and scaling together train a small network in every precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, checkpoint, nn
from tensorgrad.amp import autocast
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16, float16, float32, float64
from tensorgrad.optim import SGD, Adam, AdamW, LossScaler, Optimizer, schedule

STEPS = 100
Kind = Callable[[Any], Optimizer]


class Network(nn.Module):
    """Three arms from two coordinates; the hidden layer is computed again in backward."""

    def __init__(self) -> None:
        self.first = nn.Linear(2, 64)
        self.norm = nn.LayerNorm(64)
        self.last = nn.Linear(64, 3)
        rng = np.random.default_rng(1)
        for layer, scale in ((self.first, 3.0), (self.last, 0.1)):
            layer.weight.data[...] = scale * rng.standard_normal(layer.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(lambda x: tg.gelu(self.norm(self.first(x))))(x)
        y: Tensor = self.last(hidden)
        return y


def spiral(device: str, dtype: Any) -> tuple[Tensor, Tensor]:
    """Return points on three arms of a spiral, and which arm each is on."""
    rng = np.random.default_rng(0)
    arm = np.arange(240) % 3
    radius = rng.uniform(0.1, 1, 240)
    angle = 3 * radius + arm * 2 * np.pi / 3 + rng.normal(0, 0.05, 240)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(dtype)
    return Tensor(backend.to_device(points, device)), Tensor(backend.to_device(arm, device))


def losses(
    kind: Kind, device: str, dtype: Any, cast: str | None = None, scaler: LossScaler | None = None
) -> tuple[float, float]:
    """Train; return the first and the last loss."""
    x, arm = spiral(device, dtype)
    model = Network().to(device, dtype)
    optimizer = kind(model.named_parameters())
    peak, found = optimizer.lr, []
    for step in range(STEPS):
        optimizer.lr = schedule.cosine(step, peak, STEPS, warmup=10)
        optimizer.zero_grad()
        with autocast(cast) if cast else nullcontext():
            loss = tg.cross_entropy(model(x), arm)
        (scaler.scale(loss) if scaler else loss).backward()
        optimizer.step(max_norm=1.0, scaler=scaler)
        found.append(float(loss.item()))
    return found[0], found[-1]


KINDS: dict[str, Kind] = {
    "sgd": lambda p: SGD(p, lr=1.0, momentum=0.9, nesterov=True),
    "adam": lambda p: Adam(p, lr=0.05),
    "adamw": lambda p: AdamW(p, lr=0.05),
}


@pytest.mark.parametrize(
    ("kind", "dtype", "cast", "scale"),
    [
        ("sgd", float32, None, None),
        ("sgd", bfloat16, None, None),
        ("adam", float32, None, None),
        ("adamw", float64, None, None),
        ("adamw", float32, None, None),
        ("adamw", float32, "bfloat16", None),
        ("adamw", bfloat16, None, None),
        ("adamw", float32, "float16", 2.0**28),  # overflows at first
        ("adamw", float16, None, 2.0**28),
    ],
    ids=str,
)
def test_every_precision_learns(
    kind: str, dtype: Any, cast: str | None, scale: float | None, device: str
) -> None:
    scaler = LossScaler(scale) if scale else None
    first, last = losses(KINDS[kind], device, dtype, cast, scaler)
    assert first > 0.9
    assert last < 0.2
    if scaler is not None and scale is not None:
        assert scaler.state_dict()["scale"] < scale, "the toy overflowed nothing"
