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

    Args:
        optimizer: its rate at this moment is the one that is multiplied.
        lr_lambda: takes the step, from 0, and returns the factor.

    Returns:
        A `Scheduler`; call its `step()` after each `optimizer.step()`.

    Raises:
        ArgumentError: lr_lambda is not a function.

    Example:
        >>> optimizer = tg.optim.SGD([tg.ones(2, requires_grad=True)], lr=1.0)
        >>> scheduler = tg.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        >>> scheduler.step()
        >>> optimizer.lr
        0.5
    """
    check_function("LambdaLR", lr_lambda)
    return Scheduler(optimizer, _scaled, lr_lambda=lr_lambda)


def StepLR(optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> Scheduler:
    """Return a scheduler that multiplies the rate by `gamma` after each `step_size` steps.

    Args:
        optimizer: its rate at this moment is that of the first steps.
        step_size: number of steps with one rate, 1 or more.
        gamma: factor between rates, 0 or more.

    Returns:
        A `Scheduler`; call its `step()` after each `optimizer.step()`.

    Raises:
        ArgumentError: step_size is not an integer from 1, or gamma is negative or not finite.

    Example:
        >>> optimizer = tg.optim.SGD([tg.ones(2, requires_grad=True)], lr=1.0)
        >>> scheduler = tg.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        >>> for _ in range(2):
        ...     scheduler.step()
        >>> optimizer.lr
        0.5
    """
    check_integer("StepLR", "step_size", step_size, 1)
    check_range("StepLR", "gamma", gamma)
    return Scheduler(optimizer, _stepwise, step_size=step_size, gamma=gamma)


def _scaled(step: int, lr: float, lr_lambda: Callable[[int], float]) -> float:
    return lr * lr_lambda(step)


def _stepwise(step: int, lr: float, step_size: int, gamma: float) -> float:
    return lr * gamma ** (step // step_size)
