"""Train a GPT-2 on several ranks: each computes its part of every batch, then all add gradients.

    mpirun -n 2 python examples/train_gpt2_dp.py
    mpirun -n 8 python examples/train_gpt2_dp.py --preset gpt2-124M --dtype bfloat16 --batch 256
    mpirun -n 4 python examples/train_gpt2_dp.py --zero 1
    mpirun -n 2 python examples/train_gpt2_dp.py --resume runs/gpt2-1

On CPUs, or with one GPU a rank. Options, data and results are those of train_gpt2.py: --batch
counts the sequences of all ranks together, and any number of ranks takes the same steps. So a
run may be resumed on another number, and with other --reduction, --bucket-mb and --zero: speed
and memory depend on them, losses do not. Rank 0 prints and saves; with --zero all save.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from tensorgrad.command import drop_unwritten_output, status_and_line
from tensorgrad.errors import ArgumentError, TensorgradError
from tensorgrad.parallel import Comm, DataParallel, Zero, world
from tensorgrad.parallel.data import REDUCTIONS
from tensorgrad.train import config
from tensorgrad.train.config import option
from tensorgrad.train.device import choose_device
from tensorgrad.train.loop import Outcome
from tensorgrad.train.ranks import Ranks
from train_gpt2 import Settings, folder_of, train

ABOUT = "Train a GPT-2 on several ranks, each of which computes its part of every batch."


@dataclass(frozen=True)
class ParallelSettings(Settings):  # type: ignore[misc]  # mypy does not see scripts beside it
    """What can be said on the command line; how ranks share the work, each start says anew."""

    reduction: str = option(
        "overlap",
        "gradients are added by one call each (naive), one in all (flat), or one for each bucket, "
        "while backward goes on (overlap)",
        choices=REDUCTIONS,
        saved=False,
    )
    bucket_mb: float | None = option(
        None, "size of a bucket, in MB of gradients, if not by their number", saved=False
    )
    zero: int = option(
        0,
        "a rank has a part of: 1 the optimizer's state; 2 gradients too; 3 parameters too",
        low=0,
        high=3,
        saved=False,
    )
    timeout: float = option(
        10, "minutes that a rank waits for the others before all end", low=0.01, saved=False
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
        """Return how the ranks train together."""
        if self.zero:
            return Zero(comm, self.zero, self.bucket_mb)
        return DataParallel(comm, self.reduction, self.bucket_mb)


AnySettings = TypeVar("AnySettings", bound=ParallelSettings)


def begin() -> Comm:
    """Return the ranks; the first of them shows messages."""
    comm = world()
    level = logging.INFO if comm.rank == 0 else logging.ERROR
    logging.basicConfig(level=level, format="%(message)s")
    return comm


def read_command_line_once(
    comm: Comm, kind: type[AnySettings], about: str
) -> tuple[AnySettings, Path, bool]:
    """Return what rank 0 reads from the command line; it also chooses the folder of the run."""
    told: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            settings, folder, resuming = config.read_command_line(kind, about, folder_of)
            told = {"settings": asdict(settings), "folder": str(folder), "resuming": resuming}
        except SystemExit as end:  # after --help or an unknown option: all ranks end in peace
            told = {"status": end.code}
        except TensorgradError as error:  # what a user can mend: one line, no traceback
            logging.error("%s", error)
            told = {"status": 1}
    told = comm.broadcast_object(told)
    if "status" in told:
        sys.exit(told["status"])
    settings = kind(**told["settings"])
    world(timeout=60 * settings.timeout)
    return settings, Path(told["folder"]), told["resuming"]


def run_on_ranks(kind: type[AnySettings], about: str) -> int:
    """Run the command together with the other ranks, each on its device; return its exit status.

    An error that a user can mend ends all ranks with one line, any other with its traceback.
    """
    comm = begin()
    settings, folder, resuming = read_command_line_once(comm, kind, about)
    try:
        ranks = settings.ranks(comm)
    except ArgumentError as error:  # the same on all ranks: they end in peace
        if comm.rank == 0:
            logging.error("%s", error)
        return 1
    try:
        settings, _ = choose_device(settings)
        device = comm.select_device(settings.device)
        outcome: Outcome = train(settings, folder, resuming, ranks, device, comm.size)
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


if __name__ == "__main__":
    sys.exit(run_on_ranks(ParallelSettings, ABOUT))
