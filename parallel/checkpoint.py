"""Ranks that write and load a checkpoint together.

Each writes its shard (train/shards.py). The folder is created under another name and renamed by
rank 0 when all files are on the disk, as for one process (train/checkpoint.py): killing a rank at
any moment leaves the earlier checkpoints intact. To load, the ranks divide the verification of the
checksums. Tests: tests/parallel/test_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorgrad.core.errors import CheckpointError, DamagedError
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.train import checkpoint as files
from tensorgrad.train.checkpoint import Checkpoint, OneWriter

Json = Any


class RankWriters(OneWriter):
    """Ranks that write a checkpoint together.

    Args:
        comm: the ranks.
    """

    alone = False

    def __init__(self, comm: Comm) -> None:
        self._comm, self.rank = comm, comm.rank

    def on_all(self, act: Callable[[], Json]) -> list[Json]:
        """Run a function on every rank and return all results, or raise the errors of all on all.

        The error is a DamagedError only if it is on all ranks: what one rank could not read may be
        intact.
        """
        result, problem, damaged = None, "", True
        try:
            result = act()
        except (CheckpointError, OSError) as error:
            problem, damaged = str(error), isinstance(error, DamagedError)
        everyone = self._comm.all_gather_objects([result, problem, damaged])
        problems = dict.fromkeys(problem for _, problem, _ in everyone if problem)
        if problems:
            kind = DamagedError if all(damaged for *_, damaged in everyone) else CheckpointError
            raise kind("; ".join(problems))
        return [result for result, *_ in everyone]

    def on_main(self, act: Callable[[], str]) -> str:
        """Run a function on rank 0 and return its result on all, or raise its error on all."""
        return str(self.on_all(lambda: act() if self.rank == 0 else "")[0])

    def load_latest(self, folder: Path) -> Checkpoint | None:
        """Open the newest undamaged checkpoint; the ranks divide the verification.

        Returns:
            The checkpoint, the same on all ranks; None without any.
        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
            CommError: the ranks see different checkpoints: the hosts do not share the folder.
        """
        everyone = self.on_all(lambda: [path.name for path in files.list_checkpoints(folder)])
        self._comm.agree("load", {"the list of checkpoints": everyone[self.rank]})

        def load(path: Path) -> Checkpoint:
            found: list[Checkpoint] = []
            part, parts = self.rank, self._comm.size
            self.on_all(lambda: found.append(files.load_checkpoint(path, part, parts)))
            return found[0]

        return files.load_latest(folder, load)
