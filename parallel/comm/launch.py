"""The launcher (mpirun, srun), and how an error on one rank ends all of them.

Nothing here imports mpi4py, so a program of one process needs none.
"""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from tensorgrad.core import backend, errors
from tensorgrad.startup.interrupt import INTERRUPTED, during_import

_log = logging.getLogger(__name__)

# MPICH, Intel MPI, Slurm with pmi2; Open MPI; MVAPICH.
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK")
_READ = 0.2  # seconds that the launcher needs to read what a rank wrote


def launched_ranks() -> int:
    """Return the number of ranks that the launcher (mpirun, srun) started; 1 without a launcher."""
    ranks = _number_in(_SIZE_VARIABLES)
    if ranks is None and "PMIX_RANK" in os.environ:
        ranks = _number_in(("SLURM_STEP_NUM_TASKS",))  # srun --mpi=pmix gives the size only there
    return 1 if ranks is None else ranks


def launched_rank() -> int:
    """Return the rank that the launcher gave this process; 0 without a launcher."""
    return _number_in(_RANK_VARIABLES) or 0


def _number_in(names: Sequence[str]) -> int | None:
    """Return the number in the first of some environment variables that has one."""
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdigit()), None)


def check_one_process(program: str) -> None:
    """Refuse to run a program on several ranks, each of which would do the same work.

    Args:
        program: its name, for the error.
    Raises:
        ArgumentError: a launcher started several ranks; one of them says so.
        SystemExit: the same, on the other ranks.
    """
    ranks = launched_ranks()
    if ranks > 1 and launched_rank() > 0:
        raise SystemExit(1)
    if ranks > 1:
        raise errors.ArgumentError(
            f"{program}: got {ranks} ranks, expected one process: start it without mpirun"
        )


@contextmanager
def time_limit(seconds: float, show: bool = True) -> Iterator[None]:
    """End this process with status 1 if the body takes longer than the given number of seconds.

    It also works while no other Python thread can run, as when MPI starts.

    Args:
        seconds: above 0.
        show: whether to write a traceback then.
    """
    with ExitStack() as files:
        where: int | IO[str] = 2
        if not show:
            with suppress(OSError):  # a process without free file numbers must end too
                where = files.enter_context(open(os.devnull, "w"))
        faulthandler.dump_traceback_later(seconds, exit=True, file=where)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def program_facts() -> dict[str, str]:
    """Return the versions that must be equal on all ranks for equal results."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "the code of tensorgrad": _code_digest(),
    }


def _code_digest() -> str:
    """Digest every source file of the package, as hosts may have different checkouts."""
    root = Path(errors.__file__).parent
    files = [
        Path(folder, name)
        for folder, _, names in os.walk(root, followlinks=True)  # models and parallel are links
        for name in names
        if name.endswith((".py", ".cu", ".cuh", ".json"))
    ]
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def share_cores(ranks: int, warn: bool) -> None:
    """Limit BLAS threads so that the ranks of a host divide its cores; OMP_NUM_THREADS overrides.

    With a thread for every core in every rank, ranks mostly wait for each other's threads.
    """
    share = max(1, (os.cpu_count() or 1) // ranks)
    if "OMP_NUM_THREADS" in os.environ or backend.threads() <= share:
        return
    if not backend.limit_threads(share) and warn:
        _log.warning(
            "%d ranks share the cores and this BLAS does not say how to limit its threads; "
            "start them with OMP_NUM_THREADS=%d",
            *(ranks, share),
        )


def write_failure(rank: int, size: int, why: str) -> None:
    """Write to the standard error why this rank is about to end all."""
    line = f"rank {rank} of {size}: {why.rstrip()}\n"
    for stream, text in ((sys.stdout, ""), (sys.stderr, line)):
        with suppress(OSError, ValueError):  # if a stream is closed, all end all the same
            stream.write(text)
            stream.flush()
    time.sleep(_READ)  # when the job is aborted, the launcher loses what it has not read


def end_all_ranks_on_error(abort: Callable[[int, str], object]) -> None:
    """Make an uncaught exception, in any thread, end the whole job from now on.

    Otherwise the other ranks would hang in their next collective.

    Args:
        abort: ends all ranks with a status, after one of the callers has said why.
    """

    def report_and_abort(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        quiet = during_import(error, trace)
        lines = [] if quiet else traceback.format_exception(kind, error, trace)
        status = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
        try:
            abort(status, f"uncaught {kind.__name__}, all ranks end\n" + "".join(lines))
        except KeyboardInterrupt:  # a second Ctrl-C does not wait for other ranks
            os._exit(INTERRUPTED)

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, SystemExit):  # in Python it ends only the thread
            report_and_abort(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = report_and_abort
    threading.excepthook = in_thread
