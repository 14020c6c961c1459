"""Distributed training over MPI and NCCL: data, pipeline and tensor parallelism, and ZeRO.

Import as `tensorgrad.parallel`. A strategy (`DataParallel`, `Zero`, `Pipeline`, `TensorParallel` or
`mesh_strategy` for all of them) goes to the training loop as its `strategy`.
"""

if __name__ != "tensorgrad.parallel":
    raise ImportError("`parallel` is tensorgrad.parallel: write `from tensorgrad import parallel`")

from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.handle import Handle
from tensorgrad.parallel.comm.mpi_nccl import world
from tensorgrad.parallel.data import (
    DataParallel,
    all_reduce_gradients,
    all_reduce_tree,
    broadcast_parameters,
)
from tensorgrad.parallel.mesh import Mesh, make_mesh
from tensorgrad.parallel.pipeline import Pipeline
from tensorgrad.parallel.strategy import mesh_strategy
from tensorgrad.parallel.tensor import TensorParallel, tensor_parallel
from tensorgrad.parallel.zero import Zero

__all__ = [
    "Comm",
    "DataParallel",
    "Handle",
    "Mesh",
    "Pipeline",
    "TensorParallel",
    "Zero",
    "all_reduce_gradients",
    "all_reduce_tree",
    "broadcast_parameters",
    "make_mesh",
    "mesh_strategy",
    "tensor_parallel",
    "world",
]
