"""Run a program several times in the same processes, which start and meet once; see ranks.run_each.

mpirun -n 2 python tests/several.py FOLDER PROGRAM '[["--steps", "3"], ...]'

What a rank writes is in FOLDER/RUN.RANK.out and .err, its exit status in FOLDER/RUN.RANK.status.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from tensorgrad import parallel


def run(program: str, arguments: list[str]) -> int:
    """Run the program once and return its exit status."""
    sys.argv[:] = [program, *arguments]
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def main(folder: Path, program: str, runs: list[list[str]]) -> None:
    world = parallel.world()
    for number, arguments in enumerate(runs):
        place = f"{number}.{world.rank}"
        for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
            file = os.open(folder / f"{place}.{name}", os.O_CREAT | os.O_WRONLY)
            stream.flush()
            os.dup2(file, stream.fileno())
            os.close(file)
        status = run(program, arguments)
        (folder / f"{place}.status").write_text(str(status))
        sys.stdout.flush()
        world.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
