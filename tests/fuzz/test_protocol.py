"""Arbitrary bytes at the watchdog's socket: attackers change nothing, and no rank can break it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorgrad.parallel.comm import watchdog
from tensorgrad.parallel.comm.watchdog import (
    HELLO,
    MESSAGE,
    SECRET_BYTES,
    Command,
    Message,
    Watchdog,
)
from tests.fuzz.cases import cases

SECRET = bytes(range(100, 100 + SECRET_BYTES))
SIZE = 3
MOST = 4  # attackers at once: few, so that there are more of them in many cases


class System:
    """System calls of the watchdog, which are only recorded."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.killed: list[int] = []

    def write(self, _: int, data: bytes) -> None:
        self.lines.append(data)

    def kill(self, process: int, _: int) -> None:
        self.killed.append(process)


system = System()


@pytest.fixture(autouse=True, scope="module")
def harmless() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "os", system)
        patch.setattr(watchdog, "_UNAUTHENTICATED", MOST)
        yield


class Program:
    """A watchdog and the ranks that have joined."""

    def __init__(self) -> None:
        system.lines.clear()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        self.watched = Watchdog(listener, SIZE, SECRET)
        self.connections: list[socket.socket] = []

    def connect(self) -> socket.socket:
        self.connections.append(socket.create_connection(self.address))
        self.step()
        return self.connections[-1]

    def join(self, number: int) -> socket.socket:
        rank = self.connect()
        rank.sendall(hello(number))
        rank.setblocking(False)
        for _ in range(100):  # bytes over the loopback come at once, or nearly so
            self.watched.step(0.1)
            if heard(rank) == [Command.WELCOME]:
                return rank
        raise AssertionError(f"rank {number} is not welcome")

    def step(self) -> None:
        """Let the watchdog handle what is due."""
        for _ in range(3):
            self.watched.step(0)
        assert len(self.watched._unauthenticated) <= MOST
        for attacker in self.watched._unauthenticated:
            assert len(attacker.data) < HELLO.size

    def close(self) -> None:
        for connection in self.connections:
            reset(connection)  # otherwise the system remembers each for a minute
        self.watched.close()
        assert system.killed == []


def reset(connection: socket.socket) -> None:
    if connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def hello(number: int, secret: bytes = SECRET) -> bytes:
    return watchdog.pack_hello(secret, number, 2**22 + number, "nowhere")


def heard(rank: socket.socket) -> list[Command]:
    try:
        return [Command(word) for word in rank.recv(100)]
    except BlockingIOError:
        return []


# Messages of an attacker: anything, or what ranks send but for the secret.
wrong_secrets = st.one_of(
    st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES),
    st.integers(0, SECRET_BYTES - 1).map(lambda n: SECRET[:n] + b"\0" + SECRET[n + 1 :]),
)
messages = st.builds(
    MESSAGE.pack,
    st.sampled_from(Message) | st.integers(0, 255),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(width=64),
    st.binary(max_size=40) | st.text(max_size=20).map(str.encode),
)
greetings = st.builds(
    HELLO.pack,
    wrong_secrets,
    st.integers(0, SIZE) | st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=40),
)
chunks = st.one_of(
    st.binary(max_size=2 * HELLO.size),
    messages,
    greetings,
    st.builds(lambda data, n: data[:n], greetings, st.integers(0, HELLO.size)),
    st.sampled_from([b"[" * 5000 + b"\n", b'{"token": ' * 500, b"x" * 100_000]),
)
acts = st.one_of(
    st.tuples(st.just("say"), st.integers(0, 7), chunks),
    st.tuples(st.just("connect"), st.just(0), st.just(b"")),
    st.tuples(st.just("close"), st.integers(0, 7), st.just(b"")),
    st.tuples(st.just("reset"), st.integers(0, 7), st.just(b"")),
)


def act(program: Program, attackers: list[socket.socket], how: str, who: int, data: bytes) -> None:
    if how == "connect" or not attackers:
        attackers.append(program.connect())
    attacker = attackers[who % len(attackers)]
    if how == "say":
        say(attacker, data)
    elif how == "close":
        attacker.close()
    elif how == "reset":
        reset(attacker)


def say(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # a side has closed it, or it is full
        connection.setblocking(False)
        connection.send(data)


@cases(1000)
@given(st.lists(acts, max_size=12))
def test_attackers_change_nothing(script: list[tuple[str, int, bytes]]) -> None:
    program = Program()
    try:
        ranks = [program.join(number) for number in range(SIZE - 1)]
        attackers: list[socket.socket] = []
        for how, who, data in script:
            act(program, attackers, how, who, data)
            program.step()
        ranks.append(program.join(SIZE - 1))
        assert program.watched._listener is None
        assert program.watched._unauthenticated == []
        assert sorted(program.watched._ranks) == list(range(SIZE))
        assert [heard(rank) for rank in ranks] == [[]] * SIZE
        assert system.lines == []
    finally:
        program.close()


@cases(1000)
@given(
    st.lists(st.tuples(st.integers(0, SIZE - 1), messages | st.binary(max_size=3000)), max_size=8)
)
def test_no_rank_breaks_the_watchdog(script: list[tuple[int, bytes]]) -> None:
    """Whatever ranks send, the watchdog continues, or ends all of them and says once why."""
    program = Program()
    try:
        ranks = [program.join(number) for number in range(SIZE)]
        for who, data in script:
            say(ranks[who], data)
            program.step()
        for rank in ranks:
            rank.close()
        program.step()
        assert program.watched._ranks == {}
        assert len(system.lines) <= 1
        assert all(b": all ranks end\n" in line for line in system.lines)
    finally:
        program.close()


def test_who_shows_the_secret_changes_something() -> None:
    """The faults that the other tests look for can be seen."""
    program = Program()
    try:
        attacker = program.join(1)
        say(attacker, watchdog.pack_message(Message.LATE, seconds=700, text="barrier"))
        program.step()
        assert heard(attacker) == [Command.REPORT]
        reset(attacker)
        program.step()
        assert b"rank 1 of 3" in system.lines[0]
    finally:
        program.close()
