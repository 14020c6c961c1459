"""Strategies inside strategies: pipeline and tensor parallelism around data parallelism.

A nested strategy works along one axis of the mesh. It leaves what the other axes do to an inner
strategy, and wraps what that does in its own part of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorgrad.core.backend import Array
from tensorgrad.parallel.checkpoint import RankWriters
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.train.strategy import OneProcess, Strategy


class NestedStrategy(Strategy):
    """A strategy along one axis of the mesh, with an inner strategy for the other axes.

    Args:
        comm: the ranks along this axis.
        inner: how ranks that have the same place on this axis train together; None: alone.
        world: all ranks, which write checkpoints together; None: those of `comm`.
    """

    def __init__(self, comm: Comm, inner: Strategy | None, world: Comm | None) -> None:
        self._comm, self._world = comm, world or comm
        self._inner = OneProcess() if inner is None else inner
        self.rank, self.ranks = self._inner.rank, self._inner.ranks
        self.processes, self.writers = self._world.size, RankWriters(self._world)
        self.is_main = comm.rank == 0 and self._inner.is_main

    def begin(
        self, step: int, arrays: Sequence[Array], facts: Mapping[str, Any] | None = None
    ) -> None:
        """Check that all ranks are at this step; the inner ones may exchange arrays.

        Raises:
            CommError: they are not.
        """
        self._comm.agree("train", {"step": step, **(facts or {})})
        self._inner.begin(step, arrays, facts)

    def add_counts(self, count: Array) -> None:
        """Add, in place, how many targets the inner ranks have of a batch."""
        self._inner.add_counts(count)

    def add_shards(self, array: Array) -> None:
        """Add, in place, what the inner ranks with other shards have in its place."""
        self._inner.add_shards(array)

    def after_step(self) -> None:
        """Gather the parameters that other inner ranks have updated."""
        self._inner.after_step()
