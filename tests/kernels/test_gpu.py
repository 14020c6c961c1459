from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tensorgrad.core import backend
from tensorgrad.kernels.gpu import (
    GpuMonitor,
    clock_and_watts,
    clock_and_watts_text,
    driver_version,
    memory_bandwidth,
    name_of,
    peak_flops,
)


class NVMLError(Exception):
    pass


class FakeNvml:
    """The functions of nvidia-ml-py, for one GPU that does not report its clock."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1

    def __init__(self) -> None:
        self.watts = 400
        self.utilization = 90
        self.power_now: int | None = None  # mW; None: an error
        self.power_status = 0
        self.calls: list[str] = []

    def nvmlInit(self) -> None:
        self.calls.append("init")

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetHandleByPciBusId(self, place: str) -> str:
        return place

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        assert handle == "0000:01:00.0"
        return SimpleNamespace(gpu=self.utilization)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        raise NVMLError

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self.watts += 100
        return self.watts * 1000

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]) -> list[Any]:
        assert fields == [186]
        if self.power_now is None:
            raise NVMLError
        value = SimpleNamespace(uiVal=self.power_now)
        return [SimpleNamespace(nvmlReturn=self.power_status, value=value)]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    runtime = SimpleNamespace(
        deviceGetPCIBusId=lambda index: "0000:01:00.0",
        getDeviceProperties=lambda index: {"name": b"NVIDIA H200"},
    )
    cupy: Any = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(backend, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_the_monitor_gives_means_of_what_the_gpu_reports(nvml: FakeNvml) -> None:
    with GpuMonitor(0, seconds=1000) as monitor:
        assert monitor.take() == {}
        monitor.read()
        monitor.read()
        assert monitor.take() == {"gpu_utilization": 90, "watts": 550}
        assert monitor.take() == {}
    assert nvml.calls == ["init", "shutdown"]


def test_readings_of_an_idle_gpu_may_be_skipped(nvml: FakeNvml) -> None:
    with GpuMonitor(0, seconds=1000, busy=True) as monitor:
        monitor.read()
        nvml.utilization = 0
        monitor.read()
        assert monitor.take() == {"gpu_utilization": 90, "watts": 500}
        monitor.read()
        assert monitor.take() == {}


@pytest.mark.parametrize(
    ("now", "status", "watts"), [(650_000, 0, 650), (650_000, 3, 500), (0, 0, 500)]
)
def test_power_is_that_of_now_where_it_is_known(
    nvml: FakeNvml, now: int, status: int, watts: float
) -> None:
    nvml.power_now, nvml.power_status = now, status
    with GpuMonitor(0, seconds=1000) as monitor:
        monitor.read()
        assert monitor.take()["watts"] == watts


def test_means_of_clock_and_power_and_what_is_unknown() -> None:
    both, power = {"gpu_utilization": 9, "clock_mhz": 1500, "watts": 600}, {"watts": 650}
    assert clock_and_watts(both, power) == {"clock_mhz": 1500, "watts": 625}
    assert clock_and_watts(power) == {"watts": 650}
    assert clock_and_watts() == clock_and_watts({}) == {}
    assert clock_and_watts_text({**both, "ms": 3}) == "1500 MHz, 600 W"
    assert clock_and_watts_text(power) == "650 W"
    assert clock_and_watts_text({}) == ""


def test_the_monitor_reads_in_a_thread(nvml: FakeNvml) -> None:
    with GpuMonitor(0, seconds=0.001) as monitor:
        found: dict[str, float] = {}
        while not found:
            assert monitor._thread.is_alive()
            found = monitor.take()
    assert found["gpu_utilization"] == 90
    assert not monitor._thread.is_alive()


@pytest.mark.parametrize("missing", ["package", "driver"])
def test_without_nvml_there_are_no_values(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def refuse() -> None:
        raise NVMLError("no driver")

    if missing == "package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        monkeypatch.setattr(nvml, "nvmlInit", refuse)
    with GpuMonitor(0, seconds=0.001) as monitor:
        assert monitor.take() == {}
    assert driver_version() is None
    with GpuMonitor(None) as monitor:
        assert monitor.take() == {}


def test_the_driver_and_the_name_are_known(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_version() == "580.1"
    assert nvml.calls == ["init", "shutdown"]
    monkeypatch.setattr(nvml, "nvmlSystemGetDriverVersion", lambda: b"535.2")
    assert driver_version() == "535.2"
    assert name_of(0) == "NVIDIA H200"


@pytest.mark.parametrize(
    ("name", "half", "single", "memory"),
    [
        ("NVIDIA H200", 989, 67, 4800),
        ("NVIDIA H100 80GB HBM3", 989, 67, 3350),
        ("NVIDIA H100 PCIe", 756, 51, 2000),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5, 2039),
        ("NVIDIA A100-SXM4-40GB", 312, 19.5, 1555),
        ("NVIDIA A10", 125, 31.2, 600),
        ("NVIDIA L40S", 362, 91.6, 864),
        ("Tesla T4", 65, 8.1, 320),
        ("NVIDIA GB200", 2500, 80, 8000),
    ],
)
def test_the_peak_of_known_gpus(name: str, half: float, single: float, memory: float) -> None:
    assert memory_bandwidth(name) == 1e9 * memory
    for dtype in ("bfloat16", "bfloat16-parameters", "float16"):
        assert peak_flops(name, dtype) == 1e12 * half
    assert peak_flops(name, "float32") == 1e12 * single
    assert peak_flops(name, "tf32") == 1e12 * (single if name == "Tesla T4" else half / 2)


@pytest.mark.parametrize("name", ["", "NVIDIA T400", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "A1000"])
def test_other_gpus_have_no_known_peak(name: str) -> None:
    assert peak_flops(name, "bfloat16") is None
    assert memory_bandwidth(name) is None


@pytest.mark.gpu
def test_a_real_gpu_is_read() -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py (pip install -e '.[cuda13]')")
    assert driver_version()
    with GpuMonitor(0, seconds=1000) as monitor:
        monitor.read()
        found = monitor.take()
    assert found["watts"] > 1
    assert found["clock_mhz"] > 1
