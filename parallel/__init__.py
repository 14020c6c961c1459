"""Training on several ranks over MPI and NCCL. Import as `tensorgrad.parallel`."""

if __name__ != "tensorgrad.parallel":
    raise ImportError("`parallel` is tensorgrad.parallel: write `from tensorgrad import parallel`")

from tensorgrad.parallel.collectives import Comm
from tensorgrad.parallel.comm import world
from tensorgrad.parallel.data import (
    all_reduce_gradients,
    any_rank,
    broadcast_parameters,
    mean_over_ranks,
)
from tensorgrad.parallel.mesh import Mesh, make_mesh

__all__ = [
    "Comm",
    "Mesh",
    "all_reduce_gradients",
    "any_rank",
    "broadcast_parameters",
    "make_mesh",
    "mean_over_ranks",
    "world",
]
