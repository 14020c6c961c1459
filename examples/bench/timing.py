"""GPU time of calls without the host's launch time; used by kernels.py.

Launches are queued behind a kernel that waits, so that they run back to back. CuPy and PyTorch
share the default stream here, so one clock measures both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tensorgrad import backend

ROUNDS = 20  # calls between two events
REPEATS = 5  # of which the median is taken
Call = Callable[[int], object]  # takes the number of the round, to change inputs with

_WAIT = """
extern "C" __global__ void wait(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}
"""


@dataclass
class Job:
    """A line of the table: work of a known amount, by our implementation and by peers.

    Args:
        name: of the work.
        size: of its operands.
        amount: bytes that must at least move, or floating-point operations.
        unit: "GB/s" or "TFLOP/s".
        ours: our implementation.
        peers: name -> another implementation.
    """

    name: str
    size: str
    amount: float
    ours: Call
    peers: dict[str, Call] = field(default_factory=dict)
    unit: str = "GB/s"


Jobs = Iterator[Job]


def milliseconds(call: Call) -> float:
    """Return the median GPU time of one call."""
    return compare(call)[0]


def compare(*calls: Call) -> list[float]:
    """Return the median GPU time of each call.

    They alternate: under such load a GPU lowers its clocks after a while, by a sixth and more,
    which would favor the first call.
    """
    queues = [_queue(call) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(REPEATS):
        for i in range(len(calls))[:: 1 if turn % 2 == 0 else -1]:
            times[i].append(next(queues[i]))
    return [statistics.median(each) for each in times]


def _queue(call: Call) -> Iterator[float]:
    """Yield the mean time of some calls in a row, without end."""
    cupy = backend.cupy
    wait = cupy.RawKernel(_WAIT, "wait")
    for i in range(3):
        call(i)
    cupy.cuda.runtime.deviceSynchronize()
    start = time.perf_counter()
    call(0)
    cupy.cuda.runtime.deviceSynchronize()
    rounds = max(2, min(ROUNDS, int(0.05 / (time.perf_counter() - start))))
    pause = 1e-3
    while True:
        events = [cupy.cuda.Event() for _ in range(2)]
        start = time.perf_counter()
        wait((1,), (1,), (int(pause * 1e9),))
        events[0].record()
        for i in range(rounds):
            call(i)
        events[1].record()
        queued = time.perf_counter() - start
        events[1].synchronize()
        if queued > pause and pause < 0.2:
            pause = 2 * queued  # the GPU may have waited for the host: once more
            continue
        yield cupy.cuda.get_elapsed_time(*events) / rounds


def copy_ceiling() -> float:
    """Return the rate of a copy of 2 GB on the device, in GB/s read and written."""
    cupy = backend.cupy
    source = cupy.random.default_rng(0).random(2**28, dtype="float32")
    target = cupy.empty_like(source)
    return float(2 * source.nbytes / milliseconds(lambda _: cupy.copyto(target, source)) / 1e6)


def random_array(shape: tuple[int, ...], dtype: Any = "float32", seed: int = 0) -> Any:
    """Return normal random numbers on the GPU."""
    numbers = backend.cupy.random.default_rng(seed).standard_normal(shape, dtype="float32")
    return numbers.astype(dtype, copy=False)
