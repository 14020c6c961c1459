"""`tensorgrad bench comm`: all-reduce over sizes, ranks and backends.

    algorithm bandwidth = bytes / time,  bus bandwidth = 2 (n - 1) / n * algorithm bandwidth

The bus bandwidth is what a ring sends over each link; it can be compared with the link's speed for
any number of ranks n. Where each rank has a GPU of its own, or on CPUs, the direct call of NCCL or
MPI takes turns with ours. Tests: tests/bench/test_comm.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from tensorgrad.bench.memory import check_fits
from tensorgrad.bench.options import Device, check_ranks, crossed
from tensorgrad.bench.pictures import lines
from tensorgrad.bench.steps import RankTimer
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import in_turns
from tensorgrad.core import backend
from tensorgrad.core.dtypes import as_dtype
from tensorgrad.core.errors import ArgumentError
from tensorgrad.parallel.comm.collectives import Comm

BACKENDS = ("mpi", "nccl")
_WINDOWS, _MOST_CALLS = 5, 1000
_WINDOW = 0.05  # seconds of a timed window


def comm_sweep(
    *,
    comm: Comm,
    sizes: tuple[float, ...] = (1, 4, 16, 64, 256, 1024),
    ranks: tuple[int, ...] = (),
    backends: tuple[Literal[BACKENDS], ...] = (),  # type: ignore[valid-type]
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    device: Device = "auto",
) -> Iterator[Sweep]:
    """Measure all-reduce over sizes, ranks and backends: time, algorithm and bus bandwidth.

    Args:
        sizes: MB (10^6 bytes) on each rank.
        ranks: how many of the ranks take part; several numbers are compared (default: all).
        backends: mpi, arrays of the host; nccl, arrays of GPUs (default: both, on a CPU mpi).
        dtype: of the arrays.
    """
    names = backends or (("mpi",) if device == "cpu" else BACKENDS)
    if "nccl" in names and device == "cpu":
        raise ArgumentError("--backends: got nccl without a GPU, expected mpi")
    check_ranks("comm", comm.size)
    for count in ranks:
        if not 2 <= count <= comm.size:
            raise ArgumentError(f"bench comm: ranks is {count}, expected 2 to {comm.size}")
    cases = crossed(
        backend=names, ranks=sorted(ranks or (comm.size,)), size_mb=sorted(map(float, sizes)),
        dtype=as_dtype(dtype).name,
    )  # fmt: skip
    results = "ms", "std", "algorithm_gbps", "bus_gbps", "direct_gbps", "ratio"
    yield Sweep("comm", cases, CommBench(comm, device), results, draw_comm, device)


class CommBench:
    """Measures all-reduces; every rank makes one and calls it with the same cases.

    Args:
        comm: all ranks.
        device: of this rank, for NCCL.
    """

    def __init__(self, comm: Comm, device: str) -> None:
        self._comm, self._device = comm, device
        self._groups: dict[int, Comm] = {comm.size: comm}

    def __call__(self, case: Case) -> Row:
        """Return the results of a case; ranks that take no part wait."""
        group = self._group(case["ranks"])
        device = "cpu" if case["backend"] == "mpi" else self._device
        row: Row = {}
        if self._comm.rank < case["ranks"]:
            row = self._measure(case, group, device)
        self._comm.barrier()
        return row

    def _group(self, ranks: int) -> Comm:
        """Return the communicator of the first ranks, or of the others."""
        if ranks not in self._groups:
            first = self._comm.rank < ranks
            members = range(ranks) if first else range(ranks, self._comm.size)
            self._groups[ranks] = self._comm.split(list(members))
        return self._groups[ranks]

    def _measure(self, case: Case, group: Comm, device: str) -> Row:
        dtype = as_dtype(case["dtype"])
        count = max(1, round(case["size_mb"] * 1e6 / dtype.itemsize))
        _check_fits(2.0 * count * dtype.itemsize, device, group)
        array = backend.to_device(np.ones(count, dtype), device)

        def call() -> None:
            group.all_reduce(array, "mean")

        direct = self._direct(group, array)
        timer = RankTimer(group, device, 1)
        call()  # connects, and allocates buffers
        count = max(1, min(_MOST_CALLS, int(_WINDOW / max(timer.seconds(call, 1), 1e-9))))
        times: list[float] = []

        def ours() -> float:
            times.append(timer.seconds(call, count))
            return times[-1]

        measures: list[Callable[[], float]] = [ours]
        if direct is not None:
            measures.append(partial(timer.seconds, direct, count))
        seconds, *others = in_turns(measures, _WINDOWS)
        algorithm = array.nbytes / seconds / 1e9
        bus = algorithm * 2 * (group.size - 1) / group.size
        row: Row = {
            "ms": 1e3 * seconds, "std": 1e3 * float(np.std(times)),
            "algorithm_gbps": algorithm, "bus_gbps": bus,
        }  # fmt: skip
        if others:
            row |= {"direct_gbps": bus * seconds / others[0], "ratio": others[0] / seconds}
        return row

    def _direct(self, group: Comm, array: backend.Array) -> Callable[[], object] | None:
        """Return a direct call of MPI or NCCL for all ranks; None where there is none."""
        if group is not self._comm:
            return None
        if backend.is_numpy(array):
            if array.dtype != np.float32:
                return None
            mpi: Any = importlib.import_module("mpi4py.MPI")
            return lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, array)
        if group.local_size > backend.gpu_count() or array.dtype != np.float32:
            return None
        link: Any = importlib.import_module("cupy.cuda.nccl")
        own = link.get_unique_id().hex() if group.rank == 0 else ""
        name = bytes.fromhex(group.broadcast_object(own))
        ranks = link.NcclCommunicator(group.size, name, group.rank)
        stream = backend.cupy.cuda.get_current_stream()
        place, float32, mean = array.data.ptr, 7, 4
        return lambda: ranks.allReduce(place, place, array.size, float32, mean, stream.ptr)


def _check_fits(size: float, device: str, group: Comm) -> None:
    """Raise MemoryError on all ranks of a group where an array does not fit on one of them.

    The others would wait in the all-reduce for the rank that failed.
    """
    problem = ""
    try:
        check_fits(size, device)
    except MemoryError as error:
        problem = str(error)
    problems = [str(text) for text in group.all_gather_objects(problem) if text]
    if problems:
        raise MemoryError(problems[0])


def draw_comm(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figure of a sweep: time and bus bandwidth over size."""
    panels = {"ms": "time (ms)", "bus_gbps": "bus bandwidth (GB/s)"}
    title, x = "All-reduce, {dtype}, {device}", ("size_mb", "size (MB)")
    return {"": lines(rows, title, x, panels, ("backend", "ranks"))}
