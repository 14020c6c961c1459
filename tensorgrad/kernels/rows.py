"""How rows are divided among threads. Device code: kernels/rows.cuh.

A layout depends on the shape, the dtype and the alignment alone, never on the GPU, so that equal
inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tensorgrad.core.backend import Array

VECTOR_BYTES = 16  # bytes of one access of one thread


class RowLayout(NamedTuple):
    """Threads of a row, rows of a block, and vectors of a row that a thread holds."""

    threads: int
    groups: int
    vectors: int

    @property
    def block(self) -> tuple[int, int]:
        """The shape of a block."""
        return self.threads, self.groups

    def grid(self, rows: int) -> tuple[int]:
        """Return the blocks for one row a group."""
        return (-(-rows // self.groups),)


def aligned(width: int, *arrays: Array | None) -> bool:
    """Whether rows of this many elements consist of whole 16-byte vectors in all arrays."""
    for a in arrays:
        if a is not None and (width * a.itemsize % VECTOR_BYTES or a.data.ptr % VECTOR_BYTES):
            return False
    return True


def in_registers(
    row_bytes: int, vectors: Sequence[int], lanes: int, threads: int, most: int
) -> RowLayout | None:
    """Return how rows of whole vectors are held in registers, or None if they are too long.

    Args:
        row_bytes: a multiple of 16.
        vectors: numbers that a thread may hold, ascending. The first with which `lanes` threads
            hold a row is taken, else the last.
        lanes: threads of a row, if it is long enough.
        threads: of a block.
        most: threads of a row.
    """
    count = row_bytes // VECTOR_BYTES
    own = next((v for v in vectors if v * lanes >= count), vectors[-1])
    needed = -(-count // own)
    needed = power_of_two(needed) if needed <= 32 else -(-needed // 32) * 32
    if needed > most:
        return None
    return RowLayout(needed, max(1, threads // needed), own)


def strided_loop(width: int, threads: int = 512, per_thread: int = 8) -> RowLayout:
    """Return the layout for rows of any width and alignment, read in more than one pass."""
    lanes = min(threads, power_of_two(-(-width // per_thread)))
    return RowLayout(lanes, max(1, threads // 2 // lanes), 1)


def power_of_two(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
