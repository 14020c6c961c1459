"""Train a GPT-2 whose layers are spread over the ranks, stage after stage.

    mpirun -n 2 python examples/train_gpt2_pp.py
    mpirun -n 4 python examples/train_gpt2_pp.py --layers 8 --order interleaved --micro-batches 8
    mpirun -n 4 python examples/train_gpt2_pp.py --stages 2 --zero 1
    mpirun -n 2 python examples/train_gpt2_pp.py --resume runs/gpt2-1

On CPUs, or with one GPU a rank. Options, data and results are those of train_gpt2.py, which calls
--micro-batches --accumulate. A run may be resumed on another number of stages, down to one, and in
another order. With fewer --stages than ranks several pipelines share the batch. All ranks save,
rank 0 prints.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tensorgrad.errors import ArgumentError
from tensorgrad.parallel import Comm, make_mesh, mesh_ranks
from tensorgrad.parallel.schedule import SCHEDULES
from tensorgrad.train.config import option
from tensorgrad.train.ranks import Ranks
from train_gpt2_dp import ParallelSettings, run_on_ranks

ABOUT = "Train a GPT-2 whose layers are spread over the ranks, stage after stage."


@dataclass(frozen=True)
class PipelineSettings(ParallelSettings):  # type: ignore[misc]  # mypy does not see scripts beside
    """What can be said on the command line; how ranks share the work, each start says anew."""

    accumulate: int = option(
        4,
        "parts of a batch that pass from stage to stage, so that all stages work at a time",
        low=1,
        by_ranks=True,
        flag="--micro-batches",
    )
    stages: int | None = option(
        None,
        "ranks that share the layers, if not all; fewer: several pipelines",
        low=1,
        saved=False,
    )
    order: str = option("1f1b", "in which order stages work", choices=tuple(SCHEDULES), saved=False)
    chunks: int | None = option(
        None, "parts of the model a stage has, if not 1, or 2 interleaved", low=1, saved=False
    )

    def ranks(self, comm: Comm) -> Ranks:
        """Return how the ranks train together."""
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
        chunks = self.chunks or (2 if self.order == "interleaved" else 1)
        return mesh_ranks(
            comm,
            mesh,
            zero=self.zero,
            reduction=self.reduction,
            bucket_mb=self.bucket_mb,
            schedule=self.order,
            chunks=chunks,
        )


if __name__ == "__main__":
    sys.exit(run_on_ranks(PipelineSettings, ABOUT))
