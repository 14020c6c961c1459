"""Ctrl-C and SIGTERM as a wish that training fulfils at the end of a step."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

_log = logging.getLogger(__name__)


class Interrupts:
    """Notes the first SIGINT or SIGTERM inside a `with` block; a second one acts at once.

    In other threads than the main one, where Python delivers no signals, it notes nothing.

    Attributes:
        received: the name of the signal, or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        self._restore()
        _log.warning("%s: finishing the step; a second one stops at once", self.received)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
