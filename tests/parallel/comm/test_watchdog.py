"""Protocol of the watchdog: connections of ranks and of attackers, and reports of a rank."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tensorgrad.parallel.comm import watchdog, watchdog_client
from tensorgrad.parallel.comm.watchdog import HELLO, MESSAGE, Command, Message, Watchdog
from tensorgrad.parallel.comm.watchdog_client import LastCall
from tests.parallel.comm.attackers import ATTACKS, Attack, Attacker, half_a_greeting, is_closed

SIZE = 3
PROCESS = 2**22  # above all processes there are
LONG = 60.0  # seconds: a bound on what should never take so long


class Rank:
    """The connection of a rank."""

    def __init__(self, address: tuple[str, int], greeting: bytes) -> None:
        self.socket = socket.create_connection(address, LONG)
        self.socket.sendall(greeting)

    def say(self, message: Message, number: int = -1, seconds: float = 0, text: str = "") -> None:
        self.socket.sendall(watchdog.pack_message(message, number, seconds, text))

    def hear(self, question: bool = False) -> Command | None:
        """Return the next command that is, or is no, question what this rank does."""
        while word := self.socket.recv(1):
            if question is (word[0] == Command.REPORT):
                return Command(word[0])
        return None

    def close(self) -> None:
        self.socket.close()


class Joined:
    """A watchdog's address, and the ranks that have joined."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self.address, self.secret = address, secret
        self.ranks: list[Rank] = []

    def join(self, number: int) -> Rank:
        rank = Rank(self.address, self.greeting(number))
        self.ranks.append(rank)
        assert rank.hear() is Command.WELCOME
        return rank

    def greeting(self, number: int) -> bytes:
        return watchdog.pack_hello(self.secret, number, PROCESS + number, "nowhere")


class Watched(Joined):
    """A watchdog in a process of its own."""

    def __init__(self, ranks: int) -> None:
        listener = watchdog_client._listen(["127.0.0.1"])
        assert listener is not None
        super().__init__(listener.getsockname(), secrets.token_bytes(watchdog.SECRET_BYTES))
        self.process: subprocess.Popen[bytes] = watchdog_client._start_watchdog(
            listener, SIZE, self.secret
        )
        for number in range(ranks):
            self.join(number)

    def end(self) -> None:
        for rank in self.ranks:
            rank.close()
        assert self.process.wait(LONG) == 0


@contextmanager
def in_this_process(size: int) -> Iterator[Joined]:
    """Run a watchdog whose constants a test may change."""
    listener = watchdog_client._listen(["127.0.0.1"])
    assert listener is not None
    here = Joined(listener.getsockname(), bytes(watchdog.SECRET_BYTES))
    thread = threading.Thread(target=Watchdog(listener, size, here.secret).run, daemon=True)
    thread.start()
    yield here
    for rank in here.ranks:
        with suppress(OSError):  # it may have said so already
            rank.say(Message.GOODBYE)
    thread.join(LONG)
    assert not thread.is_alive()
    for rank in here.ranks:
        rank.close()


Start = Callable[..., Watched]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a watchdog inside the test, which captures its output."""
    started: list[Watched] = []

    def start(ranks: int = SIZE) -> Watched:
        started.append(Watched(ranks))
        return started[0]

    yield start
    for each in started:
        each.end()


def test_ranks_that_say_goodbye_are_not_lost(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    watched = start()
    for rank in watched.ranks:
        rank.say(Message.GOODBYE)
    assert watched.process.wait(LONG) == 0
    assert capfd.readouterr().err == ""


def test_the_first_that_is_lost_is_named_and_the_others_are_told(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    watched = start()
    ranks = watched.ranks
    ranks[1].close()
    assert [ranks[0].hear(), ranks[2].hear()] == [Command.END] * 2
    watched.end()
    assert capfd.readouterr().err == (
        f"rank 1 of 3 (process {PROCESS + 1} on nowhere) is lost: killed, or crashed "
        "without a word: all ranks end\n"
    )


def test_of_ranks_that_ended_before_it_could_look_the_first_is_named(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher kills all ranks when one is lost; a busy machine runs the watchdog later."""
    watched = start()
    os.kill(watched.process.pid, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(watched.process.pid, os.WUNTRACED)[1])
    watched.ranks[1].say(Message.REPORT, number=3)  # read with the end, not before it
    for number in (1, 0):
        watched.ranks[number].close()
        time.sleep(0.05)
    os.kill(watched.process.pid, signal.SIGCONT)
    assert watched.ranks[2].hear() is Command.END
    watched.end()
    first, after = (f"rank {n} of 3 (process {PROCESS + n} on nowhere)" for n in (1, 0))
    assert capfd.readouterr().err == (
        f"{first} is lost: killed, or crashed without a word, and after it {after}: all ranks end\n"
    )


def test_an_aborting_rank_has_said_why(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    watched = start()
    watched.ranks[2].say(Message.ABORT)
    watched.end()
    assert capfd.readouterr().err == ""


def test_ranks_that_do_not_end_are_killed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[list[int]] = []
    monkeypatch.setattr(Watchdog, "_kill", lambda self: killed.append(sorted(self._ranks)))
    for seconds in (LONG, 0.1):
        monkeypatch.setattr(watchdog, "_END", seconds)
        with in_this_process(2) as here:
            ranks = [here.join(number) for number in range(2)]
            began = time.monotonic()
            ranks[1].say(Message.ABORT)
            if seconds == LONG:
                assert killed == []
            else:
                assert ranks[0].hear() is None  # until the watchdog has closed
                assert time.monotonic() - began > seconds
    assert killed == [[0, 1]]


def test_ranks_that_come_further_do_not_wait_for_each_other(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = start().ranks
    for stuck in (8, -1, 11, 11):  # rank 1 comes further
        assert capfd.readouterr().err == ""
        for number, rank in enumerate(ranks):
            assert rank.hear(question=True) is Command.REPORT
            rank.say(
                Message.REPORT, number=stuck if number == 1 else 7 + number, text=f"in {number}"
            )
    assert [rank.hear() for rank in ranks] == [Command.END] * 3
    assert capfd.readouterr().err == (
        "the ranks wait for each other: all ranks end\n"
        "  rank 0: in 0\n  rank 1: in 1\n  rank 2: in 2\n"
    )


def test_a_rank_that_does_not_answer_is_named(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = start().ranks
    for number in (0, 2):
        assert ranks[number].hear(question=True) is Command.REPORT
        ranks[number].say(Message.LATE, seconds=600.2 + number, text="barrier")
        ranks[number].say(Message.REPORT, number=3, text="in call 3")
    assert [rank.hear() for rank in ranks] == [Command.END] * 3
    err = capfd.readouterr().err.splitlines()
    assert err[0] == "rank 0 of 3 has waited 600 s in barrier: all ranks end"
    assert err[2].startswith(f"  rank 1: does not answer (process {PROCESS + 1} on nowhere)")


def test_of_ranks_that_fail_the_first_alone_may_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank that fails waits for lower ones, until they fail too or wait for others."""
    monkeypatch.setattr(watchdog, "_CHOICE", 100 * LONG)
    with in_this_process(SIZE) as here:
        ranks = [here.join(number) for number in range(SIZE)]
        ranks[2].say(Message.FAILED)
        ranks[1].say(Message.FAILED)
        ranks[0].say(Message.REPORT, number=5, seconds=3.5)
        assert ranks[1].hear() is Command.SPEAK
        ranks[0].say(Message.FAILED)  # too late
        for rank in ranks:
            rank.say(Message.GOODBYE)
        assert [rank.hear() for rank in ranks] == [None] * SIZE


def test_rank_0_may_speak_at_once(start: Start) -> None:
    ranks = start().ranks
    ranks[0].say(Message.FAILED)
    assert ranks[0].hear() is Command.SPEAK


def test_a_rank_does_not_wait_for_long_for_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_CHOICE", 0.1)
    with in_this_process(2) as here:
        ranks = [here.join(number) for number in range(2)]
        ranks[1].say(Message.FAILED)
        assert ranks[1].hear() is Command.SPEAK


def test_a_connection_without_greeting_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_GREETING", 0.1)
    with in_this_process(1) as here:
        attacker = Attacker(here.address, here.greeting(0))
        half_a_greeting(attacker)
        attacker.connect()
        assert [is_closed(each) for each in attacker.kept] == [True, True]
        attacker.leave()
        here.join(0)


def test_the_watchdog_exits_when_no_rank_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_START", 0.1)
    with in_this_process(1):
        pass  # its end is waited for


def stops_listening(address: tuple[str, int]) -> bool:
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        try:
            socket.create_connection(address).close()
        except ConnectionResetError:
            continue  # the listener was closed before it accepted this connection
        except ConnectionRefusedError:
            return True
    return False


@pytest.mark.parametrize("attack", ATTACKS)
def test_attackers_change_nothing(
    start: Start, attack: Attack, capfd: pytest.CaptureFixture[str]
) -> None:
    watched = start(ranks=2)
    attacker = Attacker(watched.address, watched.greeting(1))
    attack(attacker)
    watched.join(2)
    assert all(is_closed(each) for each in attacker.kept if each.fileno() >= 0)
    attacker.leave()
    assert stops_listening(watched.address)  # all are there
    for rank in watched.ranks:
        rank.say(Message.GOODBYE)
    assert watched.process.wait(LONG) == 0
    assert [rank.hear() for rank in watched.ranks] == [None] * 3
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of others can be set on Linux")
def test_attackers_do_not_use_up_the_files_of_the_watchdog(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = start(ranks=2)
    most = len(os.listdir(f"/proc/{watched.process.pid}/fd")) + 3
    resource.prlimit(watched.process.pid, resource.RLIMIT_NOFILE, (most, most))
    attacker = Attacker(watched.address, watched.greeting(1))
    for _ in range(40):
        attacker.connect()
    watched.join(2)
    attacker.leave()


def test_a_rank_outside_the_program_is_not_taken(start: Start) -> None:
    watched = start(ranks=2)
    for number in (SIZE, 2**31):
        attacker = Rank(watched.address, watched.greeting(number))
        assert attacker.hear() is None
        attacker.close()


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = "all_reduce " + "é" * 2000 + " in step"
    _, _, _, data = MESSAGE.unpack(watchdog.pack_message(Message.LATE, text=text))
    assert len(data) == MESSAGE.size - 17
    short = watchdog._text(data)
    assert short.startswith("all_reduce é")
    assert short.endswith("é in step")
    assert " ... " in short


def test_a_connection_ends_soon_after_its_host() -> None:
    with socket.socket() as connection:
        watchdog.end_with_host(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if sys.platform == "linux":
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle, interval, count = (
                connection.getsockopt(socket.IPPROTO_TCP, option) for option in options
            )
            assert idle + interval * count <= 20
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000


def test_a_gpu_is_asked_only_after_a_while() -> None:
    last = LastCall()
    last.begin("all_reduce")
    last.event = types.SimpleNamespace(done=False)
    assert last.waits() is None
    last.since = time.monotonic() - 100
    assert last.waits() == last.since
    last.event.done = True
    assert last.waits() is None
    del last.event.done  # events that were captured into a graph raise an error
    assert last.waits() is None
    last.waits_since = 5.0
    assert last.waits() == 5.0


class OtherRanks:
    """The network of rank `rank`, of four on two hosts; `said` has what the others report."""

    size, local_size = 4, 2

    def __init__(self, rank: int, said: Sequence[str]) -> None:
        self.rank, self._said = rank, iter(said)

    def exchange(self, text: str) -> list[str]:
        return next(self._said).split("|")


def test_a_rank_that_cannot_reach_rank_0_continues_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog_client, "_CONNECT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    network: Any = OtherRanks(3, ["localhost", "", f"127.0.0.1 {port} 00"])
    assert watchdog_client.start(network, LastCall()) is None
    assert f"rank 3 cannot reach rank 0 at 127.0.0.1, port {port}" in caplog.text


def test_a_host_that_others_do_not_know_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Its host knows itself by the loopback, and others do not know its name."""
    network: Any = OtherRanks(0, ["localhost", "127.0.0.1|127.0.1.1||", ""])
    assert watchdog_client.start(network, LastCall()) is None
    assert "other hosts know no address of localhost, where rank 0 is" in caplog.text


def test_the_watchdog_listens_where_most_ranks_look_for_it() -> None:
    network: Any = OtherRanks(0, ["127.0.1.1|192.0.2.9|192.0.2.7|192.0.2.7 192.0.2.8"])
    assert watchdog_client._addresses_of_rank_0(network, "localhost") == [
        "192.0.2.7",
        "192.0.2.9",
        "192.0.2.8",
    ]
    network.local_size = 4
    assert watchdog_client._addresses_of_rank_0(network, "localhost") == ["127.0.0.1"]


def test_the_watchdog_listens_on_one_address_of_this_host() -> None:
    listener = watchdog_client._listen(["192.0.2.7", "127.0.0.1"])  # the first belongs to no host
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    assert watchdog_client._listen(["192.0.2.7"]) is None


def test_a_rank_that_the_watchdog_drops_tries_again() -> None:
    secret = bytes(range(watchdog.SECRET_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        connecting = pool.submit(watchdog_client._connect, 3, server.getsockname(), secret)
        server.accept()[0].close()
        again, _ = server.accept()
        with again:
            greeting = again.recv(watchdog.HELLO.size, socket.MSG_WAITALL)
            assert HELLO.unpack(greeting)[:2] == (secret, 3)
            again.sendall(bytes([Command.WELCOME]))
            with connecting.result(LONG) as connection:
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_a_process_that_may_have_few_files_keeps_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog_client, "_HIGH", 1 << 30)
    ours, theirs = socket.socketpair()
    with ours, watchdog_client._with_high_number(theirs) as kept:
        kept.sendall(b"here")
        assert ours.recv(4) == b"here"
