"""The page of one run: its outcome, curves, samples, settings and environment."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.core.errors import ArgumentError, TensorgradError
from tensorgrad.io.tables import write_text
from tensorgrad.report.curvature import curvature_section, sharpness_chart
from tensorgrad.report.curves import charts, title_of
from tensorgrad.report.document import (
    check_output,
    counted,
    curves_section,
    document,
    escaped,
    section,
    shortened,
    table,
)
from tensorgrad.report.result import Result, label_of, result_of, text_of
from tensorgrad.report.run import Progress, Run, number, read_run
from tensorgrad.report.settings import defaults, grouped, value_text
from tensorgrad.train.curves import Column
from tensorgrad.train.log import KNOWN
from tensorgrad.train.run import without_checkpoint

FILE = "report.html"
# So that no run makes a page too large to open: the most that is shown of each kind.
_FACTS = {
    "parameters": "Parameters",
    "training_tokens": "Tokens of the text",
    "training_pairs": "Pairs of sentences",
    "training_sentences": "Sentences",
}
_POINTS = 4500  # points of a curve
_CURVE_POINTS = 75_000  # points of all curves
_VALUE = 500  # characters
_ROWS = 300
_SAMPLES = 30
_SAMPLE = 10_000  # characters
_DIFF_LINES = 5000
_DIFF = 200_000  # characters


def write_report(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write one HTML file about a run, which opens without a network.

    Args:
        folder: the folder of the run, finished or not.
        out: the file, a new one; default: report.html in the folder, which is replaced.
        progress: as for `read_run`.

    Returns:
        The path of the file.

    Raises:
        DataError: it is not the folder of a run.
        ArgumentError: the file cannot be written there.
        OSError: the disk is full.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.report import write_report
        >>> Path("gpt2-3").mkdir(exist_ok=True)
        >>> _ = Path("gpt2-3/metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\\n')
        >>> write_report("gpt2-3").name
        'report.html'
    """
    folder = Path(folder)
    target = folder / FILE if out is None else Path(out)
    if out is not None:
        check_output("--out", target, (".html", ".htm"))
    elif folder.is_dir() and not os.access(folder, os.W_OK):
        raise ArgumentError(f"report: {folder} is not writable, choose another place with --out")
    write_text(target, page(read_run(folder, progress)))
    return target


def page(run: Run) -> str:
    """Return the HTML page of a run."""
    found, result = charts([run], [""]), result_of(run)
    if run.curvature is not None:
        found.append(sharpness_chart(run.curvature))
    curves = sum(len(chart.curves) for chart in found)
    points = max(100, min(_POINTS, _CURVE_POINTS // max(1, curves)))
    drawn, data = curves_section(found, [run], points)
    shown = _evaluations, _curvature, _samples, _configuration, _environment, _diff
    parts = [part(run) for part in shown]
    return document(f"{run.name}: report", _header(run, result) + drawn + "".join(parts), data)


def _header(run: Run, result: Result) -> str:
    tiles = [("Status", result.status, "")]
    for name, value in result.values.items():
        tokens = result.values.get(name.removesuffix("loss") + "tokens")
        under = "" if tokens is None else f"on {tokens:,.0f} tokens"
        if name == "best_validation_loss" and result.best_step is not None:
            under = f"at step {result.best_step:,}{_unkept(run, result.best_step)}"
        if name != "step" and not name.endswith("_tokens"):
            tiles.append((label_of(name), text_of(name, value), under))
    for fact, label in _FACTS.items():
        size = number(run.facts.get(fact))
        if math.isfinite(size):
            tiles.append((label, f"{size:,.0f}", ""))
    gpu = run.environment.get("gpu") or run.environment.get("device")
    if gpu:
        tiles.append(("Device", shortened(value_text(gpu), 60), ""))
    notes = [*run.notes]
    if result.not_finite:
        missing = counted(result.not_finite, "logged loss", "logged losses")
        notes.append(f"the curve of the loss has gaps: {missing} not finite")
    if result.is_broken:
        notes.append("the last validation loss is not finite")
    if not run.config:
        notes.append("config.json: no settings are known")
    cells = "".join(
        f"<div><dt>{escaped(label)}</dt><dd>{escaped(text)}"
        f"{f'<small>{escaped(under)}</small>' if under else ''}</dd></div>\n"
        for label, text, under in tiles
    )
    return (
        f'<header>\n<h1>{escaped(run.name)}</h1>\n<p class="quiet">{escaped(run.folder)}</p>\n'
        f'<dl class="tiles">\n{cells}</dl>\n'
        + "".join(f'<p class="note">{escaped(shortened(note, _VALUE))}</p>\n' for note in notes)
        + "</header>\n"
    )


def _unkept(run: Run, step: int) -> str:
    """Return what to say of a best step without a checkpoint; nothing where none can be read."""
    try:
        return without_checkpoint(run.folder, step)
    except (OSError, TensorgradError):
        return ""


def _evaluations(run: Run) -> str:
    known = [key for key in KNOWN if "validation" in key]
    found = {key: run.metrics[key] for key in (*known, *run.measures)}
    found = {key: values for key, values in found.items() if len(values)}
    if not found:
        return ""
    steps = np.unique(np.concatenate([values.steps for values in found.values()]))
    shown = steps[-_ROWS:].tolist()
    count = counted(len(steps), "evaluation")
    caption = f"The last {_ROWS} of {count}" if len(shown) < len(steps) else "Evaluations"
    columns = [_cells(key, values, shown) for key, values in found.items()]
    rows = [[f"{step:,}", *cells] for step, *cells in zip(shown, *columns, strict=True)]
    inside = table(caption, ["Step", *map(title_of, found)], rows)
    return section("Evaluations", f"<details><summary>{count}</summary>\n{inside}</details>\n")


def _cells(key: str, values: Column, steps: list[int]) -> list[str]:
    """Return a value as text at each step, and nothing where it was not measured."""
    at = dict(zip(values.steps.tolist(), values.values.tolist(), strict=True))
    texts = {
        s: "not finite" if math.isnan(at[s]) else text_of(key, at[s]) for s in steps if s in at
    }
    return [texts.get(step, "") for step in steps]


def _curvature(run: Run) -> str:
    return "" if run.curvature is None else curvature_section(run.curvature)


def _samples(run: Run) -> str:
    found = [r for r in run.samples if isinstance(r.get("text"), str)]
    if not found:
        return ""
    parts = [
        f"<details{' open' * (place == 0)}><summary>Step {record['step']:,}</summary>\n"
        f"<pre>{_sample(record)}</pre></details>\n"
        for place, record in enumerate(reversed(found[-_SAMPLES:]))
    ]
    count = f"The newest {_SAMPLES} of {len(found):,}. " if len(found) > _SAMPLES else ""
    about = f'<p class="quiet">{count}The prompt is in bold; the model wrote the rest.</p>\n'
    return section("Samples", about + "".join(parts))


def _sample(record: dict[str, Any]) -> str:
    text, prompt = record["text"], record.get("prompt")
    prompt = prompt if isinstance(prompt, str) else ""
    rest = shortened(text.removeprefix(prompt), _SAMPLE)
    start = f"<mark>{escaped(shortened(prompt, _SAMPLE))}</mark>" if prompt else ""
    return start + escaped(rest)


def _configuration(run: Run) -> str:
    if not run.config:
        return ""
    config = dict(islice(run.config.items(), _ROWS))
    usual, resolved = defaults(config), run.resolved
    changed = frozenset(name for name in config if name in usual and config[name] != usual[name])
    tables = []
    head = ["Setting", "Value", "Default"][: 2 + bool(usual)]
    for group, names in grouped(config).items():
        rows = [
            [name, shortened(value_text(resolved.get(name)), _VALUE),
             value_text(usual[name]) if name in changed else ""][: len(head)]
            for name in names
        ]  # fmt: skip
        tables.append(table(group, head, rows, changed))
    about = (
        '<p class="quiet">Marked values differ from the default, which stands beside them.</p>\n'
        if usual
        else ""
    )
    return section("Configuration", f'{about}<div class="tables">\n{"".join(tables)}</div>\n')


def _environment(run: Run) -> str:
    if not run.environment:
        return ""
    packages = run.environment.get("packages")
    own = {key: value for key, value in run.environment.items() if key not in ("packages", "git")}
    git = run.environment.get("git")
    if isinstance(git, dict):
        dirty = " with uncommitted changes" if git.get("dirty") is True else ""
        own["commit"] = f"{value_text(git.get('commit'))}{dirty}"
    inside = f'<div class="tables">\n{_facts("Process and machine", "Name", own)}</div>\n'
    if isinstance(packages, dict) and packages:
        listed = _facts("Packages", "Package", packages)
        count = counted(len(packages), "package")
        inside += f"<details><summary>{count}</summary>\n{listed}</details>\n"
    return section("Environment", inside)


def _facts(caption: str, name: str, facts: dict[str, Any]) -> str:
    rows = [
        [shortened(key, _VALUE), shortened(value_text(value), _VALUE)]
        for key, value in islice(facts.items(), _ROWS)
    ]
    return table(caption, [name, "Value"], rows)


def _diff(run: Run) -> str:
    if not run.diff.strip():
        return ""
    lines = run.diff[:_DIFF].splitlines()[:_DIFF_LINES]
    total = len(run.diff.splitlines())
    cut = len(lines) < total or len(run.diff) > _DIFF
    more = f", the first {len(lines):,} shown; the rest is in uncommitted.diff" if cut else ""
    return section(
        "Uncommitted changes",
        f"<details><summary>{counted(total, 'line')} of git diff{more}</summary>\n"
        f'<pre class="diff" tabindex="0">{"".join(_highlighted(lines))}</pre></details>\n',
    )


def _highlighted(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a diff as HTML, those of one kind together."""
    for kind, group in groupby(lines, _kind):
        text = escaped("\n".join(group)) + "\n"
        yield f'<span class="{kind}">{text}</span>' if kind else text


def _kind(line: str) -> str:
    """Return the CSS class of a line of a diff; "" for context."""
    if line.startswith(("diff ", "index ", "--- ", "+++ ")):
        return "file"
    return {"+": "added", "-": "removed", "@": "place-of"}.get(line[:1], "")
