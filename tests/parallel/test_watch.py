"""The watcher, spoken to as ranks do, and what a rank tells it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tensorgrad.parallel import watch
from tensorgrad.parallel.watch import LastCall


class Rank:
    """The connection of a rank."""

    def __init__(self, address: dict[str, Any], rank: int, token: str = "") -> None:
        self.socket = socket.create_connection((address["hosts"][0], address["port"]), 10)
        self.lines = self.socket.makefile("r")
        self.say(token=token or address["token"], rank=rank, process=2**22 + rank, host="nowhere")

    def say(self, **said: object) -> None:
        self.socket.sendall(json.dumps(said).encode() + b"\n")

    def hear(self) -> str | None:
        line = self.lines.readline()
        return json.loads(line)["word"] if line else None

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


class Watched:
    """A watcher and three ranks."""

    def __init__(self, one_host: bool) -> None:
        self.process, address = watch._start_watcher(3, one_host)
        stranger = Rank(address, 1, token="guessed")
        assert stranger.hear() is None
        stranger.close()
        self.ranks = [Rank(address, number) for number in range(3)]
        assert [rank.hear() for rank in self.ranks] == ["welcome"] * 3

    def end(self) -> None:
        for rank in self.ranks:
            rank.close()
        assert self.process.wait(10) == 0


Start = Callable[[], Watched]


@pytest.fixture(params=[True, False], ids=["one host", "several hosts"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Return what starts a watcher, in the test itself: there its standard error is captured."""
    started: list[Watched] = []

    def start() -> Watched:
        started.append(Watched(request.param))
        return started[0]

    yield start
    for each in started:
        each.end()


# What the watcher asks, and waits for, does not depend on how ranks reach it.
on_one_host = pytest.mark.parametrize("start", [True], indirect=True, ids=["one host"])


def test_ranks_that_say_goodbye_are_not_lost(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    watched = start()
    ranks = watched.ranks
    for rank in ranks:
        rank.say(word="goodbye")
    assert watched.process.wait(10) == 0
    assert capfd.readouterr().err == ""


def test_the_first_that_is_lost_is_named_and_the_others_are_told(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    watched = start()
    ranks = watched.ranks
    ranks[1].close()
    assert [ranks[0].hear(), ranks[2].hear()] == ["end", "end"]
    watched.end()
    assert capfd.readouterr().err == (
        f"rank 1 of 3 (process {2**22 + 1} on nowhere) is lost: killed, or crashed "
        "without a word: all ranks end\n"
    )


def test_of_ranks_that_ended_before_it_could_look_the_first_is_named(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher kills all ranks when one is lost; a busy machine runs the watcher later."""
    watched = start()
    os.kill(watched.process.pid, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(watched.process.pid, os.WUNTRACED)[1])
    watched.ranks[1].say(word="stuck", number=3)  # read with the end, not before it
    for number in (1, 0):
        watched.ranks[number].close()
        time.sleep(0.05)
    os.kill(watched.process.pid, signal.SIGCONT)
    assert watched.ranks[2].hear() == "end"
    watched.end()
    first, after = (f"rank {n} of 3 (process {2**22 + n} on nowhere)" for n in (1, 0))
    assert capfd.readouterr().err == (
        f"{first} is lost: killed, or crashed without a word, and after it {after}: all ranks end\n"
    )


def test_who_aborts_has_said_why(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    watched = start()
    ranks = watched.ranks
    ranks[2].say(word="abort")
    watched.end()
    assert capfd.readouterr().err == ""


@on_one_host
def test_ranks_that_come_further_do_not_wait_for_each_other(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = start().ranks
    for number, rank in enumerate(ranks):
        rank.say(word="stuck", number=7 + number)
    for round, stuck in enumerate((None, 11, 11)):  # at first rank 1 has come further
        assert capfd.readouterr().err == ""
        for number, rank in enumerate(ranks):
            assert rank.hear() == "report"
            rank.say(word="report", stuck=stuck if number == 1 else 7 + number, text=f"in {number}")
        if round == 0:
            ranks[1].say(word="stuck", number=10)
    assert [rank.hear() for rank in ranks] == ["end"] * 3
    assert capfd.readouterr().err == (
        "the ranks wait for each other: all ranks end\n"
        "  rank 0: in 0\n  rank 1: in 1\n  rank 2: in 2\n"
    )


@on_one_host
def test_who_does_not_answer_is_named(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    watched = start()
    ranks = watched.ranks
    for rank in ranks:  # a question that another overtakes
        rank.say(word="stuck", number=3)
    ranks[0].say(word="late", seconds=600.2, call="barrier")
    for number in (0, 2):
        assert ranks[number].hear() == "report"
        ranks[number].say(word="report", stuck=3, text="in call 3")
    assert [rank.hear() for rank in ranks] == ["end", "report", "end"]
    err = capfd.readouterr().err.splitlines()
    assert err[0] == "rank 0 of 3 has waited 600 s in barrier: all ranks end"
    assert err[2].startswith(f"  rank 1: does not answer (process {2**22 + 1} on nowhere)")


def test_a_gpu_is_asked_only_after_a_while() -> None:
    last = LastCall()
    last.begin("all_reduce")
    last.event = types.SimpleNamespace(done=False)
    assert last.waits() is None
    last.since = time.monotonic() - 100
    assert last.waits() == last.since
    last.event.done = True
    assert last.waits() is None
    del last.event.done  # as of an event that was captured into a graph: an error
    assert last.waits() is None
    last.waits_since = 5.0
    assert last.waits() == 5.0


def test_a_rank_that_cannot_reach_rank_0_goes_on_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = json.dumps({"hosts": ["127.0.0.1"], "port": port, "token": ""})
    network: Any = types.SimpleNamespace(rank=3, exchange=lambda text: [address])
    assert watch.start(network, LastCall()) is None
    assert f"rank 3 cannot reach rank 0 at 127.0.0.1, port {port}" in caplog.text


def test_a_process_that_may_have_few_files_keeps_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "_HIGH", 1 << 30)
    ours, theirs = socket.socketpair()
    with ours, watch._with_high_number(theirs) as kept:
        kept.sendall(b"here")
        assert ours.recv(4) == b"here"
