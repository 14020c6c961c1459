"""The settings that every training run has, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tensorgrad.amp import autocast
from tensorgrad.errors import ArgumentError
from tensorgrad.optim import AdamW, FlatParameters, LossScaler, schedule
from tensorgrad.optim.flat import NamedParameters
from tensorgrad.train.config import check, option

DTYPES = ("float32", "bfloat16", "bfloat16-parameters", "float16")
SCHEDULES = ("cosine", "linear", "constant", "inverse-square-root")


@dataclass(frozen=True)
class TrainSettings:
    """How to train: what a program adds is a subclass.

    Raises:
        ArgumentError: a setting is out of its range.
    """

    steps: int = option(1000, "optimizer steps in all", low=1, grows=True)
    batch: int = option(8, "sequences of a step, on all ranks together", low=1)
    accumulate: int = option(
        1,
        "parts that a batch is cut into, to need less memory; same result",
        low=1,
        by_ranks=True,
    )
    lr: float = option(1e-3, "highest learning rate", low=0)
    warmup: int | None = option(
        None, "steps in which the learning rate rises, if not a twentieth of all", low=0
    )
    schedule: str = option("cosine", "how the learning rate falls after that", choices=SCHEDULES)
    lr_end: float = option(0.1, "learning rate at the end, as a share of --lr", low=0, high=1)
    weight_decay: float = option(0.1, "decay of matrices, times the learning rate", low=0)
    beta1: float = option(0.9, "AdamW: decay of the mean gradient", low=0, high=1)
    beta2: float = option(0.95, "AdamW: decay of the mean square", low=0, high=1)
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip", low=0)
    dtype: str = option(
        "float32",
        "of matrix products; -parameters: parameters too, with float32 copies to update",
        choices=DTYPES,
    )
    nan: str = option(
        "stop",
        "a loss or gradient that is not finite: stop the run, or skip the step and count it",
        choices=("stop", "skip"),
        free=True,
    )
    seed: int = option(0, "chooses initial parameters, order of the data and dropout", low=0)
    evaluate_every: int = option(100, "steps between two evaluations", low=1)
    checkpoint_every: int = option(100, "steps between two checkpoints", low=1, free=True)
    keep: int = option(2, "newest checkpoints to keep, besides the best", low=1, free=True)
    log_every: int = option(
        1, "steps between two looks at the loss, each of which waits for the GPU", low=1, free=True
    )
    plot: bool = option(True, "draw loss.png at the end, where matplotlib is there", free=True)
    stop_after: int | None = option(
        None, "leave with a checkpoint after so many steps, as Ctrl-C does", low=1, saved=False
    )

    def __post_init__(self) -> None:
        check(self)
        if self.warmup_steps >= self.steps:
            raise ArgumentError(
                f"--warmup: got {self.warmup}, expected less than --steps, {self.steps}"
            )

    @property
    def warmup_steps(self) -> int:
        """In how many steps the learning rate rises."""
        return self.steps // 20 if self.warmup is None else self.warmup

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warmup = self.warmup_steps
        if self.schedule == "constant":
            return schedule.constant(step, self.lr, warmup)
        if self.schedule == "inverse-square-root":
            return schedule.inverse_square_root(step, self.lr, max(1, warmup))
        falling = schedule.cosine if self.schedule == "cosine" else schedule.linear
        return falling(step, self.lr, self.steps, warmup, self.lr * self.lr_end)

    def optimizer(self, parameters: FlatParameters | NamedParameters) -> AdamW:
        """Return AdamW over these parameters."""
        betas = (self.beta1, self.beta2)
        return AdamW(parameters, self.lr, betas, weight_decay=self.weight_decay)

    def scaler(self) -> LossScaler | None:
        """Return what float16 needs and the other types do not."""
        return LossScaler() if self.dtype == "float16" else None

    def precision(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes the context to compute the loss in."""
        if self.dtype in ("bfloat16", "float16"):
            return lambda: autocast(self.dtype)
        return nullcontext

    @property
    def parameter_dtype(self) -> str:
        """The type of the parameters."""
        return "bfloat16" if self.dtype == "bfloat16-parameters" else "float32"
