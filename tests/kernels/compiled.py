"""Compile the kernels of a test ahead, on all cores."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from tensorgrad.core import backend
from tensorgrad.kernels import loader


def compile_all(kernels: Iterable[tuple[str, str]]) -> None:
    """Make (file, kernel) pairs ready on the current GPU."""
    with ThreadPoolExecutor(backend.threads()) as pool:  # NVRTC releases the GIL and is parallel
        list(pool.map(lambda pair: loader.load(*pair), kernels))
