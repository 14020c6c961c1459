"""mpirun -n 2 python tests/bench/sweep_ranks.py FOLDER: a case that fails on one rank alone."""

import sys
from pathlib import Path

import numpy as np

from tensorgrad import parallel
from tensorgrad.bench.sweep import Case, Row, Sweep, run_sweep

comm = parallel.world()
array = np.ones(1000, np.float32)


def measure(case: Case) -> Row:
    if (case["n"], comm.rank) == (2, 1):
        raise MemoryError("none here")
    if (case["n"], comm.rank) == (3, 0):
        raise ValueError("not here")
    for _ in range(3):
        comm.all_reduce(array, "mean")
    return {"ms": 1.0}


cases = [{"n": n, "dtype": "float32"} for n in range(1, 5)]
sweep = Sweep("lopsided", cases, measure, ("ms",))
found = run_sweep(sweep, Path(sys.argv[1]), device="cpu", version="1", comm=comm)
if comm.rank == 0:
    assert [(row["status"], row["message"]) for row in found.rows] == [
        ("ok", ""),
        ("out of memory", "rank 1: none here"),
        ("error", "not here"),
        ("ok", ""),
    ], found.rows
