"""Device mesh: which rank has which coordinates in data, pipeline and tensor parallelism.

It is plain data, computed from sizes alone, so it can be tested and planned anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorgrad.core.errors import ArgumentError

AXES = ("dp", "pp", "tp")


@dataclass(frozen=True)
class Mesh:
    """A dp x pp x tp mesh and the coordinates of one rank in it.

    rank = (pp_rank * dp + dp_rank) * tp + tp_rank

    The ranks of a host have consecutive numbers. So tensor parallel ranks, which communicate most,
    are neighbours, and pipeline stages, which communicate least, are furthest apart.

    Args:
        dp: data parallel ranks: each has the same parameters and another part of the batch.
        pp: pipeline stages: each has some of the layers.
        tp: tensor parallel ranks: each has a part of every layer.
        rank: this rank, 0 to dp * pp * tp - 1.

    Raises:
        ArgumentError: a size is below 1, or the rank is outside the mesh.

    Example:
        >>> mesh = tg.parallel.Mesh(dp=2, pp=2, tp=2, rank=5)
        >>> mesh.dp_rank, mesh.pp_rank, mesh.tp_rank  # 5 = (1 * 2 + 0) * 2 + 1
        (0, 1, 1)
        >>> mesh.line("dp")
        (5, 7)
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        """Check the sizes and the rank."""
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ArgumentError(f"Mesh: {axis} is {getattr(self, axis)}, expected 1 or more")
        if not 0 <= self.rank < self.size:
            raise ArgumentError(f"Mesh: rank is {self.rank}, expected 0 to {self.size - 1}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp

    @property
    def dp_rank(self) -> int:
        """The data parallel coordinate: which part of the batch this rank has."""
        return self.rank // self.tp % self.dp

    @property
    def pp_rank(self) -> int:
        """The pipeline coordinate: which stage this rank is."""
        return self.rank // (self.tp * self.dp)

    @property
    def tp_rank(self) -> int:
        """The tensor parallel coordinate: which part of each layer this rank has."""
        return self.rank % self.tp

    def rank_at(self, dp_rank: int, pp_rank: int, tp_rank: int) -> int:
        """Return the rank at these coordinates.

        Raises:
            ArgumentError: a coordinate is outside the mesh.
        """
        for axis, place in zip(AXES, (dp_rank, pp_rank, tp_rank), strict=True):
            size = getattr(self, axis)
            if not 0 <= place < size:
                raise ArgumentError(f"rank_at: {axis}_rank is {place}, expected 0 to {size - 1}")
        return (pp_rank * self.dp + dp_rank) * self.tp + tp_rank

    def line(self, axis: str) -> tuple[int, ...]:
        """Return the ranks that differ from this one along one axis only, in order, with this one.

        Args:
            axis: "dp": the ranks that average gradients with this one; "pp": the stages of its
                pipeline; "tp": the ranks that share its layers.
        Raises:
            ArgumentError: the axis is unknown.
        """
        if axis not in AXES:
            raise ArgumentError(f"line: axis is {axis!r}, expected one of {', '.join(AXES)}")
        step = {"tp": 1, "dp": self.tp, "pp": self.tp * self.dp}[axis]
        size = getattr(self, axis)
        first = self.rank - step * (self.rank // step % size)
        return tuple(range(first, first + step * size, step))


def make_mesh(
    ranks: int, rank: int = 0, *, dp: int | None = None, pp: int = 1, tp: int = 1
) -> Mesh:
    """Return the mesh of all ranks.

    Args:
        ranks: number of ranks.
        rank: this rank, 0 to ranks - 1.
        dp, pp, tp: sizes; dp defaults to ranks / (pp * tp).

    Returns:
        The mesh, with the coordinates of this rank.

    Raises:
        ArgumentError: the sizes do not multiply to the number of ranks.

    Example:
        >>> tg.parallel.make_mesh(8, rank=5, pp=2, tp=2)
        Mesh(dp=2, pp=2, tp=2, rank=5)
    """
    if dp is None:
        if pp < 1 or tp < 1 or ranks % (pp * tp):
            raise ArgumentError(
                f"make_mesh: pp * tp is {pp} * {tp}, expected a divisor of the {ranks} ranks"
            )
        dp = ranks // (pp * tp)
    if dp * pp * tp != ranks:
        raise ArgumentError(
            f"make_mesh: dp * pp * tp is {dp} * {pp} * {tp} = {dp * pp * tp}, "
            f"expected the number of ranks, {ranks}"
        )
    return Mesh(dp, pp, tp, rank)
