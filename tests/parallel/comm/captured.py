"""A collective inside a CUDA graph; run by test_collectives.py on one GPU a rank."""

from __future__ import annotations

import sys

from tensorgrad import parallel
from tensorgrad.core import backend

cupy = backend.cupy


def main() -> None:
    comm = parallel.world()
    comm.select_device("cuda")
    x = cupy.full(1000, comm.rank + 1.0)
    comm.all_reduce(x)
    total = comm.size * (comm.size + 1) / 2
    assert (x.get() == total).all()
    work = cupy.ones((4096, 4096), "float32")
    work @ work
    large = cupy.ones(1 << 24, "float32")
    comm.all_reduce(large)
    cupy.cuda.Device().synchronize()

    for _ in range(20):
        work @ work
    large.fill(comm.rank + 1)
    before = cupy.cuda.Event()
    before.record()
    comm.all_reduce(large)
    assert not before.done, "the host has waited for the GPU"
    assert float(large[-1]) == total, "the sum did not wait for what was to be added"

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x.fill(comm.rank + 1)
        stream.begin_capture()
        comm.all_reduce(x)
        comm.all_reduce(x, "mean")
        graph = stream.end_capture()
        graph.launch()
        graph.launch()
        stream.synchronize()
    assert (x.get() == total * comm.size).all()
    sys.modules["kept"] = graph  # as a program keeps it: alive when the communicator ends
    if comm.rank == 0:
        print("captured")


if __name__ == "__main__":
    main()
