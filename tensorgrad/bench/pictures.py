"""Figures of matplotlib, made and saved without a display."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.io.files import replacing

MARKERS = "osD^vPX*"
Rows = Sequence[dict[str, Any]]


def new_figure(
    columns: int = 1, rows: int = 1, title: str = "", width: float = 6.4, height: float = 4.8
) -> Any:
    """Return an empty figure for `columns` x `rows` axes of a width and a height in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), dpi=120, layout="constrained")
    figure.suptitle(title)
    return figure


def plot_lines(axes: Any, rows: Rows, x: str, y: str, by: Sequence[str], **style: Any) -> None:
    """Draw y over x, a line for each combination of values of the columns `by`."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row[y] != "" and row[x] != "":
            groups.setdefault(tuple(row[name] for name in by), []).append(row)
    for number, (key, members) in enumerate(groups.items()):
        members.sort(key=lambda row: row[x])
        axes.plot(
            *([row[name] for row in members] for name in (x, y)),
            marker=MARKERS[number % len(MARKERS)], markersize=4, linewidth=1.2,
            label=", ".join(map(str, key)), **style,
        )  # fmt: skip
    axes.grid(alpha=0.3, which="both")
    if groups:
        axes.legend(title=", ".join(by), fontsize=8, title_fontsize=8)


def lines(
    rows: Rows, title: str, x: tuple[str, str], panels: Mapping[str, str], by: Sequence[str],
    **axis: Any,
) -> Any:  # fmt: skip
    """Return a figure of lines, each for a combination of values of the columns `by`.

    Args:
        rows: measured.
        title: of the figure; {NAME} is a value of the first row.
        x: column, and label of its axis.
        panels: label of the axis by column, for each a drawing.
        by: columns.
        axis: settings of all drawings, such as their scales.
    """
    figure = new_figure(len(panels), 1, title.format(**rows[0]), 8.0 if len(panels) == 1 else 6.4)
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (y, label) in zip(all_axes, panels.items(), strict=True):
        plot_lines(axes, rows, x[0], y, by)
        axes.set(xlabel=x[1], ylabel=label, **{"xscale": "log", "yscale": "log"} | axis)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    return figure


def bars(
    title: str, unit: str, names: Sequence[str], columns: Sequence[str], note: str = ""
) -> Callable[[Rows], dict[str, Any]]:
    """Return the `draw` of a sweep: a group of bars for each row, see `bar_figure`."""
    return lambda rows: {"": bar_figure(rows, title, unit, names, columns, note)}


def bar_figure(
    rows: Rows, title: str, unit: str, names: Sequence[str], columns: Sequence[str], note: str = ""
) -> Any:
    """Return a figure with a group of bars for each row.

    Args:
        rows: measured.
        title: of the figure; {NAME} is a value of the first row.
        unit: of the columns.
        names: columns that tell the rows apart.
        columns: with values; each is a bar, with its deviation where there is a column NAME_std.
        note: column in percent, which is written above the bars.
    """
    heading = f"{title.format(**rows[0])}, {rows[0]['device']}"
    figure = new_figure(1, 1, heading, max(6.4, 0.9 * len(rows)))
    axes = figure.subplots()
    shown = [column for column in columns if any(row[column] != "" for row in rows)]
    width = 0.8 / max(1, len(shown))
    for number, column in enumerate(shown):
        places = np.arange(len(rows)) + (number - (len(shown) - 1) / 2) * width
        spread = [row.get(column.replace("_ms", "_std")) or 0 for row in rows]
        options = {"yerr": spread, "capsize": 3} if f"{column[:-3]}_std" in rows[0] else {}
        heights = [row[column] or 0 for row in rows]
        drawn = axes.bar(places, heights, 0.95 * width, label=column, **options)
        if note:
            words = ["" if row[note] == "" else f"{row[note]:.1f} %" for row in rows]
            axes.bar_label(drawn, words, fontsize=7)
    labels = ["\n".join(str(row[name]) for name in names) for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    return figure


def running_means(losses: Sequence[float], window: int) -> Any:
    """Return the means of each window."""
    return np.convolve(losses, np.full(window, 1 / window), "valid")


def loss_curves(
    title: str, curves: Mapping[str, Sequence[float]], reference: str, window: int
) -> dict[str, Any]:
    """Return the figure of losses by step, and of what running means are above the reference's."""
    figure = new_figure(1, 2, title, 8.0)
    above, below = figure.subplots(2, sharex=True)
    means = {name: running_means(losses, window) for name, losses in curves.items()}
    for number, (name, losses) in enumerate(curves.items()):
        color, steps = f"C{number}", range(window, len(losses) + 1)
        above.plot(range(1, len(losses) + 1), losses, color=color, alpha=0.25, linewidth=0.6)
        above.plot(steps, means[name], color=color, linewidth=1.2, label=name)
        if name != reference and len(losses) == len(curves.get(reference, ())):
            below.plot(steps, means[name] - means[reference], color=color, linewidth=1, label=name)
    below.axhline(0, color="gray", linewidth=0.6)
    above.set(ylabel=f"loss in nats, and means of {window} steps")
    below.set(xlabel="step", ylabel=f"mean above that of {reference} (nats)")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    return {"": figure}


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with replacing(path) as file:
        FigureCanvasAgg(figure).print_png(file)
