"""Training a GPT-2 on several ranks: the program of the examples train_gpt2_dp, _pp and _3d.

Rank 0 reads the command line and prints; an error that a user can fix ends all ranks with one line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from tensorgrad.command import drop_unwritten_output, printable, status_and_line
from tensorgrad.errors import ArgumentError, TensorgradError
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.mpi_nccl import world
from tensorgrad.parallel.data import REDUCTIONS
from tensorgrad.train.config import option, read_command_line
from tensorgrad.train.device import choose_device
from tensorgrad.train.gpt2 import GPT2Settings, train
from tensorgrad.train.ranks import Ranks


@dataclass(frozen=True)
class ParallelSettings(GPT2Settings):
    """The options of a program that trains a GPT-2 on several ranks.

    How the ranks share the work is not saved with a run: each start says it again.
    """

    reduction: str = option(
        "overlap",
        "how gradients are all-reduced: naive (a call per parameter), flat (one call), or overlap "
        "(a call per bucket during backward)",
        choices=REDUCTIONS,
        saved=False,
    )
    bucket_mb: float | None = option(
        None, "size of a gradient bucket in MB", shown="chosen by the number of gradients",
        saved=False,
    )  # fmt: skip
    zero: int = option(
        0,
        "ZeRO stage, what is sharded: 1 optimizer state; 2 gradients too; 3 parameters too",
        low=0,
        high=3,
        saved=False,
    )
    timeout: float = option(
        10, "minutes to wait for another rank before all ranks exit", low=0.01, saved=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zero and self.reduction != "overlap":
            raise ArgumentError(
                f"--reduction: got {self.reduction!r} with --zero {self.zero}, expected 'overlap'"
            )
        if self.bucket_mb is not None and (self.zero > 1 or self.reduction != "overlap"):
            how = f"--zero {self.zero}" if self.zero else f"--reduction {self.reduction}"
            raise ArgumentError(
                f"--bucket-mb: got {self.bucket_mb} with {how}, expected none: it has no buckets"
            )

    def ranks(self, comm: Comm) -> Ranks:
        """Return the strategy with which the ranks train together."""
        raise NotImplementedError


_Settings = TypeVar("_Settings", bound=ParallelSettings)


def run_on_ranks(
    kind: type[_Settings], description: str | None, show: Callable[[str], object]
) -> int:
    """Train together with the other ranks, each on its device; return the exit status.

    Args:
        kind: the settings, whose `ranks` is the strategy.
        description: of the program; its first line is for --help.
        show: called on the main rank with a sample of the trained model's text.
    """
    comm = world()
    level = logging.INFO if comm.rank == 0 else logging.ERROR
    logging.basicConfig(level=level, format="%(message)s")
    settings, folder, resuming = _read_once(comm, kind, description)
    try:
        ranks = settings.ranks(comm)
    except ArgumentError as error:  # the same on all ranks: each exits by itself
        if comm.rank == 0:
            logging.error("%s", error)
        return 1
    try:
        settings, _ = choose_device(settings)
        device = comm.select_device(settings.device)
        outcome, sample = train(settings, folder, resuming, device, ranks, comm.size)
        if sample is not None and ranks.is_main:
            show(printable(sample))
        return outcome.status
    except BaseException as error:
        found = status_and_line(error)
        if found is None:
            raise
        status, line = found
        comm.abort(status, line or type(error).__name__)
        return status
    finally:
        drop_unwritten_output()


def _read_once(
    comm: Comm, kind: type[_Settings], description: str | None
) -> tuple[_Settings, Path, bool]:
    """Return what rank 0 reads from the command line; it also chooses the folder of the run."""
    read: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            settings, folder, resuming = read_command_line(kind, description)
            read = {"settings": asdict(settings), "folder": str(folder), "resuming": resuming}
        except SystemExit as end:  # --help or an unknown option: all ranks exit with this status
            read = {"status": end.code}
        except TensorgradError as error:
            logging.error("%s", error)
            read = {"status": 1}
    read = comm.broadcast_object(read)
    if "status" in read:
        sys.exit(read["status"])
    settings = kind(**read["settings"])
    world(timeout=60 * settings.timeout)
    return settings, Path(read["folder"]), read["resuming"]
