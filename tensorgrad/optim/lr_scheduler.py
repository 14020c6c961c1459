"""PyTorch's names of learning-rate schedules: each is a `Scheduler`.

Tests: tests/optim/test_schedule.py.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorgrad.core.checks import check_function, check_integer, check_range
from tensorgrad.optim.optimizer import Optimizer
from tensorgrad.optim.scheduler import Scheduler

__all__ = ["LambdaLR", "StepLR"]


def LambdaLR(optimizer: Optimizer, lr_lambda: Callable[[int], float]) -> Scheduler:
    """Return a scheduler whose rate is that of the optimizer, times `lr_lambda(step)`.

    Raises:
        ArgumentError: lr_lambda is not a function.
    """
    check_function("LambdaLR", lr_lambda)
    return Scheduler(optimizer, _scaled, lr_lambda=lr_lambda)


def StepLR(optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> Scheduler:
    """Return a scheduler that multiplies the rate by `gamma` after each `step_size` steps.

    Raises:
        ArgumentError: step_size is not an integer from 1, or gamma is negative or not finite.
    """
    check_integer("StepLR", "step_size", step_size, 1)
    check_range("StepLR", "gamma", gamma)
    return Scheduler(optimizer, _stepwise, step_size=step_size, gamma=gamma)


def _scaled(step: int, lr: float, lr_lambda: Callable[[int], float]) -> float:
    return lr * lr_lambda(step)


def _stepwise(step: int, lr: float, step_size: int, gamma: float) -> float:
    return lr * gamma ** (step // step_size)
