"""A self-contained HTML document: style, script and data inline, and no access to anything else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from tensorgrad.core.errors import ArgumentError
from tensorgrad.report.curves import AXES, COLORS, Chart, Curve, axes, curve_data, units
from tensorgrad.report.run import Run


def escaped(text: object) -> str:
    """Return text for HTML, between tags or in an attribute."""
    return html.escape(str(text))


def shortened(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text, and how many there are if that is less."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def counted(number: int, one: str, more: str = "") -> str:
    """Return a number with its noun, such as "1 line" and "3 lines"."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def document(title: str, body: str, data: str) -> str:
    """Return a page.

    Its policy allows the two inline blocks that have these hashes, and no address at all. What a
    run wrote can thus neither run as a script nor load anything.

    Args:
        title: plain text.
        body: HTML, in which what a run wrote is escaped.
        data: JSON for charts.js, from `curves_section`; empty: the page has no charts.
    """
    style, script = _asset("page.css"), _asset("charts.js") if data else ""
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<main>\n{body}</main>\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def curves_section(charts: Sequence[Chart], runs: Sequence[Run], limit: int) -> tuple[str, str]:
    """Return the section with the charts of runs, and the data that charts.js draws there.

    Args:
        charts: of the page.
        runs: whose numbers the curves have.
        limit: the most points of a curve.
    """
    if not charts:
        return section("Curves", '<p class="quiet">No step has been logged.</p>\n'), ""
    places = [axes(run) for run in runs]
    buttons = "".join(
        f'<button type="button" data-axis="{axis}" aria-pressed="{str(axis == "step").lower()}">'
        f"{escaped(text)}</button>\n"
        for axis, text in AXES.items()
        if axis == "step" or any(axis in place for place in places)
    )
    figures = "".join(_figure(number, chart) for number, chart in enumerate(charts))
    data = {
        "units": units(places),
        "runs": places,
        "charts": [[curve_data(curve, limit) for curve in chart.curves] for chart in charts],
    }
    content = (
        '<noscript><p class="note">Charts need JavaScript.</p></noscript>\n'
        f'<div id="controls"><fieldset><legend>Over</legend><span>{buttons}</span></fieldset>'
        '<button type="button" id="reset" disabled>Reset zoom</button>'
        '<span class="quiet">Drag over a chart to zoom, double-click to reset; '
        "select a name in a legend to hide its curve.</span></div>\n"
        f'<div class="charts">\n{figures}</div>\n'
    )
    # Not the end of a script, which text in it must not be either.
    values = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return section("Curves", content), values


def _figure(number: int, chart: Chart) -> str:
    """Return the place of a chart: its heading, its legend, and an SVG that is still empty."""
    keys = "".join(_legend_key(curve) for curve in chart.curves)
    return (
        f'<figure data-chart="{number}"><figcaption class="bar">'
        f'<h3>{escaped(chart.title)}</h3> <span class="unit">{escaped(chart.unit)}</span>'
        '<button type="button" aria-pressed="false">log y</button></figcaption>\n'
        f'<div class="legend">{keys}<output class="place"></output></div>\n'
        '<div class="box"><svg class="svg" tabindex="0" role="img" '
        f'aria-label="{escaped(sentence(chart))}"></svg></div></figure>\n'
    )


def _legend_key(curve: Curve) -> str:
    color = f"c{curve.color % COLORS}"
    dot = f'<path d="M11 4h0" class="dots {color}"/>' if curve.style == "markers" else ""
    return (
        '<button type="button" aria-pressed="true"><svg viewBox="0 0 22 8" aria-hidden="true">'
        f'<path d="M1 4H21" class="curve {curve.style} {color}"/>{dot}</svg>'
        f"<bdi>{escaped(curve.label)}</bdi><output></output></button>\n"
    )


def sentence(chart: Chart) -> str:
    """Return in words what a chart shows: of a single curve its ends and extremes."""
    parts = []
    for curve in chart.curves[:3]:
        if curve.style == "faint" and len(chart.curves) > 1:
            continue
        points = curve.column.finite
        ends = points.values[0], points.values[-1], points.values.min(), points.values.max()
        first, last, low, high = (f"{value:,.5g}" for value in ends)
        parts.append(f"{curve.label}: {first} to {last}, lowest {low}, highest {high}")
    more = len(chart.curves) - 3
    return "; ".join(parts) + (f"; and {more} more curves" if more > 0 else "")


def section(title: str, content: str) -> str:
    """Return a section with a heading."""
    return f"<section>\n<h2>{escaped(title)}</h2>\n{content}</section>\n"


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    changed: frozenset[str] = frozenset(),
    best: Sequence[frozenset[int]] = (),
) -> str:
    """Return a table of plain text whose first column names the rows.

    Args:
        caption, head: titles of the table and of its columns.
        rows: a name, and a cell for each further column.
        changed: names of the rows to mark.
        best: of each row of a comparison, the numbers of its best cells, from 0.
    """
    lines = []
    for number, (name, *cells) in enumerate(rows):
        mark, chosen = ' class="changed"' if name in changed else "", best[number] if best else ()
        values = "".join(
            f'<td class="best">{text} (best)</td>' if place in chosen else f"<td>{text}</td>"
            for place, text in enumerate(map(escaped, cells))
        )
        lines.append(f'<tr{mark}><th scope="row">{escaped(name)}</th>{values}</tr>\n')
    top = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in head)
    kind = ' class="comparison"' if best else ""
    return (
        f'<div class="wide"><table{kind}><caption>{escaped(caption)}</caption>\n'
        f"<thead><tr>{top}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody></table></div>\n"
    )


def check_output(option: str, path: Path, suffixes: Sequence[str]) -> None:
    """Check a file to write, before any work: a new one, so that no other file is lost.

    Raises:
        ArgumentError: it exists, has another ending, or its folder is missing or not writable.
    """
    endings = " or ".join(suffixes)
    for is_wrong, problem in (
        (path.is_dir(), "is a folder, expected a new file"),
        (
            path.suffix.lower() not in suffixes,
            f"has the ending {path.suffix!r}, expected {endings}",
        ),
        (os.path.lexists(path), "exists, expected a new file"),
        (not path.parent.is_dir(), f"is in {path.parent}, which is not a folder; make it first"),
        (
            not os.access(path.parent, os.W_OK),
            f"is in {path.parent}, which is not writable; choose another place",
        ),
    ):
        if is_wrong:
            raise ArgumentError(f"{option}: {path} {problem}")


@cache
def _asset(name: str) -> str:
    return resources.files("tensorgrad.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
