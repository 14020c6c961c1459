"""Start a program on several ranks, and never wait for it longer than said."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def mpirun() -> tuple[str, ...] | None:
    """Return the start of an mpirun command line, or None where there is none.

    The one beside this Python comes first: it belongs to the MPI that mpi4py loads from the same
    environment. Open MPI refuses root and more ranks than cores unless told otherwise. It binds
    the ranks of each mpirun to the first cores, which tests that run side by side would share.
    """
    program = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which(
        "mpirun"
    )
    if program is None:
        return None
    version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    if "Open MPI" in version.stdout:
        return (program, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
    return (program,)


def missing() -> str | None:
    """Return why ranks cannot be started here, or None."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install -e '.[mpi]')"
    if mpirun() is None:
        return "there is no mpirun (pip install -e '.[mpi]')"
    return None


def run_ranks(
    target: str | Path,
    n: int,
    args: Sequence[object] = (),
    *,
    timeout: float = 120,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script (a path that ends in .py) or a module on `n` ranks with one thread each.

    Args:
        target: script, relative to the root of the checkout or absolute; or a module's name.
        n: number of ranks.
        args: command line of every rank.
        timeout: seconds after which all ranks are killed.
        check: fail unless every rank ends with 0.
        env: variables to add for the ranks.
    Returns:
        the finished mpirun with the output of all ranks, lines of different ranks mixed.
    Raises:
        AssertionError: the ranks took too long or, with `check`, failed; with their output.
    """
    launcher = mpirun()
    assert launcher is not None, "run_ranks: no mpirun, mark the test with pytest.mark.mpi"
    program = [str(target)] if str(target).endswith(".py") else ["-m", str(target)]
    command = [*launcher, "-n", str(n), sys.executable, *program, *map(str, args)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(env or {})}
    variables.setdefault("MPIR_CVAR_POLLS_BEFORE_YIELD", "1")  # ranks share cores; of MPICH
    variables.pop("PYTHONUNBUFFERED", None)  # it parts lines from their ends, for others to come in
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        out, err = process.communicate()
        raise AssertionError(
            f"{n} ranks of {target} did not end in {timeout:g} s\n{out}\n{err}"
        ) from None
    except BaseException:
        _kill(process)
        raise
    result = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check and result.returncode != 0:
        raise AssertionError(f"{n} ranks of {target} ended with {result.returncode}\n{out}\n{err}")
    return result


def run_each(
    target: str | Path, n: int, runs: Sequence[Sequence[object]], folder: Path
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script or a module several times on the same ranks, which takes one start of all.

    Args:
        target: as of `run_ranks`; it ends with `sys.exit`, or by itself, on all ranks.
        n: number of ranks.
        runs: command line of every run.
        folder: empty, for what the ranks write.
    Returns:
        the highest exit status of each run, and the output of rank 0, then of rank 1, and so on.
    """
    lines = json.dumps([[*map(str, args)] for args in runs])
    result = run_ranks(ROOT / "tests" / "several.py", n, [folder, target, lines])
    assert result.stdout == "", result.stdout

    def written(run: int, what: str) -> list[str]:
        return [(folder / f"{run}.{rank}.{what}").read_text() for rank in range(n)]

    return [
        subprocess.CompletedProcess(
            [str(target), *map(str, args)],
            max(map(int, written(run, "status"))),
            "".join(written(run, "out")),
            "".join(written(run, "err")),
        )
        for run, args in enumerate(runs)
    ]


def _kill(process: subprocess.Popen[str]) -> None:
    """End mpirun and the ranks, which MPICH gives sessions of their own."""
    family = descendants(process.pid)
    process.terminate()
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def descendants(root: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    table = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    children: dict[int, list[int]] = {}
    for line in table.stdout.splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    stack = [root]
    while stack:
        below = children.get(stack.pop(), [])
        found += below
        stack += below
    return found
