"""The training loop: accumulate, reduce, clip, update; evaluate, log, save; stop and resume.

The caller gives what differs between tasks: the loss of a batch, the batches from a step on, the
evaluation, and how several processes share the work (ranks.py). A step is a function of the
parameters, the optimizer state, the generator state and the step number; a checkpoint holds these
four, so a stopped run resumes to the same bits.

Losses and norms stay on the device for `log_every` steps, so a GPU does not wait for the host in
between. The optimizer skips a step with NaN or infinity in its gradients, on the device.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from tensorgrad import backend, graph, random, ranges
from tensorgrad.backend import Array
from tensorgrad.errors import ArgumentError, CheckpointError, GraphError, TrainingError
from tensorgrad.files import finite, make_folder
from tensorgrad.interrupt import uninterrupted
from tensorgrad.nn import Module, evaluating
from tensorgrad.optim import LossScaler, Optimizer
from tensorgrad.train.background import CPU_FRACTION, BackgroundSaving, HostMemory
from tensorgrad.train.callbacks import Callback
from tensorgrad.train.checkpoint import (
    RESERVED,
    Checkpoint,
    Saving,
    check_state,
    list_checkpoints,
    prune_checkpoints,
    step_of,
)
from tensorgrad.train.folder import hold
from tensorgrad.train.patience import Patience
from tensorgrad.train.progress import ProgressBar
from tensorgrad.train.run_log import RunLog
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.state import load_state, state_of
from tensorgrad.train.stop_signals import STOPS, StopSignals
from tensorgrad.train.strategy import Batch, Count, Loss, OneProcess, Strategy, count_targets
from tensorgrad.train.times import Clock, Work, peak_of
from tensorgrad.weights import check_savable

_log = logging.getLogger(__name__)
# The entries of a checkpoint's state beside those of `belongs_to`.
_ENTRIES = (
    *(*RESERVED, "settings", "ranks", "scaler", "generator", "metrics", "patience", "optimizer"),
)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: the number of steps done in all.
        finished: whether these are all steps of the run, or its patience was over.
        skipped: the number of steps of this process skipped for NaN or infinity.
        tokens_per_second: of this process's steps, without evaluation and checkpoints.
        checkpoint: the newest one.
        stopped_by: the signal that stopped the run before its end, or None: all steps were done,
            those of `stop_after`, or a callback has called `Trainer.stop`.
    """

    step: int
    finished: bool
    skipped: int
    tokens_per_second: float
    checkpoint: Path | None
    stopped_by: signal.Signals | None = None

    @property
    def status(self) -> int:
        """The exit status of the program: 0, or 128 + the signal, as in a shell."""
        return 0 if self.stopped_by is None else 128 + self.stopped_by


class _PendingStep(NamedTuple):
    """A step whose values are still on the device."""

    step: int
    lr: float
    total: Array  # of the losses of this rank's parts
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
        strategy: the ranks whose batches are averaged; default: this process alone.
        count: takes the arrays of a batch and returns how much its mean loss divides by.
    Raises:
        ArgumentError: batches is empty on all ranks, or all its targets are ignored.
    """
    return measure_loss(model, loss, batches, strategy, count)["validation_loss"]


def measure_loss(
    model: Module,
    loss: Loss,
    batches: Iterable[Batch],
    strategy: Strategy | None = None,
    count: Count = count_targets,
) -> dict[str, float]:
    """Return "validation_loss", see `mean_loss`, and "validation_tokens", how many it is of."""
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


class Trainer:
    """One training run in a folder.

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
        belongs_to: what a checkpoint must have been made with to fit this run, by group; for
            example {"model": {"layers": 2}, "data": {"key": "0f3a"}}; values as in JSON.
        strategy: the processes that train together.
        scaler: for float16.
        count: takes the arrays of a part and returns how much its mean loss divides by, by default
            its targets (`count_targets`): with class weights the sum of the targets' weights, or
            the rows where the loss is a mean of rows. So a step does not depend on how ranks and
            `micro_batches` divide a batch.
        graphs: steps of this number of shapes are captured (with `settings.capture`), those of
            further shapes run eagerly.
    Raises:
        ArgumentError: a group of `belongs_to` is not a mapping, or has the name of another entry.
    Attributes:
        step: the number of steps done.
        sampled: the newest sample's text, None before the first.
        finished: whether all steps are done, or the patience of the settings is over.
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
        belongs_to: Mapping[str, Mapping[str, Any]] | None = None,
        strategy: Strategy | None = None,
        scaler: LossScaler | None = None,
        count: Count = count_targets,
        graphs: int = 8,
    ) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.settings, self.folder = settings, Path(folder)
        self.step = 0
        self.sampled: str | None = None
        self._loss, self._count = loss, count
        self._batches, self._schedule = batches, schedule
        self._evaluate, self._belongs_to = evaluate, dict(belongs_to or {})
        self._strategy = OneProcess() if strategy is None else strategy
        self._tokens_per_step, self._flops_per_token = tokens_per_step, flops_per_token
        self._steps_per_epoch = steps_per_epoch
        self._sampler, self._sample_every = sample, sample_every
        self._callbacks = tuple(callbacks)
        self._device = backend.device_of(optimizer.hyper)
        self._captured: graph.Captured | None = None
        if settings.capture and self._device != "cpu" and self._strategy.captures:
            self._captured = graph.capture(self._whole_step, self._device, graphs)
        self._patience = Patience()
        self._measured: dict[str, float] = {}  # by the evaluation after `step`, if there was one
        self._pending: list[_PendingStep] = []
        self._skipped = 0
        self._saved: Path | None = None
        self._saving: tuple[int, BackgroundSaving] | None = None  # the step, and its checkpoint
        self._memory = HostMemory()  # for copies, while it runs
        self._log: RunLog | None = None  # while it runs, on the main rank
        self._asked = False  # whether `stop` was called here
        self._ending = False  # whether a callback has failed or stopped the run, as all ranks know
        for name, group in self._belongs_to.items():
            if name in _ENTRIES or not isinstance(group, Mapping):
                raise ArgumentError(
                    f"Trainer: belongs_to has {name!r:.80} with {group!r:.80}, expected mappings "
                    f"by other names than {', '.join(_ENTRIES)}"
                )

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or as many evaluations as `patience` had no lower loss."""
        # A longer run may have been resumed.
        return self.step >= self.settings.steps or self._patience.is_over(self.settings.patience)

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.folder / "checkpoints"

    def resume(self) -> bool:
        """Load the newest intact checkpoint of the folder.

        Returns:
            False if there is none: the run starts at step 0.
        Raises:
            CheckpointError: it belongs to another model, vocabulary or data or was made with other
                settings, all are damaged, or the system cannot read one.
        """
        found = self._strategy.load_latest(self.checkpoints)
        if found is None:
            return False
        self.load(found)
        self._saved = found.path
        if self._strategy.is_main:
            _log.info("resuming from step %d of %d: %s", self.step, self.settings.steps, found.path)
            self._tell_longer_schedule(found)
        return True

    def _tell_longer_schedule(self, checkpoint: Checkpoint) -> None:
        """Log how the learning rate continues where the run gets more steps than it had."""
        before, steps = checkpoint.settings("settings").get("steps"), self.settings.steps
        if isinstance(before, int) and before < steps:
            _log.warning(
                "%d steps instead of %d: the learning rate follows the longer schedule, %.3g at "
                "step %d after %.3g at step %d",
                *(steps, before, self._schedule(self.step), self.step + 1),
                *(self.optimizer.lr, self.step),
            )

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the whole state of a checkpoint; nothing changes if it does not fit.

        Raises:
            CheckpointError: it belongs to another model, vocabulary or data, or was made with
                settings that a resumed run must keep.
        """
        metrics = checkpoint.mapping("metrics")
        patience = Patience.load(checkpoint.state.get("patience"))
        load_state(
            checkpoint,
            self.model,
            self.optimizer,
            self.settings,
            self._strategy,
            self._belongs_to,
            self.scaler,
        )
        self._measured, self._patience = dict(metrics), patience
        self.step = checkpoint.step

    def stop(self) -> None:
        """End the run after the step in progress, with a checkpoint; a callback may call this.

        With several ranks it ends after the next step whose loss is logged, as all of them must.
        """
        self._asked = True

    def run(self) -> Outcome:
        """Train until all steps are done or something asks to stop; write a checkpoint at the end.

        Raises:
            ArgumentError: a new run in a folder with checkpoints; batches end, or one is not a
                tuple of arrays; the loss is not a scalar tensor; a checkpoint could not be read
                again.
            DtypeError: a parameter or a value of `belongs_to` is none that a checkpoint can hold.
            TrainingError: a loss or gradient is not finite, and `nan` is "stop".
            CheckpointError: a checkpoint cannot be written, or another process trains in the
                folder.
        """
        settings, shown = self.settings, self._strategy.is_main
        check_state(self._state())
        check_savable({name: tensor.data for name, tensor in self.model.state_dict().items()})
        if self.step == 0 and list_checkpoints(self.checkpoints):
            raise ArgumentError(
                f"train: {self.folder} has checkpoints of a run, which a new one would replace, "
                "expected a new folder, or resume() first"
            )
        first, end = self.step, settings.steps
        if settings.stop_after is not None:
            end = min(end, first + settings.stop_after)
        self._synchronize()
        self._clock = Clock()
        self._progress = ProgressBar(
            settings.steps, first, self._tokens_per_step, self._clock, shown
        )
        self._asked = self._ending = False
        with StopSignals() as interrupts, ExitStack() as stack, self._progress:
            if shown:
                make_folder(self.folder)
                stack.enter_context(hold(self.folder))
                prune_checkpoints(self.checkpoints, first, settings.keep)
                with self._clock.paused():
                    self._log = stack.enter_context(self._run_log())
            stack.push(self._end_saving)
            batches = self._batches(first)
            if isinstance(batches, Generator):
                stack.enter_context(closing(batches))  # ends the read-ahead thread
            if first == 0:
                self._measure()
            if self.finished:
                self._sample()
            stopped_by = None
            reading = [settings.log_every, settings.checkpoint_every, settings.evaluate_every]
            reading += [self._sample_every] if self._sampler is not None else []
            while self.step < end and stopped_by is None and not self._ends_early:
                with ranges.phase("step"):
                    self._train_step(self._next(batches))
                asked = interrupts.received
                # Several processes agree, so that all of them stop at the same step.
                at_once = self.step == end or (
                    self._strategy.alone and (asked is not None or self._asked)
                )
                if at_once or any(map(self._due, reading)):
                    stopped_by = self._read(asked)
                if self._due(settings.evaluate_every):
                    self._measure()
                if self._due(self._sample_every):
                    self._sample()
                ends = self.step == end or stopped_by is not None or self._ends_early
                if ends or self._due(settings.checkpoint_every):
                    self._save(in_background=settings.background_checkpoints and not ends)
            outcome = Outcome(
                self.step,
                self.finished,
                self._skipped,
                self._progress.tokens_per_second,
                self._saved,
                None if self.finished else stopped_by,
            )
            if self._log is not None:
                self._log.end(outcome)
        return outcome

    def _run_log(self) -> RunLog:
        """Return the files and callbacks of this run."""
        settings, processes = self.settings, max(self._strategy.processes, self._strategy.ranks)
        peak = peak_of(self._device, settings.dtype, processes)
        work = Work(self._tokens_per_step, self._flops_per_token, peak, self._steps_per_epoch)
        return RunLog(
            self.folder,
            self.step,
            self._clock,
            work,
            self._device,
            processes,
            samples=self._sampler is not None,
            plot=settings.plot,
            trainer=self,
            callbacks=self._callbacks,
        )

    @property
    def _ends_early(self) -> bool:
        """Whether the run has finished, or all ranks know that a callback failed or stopped it."""
        return self.finished or self._ending or (self._strategy.alone and self._asks_to_end)

    @property
    def _asks_to_end(self) -> bool:
        """Whether a callback has failed or stopped the run here."""
        return self._asked or (self._log is not None and self._log.failure is not None)

    def _synchronize(self) -> None:
        """Broadcast the main rank's state, and give each rank its stream of random numbers.

        Each rank makes its own settings, model and data: they must be equal.
        """
        tensors = self.model.state_dict().values()
        arrays = [*(tensor.data for tensor in tensors), *self.optimizer.state.values()]
        names = [each.name for each in fields(TrainSettings) if each.name != "device"]
        facts = {name: getattr(self.settings, name) for name in names}
        for group, found in self._belongs_to.items():
            facts.update((f"{group} {name}", value) for name, value in found.items())
        self._strategy.begin(self.step, arrays, facts)
        random.set_state({**random.get_state(), "stream": self._strategy.rank})

    def _due(self, every: int) -> bool:
        """Whether this step is the last or, unless `every` is 0, a multiple of it."""
        return self.finished or (every > 0 and self.step % every == 0)

    def _next(self, batches: Iterator[Batch]) -> Batch:
        """Return the batch of the next step."""
        try:
            with ranges.phase("data"):
                return _checked(next(batches))
        except StopIteration as error:
            raise ArgumentError(
                f"train: batches ended after step {self.step}, expected one for each of the "
                f"{self.settings.steps} steps"
            ) from error

    def _train_step(self, batch: Batch) -> None:
        """Take one step, completely or not at all; append its loss and norm to `_pending`."""
        before = self.step
        generator = random.get_state()
        # Several processes end together, and in this block they may wait for each other.
        whole = uninterrupted() if self._strategy.alone else nullcontext()
        check_parts(len(batch[0]), self.settings.micro_batches, self._strategy.ranks)
        try:
            targets, arrays = count_targets(*batch), _moved(batch, self._device)
            self.optimizer.lr = self._schedule(self.step)
            if self._captured is not None:
                with whole:
                    self._done(*self._replay(arrays), targets)
            else:
                total = self._gradients(*arrays)
                with whole:
                    self._done(total, self._update(), targets)
        except BaseException:
            if self.step == before:
                random.set_state(generator)
            raise

    def _replay(self, arrays: Batch) -> tuple[Array, Array]:
        """Take a step as a CUDA graph; if that is not possible, eagerly from now on."""
        assert self._captured is not None
        generator = random.get_state()
        try:
            total, norm = self._captured(*arrays)
            return total, norm
        except (GraphError, MemoryError) as error:
            if isinstance(error, MemoryError) and not self._strategy.alone:
                raise  # other ranks may not have failed
            _log.info("steps are not captured: %s", error)
        self._captured = None
        self._strategy.reset()
        random.set_state(generator)
        return self._whole_step(*arrays)

    def _whole_step(self, *arrays: Array) -> tuple[Array, Array]:
        return self._gradients(*arrays), self._update()

    def _gradients(self, *arrays: Array) -> Array:
        """Compute the gradients of a batch; return the sum of the losses of its parts."""
        self.optimizer.zero_grad()
        parts = list(_parts(arrays, self.settings.micro_batches))
        return self._strategy.compute_gradients(self._loss, parts, self.scaler, self._count)

    def _update(self) -> Array:
        """Update the parameters; return the gradient norm."""
        clip = self.settings.clip or math.inf
        norm = self.optimizer.step(clip, self.scaler, self._strategy.reduce_norm)
        self._strategy.after_step()
        assert norm is not None
        return norm

    def _done(self, total: Array, norm: Array, targets: Array) -> None:
        """Count a step."""
        self.step += 1
        self._pending.append(_PendingStep(self.step, self.optimizer.lr, total, norm, targets))
        self._measured = {}

    def _read(self, asked: signal.Signals | None) -> signal.Signals | None:
        """Log the pending losses; return the signal that asked any rank to stop, or None."""
        pending, self._pending = self._pending, []
        losses = [float(each.total) / self.settings.micro_batches for each in pending]
        targets = [float(each.targets) for each in pending]
        writes = self._saving is not None and not self._saving[1].is_written
        flags = [writes, self._asks_to_end, *(asked is each for each in STOPS)]
        sums = iter(self._strategy.sum([*losses, *targets, *map(float, flags)]))
        totals, targets = ([next(sums) for _ in pending] for _ in range(2))
        writing, endings, *counts = sums
        self._ending = endings > 0
        if not writing:
            self._finish_saving()
        for (step, rate, _, device_norm, _), total, counted in zip(
            pending, totals, targets, strict=True
        ):
            loss = total / self._strategy.ranks if counted else math.nan
            norm = float(device_norm)
            self._skipped += not math.isfinite(norm)
            if self._log is not None:
                self._log.step(step, {"loss": loss, "lr": rate, "gradient_norm": norm})
            if counted:
                self._check_finite(step, loss, norm)
            else:
                _log.warning("step %d: the batch has no target that counts, and no loss", step)
            self._progress.update(step, loss, rate, norm)
        if self._log is not None:
            self._log.times(self.step)
        return next((each for each, count in zip(STOPS, counts, strict=True) if count), None)

    def _check_finite(self, step: int, loss: float, norm: float) -> None:
        """Stop or skip where a value is not finite; the scaler handles norms that overflow."""
        if math.isfinite(loss) and (math.isfinite(norm) or self.scaler is not None):
            return
        what = f"step {step}: the loss is {loss:g} and the gradient norm {norm:g}"
        if self.settings.nan == "skip":
            _log.warning("%s; the step was skipped, %d so far", what, self._skipped)
            return
        try:
            self._finish_saving()
        except CheckpointError as error:
            _log.warning("%s", error)
        kept = f"the last good checkpoint is {self._saved}" if self._saved else "none was saved yet"
        raise TrainingError(
            f"train: {what}, expected finite numbers; {kept}. Try a lower learning rate, or "
            "--nan skip to skip such steps"
        )

    def _measure(self) -> None:
        """Evaluate and log; its time does not count as training."""
        if self._evaluate is None:
            return
        with self._clock.paused(), ranges.phase("evaluation"):
            self._measured = dict(self._evaluate())
            self._wait()
            if self._log is not None:
                self._log.evaluation(self.step, self._measured)
                values = "  ".join(
                    f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4f}"
                    for name, value in self._measured.items()
                )
                _log.info("step %d/%d  %s", self.step, self.settings.steps, values)
                broken = [name for name, value in finite(self._measured).items() if value is None]
                if broken:
                    _log.warning("step %d: not finite: %s", self.step, ", ".join(broken))

    def _wait(self) -> None:
        """Count the evaluation; if it ends the run, evaluate as after the last step."""
        if self._evaluate is None or "validation_loss" not in self._measured:
            return
        total, ranks = self._strategy.sum([self._measured["validation_loss"], 1.0])
        ended = self.finished
        self._patience.see(total / ranks)
        if self.finished and not ended:
            if self._strategy.is_main:
                _log.info(
                    "step %d: the run ends early: evaluations without a validation loss below %s: "
                    "%d; see --patience",
                    *(self.step, self._patience.lowest, self._patience.waited),
                )
            self._measured = dict(self._evaluate())

    def _sample(self) -> None:
        """Let the model write, without an effect on training; its time does not count."""
        if self._sampler is None:
            return
        if None in finite(self._measured).values():
            return  # the model is broken, and would not sample
        generator = random.get_state()
        try:
            with self._clock.paused(), ranges.phase("sample"):
                prompt, self.sampled = self._sampler()
        except Exception:
            saved = self._saved is not None and step_of(self._saved) == self.step
            if not saved and self._strategy.alone:
                self._save()  # a sample may need memory that training does not
            raise
        finally:
            random.set_state(generator)
        if self._log is not None:
            self._log.sample(self.step, prompt, self.sampled)

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint of this step has beside the arrays."""
        state = state_of(
            self.settings, self._strategy, self._belongs_to, self._measured, self.scaler
        )
        return {**state, "patience": asdict(self._patience)}

    def _save(self, in_background: bool = False) -> None:
        """Save a checkpoint, or begin to; first finish the one that is being written."""
        self._finish_saving()
        if self._log is not None:
            self._log.times(self.step, at_once=True)
            self._log.sync()
        with self._clock.paused(), ranges.phase("checkpoint"):
            saving = self._strategy.begin_save(
                self.checkpoints,
                self.step,
                self.model,
                self.optimizer,
                self._state(),
                self.settings.keep,
                memory=self._memory if in_background else None,
            )
            if saving is None:
                return
            if in_background:
                fraction = CPU_FRACTION if self._device == "cpu" else 1.0
                self._saving = self.step, BackgroundSaving(saving, fraction)
            else:
                saving.write()
                self._appear(self.step, saving)

    def _appear(self, step: int, saving: Saving | BackgroundSaving) -> None:
        """Finish the checkpoint of a step, and tell callbacks."""
        self._saved = saving.finish()
        if self._log is not None:
            self._log.checkpoint(step, self._saved)

    def _finish_saving(self) -> None:
        """Finish the checkpoint that is being written, if there is one.

        Raises:
            CheckpointError: it could not be written; earlier ones are unchanged.
        """
        if self._saving is not None:
            (step, saving), self._saving = self._saving, None
            with self._clock.paused(), ranges.phase("checkpoint"):
                self._appear(step, saving)

    def _end_saving(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After an error, finish the checkpoint that is being written, or delete it.

        Several ranks finish it together, and others may not have failed. An interrupt ends at once.
        """
        if isinstance(error, Exception) and self._strategy.alone:
            try:
                self._finish_saving()
            except Exception as another:
                _log.warning("%s", another)
        if self._saving is not None:
            (_, saving), self._saving = self._saving, None
            saving.abandon()
        self._memory = HostMemory()


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
    held = [type(each).__name__ for each in batch] if isinstance(batch, tuple | list) else ""
    raise ArgumentError(
        f"train: a batch is a {type(batch).__name__}{f' of {held}' if held else ''}, expected a "
        "tuple of NumPy arrays"
    )
