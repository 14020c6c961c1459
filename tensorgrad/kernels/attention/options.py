"""The scale, mask, window and dropout of one attention, as all implementations take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import Dtype
from tensorgrad.kernels.random import Key

Arrays = tuple[Array, Array, Array]
ALL = 2**30  # more keys than there are


@dataclass(frozen=True)
class Sequences:
    """Sequences that lie one after the other in arrays (1, H, total, D).

    Attributes:
        q_starts, k_starts: (sequences + 1), int32, on the device of q: sequence s has the queries
            from q_starts[s] to q_starts[s + 1] - 1.
        longest: the lengths of the longest sequence in q, and in k and v; on the GPU upper bounds
            that the caller gave.
    """

    q_starts: Array
    k_starts: Array
    longest: tuple[int, int]


@dataclass(frozen=True)
class AttentionOptions:
    """The options of a pass of attention; equal in forward and backward.

    Query i of Tq is at position p = i + Tk - Tq of Tk and attends to the keys from p - before to
    p + after: a causal mask has after = 0, attention without a window before = ALL.

    Attributes:
        scale: factor of the scores.
        bias: (B, H, Tq, Tk), mostly of stride 0, dtype of the scores: added to them; -inf masks.
        adds: whether bias holds values other than 0 and -inf.
        dropout: the probability with which a weight is set to 0. With sequences of several
            lengths, weight (s, h, i, j) takes the bits that it has in (sequences, H, *longest).
        key: of the random bits of dropout, for `philox.fill_attention_keep`; the CUDA kernels
            generate them.
        keep: (B, H, Tq, Tk), bool: the keep mask of dropout, on the CPU.
        sequences: where sequences of several lengths lie; None for one of each batch entry.
        tf32: whether products may round float32 to TF32.
        rotation: how the kernel rotates queries and keys, and gradients back: cosines and sines as
            of `kernels.rotary.angles`, and whether pairs are interleaved. Only for modules whose
            `rotates` says so; None where they are rotated before, or not at all.
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
    tf32: bool = False
    rotation: tuple[Array, Array, bool] | None = None


class ForwardPass(NamedTuple):
    """The arrays of backward: operands (B, H, T, D), the result and its logsumexp (B, H, Tq)."""

    q: Array
    k: Array
    v: Array
    y: Array
    logsumexp: Array
    options: AttentionOptions


class TangentPass(NamedTuple):
    """The arrays of the tangent's backward: q, k, v, y, tq, tk, tv, ty (B, H, T, D).

    Attributes:
        logsumexp: of the scores, (B, H, Tq).
        means: of the tangents of the scores, by the weights of a query, (B, H, Tq).
    """

    q: Array
    k: Array
    v: Array
    y: Array
    logsumexp: Array
    tq: Array
    tk: Array
    tv: Array
    ty: Array
    means: Array
    options: AttentionOptions


def empty_result(q: Array, dtype: Dtype) -> Array:
    """Return an uninitialised (B, H, T, D) in the memory order of (B, T, H, D)."""
    batch, heads, length, width = q.shape
    return backend.empty((batch, length, heads, width), dtype, like=q).swapaxes(1, 2)
