"""`tensorgrad compare RUN RUN ...`: what differs between runs."""

from __future__ import annotations

import shutil
from pathlib import Path

from tensorgrad.io.command import printable
from tensorgrad.io.display import file_size
from tensorgrad.io.tables import write_text
from tensorgrad.report import compare as compare_runs
from tensorgrad.report import to_text
from tensorgrad.report.comparison import FORMS
from tensorgrad.report.document import check_output
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
    given = {"--out": (out, "page"), "--csv": (csv, "csv"), "--markdown": (markdown, "markdown")}
    outputs = [(option, path, FORMS[name]) for option, (path, name) in given.items() if path]
    for option, path, (_, endings) in outputs:
        check_output(option, path, endings)
    with StageProgress("reading") as progress:
        comparison = compare_runs(runs, progress)
    print(printable(to_text(comparison, shutil.get_terminal_size((100, 24)).columns)), end="")
    for _, path, (form, _) in outputs:
        write_text(path, form(comparison))
        print(f"{path}: {file_size(path)}")
    return 0
