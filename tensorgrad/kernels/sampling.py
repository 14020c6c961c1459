"""The next token of each sequence: launches sampling.cu, a block a sequence."""

from __future__ import annotations

import numpy as np

from tensorgrad.core.backend import Array
from tensorgrad.kernels import overlap
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.structs import pointer

_THREADS = 1024  # the kernel's constant


def sample_tokens(
    logits: Array,
    changed: tuple[Array, Array, Array, Array, Array],
    read: tuple[Array | None, Array, Array],
    penalty: float,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    """Draw a token for each row of logits and append it.

    Args:
        logits: (B, V), float32, the elements of a row side by side.
        changed: tokens, counts, lengths, latest and flags of the sequences.
        read: which tokens were seen (or None), seeds, and tokens that end a sequence.
        penalty: for tokens that were seen.
        temperature: 0 takes the most likely token.
        top_k: 0 for all tokens.
        top_p: 1 for all tokens.
    """
    seen, seeds, stops = read
    overlap.launch(
        load("sampling.cu", "sample_tokens"),
        (len(logits),),
        (_THREADS,),
        (*changed, logits, pointer(seen), seeds, stops, np.int32(len(stops)),
         np.int64(changed[0].shape[1]), np.int64(logits.strides[0] // logits.itemsize),
         np.int32(logits.shape[1]), np.float32(penalty), np.float64(temperature), np.int32(top_k),
         np.float64(top_p)),
    )  # fmt: skip
