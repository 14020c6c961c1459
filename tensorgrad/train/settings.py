"""The settings of every training run, and the schedule, optimizer and precision they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from tensorgrad.amp import AUTOCAST, FP8, autocast
from tensorgrad.core.errors import ArgumentError
from tensorgrad.models.language_model import model_of
from tensorgrad.nn import Module
from tensorgrad.optim import (
    SGD,
    Adafactor,
    AdamW,
    FlatParameters,
    Fp8Scales,
    Lion,
    LossScaler,
    Muon,
    Optimizer,
    decays_matrices,
    in_blocks,
    schedule,
)
from tensorgrad.optim.flat import NamedParameters
from tensorgrad.train.config import check, documented, option
from tensorgrad.train.folder import free_folder
from tensorgrad.train.strategy_settings import StrategySettings

DTYPES = ("float32", "tf32", "bfloat16", "bfloat16-parameters", "float16", FP8)
LOGGERS = ("tensorboard", "wandb", "trackio", "mlflow")  # see loggers.py
LARGEST_BATCH = 10**9  # whose row numbers fit into a memory
_WIDE = ("float32", "tf32")
SCHEDULES = ("cosine", "linear", "wsd", "constant", "inverse-square-root")
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": AdamW,
    "muon": Muon,
    "lion": Lion,
    "adafactor": Adafactor,
    "sgd": SGD,
}
# Defaults of those whose options are not AdamW's. Lion: Chen et al. 2023, arXiv:2302.06675. Muon:
# Jordan et al. 2024, https://kellerjordan.github.io/posts/muon. Adafactor: Shazeer and Stern 2018,
# arXiv:1804.04235, as PyTorch has it. SGD: He et al. 2015, arXiv:1512.03385, section 3.4.
_USUAL: dict[str, dict[str, float]] = {
    "lr": {"lion": 1e-4, "adafactor": 0.01, "sgd": 0.1},
    "weight_decay": {"lion": 1.0, "adafactor": 0.0, "sgd": 1e-4},
    "beta1": {"lion": 0.9},
    "beta2": {"lion": 0.99},
    "momentum": {"muon": 0.95, "sgd": 0.9},
}


_WEIGHT_DECAY = "weight decay of matrices, times --lr a step"
_BETA2 = "decay of the mean squared gradient; with lion of the mean gradient"


def by_optimizer(name: str, adamw: float | None = None) -> tuple[str, dict[str, float]]:
    """Return the argument `by` of an option whose default depends on --optimizer.

    Args:
        name: of the option.
        adamw: its default with AdamW, and with Muon, whose lr and weight decay are the same; None:
            they lack it.
    """
    same = {} if adamw is None else {"adamw": adamw, "muon": adamw}
    return "optimizer_name", {**same, **_USUAL[name]}


def has_narrow_products(dtype: str) -> bool:
    """Whether matrix products of one of DTYPES have 16-bit operands."""
    return dtype not in _WIDE


class WarmupSettings:
    """The fields of all settings with a warmup."""

    steps: int
    warmup: int | None

    def check_warmup(self) -> None:
        """Raise ArgumentError unless the warmup ends before the last step."""
        if self.warmup_steps >= self.steps:
            raise ArgumentError(
                f"--warmup: got {self.warmup}, expected less than --steps, {self.steps}"
            )

    @property
    def warmup_steps(self) -> int:
        """The number of steps in which the learning rate rises."""
        return self.steps // 20 if self.warmup is None else self.warmup

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options that were given, and those that follow from them: here none."""
        return given


@documented
@dataclass(frozen=True)
class TrainSettings(StrategySettings, WarmupSettings):
    """How to train; the options of a program are a subclass.

    Raises:
        ArgumentError: a setting is out of its range.

    Example:
        >>> settings = tg.train.TrainSettings(steps=100, lr=0.001)
        >>> [round(settings.learning_rate(step), 6) for step in (0, 4, 99)]  # 5 % are warmup
        [0.0002, 0.001, 0.0001]
    """

    task: str = option("run", "what to train", choices=("run",))
    out: str = option("", "folder of the run", shown="the first new runs/TASK-N", free=True)
    steps: int = option(1000, "optimizer steps", low=1, grows=True)
    batch: int = option(8, "sequences of a step, on all ranks together", low=1, high=LARGEST_BATCH)
    micro_batches: int = option(
        1, "parts of a batch, computed one by one to save memory", low=1, by_ranks=True
    )
    lr: float = option(None, "peak learning rate", low=0, by=by_optimizer("lr", 1e-3))
    warmup: int | None = option(None, "warmup steps", shown="5 % of --steps", low=0)
    schedule: str = option("cosine", "how the learning rate decays", choices=SCHEDULES)
    lr_end: float = option(0.1, "final learning rate, as a fraction of --lr", low=0, high=1)
    decay_fraction: float | None = option(
        None, "last fraction of the steps, in which the rate of wsd falls", low=0, high=1,
        by=("schedule", {"wsd": 0.2}),
    )  # fmt: skip
    optimizer_name: str = option(
        "adamw",
        "what updates the parameters; muon: the matrices of blocks, by steps as large as AdamW's, "
        "which updates the rest",
        choices=tuple(OPTIMIZERS),
    )
    weight_decay: float = option(None, _WEIGHT_DECAY, low=0, by=by_optimizer("weight_decay", 0.1))
    beta1: float | None = option(
        None, "decay of the mean gradient", low=0, high=1, by=by_optimizer("beta1", 0.9)
    )
    beta2: float | None = option(None, _BETA2, low=0, high=1, by=by_optimizer("beta2", 0.95))
    momentum: float | None = option(
        None, "decay of the sum of gradients", low=0, high=1, by=by_optimizer("momentum")
    )
    clip: float = option(1.0, "clip the gradient norm to this; 0: no clipping", low=0)
    dtype: str = option(
        "float32",
        "dtype of matrix products; tf32: float32 that tensor cores round to 10 bits of mantissa; "
        "bfloat16-parameters: of the parameters too, with float32 master weights; fp8: likewise, "
        "and the linear layers of inner blocks multiply in 8 bits, on Hopper",
        choices=DTYPES,
    )
    grad_dtype: str = option(
        "float32",
        "dtype of gradients; bfloat16 takes half the memory and traffic, for --dtype "
        "bfloat16-parameters in one process",
        choices=("float32", "bfloat16"),
    )
    nan: str = option(
        "stop",
        "when a loss or gradient is not finite: stop the run, or skip the step and count it",
        choices=("stop", "skip"),
        free=True,
    )
    seed: int = option(0, "seed of parameters, data order and dropout", low=0)
    patience: int = option(
        0,
        "evaluations without a new lowest validation loss after which the run ends; 0: never",
        low=0,
        free=True,
    )
    evaluate_every: int = option(100, "steps between evaluations", low=1)
    checkpoint_every: int = option(100, "steps between checkpoints", low=1, free=True)
    keep: int = option(2, "newest checkpoints to keep, besides the best", low=1, free=True)
    background_checkpoints: bool = option(
        False,
        "write checkpoints in a thread while training continues, from a copy in host memory",
        free=True,
    )
    log_every: int = option(
        1, "steps between logged losses; logging waits for the GPU", low=1, free=True
    )
    plot: bool = option(
        True, "update loss.png during training, if matplotlib is installed", free=True
    )
    report: bool = option(False, "write report.html at the end", free=True)
    loggers: tuple[str, ...] = option((), "additional loggers", choices=LOGGERS, free=True)
    device: str = option("auto", "cpu, cuda, cuda:N, or auto: a GPU if there is one", free=True)
    capture: bool = option(
        True, "on a GPU, run steps as CUDA graphs, one for each shape of batches", free=True
    )
    stop_after: int | None = option(
        None, "exit with a checkpoint after this number of steps, as on Ctrl-C", low=1, saved=False
    )

    def __post_init__(self) -> None:
        check(self)
        self.check_strategy()
        self.check_warmup()
        if self.grad_dtype != "float32" and self.dtype != "bfloat16-parameters":
            raise ArgumentError(
                f"--grad-dtype: got {self.grad_dtype} with --dtype {self.dtype}, expected "
                "float32, or --dtype bfloat16-parameters"
            )
        if self.dtype == FP8 and (self.pp > 1 or self.tp > 1 or self.parallel == "zero3"):
            raise ArgumentError(
                f"--dtype: got {FP8} with --pp {self.pp}, --tp {self.tp} and --parallel "
                f"{self.parallel}, expected data parallel ranks that have all parameters"
            )

    @property
    def folder(self) -> Path:
        """The folder of a new run."""
        return Path(self.out) if self.out else free_folder(f"runs/{self.task}")

    def check_batch(self, ranks: int) -> None:
        """Check that a batch divides into micro-batches of equal size.

        Args:
            ranks: the number of data parallel ranks.
        Raises:
            ArgumentError: the batch is not a multiple of them.
        """
        if self.batch % ranks:
            raise ArgumentError(
                f"--batch: got {self.batch}, expected a multiple of the {ranks} data parallel ranks"
            )
        rows = self.batch // ranks
        if rows % self.micro_batches:
            whose = "of a data parallel rank" if ranks > 1 else "of a batch"
            raise ArgumentError(
                f"--micro-batches: got {self.micro_batches}, expected a divisor of the {rows} "
                f"sequences {whose}"
            )

    def with_steps(self, epoch: int) -> Self:
        """Return the settings with the number of steps, where an epoch has `epoch` of them."""
        return self

    def known_sizes(self) -> Any:
        """Return the sizes of the model as far as the settings say them; None: they do not."""
        return None

    @property
    def model_class(self) -> Any:
        """The class of the language model; None: the settings do not say, or train another kind."""
        return model_of(self.known_sizes())

    def sizes(self, config: type[Any]) -> dict[str, Any]:
        """Return those fields of a model's config, a dataclass, that are settings too."""
        names = (field.name for field in fields(config))
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warmup = self.warmup_steps
        if self.schedule == "constant":
            return schedule.constant(step, self.lr, warmup)
        if self.schedule == "inverse-square-root":
            return schedule.inverse_square_root(step, self.lr, max(1, warmup))
        end = self.lr * self.lr_end
        if self.schedule == "wsd":
            assert self.decay_fraction is not None
            return schedule.wsd(step, self.lr, self.steps, warmup, end, self.decay_fraction)
        falling = schedule.cosine if self.schedule == "cosine" else schedule.linear
        return falling(step, self.lr, self.steps, warmup, end)

    def optimizer(self, parameters: FlatParameters | NamedParameters) -> Optimizer:
        """Return the optimizer of these parameters."""
        parameters = with_gradients_of(self.grad_dtype, parameters)
        options: dict[str, Any] = {"weight_decay": self.weight_decay, "decay": decays_matrices}
        if self.momentum is not None:
            options["momentum"] = self.momentum
        if self.beta1 is not None:
            options["betas"] = self.beta1, self.beta2
        if self.optimizer_name == "muon":
            options |= {"matrices": in_blocks, "match_adamw": True}
        return OPTIMIZERS[self.optimizer_name](parameters, self.lr, **options)

    def scaler(self, model: Module | None = None) -> LossScaler | None:
        """Return a loss scaler for float16, the scales of a model for fp8; else None."""
        if self.dtype == FP8 and model is not None:
            return Fp8Scales(model.named_parameters())
        return LossScaler() if self.dtype == "float16" else None

    def precision(
        self, scaler: LossScaler | None = None
    ) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes the autocast context to compute the loss in.

        Args:
            scaler: from `scaler`, whose scales fp8 takes; None measures each tensor.
        """
        if self.dtype in AUTOCAST:
            scales = scaler if self.dtype == FP8 else None
            return lambda: autocast(self.dtype, scales=scales)
        return nullcontext

    @property
    def parameter_dtype(self) -> str:
        """The dtype of the parameters."""
        return "bfloat16" if self.dtype in ("bfloat16-parameters", FP8) else "float32"


@documented
@dataclass(frozen=True)
class EpochSettings(TrainSettings):
    """Settings of a run that is as long as its epochs, unless steps are given.

    Raises:
        ArgumentError: a setting is out of its range.
    """

    epochs: int = option(10, "passes over the training data", low=1, grows=True)
    steps: int = option(0, "optimizer steps; 0: those of --epochs", low=0, grows=True)
    warmup: int | None = option(
        None, "warmup steps, fewer than all", shown="the preset's; with --steps, 5 % of them", low=0
    )
    weight_decay: float = option(None, _WEIGHT_DECAY, low=0, by=by_optimizer("weight_decay", 0.01))

    def __post_init__(self) -> None:
        check(self)
        if self.steps:
            super().__post_init__()

    @staticmethod
    def with_preset(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that were given, and those of a preset that fit them.

        Optimizers other than AdamW have their own learning rate, and a warmup suits the epochs.

        Args:
            preset: options by name, tuned with AdamW.
            given: the options of the command line.
        """
        usual = by_optimizer("lr", 0.0)[1].get(given.get("optimizer_name", "adamw")) == 0.0
        unfit = () if usual else ("lr", "weight_decay")
        found = {name: value for name, value in preset.items() if name not in unfit}
        return {**found, **({"warmup": None} if given.get("steps") else {}), **given}

    def check_batch(self, ranks: int) -> None:
        """Check nothing: where rows do not divide, loaders of epochs add padding."""

    def with_steps(self, epoch: int) -> Self:
        """Return the settings with the number of steps, where an epoch has `epoch` of them."""
        steps = self.steps or self.epochs * epoch
        warmup = None if self.warmup is None else min(self.warmup, steps - 1)
        return replace(self, steps=steps, warmup=warmup)


def with_gradients_of(
    dtype: str, parameters: FlatParameters | NamedParameters
) -> FlatParameters | NamedParameters:
    """Return parameters for an optimizer, flat where their gradients are not float32.

    Raises:
        ArgumentError: data parallel ranks have laid them out, which add gradients in float32.
    """
    if dtype == "float32":
        return parameters
    if isinstance(parameters, FlatParameters):
        raise ArgumentError(
            f"--grad-dtype: got {dtype} with data parallel ranks, expected float32, in which they "
            "add gradients"
        )
    return FlatParameters(parameters, grad_dtype=dtype)
