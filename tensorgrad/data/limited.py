"""Programs that work on untrusted input, with limits of time, memory and output."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tensorgrad.core.errors import DataError
from tensorgrad.io.readers import parse_json

_PASSED_ON = (
    *("PATH", "HOME", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "SYSTEMROOT"),
    *("XDG_CONFIG_HOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
)


# Limits hold from the start only if a process sets its own, before it becomes the program.
_START = """
import os, resource, sys
_, seconds, memory, file, *command = sys.argv
for kind, most in (
    (resource.RLIMIT_CPU, int(seconds)),
    (resource.RLIMIT_AS, int(memory)),
    (resource.RLIMIT_FSIZE, int(file)),
    (resource.RLIMIT_CORE, 0),
):
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    try:
        resource.setrlimit(kind, (most, most))
    except (OSError, ValueError):  # macOS has no limit of the address space
        pass
os.execvp(command[0], command)
"""


class Finished(NamedTuple):
    """How a program ended.

    Attributes:
        status: 0, its exit status, or minus the signal that ended it.
        output: what it wrote to its standard output, at most the limit.
        is_cut: whether it was ended since it wrote more.
    """

    status: int
    output: bytes
    is_cut: bool


def run_limited(
    command: Sequence[str],
    data: bytes = b"",
    *,
    seconds: float,
    memory: int,
    output: int,
    file: int | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run a program that can neither hang, nor fill the memory or the disk.

    It is the leader of a process group, which is killed with all its processes when it ends, when
    its time is over, and on Ctrl-C. On Windows only the time is limited.

    Args:
        command: the program and its arguments.
        data: for its standard input.
        seconds: that it may take.
        memory: bytes of its address space.
        output: bytes that are read of its standard output.
        file: bytes of any file that it writes; default: `output`.
        folder: its working directory.
        environment: variables besides PATH and a few more that are passed on.
    Raises:
        TimeoutError: it took longer.
        OSError: it cannot be started.
    """
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    name = command[0]
    if shutil.which(name) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    if sys.platform != "win32":
        limits = math.ceil(seconds), memory, max(output, file or 0) + 1
        start = [sys.executable, "-I", "-S", "-c", _START, *map(str, limits)]
        command = [*start, *command]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as written:
        given.write(data)
        given.seek(0)
        process = subprocess.Popen(
            command,
            stdin=given,
            stdout=written,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={**passed, **(environment or {})},
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{name} took more than {seconds:g} s") from error
        finally:
            _kill(process)
        written.seek(0)
        found = written.read(output + 1)
    return Finished(status, found[:output], len(found) > output)


def run_program(
    program: ModuleType,
    given: Mapping[str, Any],
    problem: str,
    *,
    seconds: float,
    memory: int,
    output: int,
) -> dict[str, Any]:
    """Return the JSON that a Python program of this package writes for a literal on its input.

    It runs without the user's modules, the site (slow to start), and .pyc files, which limits
    would cut.

    Args:
        program: its module.
        given: what the program reads.
        problem: the start of errors.
        seconds, memory, output: as for `run_limited`.
    Raises:
        DataError: the program cannot be started, exceeds a limit, or writes no JSON.
    """
    command = [sys.executable, "-I", "-S", "-B", str(program.__file__)]
    limits: dict[str, Any] = {"seconds": seconds, "memory": memory, "output": output}
    variables = {"TOKENIZERS_PARALLELISM": "false"}
    try:
        finished = run_limited(command, ascii(given).encode(), **limits, environment=variables)
    except TimeoutError as error:
        raise DataError(f"{problem}: it took more than {seconds:.3g} s") from error
    except OSError as error:
        raise DataError(f"{problem}: {sys.executable!r} cannot be started: {error}") from error
    if finished.is_cut:
        raise DataError(f"{problem}: its text has more than {output:,} bytes, expected fewer")
    try:
        return parse_json(finished.output.decode(), "its output", limit=output)
    except ValueError as error:
        raise DataError(f"{problem}: its process ended with status {finished.status}") from error


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and all processes of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
