"""The embedding layer."""

from __future__ import annotations

from typing import Any

from tensorgrad.core.checks import check_integer
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn import init
from tensorgrad.nn.module import Module, Parameter
from tensorgrad.nn.shard import Region
from tensorgrad.ops.embedding import embedding


class Embedding(Module):
    """Look up a vector for each id.

    Args:
        vocabulary: the number of ids.
        width: the length of a vector.

    Attributes:
        weight: (vocabulary, width), at first standard normal, as in PyTorch.
        region: the ranks that share the rows of the weight; or None.

    Example:
        >>> tokens = tg.nn.Embedding(1000, 8)
        >>> tokens(np.array([[5, 2, 7]])).shape
        (1, 3, 8)
    """

    region: Region | None = None

    def __init__(self, vocabulary: int, width: int) -> None:
        check_integer("Embedding", "vocabulary", vocabulary, 0)
        check_integer("Embedding", "width", width, 0)
        self.weight = Parameter(init.empty(vocabulary, width))
        init.normal_(self.weight)

    def forward(self, ids: Any, positions: Any = None, start: Any = 0) -> Tensor:
        """Return the vectors of ids, (*ids.shape, width).

        Args:
            ids: integers in [0, vocabulary), any shape.
            positions: position embedding to add, (P, width): row start + t to step t of the last
                axis of ids; see `tensorgrad.embedding`.
            start: position of the first step, an integer or one for each row of ids.
        """
        if self.region is not None:
            return self.region.embed(self.weight, ids, positions, start)
        return embedding(self.weight, ids, positions, start=start)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return "{}, {}".format(*self.weight.shape)
