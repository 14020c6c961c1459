"""A task: what a run trains, and the program that trains it.

    class Parity(Task):
        \"""Learn whether the sum of some bits is odd.\"""

        Settings = ParitySettings                  # a dataclass with the options; see config.py

        def build(self): return nn.Linear(self.settings.bits, 2)
        def loss(self, bits, labels): return self.model(bits).cross_entropy(labels)
        def batches(self, step): ...               # yields tuples of NumPy arrays

`tensorgrad train FILE.py` runs the task of a file, `tensorgrad train NAME` one of the library's
(tasks.py). `train` is the same program for all of them, alone or on the ranks that mpirun starts.
Tests: tests/train/test_task.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tensorgrad import nn, random
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.tensor import Tensor
from tensorgrad.io.files import shown
from tensorgrad.models.restore import Config
from tensorgrad.optim import LossScaler
from tensorgrad.train import config
from tensorgrad.train.callbacks import Callback
from tensorgrad.train.checkpoint import list_checkpoints, run_checkpoint
from tensorgrad.train.folder import run_folder
from tensorgrad.train.loggers import make_loggers
from tensorgrad.train.loop import Trainer, measure_loss
from tensorgrad.train.options import in_options
from tensorgrad.train.run import Outcome, report_stop, resume_run, save_facts
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.sizes import check_sizes
from tensorgrad.train.strategy import Batch, OneProcess, Strategy, count_targets
from tensorgrad.train.user_file import NUMBERS, called, is_file, wrong_return

_log = logging.getLogger(__name__)


class Task:
    """The parts of a run: data, model, loss, evaluation and sample.

    A subclass has `build`, and `loss` and `batches` or loaders; the rest has defaults. Every rank
    has a task of its own, and calls the same methods in the same order.

    Args:
        settings: of the run.
        folder: of the run.
        strategy: how ranks train together.
        resuming: whether the folder holds a run to resume.

    Attributes:
        Settings: the class of the settings, whose fields are the options of the command.
        precision: makes the context in which to compute the loss, for --dtype.
        model: what `build` returned, on its device.
        training, validation: the loaders of a task that sets them in `read`, for `batches` and
            `measure_loss`.
        step: the number of steps done.
        finished: whether these are all, or the patience of the settings is over.
        first_step: the number of steps done when this process started.
        tokens_per_step: on all ranks together, for the speed; 0: not counted.
        flops_per_token: of training, for the model FLOPs utilization; 0: not counted.
        steps_per_epoch: 0: the data has no epochs.
        graphs: batches have this number of shapes, each of which is captured on a GPU.
        samples: whether `sample` is called.
        sample_every: steps between samples; 0: one at the end.

    Example:
        >>> from pathlib import Path
        >>> class Sums(tg.train.Task):
        ...     def build(self):
        ...         return tg.nn.Linear(3, 1)
        ...
        ...     def loss(self, x, y):
        ...         return tg.nn.functional.mse_loss(self.model(x), y)
        ...
        ...     def batches(self, step):
        ...         while True:
        ...             x = np.random.default_rng(step).random((8, 3), "float32")
        ...             yield x, x.sum(1, keepdims=True)
        ...             step += 1
        >>> task = Sums(Sums.Settings(), Path("runs/7"))
        >>> task.prepare("cpu")
        >>> task.loss(*next(task.batches(0))).shape
        ()
    """

    Settings: ClassVar[type[TrainSettings]] = TrainSettings
    model: Any
    training: Any
    validation: Any
    step: int = 0
    finished: bool = False
    first_step: int = 0
    tokens_per_step: int = 0
    flops_per_token: float = 0.0
    steps_per_epoch: int = 0
    graphs: int = 8
    samples: bool = False
    sample_every: int = 0

    def __init__(
        self, settings: Any, folder: Path, strategy: Strategy | None = None, resuming: bool = False
    ) -> None:
        self.settings, self.folder, self.resuming = settings, folder, resuming
        self.strategy = OneProcess() if strategy is None else strategy
        self.scaler: LossScaler | None = None  # made with the model
        self.precision: Callable[[], AbstractContextManager[None]] = settings.precision()

    def sizes(self) -> Config | None:
        """Return the sizes of the model as far as the settings say; None: they say nothing.

        Called before the data is read, to find bad sizes at once.
        """
        sizes: Config | None = self.settings.known_sizes()
        return sizes

    def read(self) -> None:
        """Read the data."""

    def build(self) -> nn.Module:
        """Return the model with its first parameters, on the CPU."""
        raise NotImplementedError

    def loss(self, *batch: Any) -> Tensor:
        """Return the mean loss of the targets of a part of a batch, on the model's device.

        By default the model returns it, of the arrays of the batch.
        """
        with self.precision():
            loss: Tensor = called("TASK", "forward", self.model.forward, [*map(Tensor, batch)])
        return loss

    def batches(self, step: int) -> Iterator[Batch]:
        """Yield this rank's rows of the batch of a step, of the next, and so on."""
        batches: Iterator[Batch] = self.training.iterate(step)
        return batches

    def measure_loss(self) -> dict[str, float]:
        """Return "validation_loss" in nats a target, and "validation_tokens", their number."""
        batches = self.validation.evaluation_batches()
        return measure_loss(self.model, self.loss, batches, self.strategy)

    def count(self, *batch: Any) -> Any:
        """Return how much the mean loss of a part divides by; see `Trainer`."""
        return count_targets(*batch)

    def evaluate(self) -> Mapping[str, float]:
        """Return the values to log; "validation_loss" chooses the best checkpoint."""
        return {}

    def sample(self) -> tuple[str, str]:
        """Return a prompt, and the text that the model continues it with."""
        raise NotImplementedError

    def fingerprint(self) -> Mapping[str, Mapping[str, Any]]:
        """Return what a checkpoint must have been made with to be resumed, by group."""
        return {}

    def save(self) -> None:
        """Write what the run needs beside its settings and checkpoints, such as a tokenizer."""

    def facts(self) -> Mapping[str, Any]:
        """Return what facts.json and reports say: values that settings leave open, counts."""
        return {}

    def about(self) -> str:
        """Return what to say of the data when the run starts."""
        return ""

    def end(self, outcome: Outcome) -> str:
        """Do what follows the last step; return the result of the run in words, or ""."""
        return ""

    @classmethod
    def measure(
        cls, settings: Any, path: Path, device: str, checkpoint: str = "best"
    ) -> Mapping[str, Any]:
        """Return what `evaluate` measures of a trained model, without writing anything.

        Args:
            settings: of the run, perhaps with other data.
            path: the folder of the run.
            device: "cpu", "cuda" or "cuda:N".
            checkpoint: "best" or "last".
        """
        task = cls(settings, path, resuming=True)
        task.prepare(device)
        task.model.load_state_dict(cls.trained_arrays(path, checkpoint))
        return task.assess()

    @classmethod
    def trained_arrays(cls, path: Path, checkpoint: str) -> Mapping[str, Any]:
        """Return the arrays of a trained model; arguments as for `measure`."""
        return run_checkpoint(path, checkpoint).arrays("model")

    def assess(self) -> Mapping[str, Any]:
        """Return what `measure` measures."""
        return self.evaluate()

    @property
    def resolved(self) -> Any:
        """The settings with what depends on the data, such as the steps of --epochs."""
        return self.settings.with_steps(self.steps_per_epoch)

    def prepare(self, device: str) -> None:
        """Read the data, and build the model on a device."""
        self.sizes()  # bad ones are found before much is read
        self.read()
        if type(self).batches is Task.batches and not hasattr(self, "training"):
            raise ArgumentError(
                f"TASK: {type(self).__name__} has no `batches`, expected the method, or a loader "
                "`training` that `read` makes"
            )
        random.seed(self.settings.seed)
        model = self.build()
        if not isinstance(model, nn.Module):
            raise wrong_return("TASK", "build", model, "a Module")
        self.model = model.to(device, self.settings.parameter_dtype)
        self.scaler = self.settings.scaler(self.model)
        self.precision = self.settings.precision(self.scaler)

    @property
    def begins(self) -> bool:
        """Whether the run begins at step 0: it has no checkpoint to resume."""
        return not (self.resuming and list_checkpoints(self.folder / "checkpoints"))

    def check_model(self, sizes: Config) -> None:
        """Raise TensorgradError where a model does not fit the machine or the run's checkpoints."""
        check_sizes(sizes, self.folder)


def make_trainer(task: Task, callbacks: Sequence[Callback] = ()) -> Trainer:
    """Return the trainer of a task that is prepared, at step 0."""

    def evaluate() -> Mapping[str, float]:
        task.step, task.finished = trainer.step, trainer.finished
        return task.evaluate()

    _check_attributes(task)
    settings = task.resolved
    trainer = Trainer(
        task.model,
        task.strategy.prepare(task.model, settings.optimizer),
        task.loss,
        task.batches,
        settings.learning_rate,
        settings,
        task.folder,
        tokens_per_step=task.tokens_per_step,
        flops_per_token=task.flops_per_token,
        steps_per_epoch=task.steps_per_epoch,
        evaluate=evaluate,
        sample=task.sample if task.samples else None,
        sample_every=task.sample_every,
        callbacks=callbacks,
        fingerprint=task.fingerprint(),
        strategy=task.strategy,
        scaler=task.scaler,
        count=task.count,
        graphs=task.graphs,
    )
    return trainer


def _check_attributes(task: Task) -> None:
    """Raise ArgumentError where what a user's task has set is of the wrong type."""
    if not isinstance(getattr(task, "model", None), nn.Module):
        raise ArgumentError(
            f"TASK: {type(task).__name__} has no model, expected that `prepare` makes one"
        )
    if task.samples and type(task).sample is Task.sample:
        raise ArgumentError(
            f"TASK: {type(task).__name__} has no `sample`, expected the method, or samples = False"
        )
    whole = "tokens_per_step", "steps_per_epoch", "graphs", "sample_every"
    for name in (*whole, "flops_per_token"):
        value, kinds = getattr(task, name), (int, np.integer) if name in whole else NUMBERS
        if not isinstance(value, kinds) or not 0 <= value < math.inf:
            expected = "a whole number" if name in whole else "a finite number"
            raise ArgumentError(
                f"TASK: {name} is {shown(value, 80)}, expected {expected}, 0 or more"
            )


def _text(found: Any, name: str) -> str:
    """Return what a method returned; raise ArgumentError unless it is a text."""
    if not isinstance(found, str):
        raise wrong_return("TASK", name, found, "a text")
    return found


def train(
    kind: type[Task],
    settings: TrainSettings,
    folder: Path,
    resuming: bool,
    device: str,
    strategy: Strategy | None = None,
) -> tuple[Outcome, str | None]:
    """Train a task, from step 0 or from the newest checkpoint.

    Args:
        kind: the class of the task.
        settings: an instance of `kind.Settings`.
        folder: of the run.
        resuming: whether the folder holds a run to resume.
        device: "cpu", "cuda" or "cuda:N".
        strategy: how ranks train together; default: this one alone.
    Returns:
        How the run ended, and the last sample of the model's text; None where there is none or the
        run was stopped.
    """
    began = time.perf_counter()
    if kind.build is Task.build:
        raise ArgumentError(
            f"TASK: {kind.__name__} has no `build`, expected the method that returns its model"
        )
    if settings.patience and kind.evaluate is Task.evaluate:
        raise ArgumentError(
            f"--patience: got {settings.patience} for {kind.__name__}, which measures no "
            "validation_loss, expected 0, or a task whose `evaluate` returns it"
        )
    strategy = OneProcess() if strategy is None else strategy
    with in_options(settings):
        settings.known_sizes()  # bad ones leave no folder
    with in_options(settings), run_folder(folder, strategy.is_main, None if resuming else settings):
        callbacks = make_loggers(settings.loggers) if strategy.is_main else []
        task = called("TASK", kind.__name__, kind, (settings, folder, strategy, resuming))
        if not hasattr(task, "strategy"):
            raise ArgumentError(
                f"TASK: {kind.__name__} has an __init__ that does not call that of Task"
            )
        task.prepare(device)
        trainer = make_trainer(task, callbacks)
        parameters = sum(tensor.size for tensor in task.model.parameters())
        if resuming:
            resume_run(trainer)
        task.first_step = trainer.step
        if strategy.is_main:
            config.save(task.settings, folder)
            task.save()
            facts, own = {"warmup": task.resolved.warmup_steps}, task.facts()
            if not isinstance(own, Mapping):
                raise wrong_return("TASK", "facts", own, "values by name")
            save_facts(folder, {**facts, "parameters": parameters, **own})
            about = filter(None, (f"{parameters:,} parameters", _text(task.about(), "about")))
            _log.info("%s: %s, on %s", folder, ", ".join(about), device)
        outcome = trainer.run()
        if not outcome.finished:
            if strategy.is_main:
                file = getattr(task.settings, "model", "")
                file = file if is_file(file) else ""
                report_stop(outcome, trainer, file)
            return outcome, None
        task.step, task.finished = outcome.step, True
        result = _text(task.end(outcome), "end")
        if strategy.is_main:
            speed = f", {outcome.tokens_per_second:,.0f} tokens/s" if task.tokens_per_step else ""
            spent = f"{time.perf_counter() - began:.0f} s{speed}; all in {folder}"
            _log.info("%s", f"{result}; {spent}" if result else spent)
        return outcome, trainer.sampled
