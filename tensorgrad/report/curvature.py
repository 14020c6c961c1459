"""The curvature of a run on its page: eigenvalues at its checkpoints, and the spectral density.

Tests: tests/report/test_curvature.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensorgrad.curvature.record import Curvature
from tensorgrad.report.curves import Chart, Curve
from tensorgrad.report.document import counted, escaped, section, table
from tensorgrad.train.curves import Column

PICTURE = "curvature.svg"
_ROWS, _VALUES = 300, 20  # checkpoints, and eigenvalues of each, that are shown
# The picture, in units of its view box.
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 300, 70, 16, 14, 44
_INK, _QUIET, _LINE, _PANEL, _CURVE = "#1b2733", "#5b6b7b", "#d9dee4", "#f6f7f9", "#1f6fc4"


def checkpoint_rows(curvature: Curvature) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of checkpoints."""
    several = "s" * (curvature.values.shape[1] > 1)
    first = "Residual of the first" if several else "Residual"
    head = ["Step", f"Largest eigenvalue{several}", first, "2 / learning rate", "Loss"]
    rows = []
    for row, step in enumerate(curvature.steps.tolist()):
        values = ", ".join(map(_number, curvature.values[row, :_VALUES]))
        others = curvature.residuals[row, 0], curvature.thresholds[row], curvature.losses[row]
        rows.append([f"{step:,}", values, *map(_number, others)])
    return head, rows


def _number(value: float) -> str:
    return f"{value:,.4g}" if math.isfinite(value) else ""


def sharpness_chart(curvature: Curvature) -> Chart:
    """Return the chart of the largest eigenvalue and 2 / learning rate over the steps."""
    steps, order = np.unique(curvature.steps, return_index=True)
    label = f"largest eigenvalue of the {curvature.matrix}"
    curves = [
        Curve(label, Column(steps, curvature.values[order, 0]), "markers", 0),
        Curve("2 / learning rate", Column(steps, curvature.thresholds[order]), "line", 1),
    ]
    return Chart("Sharpness", "", tuple(curve for curve in curves if len(curve.column.finite)))


def curvature_section(curvature: Curvature) -> str:
    """Return the section of a run's page."""
    matrix, batches = curvature.matrix, counted(curvature.batches, "batch", "batches")
    about = (
        f"{matrix} of the mean loss of {batches} of the training data, by all parameters. "
        "Plain gradient descent is stable while the largest eigenvalue is below 2 / learning "
        "rate; momentum and adaptive methods have other thresholds."
    )
    content = f'<p class="quiet">{escaped(about)}</p>\n'
    head, rows = checkpoint_rows(curvature)
    content += table(f"Eigenvalues at {counted(len(rows), 'checkpoint')}", head, rows[-_ROWS:])
    if curvature.density is not None:
        trace = f"{curvature.trace:,.4g} (standard error {curvature.trace_error:,.2g})"
        words = (
            f"Spectral density at step {curvature.density_step:,}: the fraction of the "
            f"{curvature.density.size:,} eigenvalues around each value, and twice its standard "
            f"error. The trace, their sum, is {trace}."
        )
        content += f'<p class="quiet">{escaped(words)}</p>\n{density_picture(curvature)}'
    return section("Curvature", content)


def density_picture(curvature: Curvature) -> str:
    """Return a picture of the spectral density as SVG, on a logarithmic axis.

    The curve is drawn down to a hundredth of the height that a single eigenvalue has.
    """
    density = curvature.density
    assert density is not None
    grid, mean, error = density.curve(points=512)
    width = (grid[-1] - grid[0]) / 108  # the default of `curve`
    peak = 1 / (math.sqrt(2 * math.pi) * width)  # height of a node of weight 1
    floor = peak / (100 * max(1, density.size))
    low, high = math.log10(floor), math.log10(max(float((mean + 2 * error).max()), 10 * floor))

    def x(value: float) -> float:
        share = (value - grid[0]) / (grid[-1] - grid[0])
        return float(_LEFT + share * (_WIDTH - _LEFT - _RIGHT))

    def y(power: float) -> float:
        return _HEIGHT - _BOTTOM - (power - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def points(values: NDArray[np.float64]) -> list[str]:
        powers = np.log10(np.maximum(values, floor))
        return [f"{x(at):.1f},{y(power):.1f}" for at, power in zip(grid, powers, strict=True)]

    title = f"Spectral density of the {curvature.matrix} at step {curvature.density_step:,}"
    parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{_PANEL}"/>']
    for value in _ticks(float(grid[0]), float(grid[-1])):
        parts.append(_line(x(value), y(low), x(value), y(high)))
        parts.append(_text(x(value), _HEIGHT - _BOTTOM + 16, f"{value:.4g}", "middle"))
    powers = range(math.ceil(low), math.floor(high) + 1)
    for power in powers[:: max(1, math.ceil(len(powers) / 7))]:
        parts.append(_line(_LEFT, y(power), _WIDTH - _RIGHT, y(power)))
        parts.append(_text(_LEFT - 6, y(power) + 4, f"1e{power}", "end"))
    around = [*points(mean + 2 * error), *reversed(points(mean - 2 * error))]
    parts += [
        f'<polygon points="{" ".join(around)}" fill="{_CURVE}" fill-opacity="0.2"/>',
        f'<polyline points="{" ".join(points(mean))}" fill="none" stroke="{_CURVE}" '
        'stroke-width="1.5"/>',
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, "eigenvalue", "middle"),
        f'<text transform="translate(16 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle" '
        f'fill="{_INK}">density</text>',
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">\n'
        f"<title>{escaped(title)}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_LINE}"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_QUIET}">{words}</text>'


def _ticks(low: float, high: float) -> Sequence[float]:
    """Return round numbers between two, about six."""
    rough = (high - low) / 6
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
