"""Learning-rate schedules: functions of the step. Tests: tests/optim/test_schedule.py.

    optimizer.lr = schedule.cosine(step, lr=6e-4, steps=10_000, warmup=500)

or, with an object that counts the steps,

    scheduler = Scheduler(optimizer, schedule.cosine, lr=6e-4, steps=10_000, warmup=500)
    ...
    optimizer.step()
    scheduler.step()

Steps count from 0. All schedules begin with linear warmup, lr * (step + 1) / warmup while
step < warmup, so the first step already changes the parameters.
"""

from __future__ import annotations

import math

from tensorgrad.core.checks import check_between, check_number, check_range
from tensorgrad.core.errors import ArgumentError


def constant(step: int, lr: float, warmup: int = 0) -> float:
    """Return `lr`, after warmup.

    Args:
        step: from 0.
        lr: learning rate after warmup.
        warmup: number of warmup steps.

    Returns:
        The learning rate of the step.

    Raises:
        ArgumentError: an argument is outside its range.

    Example:
        >>> from tensorgrad.optim import schedule
        >>> [schedule.constant(step, lr=1.0, warmup=2) for step in range(4)]
        [0.5, 1.0, 1.0, 1.0]
    """
    _check("constant", step, lr, warmup)
    return _warm(step, lr, warmup) if step < warmup else lr


def linear(step: int, lr: float, steps: int, warmup: int = 0, minimum: float = 0.0) -> float:
    """Return a rate that falls linearly from `lr` at the end of warmup to `minimum`.

    lr + (minimum - lr) * min(1, (step - warmup) / (steps - warmup))

    Args:
        step: from 0.
        lr: the highest rate.
        steps: the step from which the rate is `minimum`; above `warmup`.
        warmup: number of warmup steps.
        minimum: the final rate.

    Returns:
        The learning rate of the step.

    Raises:
        ArgumentError: an argument is outside its range.

    Example:
        >>> from tensorgrad.optim import schedule
        >>> [schedule.linear(step, lr=1.0, steps=4) for step in range(5)]
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return _falling("linear", step, lr, steps, warmup, minimum, 1.0)


def cosine(step: int, lr: float, steps: int, warmup: int = 0, minimum: float = 0.0) -> float:
    """Return a rate that falls along half a cosine from `lr` at the end of warmup to `minimum`.

    minimum + (lr - minimum) * (1 + cos(pi * min(1, (step - warmup) / (steps - warmup)))) / 2

    Args:
        step: from 0.
        lr: the highest rate.
        steps: the step from which the rate is `minimum`; above `warmup`.
        warmup: number of warmup steps.
        minimum: the final rate.

    Returns:
        The learning rate of the step.

    Raises:
        ArgumentError: an argument is outside its range.

    Source: Loshchilov and Hutter 2016, arXiv:1608.03983, eq. 5, without restarts.

    Example:
        >>> from tensorgrad.optim import schedule
        >>> [round(schedule.cosine(step, lr=1.0, steps=4), 3) for step in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
    """
    _check("cosine", step, lr, warmup, steps, minimum)
    if step < warmup:
        return _warm(step, lr, warmup)
    fraction = (1 + math.cos(math.pi * _progress(step, steps, warmup))) / 2
    return minimum + (lr - minimum) * fraction


def wsd(
    step: int,
    lr: float,
    steps: int,
    warmup: int = 0,
    minimum: float = 0.0,
    decay_fraction: float = 0.2,
) -> float:
    """Return a rate that stays `lr` after warmup, and falls linearly at the end: WSD.

    begin = max(warmup, steps * (1 - decay_fraction)); lr until then, and from there
    lr + (minimum - lr) * min(1, (step - begin) / (steps - begin))

    Warmup, stable, decay. While it is stable the rate depends on no length of the run, so a
    checkpoint from before `begin` may be trained for any number of steps, as if from the start.

    Args:
        step: from 0.
        lr: the highest rate.
        steps: the step from which the rate is `minimum`; above `warmup`.
        warmup: number of warmup steps.
        minimum: the final rate.
        decay_fraction: the fraction of the steps in which the rate falls, from 0, at once, to 1.

    Returns:
        The learning rate of the step.

    Raises:
        ArgumentError: an argument is outside its range.

    Source: Hu et al. 2024, arXiv:2404.06395, section 4; a linear decay of a fifth of the steps:
        Hägele et al. 2024, arXiv:2405.18392, section 3.

    Example:
        >>> from functools import partial
        >>> from tensorgrad.optim import schedule
        >>> rate = partial(schedule.wsd, lr=1.0, steps=8, warmup=2, decay_fraction=0.25)
        >>> [rate(step) for step in range(9)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    return _falling("wsd", step, lr, steps, warmup, minimum, decay_fraction)


def _falling(
    name: str, step: int, lr: float, steps: int, warmup: int, minimum: float, decay_fraction: float
) -> float:
    """Return a rate that falls linearly in the last fraction of the steps."""
    _check(name, step, lr, warmup, steps, minimum)
    check_between(name, "decay_fraction", decay_fraction, 0, 1)
    if step < warmup:
        return _warm(step, lr, warmup)
    begin = max(warmup, steps - steps * decay_fraction)
    if step < begin or begin >= steps:
        return lr if step < steps else minimum
    return lr + (minimum - lr) * _progress(step, steps, begin)


def inverse_square_root(step: int, lr: float, warmup: int) -> float:
    """Return a rate that falls with the inverse square root of the step after warmup.

    lr * sqrt(warmup / (step + 1))

    Args:
        step: from 0.
        lr: the highest rate, reached at the end of warmup.
        warmup: number of warmup steps, at least 1.

    Returns:
        The learning rate of the step.

    Raises:
        ArgumentError: an argument is outside its range.

    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 3, lr = (C * warmup)^(-1/2).

    Example:
        >>> from tensorgrad.optim import schedule
        >>> [schedule.inverse_square_root(step, lr=1.0, warmup=4) for step in (0, 3, 15, 63)]
        [0.25, 1.0, 0.5, 0.25]
    """
    _check("inverse_square_root", step, lr, warmup)
    if warmup < 1:
        raise ArgumentError(f"inverse_square_root: warmup is {warmup}, expected at least 1")
    return _warm(step, lr, warmup) if step < warmup else lr * math.sqrt(warmup / (step + 1))


def _warm(step: int, lr: float, warmup: int) -> float:
    return lr * (step + 1) / warmup


def _progress(step: int, steps: int, begin: float) -> float:
    return min(1.0, (step - begin) / (steps - begin))


def _check(
    name: str, step: int, lr: float, warmup: int, steps: float = math.inf, minimum: float = 0.0
) -> None:
    check_range(name, "step", step)
    check_range(name, "lr", lr)
    check_range(name, "warmup", warmup)
    check_range(name, "minimum", minimum)
    check_number(name, "steps", steps)
    if not steps > warmup:
        raise ArgumentError(f"{name}: steps is {steps}, expected more than warmup, {warmup}")
