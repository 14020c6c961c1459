"""environment.json: where and with what a run was started, to tell it from another."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tensorgrad import backend, gpu
from tensorgrad.files import replacing, write_json

FILE = "environment.json"
DIFF = "uncommitted.diff"
_DIFF_BYTES = 1_000_000
_SECONDS = 10  # that git may take

_log = logging.getLogger(__name__)


def save_environment(folder: Path, device: str, ranks: int) -> None:
    """Write environment.json and uncommitted.diff into the folder of a run, at each start.

    The diff is that of the git checkout which holds the working directory, against its commit, at
    most 1 MB of it. Without changes there is no diff. A file that cannot be written is a warning:
    no run needs it.

    Args:
        folder: of the run.
        device: "cpu" or "cuda:N".
        ranks: the number of processes that train together.
    """
    git = _git_state()
    diff = _git("diff", "--no-ext-diff", "--no-textconv", "HEAD") if git and git["dirty"] else b""
    try:
        write_json(folder / FILE, environment(device, ranks) | {"git": git}, 2)
        (folder / DIFF).unlink(missing_ok=True)
        if diff:
            with replacing(folder / DIFF) as file:
                file.write(_cut(diff))
    except OSError as error:
        _log.warning("the environment of the run is not saved: %s", error)


def environment(device: str, ranks: int) -> dict[str, Any]:
    """Return what environment.json says of this process, without the git checkout."""
    index = None if device == "cpu" else backend.gpu_index(device)
    return {
        # Arguments that are not UTF-8 have halves of surrogate pairs.
        "command": shlex.join(sys.orig_argv).encode(errors="backslashreplace").decode(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages(),
        "device": device,
        "gpu": None if index is None else gpu.name_of(index),
        "driver": None if index is None else gpu.driver_version(),
        "cuda": None if index is None else _cuda_version(),
        "ranks": ranks,
    }


@cache
def packages() -> dict[str, str]:
    """Return the versions of all installed packages, by name."""
    found = {}
    for each in importlib.metadata.distributions():
        metadata = each.metadata
        name, version = metadata["Name"], metadata["Version"]
        if name and version:  # a damaged installation has none
            found[name] = version
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _cuda_version() -> str:
    number = backend.cupy.cuda.runtime.runtimeGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}"


def _git_state() -> dict[str, Any] | None:
    """Return the commit of the working directory and whether files differ from it."""
    status = _git("status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if status is None:
        return None
    lines = status.decode(errors="replace").splitlines()
    commit = next((x.removeprefix("# branch.oid ") for x in lines if "# branch.oid" in x), "")
    if not commit or commit == "(initial)":
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def _git(*arguments: str) -> bytes | None:
    """Return what a git command prints; None where there is no git or no checkout."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
    null = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, stdin=null, stdout=subprocess.PIPE, stderr=null, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("the git checkout is not described: %s", error)
        return None
    return done.stdout


def _cut(diff: bytes) -> bytes:
    """Return whole lines, at most 1 MB."""
    if len(diff) <= _DIFF_BYTES:
        return diff
    return diff[: diff.rfind(b"\n", 0, _DIFF_BYTES) + 1]
