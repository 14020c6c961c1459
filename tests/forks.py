"""Run scripts in processes that begin with the library loaded, which takes longer than most do.

python -m tests.forks SCRIPT...

Each has a process of its own, in the script's folder. The exit status is 1 if one of theirs is
not 0.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

LOADED = ("data", "models.gpt2", "nn", "optim", "parallel", "train")


def main(scripts: list[str]) -> None:
    for name in LOADED:
        importlib.import_module(f"tensorgrad.{name}")
    failed = False
    for script in scripts:
        if (child := os.fork()) == 0:
            os.chdir(Path(script).parent)
            sys.path[0] = str(Path(script).parent)
            sys.argv[:] = [script]
            runpy.run_path(script, run_name="__main__")
            return
        _, status = os.waitpid(child, 0)
        if status:
            failed = True
            code = os.waitstatus_to_exitcode(status)
            print(f"{script} ended with {code}", file=sys.stderr, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
