"""A program as a command: its standard streams, its messages, and the status it exits with."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from tensorgrad.errors import TensorgradError
from tensorgrad.interrupt import INTERRUPTED

_FIXABLE = (TensorgradError, OSError, UnicodeError)  # by a user
_NO_THREADS = "can't start new thread", "ThreadPoolBuildError"  # of Python, of tokenizers
_BROKEN_PIPE = 141  # what a shell reports for a program whose output nobody reads any more

_log = logging.getLogger(__name__)
_Arguments = ParamSpec("_Arguments")


def command(program: Callable[_Arguments, int | None]) -> Callable[_Arguments, int]:
    """Make a program a command, which shows messages and returns an exit status.

    0, or what the program returns; 1 after an error that a user can fix, shown as one line; 130
    after Ctrl-C; 141 when the reader of its output has ended, as in `| head -1`.
    """

    @wraps(program)
    def run(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> int:
        open_standard_streams()
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        try:
            try:
                status = program(*arguments, **options) or 0
            finally:
                sys.stdout.flush()  # a full disk or a closed pipe may show only now
        except BaseException as error:
            _end_at_once_on_ctrl_c(program)
            found = status_and_line(error)
            if found is None:
                raise
            status, line = found
            if line:
                _log.error("%s", line)
        finally:
            _end_at_once_on_ctrl_c(program)
            drop_unwritten_output()
        return status

    return run


def _end_at_once_on_ctrl_c(program: Callable[..., object]) -> None:
    """Let another Ctrl-C end a process of which only Python's own exit is left."""
    handled = callable(signal.getsignal(signal.SIGINT))  # not ignored
    if program.__module__ == "__main__" and handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def status_and_line(error: BaseException) -> tuple[int, str] | None:
    """Return with which exit status and line a program ends that an error has stopped.

    The line is empty where there is nothing to say. None stands for an error that a user cannot
    fix: its traceback is needed.
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "; ".join(getattr(error, "__notes__", ()))
    if isinstance(error, BrokenPipeError):
        return _BROKEN_PIPE, ""
    if isinstance(error, MemoryError):
        return 1, (
            f"out of memory: {_allocation(error)}; expected more memory, or a smaller model, "
            "--batch, --rows or --context (a larger --accumulate keeps the batch)"
        )
    if isinstance(error, UnicodeEncodeError):
        return 1, f"{error}; expected an output in UTF-8, as with PYTHONIOENCODING=utf-8"
    if any(words in str(error) for words in _NO_THREADS):
        return 1, (
            f"no more threads can be started ({error!s:.60}); expected a higher limit of processes "
            "(ulimit -u) or of memory, or OMP_NUM_THREADS=1 and TOKENIZERS_PARALLELISM=false"
        )
    return (1, str(error)) if isinstance(error, _FIXABLE) else None


def _allocation(error: MemoryError) -> str:
    """Return what was to be allocated, or where, if the error does not say what."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"at {frames[-1].filename}:{frames[-1].lineno}" if frames else "it is used up"
    return str(error).rstrip(".") or place


def open_standard_streams() -> None:
    """Open standard streams that are closed, as after `2>&-`, on the null device.

    Otherwise the next file or socket that is opened gets the number of one of them, and whatever
    is written to the standard error by number ends up in it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  the lowest free number
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def drop_unwritten_output() -> None:
    """Flush the standard streams; drop what cannot be written, or Python fails at its own end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()


def printable(text: str) -> str:
    """Return the text with escapes for the characters that the standard output cannot take."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
