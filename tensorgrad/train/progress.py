"""The progress of a run: a bar on a terminal or in a notebook, elsewhere lines of the log."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tensorgrad.train.times import Clock

# tqdm is imported where it is used: with a wrong value of one of its environment variables it
# fails, which is to be an error of the run in one line.
if TYPE_CHECKING:
    from tqdm import tqdm

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 10.0


class ProgressBar:
    """Loss, learning rate, gradient norm, tokens/s and remaining time of a run.

    On a terminal a tqdm bar on stderr, in a notebook one below the cell; elsewhere the same as a
    line of the log, at most every ten seconds.
    """

    def __init__(
        self, steps: int, start: int, tokens_per_step: int, clock: Clock, shown: bool = True
    ) -> None:
        """Show nothing yet.

        Args:
            steps: of the run.
            start: the number of steps done before.
            tokens_per_step: on all ranks together.
            clock: started with the run.
            shown: whether to show anything: one rank does.
        """
        self._steps = steps
        self._start = self._step = start
        self._tokens_per_step = tokens_per_step
        self._shown = shown
        self._bar: tqdm | None = None
        self._clock, self._last_line = clock, clock.elapsed
        self._stack = ExitStack()

    def __enter__(self) -> ProgressBar:
        kind = _bar_class() if self._shown else None
        if kind is not None:
            from tqdm.contrib.logging import logging_redirect_tqdm

            self._stack.enter_context(logging_redirect_tqdm(tqdm_class=kind))
            self._bar = self._stack.enter_context(
                kind(
                    total=self._steps,
                    initial=self._start,
                    unit="step",
                    dynamic_ncols=True,
                    smoothing=0.1,
                    bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def tokens_per_second(self) -> float:
        """The speed since the start, without evaluation and checkpoints."""
        tokens = (self._step - self._start) * self._tokens_per_step
        return tokens / max(self._clock.seconds, 1e-9)

    def update(self, step: int, loss: float, lr: float, gradient_norm: float) -> None:
        """Show the loss, learning rate and gradient norm of a step."""
        done = step - self._step
        self._step = step
        if not self._shown:
            return
        from tqdm import tqdm

        if self._bar is not None:  # a narrow terminal cuts off the end
            rounded = tqdm.format_sizeof(self.tokens_per_second)
            speed = f", {rounded} tokens/s" if self._tokens_per_step else ""
            self._bar.set_postfix_str(
                f"loss {loss:.3f}{speed}, lr {lr:.1e}, gradient {gradient_norm:.2f}", False
            )
            self._bar.update(done)
            return
        speed = f"{self.tokens_per_second:,.0f} tokens/s  " if self._tokens_per_step else ""
        now = self._clock.elapsed
        if now - self._last_line < _SECONDS_BETWEEN_LINES and step < self._steps:
            return
        self._last_line = now
        per_step = self._clock.seconds / max(1, step - self._start)
        left = tqdm.format_interval(per_step * (self._steps - step))
        _log.info(
            "step %d/%d  loss %.3f  lr %.1e  gradient %.2f  %s%s left",
            step, self._steps, loss, lr, gradient_norm, speed, left,
        )  # fmt: skip


class StageProgress:
    """The progress of work in stages: a bar for each on a terminal or in a notebook, or lines.

        with StageProgress("preparing my_texts") as progress:
            prepare("my_texts", "cache", progress=progress)

    Args:
        heading: of the lines.
        shown: whether to show anything.
    """

    def __init__(self, heading: str, shown: bool = True) -> None:
        self._heading, self._kind = heading, _bar_class() if shown else None
        self._shown, self._stage, self._bar = shown, "", None
        self._last_line = 0.0

    def __enter__(self) -> StageProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` characters or bytes are done; 0: the total is not known."""
        if not self._shown:
            return
        now, new = time.monotonic(), stage != self._stage
        if self._kind is None:
            if new or now - self._last_line >= _SECONDS_BETWEEN_LINES:
                part = f" {min(1, done / total):.0%}" if total and not new else ""
                _log.info("%s: %s%s", self._heading, stage, part)
                self._last_line = now
        else:
            if new:
                self.__exit__()
                self._bar = self._kind(desc=stage, unit="B", unit_scale=True, leave=False)
            assert self._bar is not None
            self._bar.total = total or None
            self._bar.update(done - self._bar.n)
        self._stage = stage


def _bar_class() -> type[tqdm] | None:
    """Return the progress bar for where this process shows its messages; None: lines."""
    if _is_notebook():
        from tqdm.auto import tqdm as notebook_bar  # a text bar without ipywidgets

        kind: type[tqdm] = notebook_bar
        return kind
    if not _is_terminal():
        return None
    from tqdm import tqdm as text_bar

    kind = text_bar
    return kind


def _is_notebook() -> bool:
    """Whether this process is the kernel of a notebook: Jupyter, Colab, VS Code."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def _is_terminal() -> bool:
    """Whether stderr is a terminal of known size: without a size tqdm shows nothing."""
    if sys.stderr is None or not sys.stderr.isatty():  # it is None after `2>&-`
        return False
    try:
        return os.get_terminal_size(sys.stderr.fileno()).lines > 0
    except (OSError, ValueError):
        return True
