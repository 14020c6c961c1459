"""Time of calls: on a GPU without the host's launch time, on a CPU as it is.

Launches are queued behind a kernel that waits, so that they run back to back between two CUDA
events. CuPy and PyTorch share the default stream here, so one clock measures both. Operands that
fit in the L2 cache are in it, as the results of the layer before are in a model; the number of the
round lets a call change its operands.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.dtypes import DtypeLike, as_dtype, bfloat16
from tensorgrad.kernels.gpu import GpuMonitor, clock_and_watts
from tensorgrad.profile.training_step import synchronize

ROUNDS = 20  # calls between two events
REPEATS = 5  # times, whose median is taken
_HOST_SECONDS = 0.3  # after which a CPU repeats no more
_LOAD_SECONDS = 0.01  # length of calls under load, after which the host waits for the GPU
Call = Callable[[int], object]  # takes the number of the round, to change inputs with

_WAIT = """
extern "C" __global__ void wait(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}
"""


def in_turns(measures: Sequence[Callable[[], float]], turns: int) -> list[float]:
    """Return the median of what each function returns, called in turns, there and back."""
    found: list[list[float]] = [[] for _ in measures]
    for turn in range(turns):
        for i in range(len(measures))[:: 1 if turn % 2 == 0 else -1]:
            found[i].append(measures[i]())
    return [statistics.median(times) for times in found]


def under_load(call: Call, seconds: float, device: str = "cuda") -> float:
    """Return the mean milliseconds of one call, repeated for so long without waiting for each.

    So the GPU gets as warm as in training, and may reach its limit of power.
    """
    call(0)
    synchronize(device)
    start = time.perf_counter()
    call(1)
    synchronize(device)
    rounds = max(1, int(_LOAD_SECONDS / (time.perf_counter() - start)))
    count, start = 0, time.perf_counter()
    while count == 0 or time.perf_counter() - start < seconds:
        for _ in range(rounds):
            call(count)
            count += 1
        synchronize(device)
    return 1e3 * (time.perf_counter() - start) / count


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


def compare_on(device: str, *calls: Call) -> list[float]:
    """Return the median time of each call on a CPU or a GPU, in turns, after one to warm up.

    They alternate: under such load a GPU lowers its clocks after a while, by a sixth and more,
    which would favor the first call.
    """
    if device != "cpu":
        return in_turns([partial(next, _queue(call)) for call in calls], REPEATS)
    for call in calls:
        call(0)
    slowest = max(_host_milliseconds(call) for call in calls)
    turns = max(1, min(REPEATS, int(1e3 * _HOST_SECONDS / slowest)))
    return in_turns([partial(_host_milliseconds, call) for call in calls], turns)


def _host_milliseconds(call: Call) -> float:
    start = time.perf_counter()
    call(1)
    return 1e3 * (time.perf_counter() - start)


def milliseconds_on(device: str, call: Call) -> float:
    """Return the median time of one call on a CPU or a GPU, after one to warm up."""
    return compare_on(device, call)[0]


def seconds_of(call: Callable[[], object], device: str, count: int = 1) -> float:
    """Return the seconds of some calls in a row, with the GPU's work."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return time.perf_counter() - began


def host_seconds(call: Callable[[], object], device: str) -> float:
    """Return the seconds until a call returns; a GPU is idle when it begins."""
    synchronize(device)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def phases(
    device: str,
    forward: Callable[[], Any],
    backward: Callable[[Any], object],
    update: Callable[[], object],
) -> list[float]:
    """Return the seconds of each phase of a training step; the host waits after each."""
    synchronize(device)
    moments = [time.perf_counter()]
    loss = forward()
    for call in (lambda: None, partial(backward, loss), update):
        call()
        synchronize(device)
        moments.append(time.perf_counter())
    return [after - before for before, after in pairwise(moments)]


def windows_in_turns(
    steps: Mapping[str, Callable[[], object]], device: str, windows: int, counts: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Return the median "ms" of steps that take turns, and the means of the GPU's readings.

    Args:
        steps: by name.
        device: "cpu", "cuda" or "cuda:N".
        windows: of each.
        counts: steps in a row in a window, by name.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    readings: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    with GpuMonitor(backend.gpu_index(device), 0.2) as monitor:
        for name, step in list(steps.items()) * windows:
            monitor.take()
            times[name].append(seconds_of(step, device, counts[name]) / counts[name])
            readings[name].append(monitor.take())
    return {
        name: {"ms": 1e3 * statistics.median(times[name]), **clock_and_watts(*readings[name])}
        for name in steps
    }


def random_array(
    shape: tuple[int, ...], dtype: DtypeLike = "float32", seed: int = 0, device: str = "cuda"
) -> backend.Array:
    """Return normal random numbers."""
    rng = backend.namespace_on(device).random.default_rng(seed)
    return rng.standard_normal(shape, np.float32).astype(as_dtype(dtype), copy=False)


def to_torch(torch: Any, array: Any) -> Any:
    """Return an array of NumPy or CuPy as a tensor of PyTorch that shares its memory."""
    if array.dtype == bfloat16:  # which DLPack of the array library may not know
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(array)
