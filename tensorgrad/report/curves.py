"""The curves of a page: thinned, smoothed, and placed on steps, tokens and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorgrad.report.run import Run
from tensorgrad.train.curves import SMOOTH_FROM, Column, smoothed, smoothing_span, thinned

AXES = {"step": "Steps", "tokens": "Tokens", "seconds": "Training time", "elapsed": "Elapsed time"}
COLORS = 8  # that page.css has
_AXIS_POINTS = 1000
_DIGITS = 5  # digits of a value on a page


@dataclass(frozen=True)
class Curve:
    """A curve of a chart.

    Attributes:
        label: in the legend.
        column: its points, all of them.
        style: "line", "faint" (thin and pale) or "markers" (a line with a marker at each point).
        color: its number among the colors.
        run: the number of its run, which places its steps on the other axes.
    """

    label: str
    column: Column
    style: str = "line"
    color: int = 0
    run: int = 0


@dataclass(frozen=True)
class Chart:
    """Curves with one y axis.

    Attributes:
        title: its heading.
        unit: of y; may be empty.
        curves: at least one point in all.
    """

    title: str
    unit: str
    curves: tuple[Curve, ...]


def axes(run: Run) -> dict[str, list[float]]:
    """Return where a run's steps are in tokens and time: points between which lines are straight.

    Returns:
        "step", and each of "tokens", "seconds" and "elapsed" that times.jsonl has: lists of equal
        length, at most 1,002, none of which falls. The last steps that were logged may be later
        than the last line of times.jsonl; they continue at the mean speed.
    """
    kinds = {key: run.times[key].finite for key in AXES if key != "step"}
    kinds = {key: found for key, found in kinds.items() if len(found) and found.steps[-1] > 0}
    if not kinds:
        return {}
    steps = np.unique(np.concatenate([found.steps for found in kinds.values()]))
    places = np.linspace(0, len(steps) - 1, min(len(steps), _AXIS_POINTS)).astype(int)
    last = run.metrics.last_step
    steps = np.unique(np.concatenate([[0], steps[places], [last]]))
    return {
        "step": steps.tolist(),
        **{key: _rounded(_along(steps, found), 7) for key, found in kinds.items()},
    }


def units(axes: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, tuple[str, float | None]]:
    """Return the unit of each axis on a page with these runs, and of times its seconds."""
    found: dict[str, tuple[str, float | None]]
    found = {name: (name, None) for name in ("step", "tokens")}
    for key in ("seconds", "elapsed"):
        longest = max((axis[key][-1] for axis in axes if key in axis), default=0.0)
        known = (("d", 86400), ("h", 3600), ("min", 60))
        found[key] = next((unit for unit in known if longest > 2 * unit[1]), ("s", 1))
    return found


def _along(steps: NDArray[np.int64], found: Column) -> NDArray[np.float64]:
    """Return the values at steps: 0 at step 0, straight lines between, the mean speed after."""
    known = np.maximum.accumulate(np.maximum(found.values, 0))
    at, values = found.steps, known
    if at[0] > 0:
        at, values = np.insert(at, 0, 0), np.insert(values, 0, 0.0)
    between = np.interp(steps, at, values)
    after = steps * (known[-1] / found.steps[-1])
    return np.where(steps > at[-1], after, between)


def loss_curves(run: Run, number: int = 0, name: str = "") -> list[Curve]:
    """Return training loss and validation loss.

    Args:
        run: the run.
        number: of the run on a page with several.
        name: begins the labels on such a page, where curves have the color of their run and
            training loss is only smoothed.
    """
    before = f"{name}: " if name else ""
    training = _noisy(f"{before}training", run.metrics["loss"], number, number, bool(name))
    validation = run.metrics["validation_loss"]
    color = number if name else number + 1
    return [*training, Curve(f"{before}validation", validation, "markers", color, number)]


def _noisy(label: str, values: Column, color: int, run: int, is_one: bool) -> list[Curve]:
    """Return noisy values and, of enough points, smoothed ones; only these if it is one of many."""
    count = len(values.finite)
    if count < SMOOTH_FROM:
        return [Curve(label, values, "line", color, run)]
    mean = smoothed(values)
    if is_one:
        return [Curve(label, mean, "line", color, run)]
    whole = f"{label}, mean of {smoothing_span(count)} points"
    return [Curve(label, values, "faint", color, run), Curve(whole, mean, "line", color, run)]


@dataclass(frozen=True)
class _CurveKind:
    """A chart of values that a log has by key."""

    title: str
    unit: str
    keys: dict[str, str]  # -> label
    factor: float = 1.0
    smooth: bool = True
    log: str = "times"  # the log of a run
    style: str = "line"


_KINDS = (
    _CurveKind("Learning rate", "", {"lr": "learning rate"}, 1.0, False, "metrics"),
    _CurveKind(
        "Gradient norm", "before clipping", {"gradient_norm": "gradient norm"}, log="metrics"
    ),
    _CurveKind("Throughput", "tokens/s", {"tokens_per_second": "tokens/s"}),
    _CurveKind("MFU", "% of the peak FLOP/s", {"mfu": "MFU"}, 100.0),
    _CurveKind("Memory", "MB", {"memory_mb": "in use", "peak_memory_mb": "peak"}, smooth=False),
    _CurveKind("GPU utilization", "%", {"gpu_utilization": "utilization"}),
    _CurveKind("GPU power", "W", {"watts": "power"}),
    _CurveKind("GPU clock", "MHz", {"clock_mhz": "clock"}),
)


def charts(runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    """Return the charts of runs that have points; of noisy values of several the smoothed ones.

    Args:
        runs: one or more.
        names: of the runs, which begin the labels of several; "" for one.
    """
    losses = [c for n, run in enumerate(runs) for c in loss_curves(run, n, names[n])]
    measures = dict.fromkeys(key for run in runs for key in run.measures)
    least = min(2, len(runs))  # runs that have a measure
    shared = [key for key in measures if sum(key in run.measures for run in runs) >= least]
    unit = "nats, training loss smoothed" if len(runs) > 1 else "nats"
    found = [Chart("Loss", unit, tuple(losses))]
    found += [_chart(kind, runs, names) for kind in (*map(_measure, shared), *_KINDS)]
    kept = [replace(c, curves=tuple(k for k in c.curves if len(k.column.finite))) for c in found]
    return [chart for chart in kept if chart.curves]


def title_of(key: str) -> str:
    """Return a heading for a key of a log, such as "Validation accuracy"."""
    words = key.replace("_", " ")
    return words[:1].upper() + words[1:]


def _measure(key: str) -> _CurveKind:
    """Return the chart of what evaluations measure besides the loss."""
    label = {key: key.replace("_", " ")}
    return _CurveKind(title_of(key), "", label, 1.0, False, "metrics", "markers")


def _chart(kind: _CurveKind, runs: Sequence[Run], names: Sequence[str]) -> Chart:
    curves: list[Curve] = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        log = getattr(run, kind.log)
        for place, (key, label) in enumerate(kind.keys.items()):
            values = Column(log[key].steps, log[key].values * kind.factor)
            whole = f"{name}: {label}" if name and len(kind.keys) > 1 else name or label
            color = number if name else place
            if kind.smooth:
                curves += _noisy(whole, values, color, number, bool(name))
            else:
                style = "faint" if name and place else kind.style
                curves.append(Curve(whole, values, style, color, number))
    smooth = [", smoothed"] if kind.smooth and len(runs) > 1 else []
    return Chart(kind.title, "".join([kind.unit, *smooth]), tuple(curves))


def curve_data(curve: Curve, limit: int) -> dict[str, Any]:
    """Return what charts.js draws: JSON without NaN, numbers with few digits, thinned points."""
    points = thinned(curve.column, limit)
    return {
        "style": curve.style,
        "color": curve.color % COLORS,
        "run": curve.run,
        "steps": points.steps.tolist(),
        "values": _rounded(points.values, _DIGITS),
    }


def _rounded(values: NDArray[np.float64], digits: int) -> list[Any]:
    """Return numbers with few digits; whole ones as integers, NaN as None."""
    found: list[Any] = []
    for value in values.tolist():
        if value != value:
            found.append(None)
            continue
        short = float(f"{value:.{digits}g}")
        found.append(int(short) if short.is_integer() and abs(short) < 1e15 else short)
    return found
