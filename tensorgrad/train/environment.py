"""environment.json: where and with what a run was started, to tell it from another."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tensorgrad.core import backend
from tensorgrad.core.errors import DataError
from tensorgrad.data.limited import run_limited
from tensorgrad.io.files import replacing, write_json
from tensorgrad.io.readers import read_bytes
from tensorgrad.kernels import gpu

FILE = "environment.json"
DIFF = "uncommitted.diff"
_DIFF_BYTES = 1_000_000
_SECONDS = 8.0  # that git may take in all
_MEMORY = 3 << 29
_INDEX_BYTES = 1 << 26  # the index of half a million files
_NAME_BYTES = 1 << 12
_COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_SUBMODULES = ("--ignore-submodules=dirty",)  # git would start another git with their settings
# Settings of a checkout that say how to compare its files, and start no program.
_PLAIN = {
    *("core.autocrlf", "core.eol", "core.filemode", "core.ignorecase", "core.symlinks"),
    *("core.precomposeunicode", "core.trustctime", "core.checkstat", "extensions.objectformat"),
    *("core.repositoryformatversion", "core.sparsecheckout"),
}
_OURS = {
    "core.repositoryformatversion": "0",
    "core.bare": "false",
    "core.packedGitWindowSize": "32m",  # within the memory
    "core.packedGitLimit": "256m",
    "core.bigFileThreshold": "64m",
    "core.preloadIndex": "false",
}

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
    git, diff = _git()
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
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        name, version = metadata["Name"], metadata["Version"]
        if name and version:  # a damaged installation has none
            found[name] = version
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _cuda_version() -> str:
    number = backend.cupy.cuda.runtime.runtimeGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}"


def _git() -> tuple[dict[str, Any] | None, bytes]:
    """Return the commit of the working directory, whether files differ from it, and their diff.

    The checkout may be untrusted, and its settings name programs: filters, textconv, fsmonitor,
    hooks, a pager, the remote of missing objects. So git compares the files with a git directory of
    our own, which has the checkout's commit, objects and index, and of its settings only plain
    ones. Without a setting a name in .gitattributes starts nothing.
    """
    deadline = time.monotonic() + _SECONDS
    try:
        checkout = _checkout(Path.cwd())
        if checkout is None:
            return None, b""
        with tempfile.TemporaryDirectory(prefix="tensorgrad-git-") as own:
            git = _Git(checkout, Path(own), deadline)
            commit = git.take_over()
            if commit is None:
                return None, b""
            status = git.run("status", "--porcelain=v2", "--untracked-files=no", *_SUBMODULES)
            dirty = any(line[:1] not in (b"", b"#") for line in status.splitlines())
            diff = git.run("diff", *_SUBMODULES, commit, most=_DIFF_BYTES) if dirty else b""
            return {"commit": commit, "dirty": dirty}, diff
    except (OSError, DataError, UnicodeError) as error:
        _log.debug("the git checkout is not described: %s", error)
        return None, b""


class _Checkout(NamedTuple):
    """A git checkout: its top folder, its git directory, and that of its main worktree."""

    top: Path
    git: Path
    common: Path


def _checkout(folder: Path) -> _Checkout | None:
    """Return the checkout that holds a folder; None where there is none.

    Only a folder with .git counts. Settings of a checkout, and GIT_DIR, could name another.
    """
    ceilings = os.environ.get("GIT_CEILING_DIRECTORIES", "").split(os.pathsep)
    for top in (folder, *folder.parents):
        place = top / ".git"
        if os.path.lexists(place):
            try:
                if not place.is_dir():  # a file: a submodule or a worktree
                    name = read_bytes(place, _NAME_BYTES).decode().strip()
                    place = top / name.removeprefix("gitdir: ")
                common = place
                if (place / "commondir").exists():
                    name = read_bytes(place / "commondir", _NAME_BYTES).decode().strip()
                    common = place / name
                return _Checkout(top, *(Path(os.path.realpath(path)) for path in (place, common)))
            except (OSError, ValueError) as error:  # such as a name with a NUL
                _log.debug("the git checkout is not described: %s", error)
                return None
        if str(top.parent) in ceilings:
            return None
    return None


class _Git:
    """Git with a git directory of our own for the files of a checkout."""

    def __init__(self, checkout: _Checkout, own: Path, deadline: float) -> None:
        self._checkout, self._own, self._deadline = checkout, own, deadline
        self._environment = {
            "GIT_DIR": str(checkout.git),
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        }

    def take_over(self) -> str | None:
        """Make the git directory; return the commit, None where there is none."""
        source, own = self._checkout, self._own
        commit = self.run("rev-parse", "--verify", "--quiet", "HEAD").decode().strip()
        if not _COMMIT.fullmatch(commit):
            return None
        found = self.run("config", "--list", "-z")
        pairs = (line.partition("\n") for line in found.decode(errors="replace").split("\0"))
        kept = {k: v for k, _, v in pairs if k in _PLAIN and re.fullmatch(r"[\w-]{0,20}", v)}
        sections = [*_OURS.items(), *kept.items()]
        lines = ["[{}]\n\t{} = {}".format(*key.split("."), value) for key, value in sections]
        (own / "refs").mkdir()
        (own / "HEAD").write_text(f"{commit}\n")
        (own / "config").write_text("\n".join(lines) + "\n")
        for file in (source.git / "index", *source.git.glob("sharedindex.*")):
            if file.exists():
                (own / file.name).write_bytes(read_bytes(file, _INDEX_BYTES))
                shutil.copystat(file, own / file.name)  # git compares its time with that of files
        self._environment |= {
            "GIT_DIR": str(own),
            "GIT_WORK_TREE": str(source.top),
            "GIT_OBJECT_DIRECTORY": str(source.common / "objects"),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
        }
        return commit

    def run(self, *arguments: str, most: int = _INDEX_BYTES) -> bytes:
        """Return what a git command prints, at most `most` bytes.

        Raises:
            OSError: there is no git, it fails, or takes too long.
        """
        finished = run_limited(
            ["git", *arguments],
            seconds=max(0.1, self._deadline - time.monotonic()),
            memory=_MEMORY,
            output=most,
            file=_INDEX_BYTES,
            folder=self._checkout.top,
            environment=self._environment,
        )
        if finished.status and not finished.is_cut:
            raise OSError(f"git {arguments[0]} ended with status {finished.status}")
        return finished.output


def _cut(diff: bytes) -> bytes:
    """Return whole lines, at most 1 MB."""
    if len(diff) <= _DIFF_BYTES:
        return diff
    return diff[: diff.rfind(b"\n", 0, _DIFF_BYTES) + 1]
