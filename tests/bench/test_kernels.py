"""`tensorgrad bench kernels`: every family runs, beside its floor and PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.bench import kernels
from tensorgrad.bench.kernel_jobs import FAMILIES, Calls, Job
from tensorgrad.bench.kernels import KernelBench, kernel_jobs
from tensorgrad.bench.naive import naive_matmul
from tensorgrad.bench.timing import to_torch
from tensorgrad.cli import main
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16
from tensorgrad.io.readers import read_json
from tensorgrad.kernels.gpu import GpuMonitor


class Monitor(GpuMonitor):
    """A GPU of 1,600 MHz."""

    def __init__(self, **reading: float) -> None:
        super().__init__(None)
        self._reading = reading

    def take(self) -> dict[str, float]:
        return {"clock_mhz": 1600, **self._reading}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each load, in which a call takes 2 ms."""
    found: list[float] = []

    def under_load(call: Any, seconds: float) -> float:
        found.append(seconds)
        return 2.0

    monkeypatch.setattr(kernels, "under_load", under_load)
    return found


def test_energy_is_power_times_time(loads: list[float]) -> None:
    line = kernels.loaded(print, Monitor(watts=600), 0.4)
    assert line == {"clock_mhz": 1600, "watts": 600, "mj": 1200}
    assert loads == [0.1, 0.4]  # the first does not count


def test_unknown_power_is_left_out(loads: list[float]) -> None:
    assert kernels.loaded(print, Monitor(), 0.4) == {"clock_mhz": 1600}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_runs(family: str, device: str) -> None:
    """Each kind of work once, in the smallest size: what is measured is correct elsewhere."""
    jobs = kernel_jobs(FAMILIES, [family], device, 10**6 if device == "cpu" else 64)
    smallest: dict[tuple[str, str], Job] = {}
    for job in sorted(jobs.values(), key=lambda job: job.amount, reverse=True):
        smallest[job.name, job.dtype if device == "cuda" else ""] = job
    peers = device == "cuda" or family in ("norm", "dropout", "decode", "second_order")
    torch = pytest.importorskip("torch") if peers else None
    for job in smallest.values():
        try:
            calls = job.make(device, torch)
        except NotImplementedError:  # this GPU has no such kernel
            continue
        for call in (
            calls.ours,
            *(calls.peers[name] for name in calls.peers if name != "compiled"),
        ):
            call(0)
            call(1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_naive_product_is_a_product(device: str) -> None:
    a, b = (np.random.default_rng(i).standard_normal(size, "float32")
            for i, size in enumerate(((5, 33), (33, 300))))  # fmt: skip
    y = naive_matmul(*(backend.to_device(array, device) for array in (a, b)))
    np.testing.assert_allclose(y.numpy(), a @ b, rtol=1e-4, atol=1e-5)


def test_the_naive_product_is_measured_on_a_gpu_alone() -> None:
    names = {
        device: [job.name for job in FAMILIES["matmul"](device, 1)] for device in ("cpu", "cuda")
    }
    assert names["cuda"].count("matmul naive") == 1
    assert "matmul naive" not in names["cpu"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_work_of_full_size_is_a_row(device: str) -> None:
    for name, family in FAMILIES.items():
        keys = [(job.name, job.size, job.dtype) for job in family(device, 1)]
        assert len(keys) == len(set(keys)), name
        assert all(job.amount > 0 for job in family(device, 1))


def test_a_row_has_rates_a_floor_and_the_fastest_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(device: str, torch: Any) -> Calls:
        return Calls(print, {"eager": print, "compiled": print, "unfused": print})

    job = Job("work", "8 x 8", "float32", 6e6, make)
    monkeypatch.setattr(kernels, "compare_on", lambda device, *calls: [2.0, 3.0, 1.0])
    monkeypatch.setattr(KernelBench, "_ceiling", lambda self, job: 6e9)
    bench = KernelBench({("any", "work", "8 x 8", "float32"): job}, "cpu", peer=False)
    [case] = bench.cases()
    assert case == {"family": "any", "name": "work", "size": "8 x 8", "dtype": "float32",
                    "load": 1.0, "peers": ""}  # fmt: skip
    assert bench(case) == {
        "ms": 2.0, "unit": "GB/s", "amount": 6e6, "rate": 3.0, "floor_ms": 1.0, "of_floor": 50.0,
        "eager_ms": 3.0, "eager_rate": 2.0, "unfused_ms": 1.0, "unfused_rate": 6.0,
        "peer": "unfused", "ratio": 0.5,
    }  # fmt: skip


def test_second_order_stands_beside_first_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(device: str, torch: Any) -> Calls:
        return Calls(print, {"eager": print}, first_order=print)

    job = Job("work", "8 x 8", "float32", 6e6, make)
    monkeypatch.setattr(kernels, "compare_on", lambda device, *calls: [8.0, 16.0, 2.0])
    monkeypatch.setattr(KernelBench, "_ceiling", lambda self, job: 6e9)
    bench = KernelBench({("any", "work", "8 x 8", "float32"): job}, "cpu", peer=False)
    row = bench(bench.cases()[0])
    assert (row["first_order_ms"], row["times_first_order"], row["ratio"]) == (2.0, 4.0, 2.0)


def test_a_kernel_that_a_device_lacks_is_a_row_that_says_so() -> None:
    def make(device: str, torch: Any) -> Calls:
        raise NotImplementedError("wgmma: needs compute capability 9.0")

    job = Job("work", "8 x 8", "float32", 6e6, make)
    bench = KernelBench({("any", "work", "8 x 8", "float32"): job}, "cpu", peer=False)
    assert bench(bench.cases()[0]) == {"message": "wgmma: needs compute capability 9.0"}


def test_the_command_writes_rows_with_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["bench", "kernels", "linear_cross_entropy", "decode", "--scale", "30000"]
    assert main([*command, "--no-peer", "--device", "cpu"]) == 0
    head, *others = read_json("runs/bench/kernels.json")["rows"]
    assert (head["family"], head["unit"], head["peer"]) == (
        "linear_cross_entropy", "TFLOP/s", "unfused",
    )  # fmt: skip
    assert head["peak_mb"] > 0
    assert head["unfused_peak_mb"] > 0
    assert len(others) == 2  # equal sizes are one
    assert all(row["family"] == "decode" and row["peak_mb"] is None for row in others)
    assert Path("runs/bench/kernels.png").exists()


def test_arrays_of_pytorch_share_memory() -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("float32", bfloat16, "int32"):
        array = np.arange(6).reshape(2, 3).astype(dtype)
        found = to_torch(torch, array)
        assert str(found.dtype) == f"torch.{array.dtype.name}"
        found[1, 2] = 7
        assert float(array[1, 2]) == 7
