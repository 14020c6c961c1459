"""Train a GPT-2 on a mesh of ranks by data, pipeline and tensor parallelism together.

    mpirun -n 4 python examples/train_gpt2_3d.py --dp 1 --pp 2 --tp 2
    mpirun -n 8 python examples/train_gpt2_3d.py --pp 2 --tp 2 --micro-batches 8 --batch 16
    mpirun -n 2 python examples/train_gpt2_3d.py --resume runs/gpt2-1 --tp 2

Options, data and results are those of train_gpt2.py, and any mesh takes the same steps. Every rank
writes its part of a checkpoint and reads what it needs, so a run may be resumed on another mesh, or
by one process. In a pipeline use at least as many --micro-batches as stages. To get
one file with the whole model:

    python -m tensorgrad.parallel.merge runs/gpt2-1 model.safetensors
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tensorgrad.io.command import command
from tensorgrad.parallel.program import run_program
from tensorgrad.train.language import LanguageModeling


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run_program(LanguageModeling, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
