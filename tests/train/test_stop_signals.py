from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tensorgrad.train.stop_signals import STOPS, StopSignals
from tests.processes import default_signals


@pytest.fixture(autouse=True)
def no_signal_is_ignored() -> Iterator[None]:
    with default_signals():
        yield


@pytest.mark.parametrize("number", STOPS)
def test_the_first_signal_is_noted(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals() as interrupts:
        assert interrupts.received is None
        os.kill(os.getpid(), number)
        assert interrupts.received is number
        assert signal.getsignal(number) == before
    assert signal.getsignal(number) == before


def test_the_second_acts_at_once() -> None:
    with StopSignals() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.received is signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_that_acts_at_once_says_how_to_resume() -> None:
    def interrupted_twice() -> None:
        with StopSignals():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted_twice()
    assert "--resume continues from the newest checkpoint" in caught.value.__notes__[0]


def test_a_signal_that_was_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.received is None
    finally:
        signal.signal(signal.SIGINT, before)


def exchange(*ranks: StopSignals) -> None:
    """Give all ranks the sums of their flags."""
    sums = [sum(flags) for flags in zip(*(rank.flags() for rank in ranks), strict=True)]
    for rank in ranks:
        rank.agree(sums)


def test_ranks_end_together() -> None:
    first, second = ranks = StopSignals(alone=False), StopSignals(alone=False)
    exchange(*ranks)
    assert [rank.ends for rank in ranks] == [False, False]
    first.asked = True  # the other one does not know it yet
    assert [rank.ends or rank.at_once for rank in ranks] == [False, False]
    exchange(*ranks)
    assert [rank.ends for rank in ranks] == [True, True]
    first.asked, second.received = False, STOPS[1]
    exchange(*ranks)
    assert [(rank.agreed, rank.ends, rank.at_once) for rank in ranks] == [
        (STOPS[1], True, False)
    ] * 2


def test_a_process_alone_ends_when_it_is_asked() -> None:
    alone = StopSignals()
    assert (alone.ends, alone.at_once) == (False, False)
    alone.asked = True
    assert (alone.ends, alone.at_once) == (True, True)
    alone.asked, alone.received = False, STOPS[0]
    assert (alone.ends, alone.at_once) == (False, True)
    exchange(alone)
    assert alone.ends


def test_other_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run() -> None:
        with StopSignals() as interrupts:
            seen.append((interrupts.received, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
