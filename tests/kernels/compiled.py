"""Compile the kernels of a test ahead, on all cores."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from tensorgrad import backend
from tensorgrad.kernels import loader


def compile_all(kernels: Iterable[tuple[str, str]]) -> None:
    """Make (file, kernel) pairs ready on the current GPU."""
    pairs = list(kernels)
    target = loader._gpu_target()
    with ThreadPoolExecutor(backend.threads()) as pool:  # NVRTC releases the GIL and is parallel
        binaries = list(pool.map(lambda pair: loader._binary(pair[0], pair[1], target), pairs))
    for (file, kernel), binary in zip(pairs, binaries, strict=True):
        loader._load(file, kernel, binary)
