"""`tensorgrad compare RUN RUN ...`: what differs between runs."""

from __future__ import annotations

import shutil
from pathlib import Path

from tensorgrad.command import printable
from tensorgrad.report import Outputs, to_text
from tensorgrad.report import compare as compare_runs
from tensorgrad.train.progress import StageProgress


def compare(
    *runs: Path, out: Path | None = None, csv: Path | None = None, markdown: Path | None = None
) -> int:
    """Show what differs between runs in settings, environment and result.

    Args:
        runs: folders of two or more runs.
        out: HTML file to write: the tables, and the curves of all runs over steps, tokens and time.
        csv: CSV file to write: a line for each run, with all settings and results.
        markdown: Markdown file to write: the tables.
    """
    outputs = Outputs(out, csv, markdown)
    outputs.check()
    with StageProgress("reading") as progress:
        comparison = compare_runs(runs, progress)
    print(printable(to_text(comparison, shutil.get_terminal_size((100, 24)).columns)), end="")
    for path in outputs.write(comparison):
        print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
    return 0
