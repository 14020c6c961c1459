"""3D parallelism: data, pipeline and tensor parallelism on one mesh, each inside the next.

    TensorParallel      ranks share each layer: same batches, parts of the parameters
      Pipeline          stages: same batches, other layers
        DataParallel    other batches, same parameters; or Zero, which shards them

Tests: tests/parallel/test_mesh_training.py.
"""

from __future__ import annotations

from tensorgrad.core.errors import ArgumentError
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.data import DataParallel
from tensorgrad.parallel.mesh import Mesh
from tensorgrad.parallel.pipeline import Pipeline
from tensorgrad.parallel.schedule import check_schedule
from tensorgrad.parallel.tensor import TensorParallel
from tensorgrad.parallel.zero import Zero
from tensorgrad.train.strategy import OneProcess, Strategy


def mesh_strategy(
    world: Comm,
    mesh: Mesh,
    *,
    zero: int = 0,
    reduction: str = "overlap",
    bucket_mb: float | None = None,
    schedule: str = "1f1b",
    chunks: int = 1,
    sequence: bool = False,
) -> Strategy:
    """Return the strategy of a mesh, for the training loop's `strategy`.

    Every rank calls it. An axis of one rank costs nothing.

    Args:
        world: all ranks.
        mesh: their coordinates, from `make_mesh(world.size, world.rank, ...)`.
        zero: 0, or the stage of `Zero` along dp; in a pipeline 0 or 1.
        reduction, bucket_mb: as for `DataParallel`.
        schedule, chunks: as for `Pipeline`.
        sequence: as for `TensorParallel`.

    Returns:
        `DataParallel` or `Zero`, inside `Pipeline` where pp is above 1, inside `TensorParallel`
        where tp is.

    Raises:
        ArgumentError: the mesh does not have these ranks, or an option is outside its range.

    Example:
        >>> world = tg.parallel.world()
        >>> mesh = tg.parallel.make_mesh(world.size, world.rank)
        >>> strategy = tg.parallel.mesh_strategy(world, mesh)
        >>> type(strategy).__name__, strategy.rank, strategy.ranks
        ('DataParallel', 0, 1)
    """
    if (mesh.size, mesh.rank) != (world.size, world.rank):
        raise ArgumentError(
            f"mesh_strategy: mesh is of rank {mesh.rank} of {mesh.size}, expected rank "
            f"{world.rank} of {world.size}"
        )
    if zero not in (0, 1) and (zero not in (2, 3) or mesh.pp > 1):
        expected = "0 or 1 in a pipeline" if mesh.pp > 1 else "0 to 3"
        raise ArgumentError(f"mesh_strategy: zero is {zero}, expected {expected}")
    if zero and reduction != "overlap":
        raise ArgumentError(
            f"mesh_strategy: reduction is {reduction!r} with zero {zero}, expected 'overlap'"
        )
    check_schedule("mesh_strategy", schedule, chunks)
    dp, pp, tp = (
        world if getattr(mesh, axis) == world.size else world.split(mesh.line(axis))
        for axis in ("dp", "pp", "tp")
    )
    strategy: Strategy = (
        Zero(dp, zero, bucket_mb=bucket_mb)
        if zero
        else DataParallel(dp, reduction, bucket_mb=bucket_mb)
    )
    if dp.size == 1 and world.size > 1:
        strategy = OneProcess()  # after the checks of the options above
    if pp.size > 1:
        strategy = Pipeline(pp, schedule, chunks, data=strategy, world=world)
    if tp.size > 1:
        strategy = TensorParallel(tp, strategy, sequence=sequence, world=world)
    return strategy
