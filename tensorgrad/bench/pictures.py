"""Figures of matplotlib, made and saved without a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tensorgrad.files import replacing

MARKERS = "osD^vPX*"


def new_figure(columns: int = 1, rows: int = 1, title: str = "", width: float = 6.4) -> Any:
    """Return an empty figure for `columns` x `rows` axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, 4.8 * rows), dpi=120, layout="constrained")
    if title:
        figure.suptitle(title)
    return figure


def plot_lines(
    axes: Any, rows: Sequence[dict[str, Any]], x: str, y: str, by: Sequence[str], **style: Any
) -> None:
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
    if any(key for key in groups):
        axes.legend(fontsize=8)


def bars(
    title: str, unit: str, names: Sequence[str], columns: Sequence[str]
) -> Callable[[Sequence[dict[str, Any]]], dict[str, Any]]:
    """Return the `draw` of a sweep: a group of bars for each row.

    Args:
        title: to which the device is added.
        unit: of the columns.
        names: columns that tell the rows apart.
        columns: of which each that has values is a bar.
    """
    return lambda rows: {"": _bars(rows, title, unit, names, columns)}


def _bars(
    rows: Sequence[dict[str, Any]], title: str, unit: str, names: Sequence[str],
    columns: Sequence[str],
) -> Any:  # fmt: skip
    device = rows[0]["device"]
    figure = new_figure(1, 1, f"{title}, {device}", max(6.4, 0.9 * len(rows)))
    axes = figure.subplots()
    shown = [column for column in columns if any(row[column] != "" for row in rows)]
    width = 0.8 / max(1, len(shown))
    for number, column in enumerate(shown):
        places = [i + (number - (len(shown) - 1) / 2) * width for i in range(len(rows))]
        axes.bar(places, [row[column] or 0 for row in rows], 0.95 * width, label=column)
    labels = ["\n".join(str(row[name]) for name in names) for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    return figure


def powers_of_two(axes: Any) -> None:
    """Number the x axis by powers of two, as integers."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", labelrotation=45)


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with replacing(path) as file:
        FigureCanvasAgg(figure).print_png(file)
