"""mpirun -n 3 python tests/bench/comm_ranks.py FOLDER: one rank of a group has no memory."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from tensorgrad import parallel
from tensorgrad.bench import comm as bench
from tensorgrad.bench import memory
from tensorgrad.bench.comm import comm_sweep
from tensorgrad.bench.sweep import run_sweep

comm = parallel.world()
[asked] = comm_sweep(comm=comm, sizes=(0.01, 4.0), ranks=(2,), device="cpu")
free = 1_000_000 if comm.rank == 1 else 10**9
with patch.object(memory, "free_bytes", lambda device: free):
    found = run_sweep(asked, Path(sys.argv[1]), device="cpu", version="1", comm=comm)
bench._WINDOW = 1e-3
[whole] = comm_sweep(comm=comm, sizes=(0.01,), device="cpu")
row = whole.measure(whole.cases[0])  # with MPI's own call, of all ranks
assert row["algorithm_gbps"] * row["ms"] == pytest.approx(0.01)
assert row["bus_gbps"] == pytest.approx(row["algorithm_gbps"] * 4 / 3)
assert row["direct_gbps"] * row["ratio"] == pytest.approx(row["bus_gbps"])
assert 0.01 < row["ratio"] < 100
assert 0 <= row["std"] < 100 * row["ms"]
[narrow] = comm_sweep(comm=comm, sizes=(0.01,), dtype="bfloat16", device="cpu")
assert "ratio" not in narrow.measure(narrow.cases[0])  # MPI has no such dtype
if comm.rank == 0:
    assert found.rows[0]["ratio"] == "", found.rows  # a part of the ranks
    assert [row["status"] for row in found.rows] == ["ok", "out of memory"], found.rows
    assert "0.0 GB are free" in found.rows[1]["message"], found.rows
