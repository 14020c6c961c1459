"""Train a GPT-2 on a mesh of ranks by data, pipeline and tensor parallelism together.

    mpirun -n 4 python examples/train_gpt2_3d.py --dp 1 --pp 2 --tp 2
    mpirun -n 8 python examples/train_gpt2_3d.py --pp 2 --tp 2 --batch 16 --accumulate 8 --zero 1
    mpirun -n 2 python examples/train_gpt2_3d.py --resume runs/gpt2-1 --tp 2

Options, data and results are those of train_gpt2.py, and any mesh takes the same steps. Every rank
writes its part of a checkpoint and reads what it needs, so a run may be resumed on another mesh, or
by this program on one rank. A pipeline runs the --accumulate parts of a batch as micro-batches: use
at least as many as stages. To get one file with the whole model:

    python -m tensorgrad.parallel.merge runs/gpt2-1 model.safetensors
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tensorgrad.parallel import Comm, make_mesh, mesh_ranks
from tensorgrad.parallel.schedule import SCHEDULES
from tensorgrad.parallel.train_gpt2 import ParallelSettings, run_on_ranks
from tensorgrad.train import Ranks
from tensorgrad.train.config import option


@dataclass(frozen=True)
class MeshSettings(ParallelSettings):
    """The options of training on a mesh of ranks."""

    dp: int | None = option(
        None, "data parallel ranks", shown="as many as pp and tp allow", low=1, saved=False
    )
    pp: int = option(1, "pipeline stages", low=1, saved=False)
    tp: int = option(1, "tensor parallel ranks, which share each layer", low=1, saved=False)
    order: str = option("1f1b", "pipeline schedule", choices=tuple(SCHEDULES), saved=False)
    chunks: int = option(1, "model chunks per stage, more if interleaved", low=1, saved=False)
    sequence: bool = option(
        False,
        "sequence parallelism: shard activations between layers over the tp ranks; no sample",
        saved=False,
    )

    @property
    def samples(self) -> bool:
        """Whether to write a sample: `sequence` cannot compute the logits of one token alone."""
        return super().samples and not self.sequence

    def ranks(self, comm: Comm) -> Ranks:
        """Return the strategy with which the ranks train together."""
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
    sys.exit(run_on_ranks(MeshSettings, __doc__, print))
