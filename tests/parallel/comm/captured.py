"""A collective inside a CUDA graph; run by test_collectives.py on one GPU a rank."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tensorgrad import parallel
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16

cupy = backend.cupy


def assert_shared_parts_are_reduced(comm: parallel.Comm) -> Any:
    """By copy engines, eager and in a graph, to the bits of a sum in the order of the ranks.

    Returns what to keep: a program that ends may have graphs.
    """
    kept: Any = []
    size = 1_500_004
    terms = [np.random.default_rng(rank).standard_normal(size) for rank in range(comm.size)]
    for dtype in (np.dtype("float32"), bfloat16):
        own = terms[comm.rank].astype(dtype)
        x = cupy.asarray(own)
        shared = comm.share(x)
        if shared is None:  # GPUs without a way to each other's memory
            continue
        stream = cupy.cuda.Stream(non_blocking=True)
        parts = x[8:700_008], x[700_008:1_500_000]
        assert shared.place(x[9:700_009]) is None
        assert shared.place(x[:8]) is None
        with stream:
            handles = [comm.all_reduce(part, "mean", wait=False) for part in parts]
            for handle in handles:
                handle.wait()
            eager = x.get(stream=stream)
            stream.begin_capture()
            handles = [comm.all_reduce(part, "mean", wait=False) for part in parts]
            for handle in handles:
                handle.wait()
            graph = stream.end_capture()
            total = np.zeros(size, "float32")
            for term in terms:
                total += term.astype(dtype).astype("float32")
            expected = (total / np.float32(comm.size)).astype(dtype)
            expected[:8], expected[1_500_000:] = own[:8], own[1_500_000:]
            assert np.array_equal(eager, expected)
            for _ in range(3):
                x.set(own, stream=stream)
                graph.launch()
                assert np.array_equal(x.get(stream=stream), expected)
        kept += graph, x, shared
    return kept


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
    kept = assert_shared_parts_are_reduced(comm)
    kept.append(graph)
    sys.modules["kept"] = kept  # alive when the communicator ends, like a program's own
    if comm.rank == 0:
        print("captured")


if __name__ == "__main__":
    main()
