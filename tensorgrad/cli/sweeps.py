"""How commands of `tensorgrad bench` run sweeps: ranks, progress, the table that is printed."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from tensorgrad import __version__
from tensorgrad.bench.sweep import OK, Case, Sweep, run_sweep, to_markdown
from tensorgrad.core import backend
from tensorgrad.io.command import aligned, printable, status_and_line
from tensorgrad.kernels import gpu
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.launch import launched_ranks
from tensorgrad.parallel.comm.mpi_nccl import world
from tensorgrad.startup.distribution import install
from tensorgrad.train.folder import check_new_folder

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 10.0
_TIMEOUT = 120.0  # seconds to wait for a rank that failed alone


def ranks_of(device: str) -> tuple[Comm, str]:
    """Return the ranks, and the device of this one."""
    comm = world(_TIMEOUT) if launched_ranks() > 1 else Comm()
    return comm, comm.select_device(device)


def sweep_cases(sweep: Sweep, out: Path, comm: Comm) -> int:
    """Run a sweep and print its table on rank 0.

    Args:
        sweep: what to measure.
        out: the folder of the files.
        comm: the ranks.
    Returns:
        The exit status: 1 where a case failed, or a row has a problem.
    """
    index = backend.gpu_index(sweep.device)
    device = "cpu" if index is None else gpu.name_of(index)
    main = comm.rank == 0

    def show(done: int, total: int, case: Case | None) -> None:
        progress.show(" ".join(map(str, list((case or {}).values())[:4])), done, total)

    try:
        if main:
            sweeps = tuple(path.stem for path in out.glob("*.csv"))
            check_new_folder(out, is_own=lambda path: path.name.startswith(sweeps))
        with (
            Progress(f"bench {sweep.name}", "case", main) as progress,
            gpu.GpuMonitor(index if main else None, 0.2, busy=True) as monitor,
        ):
            result = run_sweep(
                sweep, out, device=device, version=__version__, comm=comm, progress=show,
                monitor=monitor,
            )  # fmt: skip
    except KeyboardInterrupt as stop:
        stop.add_note(f"bench {sweep.name}: finished rows are in {out}; the same command resumes")
        raise
    except BaseException as error:
        known = status_and_line(error)
        if comm.size > 1 and known is not None:
            comm.abort(*known)  # the other ranks wait for this one
        raise
    if main:
        print(printable(aligned(to_markdown(sweep, result.rows))))
        if result.skipped:
            print(f"{result.skipped} of {len(sweep.cases)} rows were in {out} before")
        if not result.pictures:
            print(f"no pictures: run {install('plot')} to draw them")
        print(f"in {out}: {', '.join(path.name for path in result.paths)}")
        if result.failed:
            _log.error(
                "bench %s: %d of %d cases failed", sweep.name, result.failed, len(sweep.cases)
            )
    problems = [sweep.problem(row) for row in result.rows if row["status"] == OK]
    for words in filter(None, problems):
        _log.error("bench %s: %s", sweep.name, words)
    status = int(result.failed > 0 or any(problems))
    return int(comm.broadcast_object(status))


@dataclass
class Progress:
    """The progress of a command: a bar on a terminal; elsewhere a line of the log at times.

    Args:
        name: of the command.
        unit: of what is counted.
        shown: whether to show anything: one rank does.
    """

    name: str
    unit: str
    shown: bool = True

    def __enter__(self) -> Progress:
        self._bar: tqdm | None = None
        if self.shown and sys.stderr is not None and sys.stderr.isatty():
            self._bar = tqdm(desc=self.name, unit=self.unit, dynamic_ncols=True, leave=False)
        self._last = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, words: str, done: int, total: int) -> None:
        """Show how many are done, of a total that may be 0, and what begins; "" at the end."""
        if self._bar is not None:
            self._bar.total, self._bar.n = total, done
            self._bar.set_postfix_str(words)
        elif self.shown and words and time.monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            of = f" of {total}" if total else ""
            _log.info("%s: %s %d%s: %s", self.name, self.unit, done + 1, of, words)
