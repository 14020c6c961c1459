"""The outcome of a run: its status, losses, speed and memory, as numbers and as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorgrad.report.curves import title_of
from tensorgrad.report.document import counted
from tensorgrad.report.run import Run, number
from tensorgrad.train.curves import Column, smoothed

_Values = np.ndarray[tuple[int], np.dtype[np.float64]]
# Names of values, as in files, and whether the lowest or the highest of several runs is the best.
BEST = {
    "final_validation_loss": "low",
    "validation_loss": "low",
    "best_validation_loss": "low",
    "training_loss": "low",
    "tokens_per_second": "high",
    "mfu": "high",
    "peak_memory_mb": "low",
}


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Attributes:
        status: such as "stopped at step 300 of 800", or "finished: 3 epochs, 1,200 steps" for a
            run that was set by epochs.
        step: the last one logged.
        values: by name, in the order to show; without those that are not known.
        best_step: of the lowest validation loss; None without evaluations.
        not_finite: how many logged losses were NaN or infinite.
        is_broken: whether the last validation loss was.
    """

    status: str
    step: int
    values: dict[str, float]
    best_step: int | None
    not_finite: int
    is_broken: bool


def result_of(run: Run) -> Result:
    """Return the outcome of a run."""
    loss = run.metrics["loss"]
    validation = run.metrics["validation_loss"].finite
    final = ("final_validation_loss", "final_validation_tokens")
    last = ("validation_loss", "validation_tokens")
    step = run.metrics.last_step
    best = int(validation.values.argmin()) if len(validation) else None
    values = {
        **{key: _ended(run.metrics[key]) for key in (*final, *last)},
        "best_validation_loss": None if best is None else float(validation.values[best]),
        "training_loss": _of(smoothed(loss)),
        **{key: _of(run.metrics[key]) for key in run.measures},
        "step": float(step),
        **_speed(run),
    }
    return Result(
        status=_status(run, step, has_losses=len(loss) > 0),
        step=step,
        values={key: value for key, value in values.items() if value is not None},
        best_step=None if best is None else int(validation.steps[best]),
        not_finite=int(np.isnan(loss.values).sum()),
        is_broken=bool(np.isnan(run.metrics["validation_loss"].values[-1:]).any()),
    )


def _status(run: Run, step: int, has_losses: bool) -> str:
    plan = _planned(run, step)
    if plan is not None and plan.is_done:
        return f"finished: {plan.all_done}"
    place = f"step {step:,}" if plan is None else plan.place
    if run.is_training:
        return f"training, {place}"
    if not has_losses:
        return "evaluated, not trained" if run.metrics.columns else "no step logged yet"
    return f"{step:,} steps" if plan is None else f"stopped at {place}"


@dataclass(frozen=True)
class _Plan:
    """How much of what was planned is done, in words of steps or of epochs and steps."""

    is_done: bool
    all_done: str
    place: str


def _planned(run: Run, step: int) -> _Plan | None:
    """Return the plan of a run; None if it is not known."""
    steps, epochs = (number(run.config.get(name)) for name in ("steps", "epochs"))
    if steps > 0:  # not NaN, not 0: those of the epochs
        return _Plan(step >= steps, f"{step:,} steps", f"step {step:,} of {steps:,.0f}")
    done = _of(run.times["epoch"])
    if done is None or not epochs > 0:
        return None
    return _Plan(
        done >= epochs,
        f"{counted(round(done), 'epoch')}, {step:,} steps",
        f"epoch {done:,.4g} of {epochs:,.0f}, step {step:,}",
    )


def _speed(run: Run) -> dict[str, float | None]:
    times = run.times
    tokens, seconds = _of(times["tokens"]), _of(times["seconds"])
    logged = _of(times["tokens_per_second"], np.median)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "elapsed": _of(times["elapsed"]),
        "tokens_per_second": tokens / seconds if tokens and seconds else logged,
        "mfu": _of(times["mfu"], np.median),
        "peak_memory_mb": _of(times["peak_memory_mb"], np.max),
        "watts": _of(times["watts"], np.median),
    }


def _of(column: Column, measure: Callable[[_Values], Any] = lambda v: v[-1]) -> float | None:
    """Return a measure of the finite values of a column, by default the last; None without any."""
    values = column.finite.values
    return float(measure(values)) if len(values) else None


def _ended(column: Column) -> float | None:
    """Return the last value, None if it was not finite."""
    return None if np.isnan(column.values[-1:]).any() else _of(column)


_TITLES = {
    "final_validation_loss": "Final validation loss, whole text",
    "validation_loss": "Final validation loss",
    "best_validation_loss": "Best validation loss",
    "training_loss": "Final training loss, smoothed",
    "step": "Steps",
    "seconds": "Training time",
    "elapsed": "Elapsed time",
    "tokens_per_second": "Tokens/s, mean",
    "mfu": "MFU, median",
    "peak_memory_mb": "Peak memory",
    "watts": "GPU power, median",
}


def label_of(name: str) -> str:
    """Return the label of a value, such as "Best validation loss"."""
    return _TITLES.get(name) or title_of(name)


def text_of(name: str, value: float) -> str:
    """Return a value with its unit."""
    if name in ("step", "tokens", "tokens_per_second") or name.endswith("_tokens"):
        return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
    if name in ("seconds", "elapsed"):
        return duration(value)
    if name == "mfu":
        return f"{100 * value:.1f} %"
    if name == "peak_memory_mb":
        return f"{value:,.0f} MB"
    if name == "watts":
        return f"{value:,.0f} W"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a time such as "2 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min"
