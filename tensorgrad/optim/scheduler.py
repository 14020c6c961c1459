"""A learning-rate schedule that counts its steps. Tests: tests/optim/test_schedule.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensorgrad.core.checks import check_function
from tensorgrad.core.errors import CheckpointError
from tensorgrad.io.display import call_text
from tensorgrad.optim.optimizer import Optimizer


class Scheduler:
    """Set an optimizer's learning rate as a schedule says, and count the steps.

    Call `step()` after each `optimizer.step()`; outside of a captured step.

    Args:
        optimizer: its rate is set at once to that of step 0.
        schedule: (step, lr=..., **options) -> learning rate, as those of `optim.schedule`.
        lr: the highest rate; default: the optimizer's.
        options: further arguments of the schedule.

    Attributes:
        last_step: the step whose rate the optimizer has, from 0.

    Raises:
        ArgumentError: the schedule is not a function, or refuses its options.

    Example:
        >>> from tensorgrad.optim import SGD, Scheduler, schedule
        >>> optimizer = SGD([tg.ones(2, requires_grad=True)], lr=1.0)
        >>> scheduler = Scheduler(optimizer, schedule.linear, steps=4)
        >>> for _ in range(3):
        ...     scheduler.step()
        >>> optimizer.lr
        0.25
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Callable[..., float],
        lr: float | None = None,
        **options: Any,
    ) -> None:
        check_function("Scheduler", schedule)
        self._optimizer, self._schedule = optimizer, schedule
        self._options = {"lr": optimizer.lr if lr is None else lr, **options}
        self.last_step = 0
        self._apply()

    def __repr__(self) -> str:
        name = getattr(self._schedule, "__name__", type(self._schedule).__name__)
        settings = {"last_step": self.last_step, **self._options}
        return call_text(self, name.lstrip("_"), **settings)

    def step(self) -> None:
        """Set the rate of the next step."""
        self.last_step += 1
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """Return {"step": ...}; the options are those of the constructor."""
        return {"step": self.last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a step, and set its rate.

        Raises:
            CheckpointError: the state is not from `state_dict`; nothing changes.
        """
        step = state.get("step") if isinstance(state, Mapping) and len(state) == 1 else None
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(
                f"Scheduler.load_state_dict: got {state!r:.80}, expected a step from 0"
            )
        self.last_step = step
        self._apply()

    def _apply(self) -> None:
        self._optimizer.lr = self._schedule(self.last_step, **self._options)
