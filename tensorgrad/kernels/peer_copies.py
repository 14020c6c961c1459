"""Kernels of an all-reduce by copy engines: launches peer_copies.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import bfloat16, c_name, float16, float32, float64
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.structs import Peers, by_value

DTYPES = (float32, float64, float16, bfloat16)
ALIGNED = 16  # bytes
STATE = Peers.MOST + 1  # numbers of 32 bits that a rank keeps, 0 before its first meeting
_THREADS = 256


def peers(state: list[int], rank: int) -> Any:
    """Return the argument of `meet`.

    Args:
        state: the addresses of the numbers of all ranks, in this rank's address space.
        rank: this rank.
    """
    meetings = state[rank] + 4 * Peers.MOST
    found = Peers(rank=rank, ranks=len(state), meetings=meetings)
    found.met[: len(state)] = state
    return by_value(found)


def meet(peers: Any) -> None:
    """Make the current stream wait until all ranks have come to the same meeting."""
    load("peer_copies.cu", "meet_ranks")((1,), (32,), (peers,))


def add(own: Array, copies: Array, rank: int, scale: float) -> None:
    """Replace a part of this rank by its sum over the ranks, in their order, times `scale`.

    Args:
        own: (n,), a multiple of ALIGNED bytes.
        copies: (ranks - 1, m), those of the other ranks; m is at least n.
        rank: this rank.
        scale: 1 for a sum.
    """
    others, pitch = copies.shape
    kernel = load("peer_copies.cu", f"add_copies<{c_name(own.dtype)}>")
    blocks = -(-own.nbytes // (ALIGNED * _THREADS))
    ranks = np.int32(rank), np.int32(others + 1)
    sizes = np.int64(own.size), np.int64(pitch), np.float64(scale)
    kernel((blocks,), (_THREADS,), (own, copies, *ranks, *sizes))
