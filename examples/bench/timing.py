"""Lines of the tables of kernels.py, the bandwidth of a copy, and the energy of a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tensorgrad import backend
from tensorgrad.bench.timing import Call, milliseconds, under_load
from tensorgrad.gpu import GpuMonitor, clock_and_watts


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


def copy_ceiling() -> float:
    """Return the rate of a copy of 2 GB on the device, in GB/s read and written."""
    cupy = backend.cupy
    source = cupy.random.default_rng(0).random(2**28, dtype="float32")
    target = cupy.empty_like(source)
    return float(2 * source.nbytes / milliseconds(lambda _: cupy.copyto(target, source)) / 1e6)


def loaded(call: Call, monitor: GpuMonitor, seconds: float) -> dict[str, float]:
    """Return clock and power while a call is repeated, and its energy in mJ, if they are known."""
    under_load(call, seconds / 4)  # the GPU may reach its limit of power first
    monitor.take()
    ms = under_load(call, seconds)
    found = clock_and_watts(monitor.take())
    if "watts" in found:
        found["mJ"] = found["watts"] * ms
    return found
