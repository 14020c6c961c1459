"""Programs that tests start, talk to and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import descendants
from tests.source_tree import ROOT

STREAMS = "stdin", "stdout", "stderr"
# Signals that programs start with as ignored where their parent ignores them: nohup does so.
_INHERITED = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def default_signals() -> Iterator[None]:
    """Let no signal be ignored in the block, for this process and the programs started in it."""
    ignored = []
    if threading.current_thread() is threading.main_thread():  # others cannot change it
        ignored = [each for each in _INHERITED if signal.getsignal(each) is signal.SIG_IGN]
    for number in ignored:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, usual)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def started(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a program in the root of the checkout; end it and what it has started with the block.

    Args:
        command: words.
        options: of Popen; the streams are text.
    """
    with default_signals():
        process = subprocess.Popen(command, cwd=ROOT, text=True, **options)
    try:
        yield process
    finally:
        family = descendants(process.pid) if process.poll() is None else []
        process.kill()
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


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
