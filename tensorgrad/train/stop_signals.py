"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 as requests to stop at the end of a step."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
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

    Python delivers signals to the main thread only: in other threads nothing is recorded. Ranks
    that train together must stop at the same step: they add their `flags`, and agree by the sums.

    Args:
        alone: whether there is no other rank.
    Attributes:
        received: the recorded signal, or None.
        asked: whether a callback has stopped the run here, or has failed.
        agreed: the signal that the ranks stop for, or None.
    """

    def __init__(self, alone: bool = True) -> None:
        self.received: signal.Signals | None = None
        self.agreed: signal.Signals | None = None
        self.asked, self._alone, self._all_end = False, alone, False
        self._before: dict[int, Any] = {}

    def flags(self) -> list[float]:
        """Return what this rank was asked, for `agree`."""
        return [float(self.asked), *(float(self.received is number) for number in STOPS)]

    def agree(self, sums: Sequence[float]) -> None:
        """Take the sums of the flags of all ranks."""
        self._all_end = sums[0] > 0
        self.agreed = next((n for n, count in zip(STOPS, sums[1:], strict=True) if count), None)

    @property
    def at_once(self) -> bool:
        """Whether this process was asked to stop, and no other rank need learn of it."""
        return self._alone and (self.asked or self.received is not None)

    @property
    def ends(self) -> bool:
        """Whether the run ends before its last step, as all ranks know."""
        return self.agreed is not None or self._all_end or (self._alone and self.asked)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup, for instance
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
