"""A tiny training step, and recordings made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad import Tensor
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.optim import AdamW
from tensorgrad.profile import Profiler
from tensorgrad.profile.recording import Kernel, Range, Recording

TINY = GPT2Config(vocab_size=64, context=8, layers=2, heads=2, width=16)


class Step:
    """A tiny GPT-2 that trains on one batch."""

    def __init__(self) -> None:
        self.model = GPT2(TINY)
        self.optimizer = AdamW(self.model.named_parameters(), 1e-3)
        self.tokens = np.random.default_rng(0).integers(0, 64, (2, 8))

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(Tensor(self.tokens), Tensor(self.tokens)).backward()
        self.optimizer.step(1.0)

    def recorded(self, steps: int = 1, **options: Any) -> Profiler:
        with Profiler(self.model, self.optimizer, **options) as profiler:
            for _ in range(steps):
                with profiler.step():
                    self()
        return profiler


def made(*ranges: Range, kernels: tuple[Kernel, ...] = (), **facts: Any) -> Recording:
    """Return a recording from 0 to the end of the last range or kernel."""
    end = max([*(each.end for each in ranges), *(each.end for each in kernels)])
    return Recording(ranges, (0, end), kernels, **facts)
