"""The log of a run as it trains: the files in its folder, and the callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorgrad.core import backend
from tensorgrad.io.files import finite
from tensorgrad.kernels.gpu import GpuMonitor
from tensorgrad.train.callbacks import Callback
from tensorgrad.train.environment import save_environment
from tensorgrad.train.log import TEXT_CHARACTERS, StepLog
from tensorgrad.train.plot import LivePlot
from tensorgrad.train.times import TimesLog, Work

if TYPE_CHECKING:
    from tensorgrad.train.run import Outcome

METRICS, TIMES, SAMPLES, PLOT = "metrics.jsonl", "times.jsonl", "samples.jsonl", "loss.png"

_log = logging.getLogger(__name__)


class RunLog:
    """The logs, the plot and the callbacks of a run, on its main rank, inside a `with` block.

    Args:
        run: a `TrainingRun`, whose folder exists.
        work: of a step.
        samples: whether the model writes samples.
        plot: whether to draw the losses.
        callbacks: see Callback.
    Attributes:
        failure: the first error of a callback, which the training loop raises after a checkpoint.
    """

    def __init__(
        self, run: Any, work: Work, *, samples: bool, plot: bool, callbacks: Sequence[Callback]
    ) -> None:
        self._run, self._work, self._callbacks = run, work, callbacks
        self._has_samples, self._has_plot = samples, plot
        self._started: list[Callback] = []
        self._working: list[Callback] = []  # callbacks that have not failed
        self._samples: StepLog | None = None
        self._plot: LivePlot | None = None
        self._stack = ExitStack()
        self._ended = False
        self.failure: Exception | None = None

    def __enter__(self) -> RunLog:
        with ExitStack() as stack:
            stack.push(self._end_with_error)
            for callback in self._callbacks:
                callback.on_start(self._run)
                self._started.append(callback)
            run = self._run
            save_environment(run.folder, run.device, run.processes)
            self._open(stack, run.step)
            self._working = list(self._started)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _open(self, stack: ExitStack, step: int) -> None:
        """Open the logs, without lines after `step`, and start the threads."""
        run, folder = self._run, self._run.folder
        kept = step or -1  # a new run evaluates at step 0
        self._metrics = stack.enter_context(closing(StepLog(folder / METRICS, kept)))
        if self._has_samples or (folder / SAMPLES).exists():
            log = StepLog(folder / SAMPLES, kept, text=True)
            self._samples = stack.enter_context(closing(log))
        index = None if run.device == "cpu" else backend.gpu_index(run.device)
        monitor = stack.enter_context(GpuMonitor(index))
        times = TimesLog(folder / TIMES, step, run.clock, self._work, run.device, monitor)
        self._times = stack.enter_context(closing(times))
        if self._has_plot:
            plot = LivePlot(folder / METRICS, folder / PLOT, folder.resolve().name)
            self._plot = stack.enter_context(plot)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the loss, learning rate and gradient norm of a step."""
        self._metrics.write({"step": step, **finite(metrics)})
        self._call(lambda callback: callback.on_step(step, metrics))

    def times(self, step: int, at_once: bool = False) -> None:
        """Log the speed, if a line is due; see `TimesLog.update`."""
        values = self._times.update(step, at_once)
        if values is not None:
            self._call(lambda callback: callback.on_times(step, values))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log what an evaluation measured."""
        self._metrics.write({"step": step, **finite(metrics)})
        self._call(lambda callback: callback.on_evaluation(step, metrics))

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Log a text that the model has written; the file has the start of a long one."""
        assert self._samples is not None
        prompt, text = prompt[:TEXT_CHARACTERS], text[:TEXT_CHARACTERS]
        self._samples.write({"step": step, "prompt": prompt, "text": text})
        self._samples.sync()
        self._call(lambda callback: callback.on_sample(step, prompt, text))

    def sync(self) -> None:
        """Sync the metrics to the disk, before the checkpoint that they belong to."""
        self._metrics.sync()

    def checkpoint(self, step: int, path: Path) -> None:
        """Say that a checkpoint is safe."""
        self._call(lambda callback: callback.on_checkpoint(step, path))

    def end(self, outcome: Outcome) -> None:
        """Draw the losses and end the callbacks, with the outcome or the error of one of them.

        Raises:
            Exception: the first error of a callback.
        """
        if self._plot is not None:
            self._plot.finish()
        if self.failure is None:
            self._ended = True
            self._working = self._started
            self._call(lambda callback: callback.on_end(outcome))
        if self.failure is not None:
            raise self.failure

    def _call(self, method: Callable[[Callback], None]) -> None:
        """Call a method of all callbacks that have not failed; keep the first error."""
        for callback in list(self._working):
            try:
                method(callback)
            except Exception as error:
                error.add_note(
                    f"{type(callback).__name__}, a callback of the training loop, failed"
                )
                self._working.remove(callback)
                self._run.signals.asked = True
                if self.failure is None:
                    self.failure = error
                else:
                    _log.warning("%s failed too: %s", type(callback).__name__, error)

    def _end_with_error(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the callbacks after an error; what they raise must not hide it."""
        if error is None or self._ended:
            return
        self._ended = True
        for callback in self._started:
            try:
                callback.on_end(error)
            except Exception as another:
                _log.warning("%s failed too: %s", type(callback).__name__, another)
