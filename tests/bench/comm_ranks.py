"""mpirun -n 3 python tests/bench/comm_ranks.py FOLDER: one rank of a group has no memory."""

import sys
from pathlib import Path
from unittest.mock import patch

from tensorgrad import parallel
from tensorgrad.bench import memory
from tensorgrad.bench.comm import comm_sweep
from tensorgrad.bench.sweep import run_sweep

comm = parallel.world()
[asked] = comm_sweep(comm=comm, sizes=(0.01, 4.0), ranks=(2,), device="cpu")
free = 1_000_000 if comm.rank == 1 else 10**9
with patch.object(memory, "free_bytes", lambda device: free):
    found = run_sweep(asked, Path(sys.argv[1]), device="cpu", version="1", comm=comm)
if comm.rank == 0:
    assert [row["status"] for row in found.rows] == ["ok", "out of memory"], found.rows
    assert "0.0 GB are free" in found.rows[1]["message"], found.rows
