"""Train a GPT-2 on several ranks: each computes its part of every batch, then all add gradients.

    mpirun -n 2 python examples/train_gpt2_dp.py
    mpirun -n 8 python examples/train_gpt2_dp.py --preset gpt2-124M --dtype bfloat16 --batch 256
    mpirun -n 2 python examples/train_gpt2_dp.py --resume runs/gpt2-1

On CPUs, or with one GPU a rank. Options, data and results are those of train_gpt2.py: --batch
counts the sequences of all ranks together, and any number of ranks takes the same steps, so a
run may be resumed on another number. Rank 0 alone prints and saves.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tensorgrad.parallel import Comm, DataParallel, world
from tensorgrad.train.device import choose_device
from train_gpt2 import Settings, read_command_line, train


def read_command_line_once(
    comm: Comm, arguments: Sequence[str] | None = None
) -> tuple[Settings, Path, bool]:
    """Return what rank 0 reads from the command line; it also chooses the folder of the run."""
    told: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            settings, folder, resuming = read_command_line(arguments)
            told = {"settings": asdict(settings), "folder": str(folder), "resuming": resuming}
        except SystemExit as end:  # after --help or an unknown option: all ranks end in peace
            told = {"status": end.code}
    told = comm.broadcast_object(told)
    if "status" in told:
        sys.exit(told["status"])
    return Settings(**told["settings"]), Path(told["folder"]), told["resuming"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on this rank; an exception ends all ranks and shows its traceback."""
    comm = world()
    level = logging.INFO if comm.rank == 0 else logging.ERROR
    logging.basicConfig(level=level, format="%(message)s")
    settings, folder, resuming = read_command_line_once(comm, arguments)
    settings, _ = choose_device(settings)
    device = comm.select_device(settings.device)
    train(settings, folder, resuming, DataParallel(comm), device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
