"""Train a GPT-2 on several ranks, each of which computes its part of every batch.

    mpirun -n 2 python examples/train_gpt2_dp.py
    mpirun -n 8 python examples/train_gpt2_dp.py --preset gpt2-124M --dtype bfloat16 --batch 256
    mpirun -n 4 python examples/train_gpt2_dp.py --parallel zero1
    mpirun -n 2 python examples/train_gpt2_dp.py --resume runs/gpt2-1

Runs on CPUs, or with one GPU per rank. Options, data and results are those of train_gpt2.py:
--batch counts the sequences of all ranks together, and any number of ranks takes the same steps. So
a run may be resumed on another number of ranks, and with another --parallel and --bucket-mb: they
change speed and memory, not the losses. Rank 0 prints and saves; with ZeRO all ranks save.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tensorgrad.command import command
from tensorgrad.parallel.program import run_program
from tensorgrad.train.language import LanguageModeling


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run_program(LanguageModeling, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
