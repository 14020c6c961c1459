"""Pictures of a recording: the roofline of its ops, memory over time, and a timeline of ranks.

They need matplotlib. Tests: tests/profile/test_pictures.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tensorgrad.bench.pictures import new_figure, save
from tensorgrad.core.errors import ArgumentError
from tensorgrad.profile.ceilings import Ceilings
from tensorgrad.profile.memory import KINDS, MemoryRecording
from tensorgrad.profile.overlap import Timeline
from tensorgrad.profile.recording import intersection, union
from tensorgrad.profile.tables import Table, TableRow
from tensorgrad.startup.distribution import install

_COLORS = ("#4c72b0", "#8172b3", "#55a868", "#dd8452", "#ccb974", "#8c8c8c", "#c44e52")
_OTHER = ("other", "#8c8c8c")
_PHASES = {  # phase of a step -> label and color
    "forward": ("forward", "#4c72b0"),
    "backward": ("backward", "#8172b3"),
    "step": ("optimizer", "#dd8452"),
}
_MOST_POINTS = 12  # with a label
_MOST_BARS = 15


def plot_roofline(
    table: Table, ceilings: Ceilings, path: str | os.PathLike[str], title: str = ""
) -> None:
    """Draw the ops with matrix products under the device's roofline, and the bandwidth of the rest.

    A point is an op; its area grows with its time. Ops on the roof cannot be faster without moving
    fewer bytes (on the slope) or computing less (on the flat part).

    Args:
        table: from `op_table`.
        ceilings: of the device.
        path: of the PNG.
        title: of the picture.
    Raises:
        ArgumentError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = _figure(13, 5.5)
    roof, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    products = [row for row in table.rows if row.flops and row.nbytes and row.seconds]
    intensities = [row.flops / row.nbytes for row in products]
    low, high = min([0.1, *intensities]) / 2, max([1000.0, *intensities]) * 2
    for dtype, peak in ceilings.flops.items():
        ridge = peak / ceilings.bandwidth
        x = [min(low, ridge), ridge, max(high, ridge)]
        y = [ceilings.bandwidth * x[0] / 1e12, peak / 1e12, peak / 1e12]
        roof.plot(x, y, label=f"{dtype}: {peak / 1e12:.3g} TFLOP/s")
    ridge = max(ceilings.flops.values(), default=1e3 * ceilings.bandwidth) / ceilings.bandwidth
    slope = [ceilings.bandwidth * x / 1e12 for x in (low, ridge)]
    roof.plot([low, ridge], slope, "k:", label=f"copy: {ceilings.bandwidth / 1e9:.3g} GB/s")
    longest = max((row.seconds for row in products), default=1.0)
    for number, row in enumerate(products):
        point = row.flops / row.nbytes, row.flops_per_second / 1e12
        roof.scatter(*point, s=20 + 300 * row.seconds / longest, color=f"C{number % 10}", alpha=0.6)
        if number < _MOST_POINTS:
            roof.annotate(
                _label(row), point, fontsize=7, xytext=(10, -3), textcoords="offset points"
            )
    roof.set(xscale="log", yscale="log", xlabel="FLOPs / byte", ylabel="TFLOP/s")
    roof.set_title("matrix products")
    roof.grid(alpha=0.3, which="both")
    roof.legend(fontsize=8)
    others = [row for row in table.rows if not row.flops and row.nbytes and row.seconds]
    others = others[:_MOST_BARS][::-1]
    bars.barh([_label(row) for row in others], [row.bytes_per_second / 1e9 for row in others])
    bars.axvline(ceilings.bandwidth / 1e9, color="black", linestyle="--", linewidth=1)
    bars.set(xlabel="GB/s of operands and results (dashed: a copy)")
    bars.set_title("other ops, the longest on top")
    bars.tick_params(axis="y", labelsize=7)
    figure.suptitle(title)
    save(figure, Path(path))


def plot_memory(recording: MemoryRecording, path: str | os.PathLike[str], title: str = "") -> None:
    """Draw memory by kind over the ops of a recording, with its peak.

    Args:
        recording: of a Profiler with memory.
        path: of the PNG.
        title: of the picture.
    Raises:
        ArgumentError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = _figure(11, 5.5)
    axes = figure.subplots()
    samples, unit = recording.samples, 1e6
    peak = recording.peak
    if peak is not None:
        unit, name = (1e9, "GB") if peak.peak >= 1e9 else (1e6, "MB")
        places = list(range(len(samples)))
        series = [[sample.kinds[i] / unit for sample in samples] for i in range(len(KINDS))]
        axes.stackplot(places, series, labels=KINDS, colors=_COLORS, step="mid", linewidth=0)
        place = samples.index(peak)
        where = f"{peak.op}, {peak.layer or peak.phase}"
        axes.plot(place, peak.peak / unit, "kv", markersize=5)
        axes.annotate(
            f"peak {peak.peak / unit:.3g} {name}: {where}", (place, peak.peak / unit),
            xytext=(0, 8), textcoords="offset points", ha="center", fontsize=8,
        )  # fmt: skip
        axes.set(ylabel=f"memory ({name})", ylim=(0, 1.12 * peak.peak / unit))
        _name_phases(axes, recording)
    axes.set_xlabel("ops, forward and backward, in the order of time")
    axes.margins(x=0)
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside right upper", fontsize=8, title="at the peak of"
        " each op",
    )  # fmt: skip
    axes.set_title(title)
    save(figure, Path(path))


def plot_timeline(
    timelines: Sequence[Timeline], path: str | os.PathLike[str], title: str = ""
) -> None:
    """Draw what each rank computes and sends in a step, with what it sends while it computes.

    Args:
        timelines: of the ranks, from `overlap.timeline`.
        path: of the PNG.
        title: of the picture.
    Raises:
        ArgumentError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = _figure(13, 1.2 + 1.1 * len(timelines))
    axes = figure.subplots()
    first = min(line.start for line in timelines)
    rows: list[str] = []
    for line in timelines:
        shift = line.start - first
        for phase in sorted(line.computed, key=lambda phase: _PHASES.get(phase, _OTHER)[0]):
            label, color = _PHASES.get(phase, _OTHER)
            _bars(axes, len(rows), line.computed[phase], shift, color, label)
        computed = union(interval for intervals in line.computed.values() for interval in intervals)
        _bars(axes, len(rows) + 1, line.sent, shift, "#d62728", "communication alone")
        _bars(
            axes, len(rows) + 1, intersection(line.sent, computed), shift, "#2ca02c",
            "communication beside computation",
        )  # fmt: skip
        rows += [f"rank {line.rank}: computation", "communication"]
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="time in the step (ms)", xlim=(0, None))
    handles, labels = axes.get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=8)
    axes.set_title(title)
    save(figure, Path(path))


def _bars(
    axes: Any, row: int, intervals: Sequence[tuple[int, int]], shift: int, color: str, label: str
) -> None:
    """Draw intervals in ns as bars of a row, in ms."""
    bars = [((start + shift) / 1e6, (end - start) / 1e6) for start, end in intervals]
    axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, linewidth=0, label=label)


def _name_phases(axes: Any, recording: MemoryRecording) -> None:
    """Write the names of long phases, with lines between them."""
    start = 0
    for name, members in groupby(recording.samples, key=lambda sample: sample.phase):
        end = start + len(list(members))
        if start:
            axes.axvline(start - 0.5, color="black", linewidth=0.5, alpha=0.4)
        if end - start >= 0.08 * len(recording.samples):
            axes.text(
                (start + end - 1) / 2, 0.99, name, transform=axes.get_xaxis_transform(),
                ha="center", va="top", fontsize=8,
            )  # fmt: skip
        start = end


def _label(row: TableRow) -> str:
    return f"{row.name} backward" if row.phase == "backward" else row.name


def _figure(width: float, height: float) -> Any:
    try:
        return new_figure(width=width, height=height)
    except ImportError as error:
        raise ArgumentError(f"plot: matplotlib is not installed; run {install('plot')}") from error
