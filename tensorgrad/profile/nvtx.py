"""NVTX ranges, which Nsight Systems shows: through CuPy, or the package nvtx."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tensorgrad.core import backend
from tensorgrad.core.errors import ArgumentError


class Nvtx(NamedTuple):
    """Begin and end a range of the current thread."""

    push: Callable[[str], object]
    pop: Callable[[], object]


def nvtx_functions() -> Nvtx:
    """Return the functions.

    Raises:
        ArgumentError: neither package is installed.
    """
    if backend.cupy is not None:
        from cupy.cuda import nvtx as of_cupy

        return Nvtx(of_cupy.RangePush, of_cupy.RangePop)
    try:
        import nvtx
    except ImportError as error:
        raise ArgumentError(
            "Profiler: nvtx is True, but neither CuPy nor nvtx is installed; run `pip install nvtx`"
        ) from error
    return Nvtx(nvtx.push_range, nvtx.pop_range)
