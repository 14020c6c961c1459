"""The training step that is profiled and timed: that of the training loop, with any strategy.

Tests: tests/bench/test_steps.py, tests/profile/test_step.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from tensorgrad import nn, random
from tensorgrad.core import backend, instrument
from tensorgrad.core.backend import Array
from tensorgrad.core.tensor import Tensor
from tensorgrad.optim import LossScaler, Optimizer
from tensorgrad.train.language import LanguageSettings, with_options
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.strategy import Batch, Loss, OneProcess, Strategy
from tensorgrad.train.user_file import made


def synchronize(device: str) -> None:
    """Wait for a GPU; nothing on a CPU."""
    if device != "cpu":
        backend.cupy.cuda.runtime.deviceSynchronize()


class TrainingStep:
    """A model, its optimizer and a batch; called, it trains one step and returns the loss.

    Args:
        settings: whose optimizer, clipping and scaler count.
        model: on its device and in its dtype.
        loss: returns the mean loss of the arrays of a micro-batch.
        parts: the micro-batches of this rank; a call may give one instead.
        strategy: how ranks train together; None: this process alone.
        lazy: whether the optimizer is made by the first step, or by whoever takes it before; a step
            to capture has one already, as a graph keeps the arrays of the parameters.
        scaler: that the loss was made with; default: that of the settings.
    """

    def __init__(
        self,
        settings: TrainSettings,
        model: Any,
        loss: Loss,
        parts: Sequence[Batch] = (),
        strategy: Strategy | None = None,
        lazy: bool = False,
        scaler: LossScaler | None = None,
    ) -> None:
        self.settings, self.model, self.loss, self.parts = settings, model, loss, parts
        self.strategy = OneProcess() if strategy is None else strategy
        self._scaler = settings.scaler(model) if scaler is None else scaler
        if not lazy:
            _ = self.optimizer

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer, made on first use."""
        optimizer = self.strategy.prepare(self.model, self.settings.optimizer)
        self.strategy.begin(0, [])
        return optimizer

    def __call__(self, *batch: Any) -> Tensor:
        """Train one step, on a batch or on the parts."""
        with instrument.phase("step"):
            self.optimizer.zero_grad()
            parts = [batch] if batch else self.parts
            loss = self.strategy.compute_gradients(self.loss, parts, self._scaler)
            self.update()
            self.strategy.after_step()
        return Tensor(loss)

    def update(self) -> None:
        """Clip the gradients and take a step of the optimizer."""
        clip = self.settings.clip or math.inf
        self.optimizer.step(clip, self._scaler, self.strategy.reduce_norm)

    def phases(self) -> tuple[Callable[[], Tensor], Callable[[Tensor], None], Callable[[], None]]:
        """Return forward, backward and update of a step in one process, to call in this order."""
        self.optimizer.zero_grad()
        scale = (lambda loss: loss) if self._scaler is None else self._scaler.scale
        forward = partial(self.loss, *self.parts[0])
        return forward, lambda loss: scale(loss).backward(), self.update


def language_step(
    settings: LanguageSettings,
    config: Any,
    device: str,
    strategy: Strategy | None = None,
    lazy: bool = False,
) -> TrainingStep:
    """Return the training step of a new language model on random tokens.

    Args:
        settings: of training; data, sizes and schedule do not matter.
        config: the sizes of the model.
        device: "cpu", "cuda" or "cuda:N".
        strategy, lazy: as for `TrainingStep`.
    Raises:
        ArgumentError: the batch does not divide into micro-batches of equal size.
    """
    strategy = OneProcess() if strategy is None else strategy
    settings.check_batch(strategy.ranks)
    random.seed(settings.seed)
    with nn.init.on(device):
        model: Any = made(settings.model_class, config)
    model = with_options(model.to(device, settings.parameter_dtype), settings)
    scaler = settings.scaler(model)
    precision = settings.precision(scaler)

    def loss(x: Array, y: Array) -> Tensor:
        with precision():
            value: Tensor = model(Tensor(x), Tensor(y))
            return value

    micro_batches = settings.micro_batches
    shape = micro_batches, 2, settings.batch // strategy.ranks // micro_batches, config.context
    rng = np.random.default_rng(settings.seed + strategy.rank)
    parts = [
        tuple(backend.to_device(tokens, device) for tokens in part)
        for part in rng.integers(0, config.vocab_size, shape, np.int32)
    ]
    return TrainingStep(settings, model, loss, parts, strategy, lazy, scaler)
