"""The rows that pass through layers in a training step, to count the bytes that they save.

Each layer that saves something for backward has a formula, its method `saved_bytes`; see
docs/chapters/planning.md. Tests: tests/parallel/planning/test_costs.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch on one rank, one for each token.

    Args:
        inside: number of rows where layers compute: the tokens of the micro-batch.
        outside: between layers that ranks share: fewer where they share the rows as well.
        item: bytes of an element that a matrix product takes.
        wide: bytes of a parameter, and of an element between the layers: more under autocast.
        shared: whether ranks share the layers.
    """

    inside: int
    outside: float
    item: int
    wide: int
    shared: bool = False

    def of_heads(self, heads: int) -> Rows:
        """Return the rows of heads within a layer, as many for each token."""
        return replace(self, outside=self.inside * heads, wide=self.item)
