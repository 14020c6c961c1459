"""`tensorgrad bench kernels`: every kernel beside its floor and PyTorch's: time, GB/s or TFLOP/s.

GB/s counts each input read once and each output written once. The floor is the time of that many
bytes in a copy, or of that many operations in a large product, both measured on the device. Ours
and the peers take turns. Afterwards ours is repeated for `load` seconds, which gives the GPU's
clock and power and the energy of a call: where the GPU is at its limit of power, only less energy
is less time. The work is in kernel_jobs.py. Tests: tests/bench/test_kernels.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from tensorgrad.bench.kernel_jobs import COMPILED, FAMILIES, Calls, Family, Job
from tensorgrad.bench.memory import peak_memory
from tensorgrad.bench.options import Device, Peer, is_measured
from tensorgrad.bench.pictures import new_figure
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import Call, compare_on, under_load
from tensorgrad.core import backend
from tensorgrad.kernels.gpu import GpuMonitor, clock_and_watts
from tensorgrad.profile.ceilings import measure_ceilings

PEERS = ("eager", COMPILED, "fused", "flash-2", "cudnn", "efficient", "unfused")
_PARAMETERS = ("family", "name", "size", "dtype", "load", "peers")
SCALES = {"GB/s": 1e9, "TFLOP/s": 1e12}  # by unit


def kernel_jobs(
    families: dict[str, Family], names: Sequence[str], device: str, scale: int
) -> dict[tuple[str, str, str, str], Job]:
    """Return the jobs of some families by family, name, size and dtype.

    Args:
        families: by name.
        names: of those that are measured.
        device: "cpu", "cuda" or "cuda:N".
        scale: divides the numbers of rows.
    """
    return {
        (name, job.name, job.size, job.dtype): job
        for name in dict.fromkeys(names)
        for job in families[name](device, scale)
    }


class KernelBench:
    """Measures jobs.

    Args:
        jobs: of `kernel_jobs`.
        device: "cpu", "cuda" or "cuda:N".
        load: seconds of load for clock and power, on a GPU; 0: none.
        peer: whether PyTorch is measured where it is installed.
        compiled: whether torch.compile is, which takes seconds a line.
    """

    def __init__(
        self,
        jobs: dict[tuple[str, str, str, str], Job],
        device: str,
        load: float = 1.0,
        *,
        peer: bool = True,
        compiled: bool = False,
    ) -> None:
        self._jobs, self._device, self._load, self._compiled = jobs, device, load, compiled
        self._peer = peer and find_spec("torch") is not None
        self._torch = importlib.import_module("torch") if self._peer else None
        if self._torch is not None and device == "cpu":
            self._torch.set_num_threads(backend.threads())

    def cases(self) -> list[Case]:
        """Return the cases of a sweep, one for each job."""
        peers = ("eager " + COMPILED if self._compiled else "eager") if self._peer else ""
        return [
            dict(zip(_PARAMETERS, (*key, self._load, peers), strict=True)) for key in self._jobs
        ]

    def __call__(self, case: Case) -> Row:
        """Return the results of a case."""
        job = self._jobs[case["family"], case["name"], case["size"], case["dtype"]]
        try:
            calls = job.make(self._device, self._torch)
        except NotImplementedError as error:
            return {"message": str(error)}
        names = [name for name in calls.peers if self._compiled or name != COMPILED]
        first = [calls.first_order] if calls.first_order else []
        timed = calls.ours, *(calls.peers[name] for name in names), *first
        ours, *others = compare_on(self._device, *timed)
        rate = job.amount / SCALES[job.unit] * 1e3
        floor = 1e3 * job.amount / self._ceiling(job)
        row: Row = {
            "ms": ours, "unit": job.unit, "amount": job.amount, "rate": rate / ours,
            "floor_ms": floor, "of_floor": 100 * floor / ours,
        }  # fmt: skip
        if first:
            row["first_order_ms"] = others.pop()
            row["times_first_order"] = ours / row["first_order_ms"]
        for name, ms in zip(names, others, strict=True):
            row |= {f"{name}_ms": ms, f"{name}_rate": rate / ms}
        if others:
            row["peer"] = names[others.index(min(others))]
            row["ratio"] = min(others) / ours
        if job.memory:
            row |= self._peaks(calls)
        if self._load and self._device != "cpu":
            with GpuMonitor(backend.gpu_index(self._device), 0.05) as monitor:
                row |= loaded(calls.ours, monitor, self._load)
        return row

    def _ceiling(self, job: Job) -> float:
        """Return bytes or operations a second."""
        found = measure_ceilings(self._device, [job.dtype] if job.unit == "TFLOP/s" else [])
        return found.bandwidth if job.unit == "GB/s" else found.flops[job.dtype]

    def _peaks(self, calls: Calls) -> Row:
        """Return the most memory that calls use beyond their operands."""
        torch = self._torch if self._device != "cpu" else None
        names = ("eager", COMPILED)[: 1 + self._compiled] if torch is not None else ()
        row: Row = {}
        for name in ("", "unfused", *names):
            call = calls.peers[name] if name else calls.ours
            call(0)  # which leaves gradients, and compiles
            with peak_memory(self._device, torch if name in names else None) as peak:
                call(0)
            row[f"{name}_peak_mb".lstrip("_")] = peak.bytes / 1e6
        return row


def loaded(call: Call, monitor: GpuMonitor, seconds: float) -> dict[str, float]:
    """Return clock and power while a call is repeated, and its energy in mJ, if they are known."""
    under_load(call, seconds / 4)  # the GPU may reach its limit of power first
    monitor.take()
    ms = under_load(call, seconds)
    found = clock_and_watts(monitor.take())
    if "watts" in found:
        found["mj"] = found["watts"] * ms
    return found


def kernels_sweep(
    families: tuple[Literal[tuple(FAMILIES)], ...] = tuple(FAMILIES),  # type: ignore[valid-type]
    /,
    *,
    peer: Peer = None,
    compiled: bool = False,
    load: float = 1.0,
    scale: int | None = None,
    device: Device = "auto",
) -> Iterator[Sweep]:
    """Measure kernels beside their floor and PyTorch: time, GB/s or TFLOP/s, ratio, energy.

    Args:
        families: of kernels.
        compiled: measure torch.compile too, which takes seconds a line.
        load: seconds for which ours is repeated on a GPU, for clock, power and energy.
        scale: divides numbers of rows (default: 1, on a CPU 64).
    """
    rows = scale if scale is not None else 64 if device == "cpu" else 1
    jobs = kernel_jobs(FAMILIES, families, device, rows)
    measure = KernelBench(jobs, device, load, peer=is_measured(peer), compiled=compiled)
    results = (
        *("ms", "unit", "rate", "floor_ms", "of_floor", "peer", "ratio", "amount"),
        *(f"{name}_{what}" for name in PEERS for what in ("ms", "rate")),
        *("first_order_ms", "times_first_order"),
        *("peak_mb", "unfused_peak_mb", "eager_peak_mb", "compiled_peak_mb", "mj"),
    )
    hidden = ("load", "peers", "amount", "floor_ms", *(f"{name}_ms" for name in PEERS))
    yield Sweep("kernels", measure.cases(), measure, results, draw_kernels, device, hidden=hidden)


def draw_kernels(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figure: the fraction of its floor that each job reaches, and the ratio."""
    rows = [row for row in rows if row["ms"] != ""]
    figure = new_figure(2, max(1, len(rows) // 24), "Kernels beside their floor and PyTorch")
    floors, ratios = figure.subplots(1, 2, sharey=True)
    places = range(len(rows))
    floors.barh(places, [row["of_floor"] for row in rows])
    floors.set(xlabel="% of the floor", ylim=(len(rows), -1))
    words = [f"{row['name']}, {row['size']}, {row['dtype']}" for row in rows]
    floors.set_yticks(places, words, fontsize=5)
    ratios.barh(places, [row["ratio"] or 0 for row in rows], color="C1")
    ratios.axvline(1, color="black", linewidth=0.6)
    ratios.set(xlabel="time of the fastest peer / ours")
    return {"": figure}
