"""A GPU's abilities and its state: peak FLOP/s, bandwidth, clock, power and utilization.

Clock, power and utilization come from NVML through the package nvidia-ml-py, where it is installed.
"""

from __future__ import annotations

import importlib
import logging
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from tensorgrad.core import backend

_log = logging.getLogger(__name__)

# From data sheets, TFLOP/s without sparsity of matrix products in 16 bits that accumulate in
# float32, and of float32, and GB/s of the memory. The first name that is a part of the GPU's name
# counts. TF32 has half the rate of 16 bits.
_PEAKS = {
    "GB200": (2500, 80, 8000),
    "B200": (2250, 75, 8000),
    "GH200": (989, 67, 4000),
    "H200 NVL": (835, 60, 4800),
    "H200": (989, 67, 4800),
    "H100 PCIe": (756, 51, 2000),
    "H100 NVL": (835, 60, 3900),
    "H100": (989, 67, 3350),
    "H800": (989, 67, 3350),
    "H20": (148, 44, 4000),
    "A100 SXM4 40GB": (312, 19.5, 1555),
    "A100 PCIE 40GB": (312, 19.5, 1555),
    "A100": (312, 19.5, 2039),
    "A800": (312, 19.5, 2039),
    "A40": (149.7, 37.4, 696),
    "A30": (165, 10.3, 933),
    "A10G": (70, 35, 600),
    "A10": (125, 31.2, 600),
    "L40S": (362, 91.6, 864),
    "L40": (181, 90.5, 864),
    "L4": (121, 30.3, 300),
    "RTX 6000 Ada": (364, 91.1, 960),
    "RTX A6000": (155, 38.7, 768),
    "RTX 5090": (209.5, 104.8, 1792),
    "RTX 4090": (165.2, 82.6, 1008),
    "RTX 3090": (71, 35.6, 936),
    "V100": (125, 15.7, 900),
    "T4": (65, 8.1, 320),
}
_WITHOUT_TF32 = ("V100", "T4")
_POWER_NOW = 186  # NVML_FI_DEV_POWER_INSTANT, which older packages do not name


def name_of(index: int) -> str:
    """Return the name of a GPU, such as "NVIDIA H200"."""
    name: bytes = backend.cupy.cuda.runtime.getDeviceProperties(index)["name"]
    return name.decode()


def peak_flops(name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a GPU in matrix products, from its data sheet.

    Args:
        name: of the GPU, see `name_of`.
        dtype: of the matrix products: "float32", never rounded to TF32; "tf32"; or one of 16 bits.
            A GPU without TF32 computes them in float32. "fp8" counts as 16 bits, which attention
            and the head have.
    Returns:
        None where the GPU is not known, or is a part of one (MIG).
    """
    known = _known(name)
    if known is None:
        return None
    half, single, _ = _PEAKS[known]
    if dtype == "tf32":
        return 1e12 * (single if known in _WITHOUT_TF32 else half / 2)
    return 1e12 * (single if dtype == "float32" else half)


def memory_bandwidth(name: str) -> float | None:
    """Return the bandwidth of a GPU's memory in bytes/s, from its data sheet.

    Args:
        name: of the GPU, see `name_of`.
    Returns:
        None where the GPU is not known, or is a part of one (MIG).
    """
    known = _known(name)
    return None if known is None else 1e9 * _PEAKS[known][2]


def _known(name: str) -> str | None:
    """Return the name in the table of a GPU, or None."""
    if "MIG" in name.split():
        return None
    words = f" {name.replace('-', ' ')} "
    return next((known for known in _PEAKS if f" {known} " in words), None)


class GpuMonitor:
    """Reads utilization, clock and power of a GPU once a second, in a thread of its own.

    Works inside a `with` block. Without NVML, its package or threads it has no values.

    Args:
        index: of the GPU; None: there is none.
        seconds: between two readings.
        busy: skip readings at which the GPU reports that no kernel ran of late.
    """

    def __init__(self, index: int | None, seconds: float = 1.0, busy: bool = False) -> None:
        self._index, self._seconds, self._busy = index, seconds, busy
        self._nvml: Any = None
        self._handle: Any = None
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._readings: defaultdict[str, list[float]] = defaultdict(list)
        self._thread = threading.Thread(target=self._watch, name="GPU monitor", daemon=True)

    def __enter__(self) -> GpuMonitor:
        if self._index is not None and self._open(self._index):
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads can be started
                _log.debug("clock and power are not logged: %s", error)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._nvml is not None:
            self._nvml.nvmlShutdown()

    def take(self) -> dict[str, float]:
        """Return the means since the last call: gpu_utilization (%), clock_mhz, watts.

        A value that this GPU does not report is missing.
        """
        with self._lock:
            readings, self._readings = self._readings, defaultdict(list)
        return {name: statistics.fmean(values) for name, values in readings.items()}

    def read(self) -> None:
        """Read all values once; the thread does so."""
        nvml, handle = self._nvml, self._handle
        readings: dict[str, Callable[[], float]] = {
            "gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "watts": lambda: _watts(nvml, handle),
        }
        for name, reading in readings.items():
            try:
                value = float(reading())
            except nvml.NVMLError:  # a virtual GPU reports some of them only
                continue
            if self._busy and name == "gpu_utilization" and value == 0:
                return
            with self._lock:
                self._readings[name].append(value)

    def _open(self, index: int) -> bool:
        """Connect to NVML; the GPU is found by its place on the bus, as indices may differ."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return False
        try:
            nvml.nvmlInit()
            place = backend.cupy.cuda.runtime.deviceGetPCIBusId(index)
            self._handle = nvml.nvmlDeviceGetHandleByPciBusId(place)
        except nvml.NVMLError as error:
            _log.debug("clock and power are not logged: %s", error)
            return False
        self._nvml = nvml
        return True

    def _watch(self) -> None:
        while not self._ended.wait(self._seconds):
            self.read()


def _watts(nvml: Any, handle: Any) -> float:
    """Return the power now, or without that the power usage.

    The latter is the mean of the last second on GPUs newer than the A100.
    """
    try:
        (field,) = nvml.nvmlDeviceGetFieldValues(handle, [_POWER_NOW])
    except nvml.NVMLError:
        known = False
    else:
        known = field.nvmlReturn == 0 and field.value.uiVal > 0
    milliwatts: int = field.value.uiVal if known else nvml.nvmlDeviceGetPowerUsage(handle)
    return milliwatts / 1000


def clock_and_watts(*readings: Mapping[str, float]) -> dict[str, float]:
    """Return the means of clock_mhz and watts over what `GpuMonitor.take` gave, if known."""
    means = {}
    for name in ("clock_mhz", "watts"):
        if values := [found[name] for found in readings if name in found]:
            means[name] = statistics.fmean(values)
    return means


def clock_and_watts_text(found: Mapping[str, Any]) -> str:
    """Return what is known of a clock and a power, such as "1582 MHz, 691 W"."""
    units = {"clock_mhz": "MHz", "watts": "W"}
    return ", ".join(f"{found[name]:.0f} {unit}" for name, unit in units.items() if name in found)


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None without NVML or its package."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)
