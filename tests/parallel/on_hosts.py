"""Ranks on several hosts that work until one host is lost; run by test_hosts.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

folder, mode = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["PMI_RANK"])
# A launcher cannot bring what the ranks of a host say that is cut off from it.
os.dup2(os.open(folder / f"rank-{rank}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)

import numpy as np  # noqa: E402

from tensorgrad import parallel  # noqa: E402

world = parallel.world()
x = np.ones(100_000)
world.all_reduce(x)
(folder / f"rank-{rank}.new").write_text(str(os.getpid()))
(folder / f"rank-{rank}.new").rename(folder / f"rank-{rank}.pid")
if mode == "library":
    while True:
        world.all_reduce(x, "max")
else:
    from mpi4py import MPI

    while True:  # waits in C, inside MPI
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x, MPI.MAX)
