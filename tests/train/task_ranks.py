"""The tasks of the guide and of the library on ranks; run by test_task.py.

mpirun -n 2 python tests/train/task_ranks.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tensorgrad.cli import main
from tests.train.test_task import RUNS, STRATEGIES


def run_all(folder: Path) -> int:
    """Train each task with each strategy that it has; return the number of failures."""
    failures = 0
    for name, (words, left_out) in RUNS.items():
        for strategy in STRATEGIES:
            if strategy.split()[0] not in left_out:
                out = folder / f"{name} {strategy}"
                failures += main(["train", *words.split(), *strategy.split(), "--out", str(out)])
    return failures


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.exit(run_all(Path(sys.argv[1])))
