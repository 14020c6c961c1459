"""The ceilings of a device, measured: the bandwidth of a copy, the FLOP/s of a large product.

Tests: tests/profile/test_ceilings.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import as_dtype, float32
from tensorgrad.kernels.matmul import TF32
from tensorgrad.ops.matmul import product

_CPU_COPY, _GPU_COPY = 1 << 26, 1 << 30  # bytes: more than caches hold
_CPU_PRODUCT = 1024  # rows and columns of matrices
_ROUNDS = 5


@dataclass(frozen=True)
class Ceilings:
    """The measured limits of a device.

    Attributes:
        bandwidth: bytes/s that a copy reads and writes, together.
        flops: FLOP/s of a product of two large matrices, by dtype.
    """

    bandwidth: float
    flops: dict[str, float]


def measure_ceilings(device: str, dtypes: Iterable[str]) -> Ceilings:
    """Measure the limits of a device, once for each dtype in this process.

    It takes up to a second on a GPU, some on a CPU. Random numbers are multiplied: zeros would
    need less power and run at a higher clock.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        dtypes: of floats, or "tf32".
    Raises:
        DeviceError: the device does not exist.
    """
    backend.gpu_index(device)
    return Ceilings(
        _bandwidth(device), {name: _product_flops(device, name) for name in sorted(set(dtypes))}
    )


@cache
def _bandwidth(device: str) -> float:
    xp = backend.namespace_on(device)
    size = _CPU_COPY if xp is np else min(_GPU_COPY, xp.cuda.runtime.memGetInfo()[0] // 8)
    source, target = (xp.ones(size // 4, np.float32) for _ in range(2))

    def copy() -> None:
        xp.copyto(target, source)

    return 2 * int(source.nbytes) / _best_seconds(xp, copy)


@cache
def _product_flops(device: str, name: str) -> float:
    rounded = name == TF32
    dtype = float32 if rounded else as_dtype(name)
    xp = backend.namespace_on(device)
    size = _CPU_PRODUCT if xp is np else 8192 if rounded or dtype.itemsize == 2 else 4096
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((min(256, size), size), np.float32)
    a, b = (xp.asarray(np.tile(rows, (size // len(rows), 1)), dtype) for _ in range(2))

    def multiply() -> Array:
        return product(a, b, dtype, TF32 if rounded else None)

    return 2.0 * size**3 / _best_seconds(xp, multiply)


def _best_seconds(xp: Any, call: Callable[[], object]) -> float:
    """Return the time of the fastest call."""
    call()  # compiles, touches memory, chooses a plan
    if xp is np:
        return min(_host_seconds(call) for _ in range(_ROUNDS))
    return min(_gpu_seconds(xp.cuda, call) for _ in range(_ROUNDS))


def _host_seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _gpu_seconds(cuda: Any, call: Callable[[], object]) -> float:
    start, end = cuda.Event(), cuda.Event()
    start.record()
    for _ in range(_ROUNDS):
        call()
    end.record()
    end.synchronize()
    return float(cuda.get_elapsed_time(start, end)) / 1e3 / _ROUNDS
