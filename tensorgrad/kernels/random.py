"""Random numbers by counter-based Philox: launches random.cu."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.core.backend import Array
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.structs import pointer


class Key(NamedTuple):
    """The counter of Philox: with the shape, it decides an array of random numbers.

    `offset`, an array with one uint64 on the GPU or None, is added to the draw number inside the
    kernels: a captured launch draws new numbers at each replay when it is counted up between them.
    """

    seed: int
    draw: int
    stream: int = 0
    offset: Array | None = None


def keep_threshold(probability: float) -> int:
    """Return the number, at least 1, below which a lane of 16 bits keeps its element."""
    return max(1, round(probability * 2**16))


def attention_keep(y: Array, key: Key, probability: float) -> None:
    """Fill (B, H, Tq, Tk) with the bits that the attention kernels draw."""
    *heads, queries, keys = y.shape
    blocks = math.prod(heads) * -(-queries // 16) * 8 * -(-keys // 16)
    if not y.size:
        return
    load("random.cu", "attention_keep")(
        (-(-blocks // 256),),
        (256,),
        (y, np.int64(blocks), np.int32(queries), np.int32(keys), np.uint64(key.seed),
         np.uint64(key.draw), np.uint64(key.stream), pointer(key.offset),
         np.uint32(round(probability * 2**16))),
    )  # fmt: skip


def advance(offset: Array, draws: int) -> None:
    """Add to the part of the draw number that is on the device (see `Key`).

    At the end of a captured step of `draws` draws, it lets each replay draw what the next step
    would have drawn.
    """
    load("random.cu", "advance_draw")((1,), (1,), (offset, np.uint64(draws)))


def fill(
    kernel: str, lanes: int, y: Array, key: Key, *parameters: Any, before: tuple[Array, ...] = ()
) -> None:
    """Launch a kernel that fills `lanes` elements a thread."""
    if not y.size:
        return
    counter = (np.uint64(key.seed), np.uint64(key.draw), np.uint64(key.stream), pointer(key.offset))
    load("random.cu", kernel)(
        (-(-y.size // (256 * lanes)),),
        (256,),
        (y, *before, np.int64(y.size), *counter, *parameters),
    )
