"""The CUDA graph that is being captured, as launches know it.

In a graph the host's part of a launch costs nothing, so kernels are launched there in ways that
cost Python more, such as overlapping (overlap.py), and share what needs to be zeroed only once.
Tests: tests/kernels/test_capturing.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tensorgrad.core.backend import Array

__all__ = ["capturing", "counters", "is_capturing"]

_counters: dict[int, Array] | None = None


@contextmanager
def capturing() -> Iterator[None]:
    """Let launches know that the `with` block is captured; one thread at a time may.

    Example:
        >>> from tensorgrad.kernels.capturing import capturing, is_capturing
        >>> with capturing():
        ...     is_capturing()
        True
    """
    global _counters
    before, _counters = _counters, {}
    try:
        yield
    finally:
        _counters = before


def is_capturing() -> bool:
    """Return whether a graph is being captured.

    Returns:
        True inside `capturing`.

    Example:
        >>> from tensorgrad.kernels.capturing import is_capturing
        >>> is_capturing()
        False
    """
    return _counters is not None


def counters() -> dict[int, Array]:
    """Return the tile counters of the graph; nothing keeps them outside of a capture.

    Returns:
        Arrays on the GPU by the address of their stream, to which a launch adds its own.

    Example:
        >>> from tensorgrad.kernels.capturing import capturing, counters
        >>> with capturing():
        ...     counters()[0] = np.zeros(4, np.uint32)
        ...     sorted(counters())
        [0]
        >>> counters()
        {}
    """
    return {} if _counters is None else _counters
