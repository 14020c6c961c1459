"""`tensorgrad report RUN`: one HTML page about a run."""

from __future__ import annotations

from pathlib import Path

from tensorgrad.io.display import file_size
from tensorgrad.report import write_report
from tensorgrad.train.progress import StageProgress


def report(run: Path, /, *, out: Path | None = None) -> int:
    """Write one HTML page about a run: curves, samples, settings, environment.

    The page opens without a network. The run may be training still.

    Args:
        run: folder of the run.
        out: file to write (default: report.html in the folder).
    """
    with StageProgress("reading") as progress:
        page = write_report(run, out, progress)
    print(f"{page}: {file_size(page)}")
    return 0
