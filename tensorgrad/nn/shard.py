"""Which layers ranks share: rows of a table that a layer or a model states, and their region.

    up      column      rows of W: a rank computes some columns of the result
    down    row         columns of W: a rank computes one term of a sum over the ranks
    tokens  vocabulary  rows of W: a rank has some tokens
    q_norm  inside      whole on each rank, which applies it to what it computes alone

A region is what a rank computes alone, from `enter` to `leave`. tensorgrad.parallel.tensor divides
the layers that the tables name; on one rank there is no region.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

from tensorgrad.core.dtypes import DtypeLike
from tensorgrad.core.tensor import Tensor


class Shard(NamedTuple):
    """A row of the table of layers that ranks share, which the method `shards` of a module returns.

    Attributes:
        layer: the name of a sublayer, or of an attribute that is None: a Linear, for "vocabulary"
            also an Embedding, for "inside" any.
        kind: which elements of its weight a rank has: "column" and "vocabulary" some rows (whose
            results are columns), "row" some columns, "inside" all.
        sections: lengths along the divided axis that are divided separately.
        units: the number of equal units of the divided axis, or of each section, of which none is
            divided, such as heads. Where ranks do not divide it, some have one unit more.
        counts: the attributes of the module that count them: each rank then has its own number.

    Example:
        >>> tg.nn.FeedForward(8).shards()[0] == tg.nn.Shard("up", "column")
        True
    """

    layer: str
    kind: Literal["column", "row", "vocabulary", "inside"]
    sections: Sequence[int] | None = None
    units: int | None = None
    counts: tuple[str, ...] = ()


class Region(Protocol):
    """The ranks that share layers; see tensorgrad/parallel/region.py."""

    def enter(self, x: Any) -> Tensor:
        """Return all rows of x as the input of this rank's shard."""

    def leave(self, y: Any, bias: Any = None, residual: Any = None) -> Tensor:
        """Return the sum of the terms y of the ranks, plus bias and residual."""

    def embed(self, weight: Tensor, ids: Any, positions: Any, start: Any) -> Tensor:
        """Return the vectors of ids, where this rank has some rows of the weight."""

    def logits(self, x: Any, weight: Tensor, dtype: DtypeLike | None) -> Tensor:
        """Return x W^T, where this rank has some rows of W."""

    def cross_entropy(self, x: Any, weight: Tensor, targets: Any, **options: Any) -> Tensor:
        """Return the loss of the logits x W^T, where this rank has some rows of W."""

    def inner_stream(self) -> AbstractContextManager[None]:
        """Draw random numbers of a shard: other ones on each rank."""

    def outer_stream(self) -> AbstractContextManager[None]:
        """Draw random numbers outside the region."""
