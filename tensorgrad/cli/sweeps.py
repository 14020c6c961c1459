"""How commands of `tensorgrad bench` run sweeps: ranks, progress, the table that is printed."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from tensorgrad import __version__, backend, gpu
from tensorgrad.bench.sweep import OK, Case, Row, Sweep, run_sweep, to_markdown
from tensorgrad.command import aligned, printable, status_and_line
from tensorgrad.distribution import install
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.launch import launched_ranks
from tensorgrad.parallel.comm.mpi_nccl import world
from tensorgrad.train.folder import check_new_folder

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 10.0
_TIMEOUT = 120.0  # seconds to wait for a rank that failed alone


def ranks_of(device: str) -> tuple[Comm, str]:
    """Return the ranks, and the device of this one."""
    comm = world(_TIMEOUT) if launched_ranks() > 1 else Comm()
    return comm, comm.select_device(device)


def sweep_cases(
    sweep: Sweep,
    cases: Sequence[Case],
    measure: Callable[[Case], Row],
    out: Path,
    device: str,
    comm: Comm | None = None,
    problem: Callable[[Row], str] = lambda row: "",
) -> int:
    """Run a sweep and print its table on rank 0.

    Args:
        sweep, cases, measure: see `run_sweep`.
        out: the folder of the files.
        device: "cpu", "cuda" or "cuda:N".
        comm: the ranks; default: this process alone.
        problem: returns what is wrong with a row, "" for nothing.
    Returns:
        The exit status: 1 where a case failed, or a row has a problem.
    """
    index = backend.gpu_index(device)
    main = comm is None or comm.rank == 0
    try:
        if main:
            sweeps = tuple(path.stem for path in out.glob("*.csv"))
            check_new_folder(out, is_own=lambda path: path.name.startswith(sweeps))
        with (
            SweepProgress(sweep.name, main) as progress,
            gpu.GpuMonitor(index if main else None, 0.2, busy=True) as monitor,
        ):
            found = run_sweep(
                sweep, cases, measure, out, device="cpu" if index is None else gpu.name_of(index),
                version=__version__, comm=comm, progress=progress.show, monitor=monitor,
            )  # fmt: skip
    except KeyboardInterrupt as stop:
        stop.add_note(f"bench {sweep.name}: finished rows are in {out}; the same command resumes")
        raise
    except BaseException as error:
        known = status_and_line(error)
        if comm is not None and comm.size > 1 and known is not None:
            comm.abort(*known)  # the other ranks wait for this one
        raise
    if main:
        print(printable(aligned(to_markdown(sweep, found.rows))))
        if found.skipped:
            print(f"{found.skipped} of {len(cases)} rows were in {out} before")
        if not found.pictures:
            print(f"no pictures: run {install('plot')} to draw them")
        print(f"in {out}: {', '.join(path.name for path in found.paths)}")
        if found.failed:
            _log.error("bench %s: %d of %d cases failed", sweep.name, found.failed, len(cases))
    problems = [words for row in found.rows if row["status"] == OK and (words := problem(row))]
    for words in problems:
        _log.error("bench %s: %s", sweep.name, words)
    status = int(found.failed > 0 or len(problems) > 0)
    return status if comm is None else int(comm.broadcast_object(status))


@dataclass
class SweepProgress:
    """The progress of a sweep: a bar on a terminal; elsewhere a line of the log at times.

    Args:
        name: of the sweep.
        shown: whether to show anything: one rank does.
    """

    name: str
    shown: bool = True

    def __enter__(self) -> SweepProgress:
        self._bar: tqdm | None = None
        if self.shown and sys.stderr is not None and sys.stderr.isatty():
            self._bar = tqdm(desc=self.name, unit="case", dynamic_ncols=True, leave=False)
        self._last = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int, total: int, case: Case | None) -> None:
        """Show how many cases are done, and the one that begins."""
        words = "" if case is None else " ".join(map(str, list(case.values())[:4]))
        if self._bar is not None:
            self._bar.total, self._bar.n = total, done
            self._bar.set_postfix_str(words)
        elif self.shown and case and time.monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            _log.info("bench %s: case %d of %d: %s", self.name, done + 1, total, words)
