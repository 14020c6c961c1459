"""Signals at moments when they must wait, and Ctrl-C while a program is still being imported.

Python runs signal handlers in the main thread, between any two steps of a program. Most of them
raise an exception, as that of Ctrl-C does, wherever the program is.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from opcode import opmap
from types import FrameType, TracebackType
from typing import Any

INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C

_IMPORT = opmap["IMPORT_NAME"]  # the instruction of a frame that imports

_HANDLED = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)  # Windows has only some of them
]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let signal handlers of Python wait until the end of the `with` block, in the main thread.

    Other threads run no handlers, so nothing is done there. Signals without a handler act at once:
    they end the process or are ignored.
    """
    if threading.get_ident() != threading.main_thread().ident:
        yield
        return
    handlers: dict[int, Any] = {}
    received: list[int] = []
    ended = False

    def note(number: int, frame: FrameType | None) -> None:
        if ended:  # another handler has raised before this one could be restored
            handlers[number](number, frame)
        else:
            received.append(number)

    try:
        for number in _HANDLED:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, note)
        yield
    finally:
        ended = True
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


def during_import(error: BaseException | None, trace: TracebackType | None) -> bool:
    """Return whether this is Ctrl-C in an import, of which a traceback tells a user nothing."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    while trace is not None:
        if trace.tb_frame.f_code.co_code[trace.tb_lasti] == _IMPORT:
            return True
        trace = trace.tb_next
    return False


_report = sys.excepthook


def _end_imports_quietly(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Exit without a traceback after Ctrl-C in an import; in the interpreter only that stops."""
    if during_import(error, trace) and not hasattr(sys, "ps1"):
        sys.exit(INTERRUPTED)
    _report(kind, error, trace)


sys.excepthook = _end_imports_quietly  # here: the imports of the package itself follow
