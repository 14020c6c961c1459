"""loss.png: a plot of the losses of a run, drawn at its end and from time to time before."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.core.errors import DataError
from tensorgrad.io.files import replacing
from tensorgrad.train.curves import SMOOTH_FROM, Column, smoothed, smoothing_span, thinned
from tensorgrad.train.log import KNOWN, Record, read_metrics

_log = logging.getLogger(__name__)

_POINTS = 2400  # points of a curve: three for each column of pixels
_SECONDS = 30.0  # between two plots of a run, at least
_OTHERS, _NAME = 20, 100  # other measures that are drawn, characters of their names
_FRACTION = 0.005  # fraction of a run's time spent on plots, at most


def plot_losses(records: Sequence[Record], path: Path, title: str = "") -> bool:
    """Draw training and validation loss over steps into a PNG, and beside them other measures.

    The training loss is drawn twice: as it is, pale, and as the mean of the steps around, whose
    number the legend says. Whatever else an evaluation measured, such as the accuracy, has an
    axis of its own.

    Args:
        records: of metrics.jsonl.
        path: of the PNG.
        title: the name of the run.
    Returns:
        False where nothing was drawn: matplotlib is not installed, or fails, which gives a warning.
    """
    try:
        picture = _picture(records, title)
    except ImportError:
        return False
    except Exception as error:  # matplotlib's settings may be anything, such as MPLBACKEND
        _log.warning("%s is not drawn: %s: %.300s", path.name, type(error).__name__, error)
        return False
    with replacing(path) as file:
        file.write(picture)
    return True


def _picture(records: Sequence[Record], title: str) -> bytes:
    """Return the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.grid(alpha=0.3)
    training, validation = _column(records, "loss"), _column(records, "validation_loss")
    smooth = len(training) >= SMOOTH_FROM
    if len(training):
        pale: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.4} if smooth else {}
        _draw(axes, training, color="C0", label="training loss", **pale)
    if smooth:
        label = f"training loss, mean of {smoothing_span(len(training))} steps"
        _draw(axes, smoothed(training), color="C0", label=label)
    if len(validation):
        _draw(axes, validation, marker="o", color="C1", markersize=4, label="validation loss")
    lines = list(axes.lines)
    named = dict.fromkeys(key for record in records for key in record if key not in KNOWN)
    others = [key for key in named if len(key) <= _NAME][:_OTHERS]
    if others:
        right = axes.twinx()
        right.set_ylabel(", ".join(others))
        for number, key in enumerate(others, 2):
            lines += _draw(right, _column(records, key), marker="o", color=f"C{number}", label=key)
    if lines:
        figure.legend(handles=lines, loc="outside upper center", ncols=len(lines))
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def _draw(axes: Any, column: Column, **style: Any) -> list[Any]:
    """Draw a curve; return its lines."""
    few = thinned(column, _POINTS)
    lines: list[Any] = axes.plot(few.steps, few.values, **style)
    return lines


def _column(records: Sequence[Record], key: str) -> Column:
    """Return the finite values under a key."""
    found = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    steps, values = np.array(found, np.float64).reshape(-1, 2).T
    return Column(steps.astype(np.int64), values).finite


class LivePlot:
    """Draws loss.png again and again inside a `with` block, in a thread of its own.

    A plot is drawn every `seconds`, and less often where it takes long: half a percent of the time
    at most. Without matplotlib, or where no thread can start, there is none until `finish`.

    Args:
        metrics: metrics.jsonl.
        picture: loss.png.
        title: the name of the run.
        seconds: between two plots, at least.
    """

    def __init__(self, metrics: Path, picture: Path, title: str, seconds: float = _SECONDS) -> None:
        self._metrics, self._picture, self._title = metrics, picture, title
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw_often, name="loss.png", daemon=True)

    def __enter__(self) -> LivePlot:
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads can be started
            _log.debug("loss.png is drawn at the end only: %s", error)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def finish(self) -> None:
        """End the thread and draw the whole run.

        Raises:
            DataError, OSError: metrics.jsonl cannot be read, or the picture cannot be written.
        """
        self.__exit__()
        self._draw()

    def _draw(self) -> bool:
        return plot_losses(read_metrics(self._metrics), self._picture, self._title)

    def _draw_often(self) -> None:
        pause = self._seconds
        while not self._ended.wait(pause):
            began = time.perf_counter()
            try:
                if not self._draw():
                    return
            except (OSError, DataError) as error:  # the run itself meets them too
                _log.warning("loss.png is not drawn any more: %s", error)
                return
            pause = max(self._seconds, (time.perf_counter() - began) / _FRACTION)
