"""Ranks on several hosts that work until one host is lost; run by lost_hosts.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from tensorgrad import parallel
from tensorgrad.parallel.comm import launch


def main(folder: Path, waits_in: str) -> None:
    rank = launch.launched_rank()
    # A launcher cannot bring what the ranks of a host say that is cut off from it.
    os.dup2(os.open(folder / f"rank-{rank}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    world = parallel.world()
    # All ranks poll until they are killed: what else runs on this machine comes first.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    x = np.ones(100_000)
    world.all_reduce(x)
    (folder / f"rank-{rank}.new").write_text(str(os.getpid()))
    (folder / f"rank-{rank}.new").rename(folder / f"rank-{rank}.pid")
    if waits_in == "library":
        while True:
            world.all_reduce(x, "max")
    from mpi4py import MPI

    while True:  # in one call of C, which nothing but the end of the process ends
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x, MPI.MAX)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
