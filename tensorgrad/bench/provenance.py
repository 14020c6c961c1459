"""Where a result comes from: the date, the commit of the code, and the versions of what it uses.

Tests: tests/bench/test_provenance.py.
"""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

from tensorgrad.core import backend
from tensorgrad.kernels import gpu
from tensorgrad.train.environment import packages

COLUMNS = ("date", "commit", "versions")
_CODE = Path(__file__).parents[1]  # the package, in a checkout or installed
_NAMED = re.compile(r"numpy|torch|triton|transformers|mpi4py|cupy(-cuda\d+x)?|nvidia-nccl-cu\d+")
_SECONDS = 10  # that git may take


def provenance() -> dict[str, str]:
    """Return the date (UTC), the commit and the versions, a text each."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return dict(zip(COLUMNS, (today, commit(), versions()), strict=True))


@cache
def commit(code: Path = _CODE) -> str:
    """Return the commit of the code, with "+changes" where files differ from it.

    Args:
        code: folder of a package.
    Returns:
        12 digits; "" where the code is in no git checkout.
    """
    if _git(code, "ls-files", "--error-unmatch", "__init__.py") is None:
        return ""
    name = _git(code, "rev-parse", "--short=12", "HEAD") or ""
    changed = _git(code, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/docs")
    return name + "+changes" * bool(changed)


def exists(name: str, code: Path = _CODE) -> bool:
    """Whether the checkout of the code has a commit of this name."""
    return re.fullmatch("[0-9a-f]{7,40}", name) is not None and (
        _git(code, "cat-file", "-e", f"{name}^{{commit}}") is not None
    )


@cache
def versions() -> str:
    """Return the host's processor and threads, and versions, such as "... numpy 2.3.4"."""
    found = [f"{_processor()}, {backend.threads()} threads", f"Python {platform.python_version()}"]
    if backend.gpu_count():
        cuda = backend.cupy.cuda.runtime.runtimeGetVersion()
        found.append(f"CUDA {cuda // 1000}.{cuda % 1000 // 10}, driver {gpu.driver_version()}")
    found += [f"{name} {number}" for name, number in packages().items() if _NAMED.fullmatch(name)]
    return ", ".join(found)


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("model name"))
        return line.partition(":")[2].strip()
    return platform.machine()


def _git(folder: Path, *words: str) -> str | None:
    """Return what a git command prints; None where it fails.

    The checkout is that of the code which runs, so its settings are trusted as the code is.
    """
    options = ("--no-optional-locks", "-c", "core.fsmonitor=false")
    command = ["git", *options, "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
