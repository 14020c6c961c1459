"""Train a GPT-2 by pipeline parallelism: each rank computes some of the layers.

    mpirun -n 2 python examples/train_gpt2_pp.py
    mpirun -n 4 python examples/train_gpt2_pp.py --layers 8 --pipeline-schedule interleaved
    mpirun -n 4 python examples/train_gpt2_pp.py --pp 2 --parallel zero1
    mpirun -n 2 python examples/train_gpt2_pp.py --resume runs/gpt2-1

Runs on CPUs, or with one GPU per rank. Options, data and results are those of train_gpt2.py. A run
may be resumed with another number of stages, also one, and with another schedule. With fewer stages
(--pp) than ranks, several pipelines share the batch. All ranks save, rank 0 prints.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from tensorgrad.parallel import Comm
from tensorgrad.parallel.train_gpt2 import ParallelSettings, run_on_ranks
from tensorgrad.train import Ranks
from tensorgrad.train.config import option


@dataclass(frozen=True)
class PipelineSettings(ParallelSettings):
    """The options of pipeline parallel training; by default all ranks are one pipeline."""

    micro_batches: int = option(4, "parts of a batch in a pipeline", low=1, by_ranks=True)
    pp: int = option(0, "pipeline stages", shown="as many as ranks", low=0, saved=False)

    def ranks(self, comm: Comm) -> Ranks:
        """Return the strategy with which the ranks train together."""
        settings = replace(self, pp=self.pp or comm.size)
        return ParallelSettings.ranks(settings, comm)


if __name__ == "__main__":
    sys.exit(run_on_ranks(PipelineSettings, __doc__, print))
