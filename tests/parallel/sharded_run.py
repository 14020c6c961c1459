"""A short training run on several ranks, for tests that may kill it.

mpirun -n 2 python -m tests.parallel.sharded_run FOLDER STAGE [--resume] [options of TrainSettings]

STAGE is that of ZeRO; 0 is plain data parallelism.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tensorgrad.parallel import DataParallel, Zero, world
from tests.train.tiny_run import given_options, make_trainer


def main() -> None:
    """Train in the folder of the command line."""
    folder, stage, *rest = sys.argv[1:]
    resuming = "--resume" in rest
    comm = world()
    ranks = Zero(comm, int(stage), bucket_mb=0.005) if int(stage) else DataParallel(comm)
    trainer = make_trainer(Path(folder), ranks, **given_options(rest))
    if resuming:
        trainer.resume()
    pids = comm.all_gather_objects(os.getpid())
    if comm.rank == 0:
        print("ready", *pids, flush=True)
    outcome = trainer.run()
    if comm.rank == 0:
        print("finished" if outcome.finished else f"stopped after {outcome.step}", flush=True)


if __name__ == "__main__":
    main()
