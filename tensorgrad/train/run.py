"""A run in a folder: its checkpoints, logs and progress, and the requests to stop it.

`TrainingRun` has what surrounds the steps of every run. The training loop (loop.py) and the loops
of scripts (script.py) go through their steps with it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from tensorgrad import random
from tensorgrad.core import backend, instrument
from tensorgrad.core.errors import ArgumentError, CheckpointError, TrainingError
from tensorgrad.io.files import finite, make_folder, write_json
from tensorgrad.nn import Module
from tensorgrad.optim import LossScaler, Optimizer
from tensorgrad.train.background import CPU_FRACTION, BackgroundSaving, HostMemory
from tensorgrad.train.callbacks import Callback
from tensorgrad.train.checkpoint import (
    RESERVED,
    Checkpoint,
    PendingCheckpoint,
    best_checkpoint,
    check_same,
    list_checkpoints,
    prune_checkpoints,
    step_of,
)
from tensorgrad.train.config import contradictions, renamed
from tensorgrad.train.folder import hold
from tensorgrad.train.patience import Patience
from tensorgrad.train.progress import ProgressBar
from tensorgrad.train.run_log import RunLog
from tensorgrad.train.stop_signals import StopSignals
from tensorgrad.train.strategy import OneProcess, Strategy
from tensorgrad.train.times import Clock, Work
from tensorgrad.train.user_file import wrong_return

_log = logging.getLogger(__name__)

FACTS = "facts.json"
Fingerprint = Mapping[str, Mapping[str, Any]]
# The entries of a checkpoint's state beside those of the fingerprint.
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

    Example:
        >>> import signal
        >>> outcome = tg.train.Outcome(100, False, 0, 9500.0, None, stopped_by=signal.SIGTERM)
        >>> outcome.status  # 128 + 15
        143
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


class TrainingRun:
    """A run in a folder, around its steps. All ranks call the same methods in the same order.

    Args:
        model: its parameters must be those of the optimizer.
        optimizer: from `Strategy.prepare` where ranks train together.
        settings: a dataclass with `steps`; its fields say what a resumed run may change.
        folder: of the run; created if missing.
        strategy: how ranks train together; default: this process alone.
        fingerprint: what a checkpoint must have been made with to fit this run, by group; for
            example {"model": {"layers": 2}, "data": {"key": "0f3a"}}; values as in JSON.
        scaler: for float16.
        keep: the number of newest checkpoints to keep, besides the best.
    Raises:
        ArgumentError: a group of the fingerprint is not a mapping, or has the name of another
            entry.
    Attributes:
        step: the number of steps done.
        skipped: the number of steps skipped for NaN or infinity.
        processes: the number of processes that train together.
        measured: by the evaluation after `step`; empty if there was none.
        saved: the newest checkpoint, on the ranks that write.
        saved_step: the step of the newest checkpoint, perhaps still being written.
        log: the files and callbacks, on the main rank of a run in progress.
        clock, progress, signals: of the run in progress.
    """

    log: RunLog | None = None
    clock: Clock
    progress: ProgressBar

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        settings: Any,
        folder: str | os.PathLike[str],
        strategy: Strategy | None = None,
        fingerprint: Fingerprint | None = None,
        scaler: LossScaler | None = None,
        keep: int = 2,
    ) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.settings, self.folder, self._keep = settings, Path(folder), keep
        self.strategy = OneProcess() if strategy is None else strategy
        self.processes = max(self.strategy.processes, self.strategy.ranks)
        self.step = self.skipped = 0
        self.measured: dict[str, float] = {}
        self.saved: Path | None = None
        self.saved_step = -1
        self.signals = StopSignals()
        self.device = backend.device_of(optimizer.hyper)
        if not isinstance(fingerprint, Mapping | None):
            raise wrong_return("Trainer", "fingerprint", fingerprint, "mappings by name")
        self._fingerprint = dict(fingerprint or {})
        self._patience = Patience()
        # The step of the checkpoint that is being written.
        self._saving: tuple[int, PendingCheckpoint | BackgroundSaving] | None = None
        self._memory = HostMemory()  # for copies, while it runs
        for name, group in self._fingerprint.items():
            if name in _ENTRIES or not isinstance(group, Mapping):
                raise ArgumentError(
                    f"Trainer: fingerprint has {name!r:.80} with {group!r:.80}, expected mappings "
                    f"by other names than {', '.join(_ENTRIES)}"
                )

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return bool(self.step >= self.settings.steps)

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
        found = self.strategy.load_latest(self.checkpoints)
        if found is None:
            return False
        self.load(found)
        self.saved, self.saved_step = found.path, found.step
        if self.strategy.is_main:
            told = self.step, self.settings.steps, found.path
            _log.info("resuming from step %d of %d: %s", *told)
        return True

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the whole state of a checkpoint; nothing changes if it does not fit.

        Raises:
            CheckpointError: it belongs to another model, vocabulary or data, or was made with
                settings that a resumed run must keep.
        """
        metrics = checkpoint.mapping("metrics")
        patience = Patience.load(checkpoint.state.get("patience"))
        for name, expected in self._fingerprint.items():
            check_same(checkpoint, name, expected)
        self._check_settings(checkpoint)
        generator, before = checkpoint.mapping("generator"), random.get_state()
        scale = None if self.scaler is None else self.scaler.state_dict()
        try:
            random.set_state(generator)
            if self.scaler is not None:
                self.scaler.load_state_dict(checkpoint.entry("scaler") or {})
            self.strategy.load(checkpoint, self.model, self.optimizer)
        except BaseException as error:
            random.set_state(before)
            if self.scaler is not None and scale is not None:
                self.scaler.load_state_dict(scale)
            if isinstance(error, ArgumentError | CheckpointError):
                text = f"load: {checkpoint.path} cannot be used: {error}"
                raise CheckpointError(text) from error
            raise
        self.measured, self._patience = dict(metrics), patience
        self.step = checkpoint.step

    def _check_settings(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError where a setting differs that a resumed run must keep."""
        before = renamed(checkpoint.settings("settings"))
        same_ranks = checkpoint.state.get("ranks") == self.strategy.ranks
        now, warmup = asdict(self.settings), before.get("warmup")
        if isinstance(warmup, int) and warmup + 1 == before.get("steps"):
            now.pop("warmup", None)  # limited by the steps, with which it may grow
        wrong = contradictions(self.settings, before, now, same_ranks)
        if wrong:
            raise CheckpointError(
                f"load: {checkpoint.path} was made with other settings: {'; '.join(wrong)}"
            )

    @contextmanager
    def session(
        self,
        work: Work,
        *,
        samples: bool = True,
        plot: bool = True,
        callbacks: Sequence[Callback] = (),
    ) -> Iterator[None]:
        """Lock the folder, write logs, show progress and note signals while the block runs.

        Args:
            work: of a step.
            samples: whether the model writes samples.
            plot: whether to draw the losses.
            callbacks: called on the main rank.
        """
        self._synchronize()
        self.clock, shown = Clock(), self.strategy.is_main
        self.progress = ProgressBar(self.settings.steps, self.step, work.tokens, self.clock, shown)
        with StopSignals(self.strategy.alone) as self.signals, ExitStack() as stack, self.progress:
            if shown:
                make_folder(self.folder)
                stack.enter_context(hold(self.folder))
                prune_checkpoints(self.checkpoints, self.step, self._keep)
                with self.clock.paused():
                    log = RunLog(self, work, samples=samples, plot=plot, callbacks=callbacks)
                    self.log = stack.enter_context(log)
            stack.push(self._end_saving)
            yield

    def _synchronize(self) -> None:
        """Broadcast the main rank's state, and give each rank its stream of random numbers.

        Each rank makes its own settings, model and data: they must be equal.
        """
        arrays = [tensor.data for tensor in self.model.state_dict().values()]
        names = [field.name for field in fields(self.settings) if field.name != "device"]
        facts = {name: getattr(self.settings, name) for name in names}
        for group, found in self._fingerprint.items():
            facts.update((f"{group} {name}", value) for name, value in found.items())
        self.strategy.begin(self.step, [*arrays, *self.optimizer.state.values()], facts)
        random.set_state({**random.get_state(), "stream": self.strategy.rank})

    def log_step(self, step: int, loss: float, lr: float, gradient_norm: float) -> None:
        """Write a step to metrics.jsonl, and show it."""
        if self.log is not None:
            self.log.step(step, {"loss": loss, "lr": lr, "gradient_norm": gradient_norm})
        self.progress.update(step, loss, lr, gradient_norm)

    def log_evaluation(self, measured: Mapping[str, float]) -> None:
        """Write what an evaluation measured to metrics.jsonl, and show it."""
        self.measured = dict(measured)
        if self.log is None:
            return
        self.log.evaluation(self.step, self.measured)
        values = "  ".join(
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4f}"
            for name, value in self.measured.items()
        )
        if values:
            _log.info("step %d/%d  %s", self.step, self.settings.steps, values)
        broken = [name for name, value in finite(self.measured).items() if value is None]
        if broken:
            _log.warning("step %d: not finite: %s", self.step, ", ".join(broken))

    def end_not_finite(self, what: str, advice: str = "") -> NoReturn:
        """Raise TrainingError, which names the checkpoint to go back to."""
        try:
            self.finish_saving()
        except CheckpointError as error:
            _log.warning("%s", error)
        kept = f"the last good checkpoint is {self.saved}" if self.saved else "none was saved yet"
        raise TrainingError(
            f"train: {what}, expected finite numbers; {kept}. Try a lower learning rate{advice}"
        )

    def save(self, in_background: bool = False) -> None:
        """Save a checkpoint, or begin to; first finish the one that is being written.

        Raises:
            CheckpointError: it cannot be written; earlier ones are unchanged.
        """
        self.finish_saving()
        if self.log is not None:
            self.log.times(self.step, at_once=True)
            self.log.sync()
        with self.clock.paused(), instrument.phase("checkpoint"):
            contents = self.strategy.contents(self.model, self.optimizer)
            self.saved_step = self.step
            if contents is None:
                return
            if in_background:
                contents = self._memory.copied(contents)
            entries = self.entries()
            pending = PendingCheckpoint(self.checkpoints, self.step, contents, entries, self._keep)
            if in_background:
                fraction = CPU_FRACTION if self.device == "cpu" else 1.0
                self._saving = self.step, BackgroundSaving(pending, fraction)
                return
            self._saving = self.step, pending
            pending.write()
        self.finish_saving()

    def entries(self) -> dict[str, Any]:
        """Return what a checkpoint of this step has beside the arrays."""
        return {
            **self._fingerprint,
            "settings": asdict(self.settings),
            "ranks": self.strategy.ranks,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "generator": random.get_state(),
            "metrics": finite(self.measured),
            "patience": asdict(self._patience),
        }

    def finish_saving(self) -> None:
        """Finish the checkpoint that is being written, if there is one, and tell callbacks.

        Raises:
            CheckpointError: it could not be written; earlier ones are unchanged.
        """
        if self._saving is None:
            return
        (step, saving), self._saving = self._saving, None
        with self.clock.paused(), instrument.phase("checkpoint"):
            self.saved = saving.finish()
            if self.log is not None:
                self.log.checkpoint(step, self.saved)

    def _end_saving(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After an error, finish the checkpoint that is being written, or delete it.

        Several ranks finish it together, and others may not have failed. An interrupt ends at once.
        """
        if isinstance(error, Exception) and self.strategy.alone:
            try:
                self.finish_saving()
            except Exception as another:
                _log.warning("%s", another)
        if self._saving is not None:
            (_, saving), self._saving = self._saving, None
            saving.abandon()
        self._memory = HostMemory()

    def end(self) -> Outcome:
        """Finish the checkpoint and end the callbacks; return how the run ended."""
        self.finish_saving()
        stopped_by = None if self.finished else self.signals.agreed
        speed = self.progress.tokens_per_second
        outcome = Outcome(self.step, self.finished, self.skipped, speed, self.saved, stopped_by)
        if self.log is not None:
            self.log.end(outcome)
        return outcome


def save_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write facts.json, for reports: what the settings of a run leave open, and what follows.

    Args:
        folder: of the run.
        facts: values of settings that are None, by name, such as {"layers": 2}, and other numbers,
            such as the parameters of the model and the tokens of the text.
    """
    write_json(folder / FACTS, facts, 2)


def resume_run(run: TrainingRun) -> None:
    """Resume a run from its newest checkpoint; a run without a checkpoint starts at step 0.

    Raises:
        CheckpointError: the run has checkpoints, but none that can be used.
    """
    if not run.resume() and run.strategy.is_main:
        _log.warning("%s has no checkpoint: starting at step 0", run.folder)


def without_checkpoint(folder: Path, step: int) -> str:
    """Return what to say of the best step of a run: nothing where it has a checkpoint.

    Evaluations may be more frequent than checkpoints.
    """
    checkpoints = folder / "checkpoints"
    best = best_checkpoint(checkpoints)
    if best is None or any(step_of(path) == step for path in list_checkpoints(checkpoints)):
        return ""
    return f", which has no checkpoint: the best one is of step {step_of(best):,}"


def report_stop(outcome: Outcome, run: TrainingRun, file: str = "") -> None:
    """Log the step at which a run stopped, and the command that resumes it.

    Args:
        outcome: of the run.
        run: that ended.
        file: the Python file of the model, for one that a user has defined.
    """
    launcher = f"mpirun -n {run.processes} " if run.processes > 1 else ""
    program = Path(sys.argv[0])
    ours = "tensorgrad" in (program.name, program.parent.name)  # installed, or -m tensorgrad
    words = takewhile(lambda word: not word.startswith("-"), sys.argv[1:])
    command = " ".join(("tensorgrad", *words)) if ours else f"python {program}"
    model = f" --model {file}" if file else ""
    _log.info(
        "stopped after step %d of %d; to resume: %s%s --resume %s%s",
        *(outcome.step, run.settings.steps, launcher, command, run.folder, model),
    )
