"""Train a GPT-2 by pipeline parallelism: each rank computes some of the layers.

    mpirun -n 2 python examples/train_gpt2_pp.py
    mpirun -n 4 python examples/train_gpt2_pp.py --layers 8 --order interleaved --micro-batches 8
    mpirun -n 4 python examples/train_gpt2_pp.py --stages 2 --zero 1
    mpirun -n 2 python examples/train_gpt2_pp.py --resume runs/gpt2-1

Runs on CPUs, or with one GPU per rank. Options, data and results are those of train_gpt2.py, where
--micro-batches is called --accumulate. A run may be resumed with another number of stages, also
one, and with another schedule (--order). With fewer --stages than ranks, several pipelines share
the batch. All ranks save, rank 0 prints.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tensorgrad.errors import ArgumentError
from tensorgrad.parallel import Comm, make_mesh, mesh_ranks
from tensorgrad.parallel.schedule import SCHEDULES
from tensorgrad.parallel.train_gpt2 import ParallelSettings, run_on_ranks
from tensorgrad.train import Ranks
from tensorgrad.train.config import option


@dataclass(frozen=True)
class PipelineSettings(ParallelSettings):
    """The options of pipeline parallel training."""

    accumulate: int = option(
        4,
        "parts of a batch that pass through the stages one after the other",
        low=1,
        by_ranks=True,
        flag="--micro-batches",
    )
    stages: int | None = option(
        None, "stages of a pipeline", shown="as many as ranks", low=1, saved=False
    )
    order: str = option("1f1b", "pipeline schedule", choices=tuple(SCHEDULES), saved=False)
    chunks: int | None = option(
        None, "model chunks per stage", shown="1, or 2 if interleaved", low=1, saved=False
    )

    def ranks(self, comm: Comm) -> Ranks:
        """Return the strategy with which the ranks train together."""
        mesh = make_mesh(comm.size, comm.rank, pp=self.stages or comm.size)
        if self.batch % mesh.dp:
            raise ArgumentError(
                f"--batch: got {self.batch}, expected a multiple of the {mesh.dp} pipelines"
            )
        rows = self.batch // mesh.dp
        if rows % self.accumulate:
            raise ArgumentError(
                f"--micro-batches: got {self.accumulate}, expected a divisor of the {rows} "
                "sequences of a pipeline"
            )
        return mesh_ranks(
            comm,
            mesh,
            zero=self.zero,
            reduction=self.reduction,
            bucket_mb=self.bucket_mb,
            schedule=self.order,
            chunks=self.chunks or (2 if self.order == "interleaved" else 1),
        )


if __name__ == "__main__":
    sys.exit(run_on_ranks(PipelineSettings, __doc__, print))
