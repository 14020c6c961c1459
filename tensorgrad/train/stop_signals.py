"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 as requests to stop at the end of a training step."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

# Ctrl-C, the signals of a scheduler before its time limit, and the end of the terminal.
STOPS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
]  # Windows has neither of the last two

_log = logging.getLogger(__name__)


class StopSignals:
    """Record the first of the signals STOPS inside a `with` block; a second one acts immediately.

    Python delivers signals to the main thread only: in other threads nothing is recorded.

    Attributes:
        received: the recorded signal, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._restore()
        if isinstance(error, KeyboardInterrupt):
            error.add_note("stopped at once; --resume continues from the newest checkpoint, if any")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()
        _log.warning("%s: finishing the step; a second one stops at once", self.received.name)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
