"""The options of one attention: scale, window, mask, dropout, packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import Dtype
from tensorgrad.kernels.random import Key

Arrays = tuple[Array, Array, Array]
ALL = 2**30  # more keys than there are


@dataclass(frozen=True)
class Sequences:
    """Sequences packed one after the other into arrays (1, H, total, D).

    Attributes:
        q_starts, k_starts: (sequences + 1), int32, on the device of q: sequence s has the queries
            from q_starts[s] to q_starts[s + 1] - 1.
        longest: the longest sequence of q, and of k and v; on the GPU as the caller gave them.
    """

    q_starts: Array
    k_starts: Array
    longest: tuple[int, int]


@dataclass(frozen=True)
class Rule:
    """The options, the same in forward and backward.

    Query i of Tq is at position p = i + Tk - Tq of Tk, and attends to the keys from p - before to
    p + after. A causal rule has after = 0, one without a window before = ALL.

    Attributes:
        bias: (B, H, Tq, Tk), with strides of 0 where it is broadcast, of the dtype of the scores.
            It is added to them; -inf masks a key.
        adds: whether bias holds more than 0 and -inf.
        dropout: the probability with which a weight is set to 0. With packed sequences, weight
            (s, h, i, j) takes the bits that it has in an array (sequences, H, *longest).
        key: of the bits of dropout, for `philox.fill_keep`; CUDA kernels draw them themselves.
        keep: (B, H, Tq, Tk), bool, on the CPU: the keep mask of dropout.
    """

    scale: float
    before: int = ALL
    after: int = ALL
    bias: Array | None = None
    adds: bool = False
    dropout: float = 0.0
    key: Key | None = None
    keep: Array | None = None
    sequences: Sequences | None = None


def empty_result(q: Array, dtype: Dtype) -> Array:
    """Return an uninitialized array (B, H, T, D) in the memory order of (B, T, H, D)."""
    batch, heads, length, width = q.shape
    return backend.empty((batch, length, heads, width), dtype, like=q).swapaxes(1, 2)
