"""Deferred signals, and a quiet exit after Ctrl-C during imports.

Python runs signal handlers in the main thread between any two bytecode instructions. Most of them
raise an exception there, as that of Ctrl-C does.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from opcode import opmap
from types import FrameType, TracebackType
from typing import Any

INTERRUPTED = 130  # a shell's status for a program ended by Ctrl-C

_IMPORT = opmap["IMPORT_NAME"]  # the bytecode instruction of an import

_signal: Any = importlib.import_module("_signal")  # `signal` without slow conversions to enums

_HANDLED = [
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)  # Windows has only some of them
]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Python's signal handlers to the end of the `with` block.

    Only the main thread runs handlers; in other threads this does nothing. Signals without a
    Python handler are not deferred.
    """
    if threading.get_ident() != threading.main_thread().ident:
        yield
        return
    handlers: dict[int, Any] = {}
    received: list[int] = []
    ended = False

    def note(number: int, frame: FrameType | None) -> None:
        if ended:  # another handler has raised before this one was restored
            handlers[number](number, frame)
        else:
            received.append(number)

    try:
        for number in _HANDLED:
            handler = _signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                _signal.signal(number, note)
        yield
    finally:
        ended = True
        for number, handler in handlers.items():
            _signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


def during_import(error: BaseException | None, trace: TracebackType | None) -> bool:
    """Return whether an error is Ctrl-C during an import, where a traceback is of no use."""
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
    """Exit without a traceback after Ctrl-C in an import, unless Python is interactive."""
    if during_import(error, trace) and not hasattr(sys, "ps1"):
        sys.exit(INTERRUPTED)
    _report(kind, error, trace)


sys.excepthook = _end_imports_quietly  # here: the imports of the package itself follow
