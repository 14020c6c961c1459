"""Programs that tests start, talk to and end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable


def wait_for(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """Wait for the end of a program; return the rest of its output and its errors, both short.

    `communicate` would lose what came together with a line that has been read before.
    """
    process.wait(timeout)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        return process.stdout.read(), process.stderr.read()


def wait_until(done: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until a program has come so far, or has ended: however long a busy machine takes."""
    while not done() and process.poll() is None:
        time.sleep(0.001)
