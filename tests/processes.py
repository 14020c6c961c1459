"""Programs that tests start, talk to and end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

STREAMS = "stdin", "stdout", "stderr"


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


@contextmanager
def unread_output(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the standard output be a pipe whose reader has ended, as in `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, open(writer, "w") as stream:
        patch.setattr(sys, "stdout", stream)
        yield


@contextmanager
def closed_streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process have none of the standard streams, as after `<&- >&- 2>&-`."""
    with monkeypatch.context() as patch:
        for name in STREAMS:
            patch.setattr(sys, name, None)
        yield
        for name in STREAMS:
            opened = getattr(sys, name)
            if opened is not None:
                opened.close()
