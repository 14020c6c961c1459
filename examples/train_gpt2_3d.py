"""Train a GPT-2 on a mesh of ranks: data, pipeline and tensor parallelism, all at once.

    mpirun -n 4 python examples/train_gpt2_3d.py --dp 1 --pp 2 --tp 2
    mpirun -n 8 python examples/train_gpt2_3d.py --pp 2 --tp 2 --batch 16 --accumulate 8 --zero 1
    mpirun -n 2 python examples/train_gpt2_3d.py --resume runs/gpt2-1 --tp 2

Options, data and results are those of train_gpt2.py, and any mesh takes the same steps: every rank
writes its part of a checkpoint and reads what it needs, so a run may be resumed on another mesh, or
here on one rank. A pipeline sends the parts of --accumulate one after the other: give it at least
as many as stages. To have one file of the whole model:

    python -m tensorgrad.parallel.merge runs/gpt2-1 model.safetensors
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tensorgrad.parallel import Comm, make_mesh, mesh_ranks
from tensorgrad.parallel.schedule import SCHEDULES
from tensorgrad.train.config import option
from tensorgrad.train.ranks import Ranks
from train_gpt2_dp import ParallelSettings, run_on_ranks

ABOUT = "Train a GPT-2 on a mesh of ranks: data, pipeline and tensor parallelism."


@dataclass(frozen=True)
class MeshSettings(ParallelSettings):  # type: ignore[misc]  # mypy does not see scripts beside it
    """What can be said on the command line; how ranks share the work, each start says anew."""

    dp: int | None = option(
        None, "ranks that share the batch, if not what pp and tp leave", low=1, saved=False
    )
    pp: int = option(1, "stages: ranks that share the layers", low=1, saved=False)
    tp: int = option(1, "ranks that share each layer", low=1, saved=False)
    order: str = option("1f1b", "in which order stages work", choices=tuple(SCHEDULES), saved=False)
    chunks: int = option(1, "parts of the model a stage has, if interleaved", low=1, saved=False)
    sequence: bool = option(
        False,
        "the tp ranks share the rows of activations between the layers too; no sample at the end",
        saved=False,
    )

    @property
    def samples(self) -> bool:
        """Whether to write a sample: with `sequence` no logits of the last token alone are made."""
        return super().samples and not self.sequence

    def ranks(self, comm: Comm) -> Ranks:
        """Return how the ranks train together."""
        return mesh_ranks(
            comm,
            make_mesh(comm.size, comm.rank, dp=self.dp, pp=self.pp, tp=self.tp),
            zero=self.zero,
            reduction=self.reduction,
            bucket_mb=self.bucket_mb,
            schedule=self.order,
            chunks=self.chunks,
            sequence=self.sequence,
        )


if __name__ == "__main__":
    sys.exit(run_on_ranks(MeshSettings, ABOUT))
