"""Hooks called during training, such as logging or sending a message."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorgrad.train.loop import Trainer
    from tensorgrad.train.run import Outcome


class Callback:
    """Hooks of the training loop, called on the main rank and between two steps. All do nothing.

    Pass them as `Trainer(..., callbacks=[Progress()])`. An error in a method ends the run as soon
    as its last step is in a checkpoint, and the run raises it. With several ranks that is after the
    next step whose loss is logged. A callback that has failed is called once more, for `on_end`.
    What it does to the model or to the random numbers changes the run. `trainer.stop()` ends the
    run early, without an error.

    Example:
        >>> class Progress(tg.train.Callback):
        ...     def on_evaluation(self, step, metrics):
        ...         print(f"step {step}: {metrics['validation_loss']:.3f}")
        >>> Progress().on_evaluation(100, {"validation_loss": 2.5})  # the loop calls it like this
        step 100: 2.500
    """

    def on_start(self, trainer: Trainer) -> None:
        """Called before the first step; `trainer.step` is more than 0 where a run resumes.

        The folder exists. The logs in it still have the lines after the checkpoint, which are
        removed next.
        """

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called for each step, when losses are logged: every `log_every` steps.

        Args:
            step: the number of steps done, from 1.
            metrics: "loss", "lr" and "gradient_norm"; a value may be inf or NaN.
        """

    def on_times(self, step: int, times: Mapping[str, float]) -> None:
        """Called about once a second, with the values of a line of times.jsonl."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation, with what it measured."""

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        """Called when the model has written a sample; the text begins with the prompt."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Called when a checkpoint is safe on the disk; with one in the background, steps later."""

    def on_end(self, result: Outcome | BaseException) -> None:
        """Called once, after a successful `on_start`, however the run ends.

        Args:
            result: the outcome where the run has finished or was asked to stop, otherwise the
                error, such as KeyboardInterrupt.
        """
