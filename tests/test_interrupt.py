from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

from tensorgrad.interrupt import uninterrupted


class Stopped(Exception):
    """What a handler of a program may raise."""


def stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def during(numbers: list[signal.Signals], done: list[str]) -> None:
    with uninterrupted():
        for number in numbers:
            signal.raise_signal(number)
            done.append(number.name)


def test_ctrl_c_waits_for_the_end_of_the_block() -> None:
    before, done = signal.getsignal(signal.SIGINT), list[str]()
    with pytest.raises(KeyboardInterrupt):
        during([signal.SIGINT, signal.SIGINT], done)
    assert done == ["SIGINT", "SIGINT"]
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_of_a_program_wait_and_are_all_restored() -> None:
    """Also where the first of them raises."""
    numbers = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
    before = {number: signal.signal(number, stop) for number in numbers}
    done: list[str] = []
    try:
        with pytest.raises(Stopped):
            during(numbers, done)
        assert len(done) == 3
        assert all(signal.getsignal(number) is stop for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_blocks_nest() -> None:
    done: list[str] = []

    def nested() -> None:
        with uninterrupted():
            during([signal.SIGINT], done)
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert done == ["SIGINT", "outer"]


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        during([signal.SIGINT], [])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_need_no_block() -> None:
    seen = []

    def run() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
