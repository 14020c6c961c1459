"""The training loop: accumulate, reduce, clip, update; evaluate, log, save; stop and resume.

The caller gives what differs between tasks: the loss of a batch, the batches from a step on, the
evaluation, and how several ranks share the work (strategy.py). A step is a function of the
parameters, the optimizer state, the generator state and the step number; a checkpoint holds these
four, so a stopped run resumes to the same bits.

Losses and norms stay on the device for `log_every` steps, so a GPU does not wait for the host in
between. The optimizer skips a step with NaN or infinity in its gradients, on the device.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import Any, NamedTuple

from tensorgrad import graph, random
from tensorgrad.core import backend, instrument
from tensorgrad.core.backend import Array
from tensorgrad.core.errors import ArgumentError, GraphError
from tensorgrad.io.files import finite
from tensorgrad.io.weights import check_savable
from tensorgrad.nn import Module, evaluating
from tensorgrad.optim import Fp8Scales, LossScaler, Optimizer
from tensorgrad.startup.interrupt import uninterrupted
from tensorgrad.train.callbacks import Callback
from tensorgrad.train.checkpoint import Checkpoint, check_state, list_checkpoints
from tensorgrad.train.run import Fingerprint, Outcome, TrainingRun
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.strategy import Batch, Count, Loss, OneProcess, Strategy, count_targets
from tensorgrad.train.times import Work, peak_of
from tensorgrad.train.user_file import NUMBERS, all_texts, wrong_return

_log = logging.getLogger(__name__)


class _PendingStep(NamedTuple):
    """A step whose values are still on the device."""

    step: int
    lr: float
    total: Array  # sum of the losses of this rank's parts
    norm: Array
    targets: Array  # that count, of this rank


def mean_loss(
    model: Module,
    loss: Loss,
    batches: Iterable[Batch],
    strategy: Strategy | None = None,
    count: Count = count_targets,
) -> float:
    """Return the mean of the loss over all targets of batches, without dropout or gradients.

    Args:
        model: its mode (train or eval) is the same afterwards.
        loss: takes the arrays of a batch, on the model's device, and returns their mean loss.
        batches: of this rank.
        strategy: of the ranks whose batches are averaged; default: this process alone.
        count: takes the arrays of a batch and returns how much its mean loss divides by.

    Returns:
        The mean, in the unit of the loss.

    Raises:
        ArgumentError: batches is empty on all ranks, or all its targets are ignored.

    Example:
        >>> model = tg.nn.Linear(2, 1, bias=False)
        >>> model.weight.data.fill(1)
        >>> loss = lambda x, y: tg.nn.functional.mse_loss(model(x), y)
        >>> batch = np.ones((4, 2), "float32"), np.zeros((4, 1), "float32")
        >>> tg.train.mean_loss(model, loss, [batch])  # (1 + 1)^2
        4.0
    """
    return measure_loss(model, loss, batches, strategy, count)["validation_loss"]


def measure_loss(
    model: Module,
    loss: Loss,
    batches: Iterable[Batch],
    strategy: Strategy | None = None,
    count: Count = count_targets,
) -> dict[str, float]:
    """Return the loss as `mean_loss` does, and the number of targets it is the mean of.

    Args:
        model: its mode (train or eval) is the same afterwards.
        loss: takes the arrays of a batch, on the model's device, and returns their mean loss.
        batches: of this rank.
        strategy: of the ranks whose batches are averaged; default: this process alone.
        count: takes the arrays of a batch and returns how much its mean loss divides by.

    Returns:
        "validation_loss" and "validation_tokens".

    Raises:
        ArgumentError: batches is empty on all ranks, or all its targets are ignored.

    Example:
        >>> model = tg.nn.Linear(2, 1, bias=False)
        >>> model.weight.data.fill(1)
        >>> loss = lambda x, y: tg.nn.functional.mse_loss(model(x), y)
        >>> batch = np.ones((4, 2), "float32"), np.zeros((4, 1), "float32")
        >>> tg.train.measure_loss(model, loss, [batch])
        {'validation_loss': 4.0, 'validation_tokens': 4}
    """
    device = next(model.parameters()).device
    strategy = strategy or OneProcess()
    moved = (_moved(_checked(batch), device) for batch in batches)
    with evaluating(model):
        total, targets = strategy.sum(strategy.add_losses(loss, moved, count))
    if targets == 0:
        raise ArgumentError(
            "mean_loss: batches is empty or has only ignored targets, expected some that count"
        )
    return {
        "validation_loss": total / targets,
        "validation_tokens": int(targets) if targets.is_integer() else targets,
    }


class Trainer(TrainingRun):
    """A training run in a folder.

        runs/gpt2-1/metrics.jsonl     losses and evaluations, equal in equal runs (see log.py)
        runs/gpt2-1/times.jsonl       seconds, speed and memory (see times.py)
        runs/gpt2-1/samples.jsonl     text that the model wrote, with `sample`
        runs/gpt2-1/environment.json  of the newest start (see environment.py)
        runs/gpt2-1/loss.png          a plot of the losses, with matplotlib
        runs/gpt2-1/checkpoints/      see checkpoint.py

    Args:
        model: its parameters must be those of the optimizer.
        optimizer: its learning rate is set before each step.
        loss: takes the arrays of a part of a batch, on the model's device, and returns the mean
            loss of its targets.
        batches: called with a step; yields the batch of that step, of the next, and so on.
        schedule: gives the learning rate of a step, counted from 0.
        settings: see TrainSettings.
        folder: of the run; created if missing.
        tokens_per_step: on all ranks together, for the speed.
        flops_per_token: of training, for the model FLOPs utilization; see times.py.
        steps_per_epoch: 0: the data has no epochs.
        evaluate: returns the values to log each `evaluate_every` steps; the checkpoint with the
            lowest "validation_loss" is the best.
        sample: returns a prompt and the text that the model continues it with, at the end of the
            run and each `sample_every` steps; called on all ranks. It may draw random numbers.
        sample_every: steps between samples; 0: at the end only.
        callbacks: called on the main rank; see Callback. `make_loggers(settings.loggers)` makes
            those of the settings.
        fingerprint: what a checkpoint must have been made with to fit this run, by group; for
            example {"model": {"layers": 2}, "data": {"key": "0f3a"}}; values as in JSON.
        strategy: how ranks train together.
        scaler: for float16.
        count: takes the arrays of a part and returns how much its mean loss divides by, by default
            its targets (`count_targets`): with class weights the sum of the targets' weights, or
            the rows where the loss is a mean of rows. So a step does not depend on how ranks and
            `micro_batches` divide a batch.
        graphs: steps of this number of shapes are captured (with `settings.capture`), those of
            further shapes run eagerly.

    Attributes:
        step: the number of steps done.
        sampled: the newest sample's text, None before the first.
        finished: whether all steps are done, or the patience of the settings is over.

    Raises:
        ArgumentError: a group of the fingerprint is not a mapping, or has another entry's name.

    Example:
        >>> from tensorgrad.train import Trainer, TrainSettings
        >>> settings = TrainSettings(steps=2, device="cpu", plot=False)
        >>> model, rate = tg.nn.Linear(3, 1), settings.learning_rate
        >>> optimizer = settings.optimizer(model.named_parameters())
        >>> loss = lambda x, y: tg.nn.functional.mse_loss(model(x), y)
        >>> def batches(step):
        ...     while True:
        ...         x = np.random.default_rng(step).random((8, 3), "float32")
        ...         yield x, x.sum(1, keepdims=True)
        ...         step += 1
        >>> outcome = Trainer(model, optimizer, loss, batches, rate, settings, "runs/8").run()
        >>> outcome.step, outcome.checkpoint.name
        (2, 'step-00000002')
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        loss: Loss,
        batches: Callable[[int], Iterator[Batch]],
        schedule: Callable[[int], float],
        settings: TrainSettings,
        folder: str | os.PathLike[str],
        *,
        tokens_per_step: int = 0,
        flops_per_token: float = 0.0,
        steps_per_epoch: int = 0,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        sample: Callable[[], tuple[str, str]] | None = None,
        sample_every: int = 0,
        callbacks: Sequence[Callback] = (),
        fingerprint: Fingerprint | None = None,
        strategy: Strategy | None = None,
        scaler: LossScaler | None = None,
        count: Count = count_targets,
        graphs: int = 8,
    ) -> None:
        if settings.patience and evaluate is None:
            raise ArgumentError(
                f"--patience: got {settings.patience} without evaluations, expected 0, or an "
                "`evaluate` that returns validation_loss"
            )
        super().__init__(
            model, optimizer, settings, folder, strategy, fingerprint, scaler, settings.keep
        )
        self.sampled: str | None = None
        self._loss, self._count = loss, count
        self._batches, self._schedule = batches, schedule
        self._evaluate, self._sampler, self._sample_every = evaluate, sample, sample_every
        peak = peak_of(self.device, settings.dtype, self.processes)
        self._work = Work(tokens_per_step, flops_per_token, peak, steps_per_epoch)
        self._callbacks = tuple(callbacks)
        self._captured: graph.Captured | None = None
        if settings.capture and self.device != "cpu" and self.strategy.captures:
            self._captured = graph.capture(self._whole_step, self.device, graphs)
        self._pending: list[_PendingStep] = []
        self._clipped: dict[str, int] = {}  # by weight

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or as many evaluations as `patience` had no lower loss."""
        # A longer run may have been resumed.
        return super().finished or self._patience.is_over(self.settings.patience)

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the whole state of a checkpoint; nothing changes if it does not fit.

        Raises:
            CheckpointError: it belongs to another model, vocabulary or data, or was made with
                settings that a resumed run must keep.
        """
        super().load(checkpoint)
        if isinstance(self.scaler, Fp8Scales):
            self._clipped = {name: sum(own) for name, own in self.scaler.clipped().items()}
        before, steps = checkpoint.settings("settings").get("steps"), self.settings.steps
        if isinstance(before, int) and before < steps and self.strategy.is_main:
            _log.warning(
                "%d steps instead of %d: the learning rate follows the longer schedule, %.3g at "
                "step %d after %.3g at step %d",
                *(steps, before, self._schedule(self.step), self.step + 1),
                *(self.optimizer.lr, self.step),
            )

    def stop(self) -> None:
        """End the run after the step in progress, with a checkpoint; a callback may call this.

        With several ranks it ends after the next step whose loss is logged, as all of them must.
        """
        self.signals.asked = True

    def run(self) -> Outcome:
        """Train until all steps are done or something asks to stop; write a checkpoint at the end.

        Raises:
            ArgumentError: a new run in a folder with checkpoints; batches end, or one is not a
                tuple of arrays; the loss is not a scalar tensor; a checkpoint could not be read
                again.
            DtypeError: a parameter or a value of the fingerprint is none that a checkpoint can
                hold.
            TrainingError: a loss or gradient is not finite, and `nan` is "stop".
            CheckpointError: a checkpoint cannot be written, or another process trains in the
                folder.
        """
        settings, sample_every = self.settings, self._sample_every if self._sampler else 0
        self._check_start()
        last = min(settings.steps, self.step + (settings.stop_after or settings.steps))
        logged = settings.log_every, settings.checkpoint_every, settings.evaluate_every
        log = {"samples": self._sampler is not None, "plot": settings.plot}
        with (
            self.session(self._work, **log, callbacks=self._callbacks),
            closing(self._checked_batches()) as batches,
        ):
            if self.step == 0:
                self._measure()
            if self.finished:
                self._sample()
            while self.step < last and not self._ends:
                with instrument.phase("step"):
                    self._train_step(next(batches))
                if self.step == last or self.signals.at_once or self._due(*logged, sample_every):
                    self._read()
                if self._due(settings.evaluate_every):
                    self._measure()
                if self._due(sample_every):
                    self._sample()
                ends = self.step == last or self._ends
                if ends or self._due(settings.checkpoint_every):
                    self.save(in_background=settings.background_checkpoints and not ends)
            return self.end()

    def _check_start(self) -> None:
        """Check before any work that checkpoints can be written, and replace none."""
        check_state(self.entries())
        check_savable({name: tensor.data for name, tensor in self.model.state_dict().items()})
        if self.step == 0 and list_checkpoints(self.checkpoints):
            raise ArgumentError(
                f"train: {self.folder} has checkpoints of a run, which a new one would replace, "
                "expected a new folder, or resume() first"
            )

    @property
    def _ends(self) -> bool:
        """Whether the run has finished, or all ranks know that something asked to stop it."""
        return self.finished or self.signals.ends

    def _due(self, *periods: int) -> bool:
        """Whether this step is the last or a multiple of a period, 0 of which is never due."""
        return self.finished or any(every > 0 and self.step % every == 0 for every in periods)

    def _checked_batches(self) -> Generator[Batch]:
        """Yield the batches of this step and of those after it."""
        batches: Any = None
        try:
            batches = self._batches(self.step)
            if not isinstance(batches, Iterator):
                raise wrong_return("train", "batches", batches, "an iterator over tuples of arrays")
            while True:
                with instrument.phase("data"):
                    batch = _checked(next(batches))
                yield batch
        except StopIteration as error:
            raise ArgumentError(
                f"train: batches ended after step {self.step}, expected one for each of the "
                f"{self.settings.steps} steps"
            ) from error
        finally:
            if isinstance(batches, Generator):
                batches.close()  # ends the read-ahead thread

    def _train_step(self, batch: Batch) -> None:
        """Take one step, completely or not at all; append its loss and norm to `_pending`."""
        before, generator = self.step, random.get_state()
        # Several processes end together, and in this block they may wait for each other.
        whole = uninterrupted() if self.strategy.alone else nullcontext()
        check_parts(len(batch[0]), self.settings.micro_batches, self.strategy.ranks)
        try:
            targets, arrays = count_targets(*batch), _moved(batch, self.device)
            self.optimizer.lr = self._schedule(self.step)
            total = self._backward(*arrays) if self._captured is None else None
            with whole:
                total, norm = self._replay(arrays) if total is None else (total, self._update())
                self.step += 1
                lr = self.optimizer.lr
                self._pending.append(_PendingStep(self.step, lr, total, norm, targets))
                self.measured = {}
        except BaseException:
            if self.step == before:
                random.set_state(generator)
            raise

    def _backward(self, *arrays: Array) -> Array:
        """Go forward and backward, reduce the gradients; return the sum of the losses of parts."""
        self.optimizer.zero_grad()
        parts = list(_parts(arrays, self.settings.micro_batches))
        return self.strategy.compute_gradients(self._loss, parts, self.scaler, self._count)

    def _update(self) -> Array:
        """Clip the gradients and update the parameters; return the gradient norm."""
        clip = self.settings.clip or math.inf
        norm = self.optimizer.step(clip, self.scaler, self.strategy.reduce_norm)
        self.strategy.after_step()
        assert norm is not None
        return norm

    def _whole_step(self, *arrays: Array) -> tuple[Array, Array]:
        return self._backward(*arrays), self._update()

    def _replay(self, arrays: Batch) -> tuple[Array, Array]:
        """Take a step as a CUDA graph; if that is not possible, eagerly from now on."""
        assert self._captured is not None
        generator = random.get_state()
        try:
            total, norm = self._captured(*arrays)
            return total, norm
        except (GraphError, MemoryError) as error:
            if isinstance(error, MemoryError) and not self.strategy.alone:
                raise  # other ranks may not have failed
            _log.info("steps are not captured: %s", error)
        self._captured = None
        self.strategy.reset()
        random.set_state(generator)
        return self._whole_step(*arrays)

    def _read(self) -> None:
        """Log the pending losses, and learn whether a rank was asked to stop."""
        pending, self._pending = self._pending, []
        losses = [float(step.total) / self.settings.micro_batches for step in pending]
        targets = [float(step.targets) for step in pending]
        flags = self.signals.flags()
        saving = None if self._saving is None else self._saving[1]
        writes = float(saving is not None and not saving.is_written)
        sums = iter(self.strategy.sum([*losses, *targets, writes, *flags]))
        totals, counts = ([next(sums) for _ in pending] for _ in range(2))
        writing = next(sums)
        self.signals.agree(list(sums))
        if not writing:
            self.finish_saving()
        for (step, lr, _, norm, _), total, count in zip(pending, totals, counts, strict=True):
            self._read_step(step, total / self.strategy.ranks if count else None, lr, float(norm))
        if self.strategy.is_main and isinstance(self.scaler, Fp8Scales):
            self._tell_clipped(self.scaler.clipped())
        if self.log is not None:
            self.log.times(self.step)

    def _tell_clipped(self, counts: Mapping[str, tuple[int, int, int]]) -> None:
        """Log how many elements were beyond the formats of 8 bits since the last time, if any."""
        new = {name: sum(own) - self._clipped.get(name, 0) for name, own in counts.items()}
        self._clipped = {name: sum(own) for name, own in counts.items()}
        if any(new.values()):
            most = max(new, key=lambda name: new[name])
            _log.info(
                "step %d: %d elements were clipped to 8 bits since the last time, %d with %s",
                *(self.step, sum(new.values()), new[most], most),
            )

    def _read_step(self, step: int, loss: float | None, lr: float, norm: float) -> None:
        """Log a step; stop or skip where a value is not finite, as a scaler does with norms."""
        self.skipped += not math.isfinite(norm)
        self.log_step(step, math.nan if loss is None else loss, lr, norm)
        if loss is None:
            _log.warning("step %d: the batch has no target that counts, and no loss", step)
        elif not math.isfinite(loss) or not (math.isfinite(norm) or self.scaler is not None):
            what = f"step {step}: the loss is {loss:g} and the gradient norm {norm:g}"
            if self.settings.nan != "skip":
                self.end_not_finite(what, ", or --nan skip to skip such steps")
            _log.warning("%s; the step was skipped, %d so far", what, self.skipped)

    def _measure(self) -> None:
        """Evaluate and log, once more where it ends the run; this does not count as training."""
        if self._evaluate is None:
            return
        with self.clock.paused(), instrument.phase("evaluation"):
            measured, ended = _numbers(self._evaluate()), self.finished
            if self.settings.patience and "validation_loss" not in measured:
                raise ArgumentError(
                    f"--patience: got {self.settings.patience} and an evaluation without "
                    "validation_loss, expected 0, or an evaluation that returns it"
                )
            if "validation_loss" in measured:
                total, ranks = self.strategy.sum([measured["validation_loss"], 1.0])
                self._patience.see(total / ranks)
            if self.finished and not ended:
                if self.strategy.is_main:
                    _log.info(
                        "step %d: the run ends early: evaluations without a validation loss below "
                        "%s: %d; see --patience",
                        *(self.step, self._patience.lowest, self._patience.waited),
                    )
                measured = _numbers(self._evaluate())
            self.log_evaluation(measured)

    def _sample(self) -> None:
        """Let the model write, without an effect on training; its time does not count."""
        if self._sampler is None or None in finite(self.measured).values():
            return  # a broken model would not sample
        generator = random.get_state()
        try:
            with self.clock.paused(), instrument.phase("sample"):
                found = self._sampler()
                if not (type(found) is tuple and len(found) == 2 and all_texts(found)):
                    raise wrong_return("train", "sample", found, "a prompt and the text after it")
                prompt, self.sampled = found
        except Exception:
            if self.saved_step != self.step and self.strategy.alone:
                self.save()  # a sample may need memory that training does not
            raise
        finally:
            random.set_state(generator)
        if self.log is not None:
            self.log.sample(self.step, prompt, self.sampled)


def _numbers(measured: Any) -> Mapping[str, float]:
    """Return what an evaluation returned; raise ArgumentError unless it is numbers by name."""
    fits = isinstance(measured, Mapping) and all_texts(measured)
    if not fits or not all(isinstance(value, NUMBERS) for value in measured.values()):
        raise wrong_return("train", "evaluate", measured, "numbers by name")
    if "step" in measured:
        raise ArgumentError("train: evaluate returned 'step', expected any other name")
    found: Mapping[str, float] = measured
    return found


def check_parts(rows: int, count: int, ranks: int) -> None:
    """Raise ArgumentError unless the rows of a rank divide into `count` equal parts."""
    if not rows:
        raise ArgumentError("train: a batch has 0 rows, expected one or more")
    if rows % count:
        each = f", {rows} on each of {ranks} ranks" if ranks > 1 else ""
        raise ArgumentError(
            f"train: micro_batches is {count} and a batch has {rows * ranks} rows{each}, "
            f"expected a divisor of {rows}"
        )


def _parts(batch: Batch, count: int) -> Iterator[Batch]:
    """Cut the rows of this rank into equal parts."""
    rows = len(batch[0])
    size = rows // count
    for start in range(0, rows, size):
        yield tuple(array[start : start + size] for array in batch)


def _moved(batch: Batch, device: str) -> Batch:
    return tuple(backend.to_device(array, device) for array in batch)


def _checked(batch: Batch) -> Batch:
    """Return a batch; raise ArgumentError unless it is a tuple of arrays."""
    if isinstance(batch, tuple | list) and batch and all(map(backend.is_array, batch)):
        return batch
    held = [type(array).__name__ for array in batch] if isinstance(batch, tuple | list) else ""
    raise ArgumentError(
        f"train: a batch is a {type(batch).__name__}{f' of {held}' if held else ''}, expected a "
        "tuple of NumPy arrays"
    )
