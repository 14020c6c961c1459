"""Attacks of attackers on the watchdog's socket."""

from __future__ import annotations

import random
import resource
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from tensorgrad.parallel.comm import watchdog
from tensorgrad.parallel.comm.watchdog import HELLO, Message

IDLE = 1200  # connections: more than the 1,024 files that a process may usually open
_PATIENCE = 60.0  # seconds


class Attacker:
    """A process that can reach the socket and keeps connections open.

    Args:
        address: of the socket.
        overheard: the greeting of a rank that is already there.
    """

    def __init__(self, address: tuple[str, int], overheard: bytes) -> None:
        self.address, self.overheard = address, overheard
        self.kept: list[socket.socket] = []

    def connect(self) -> socket.socket:
        self.kept.append(socket.create_connection(self.address, _PATIENCE))
        return self.kept[-1]

    def say(self, data: bytes) -> socket.socket:
        """Send in pieces until the other side closes the connection."""
        connection = self.connect()
        with suppress(ConnectionError):
            for begin in range(0, len(data), 1 << 16):
                connection.sendall(data[begin : begin + (1 << 16)])
        return connection

    def leave(self) -> None:
        for connection in self.kept:
            connection.close()
        self.kept.clear()


def is_closed(connection: socket.socket) -> bool:
    """Wait until the other side closes a connection; return whether it sent nothing before."""
    with suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def brackets(attacker: Attacker) -> None:
    attacker.say(b"[" * 100_000 + b"\n")


def endless_line(attacker: Attacker) -> None:
    attacker.say(b"x" * (64 << 20))


def idle_connections(attacker: Attacker) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # files of the attacker alone
    for _ in range(IDLE):
        attacker.connect()


def wrong_secret(attacker: Attacker) -> None:
    for rank in range(4):  # also those that are not there yet
        data = watchdog.pack_hello(b"?" * watchdog.SECRET_BYTES, rank, 1, "attacker")
        assert is_closed(attacker.say(data + watchdog.pack_message(Message.ABORT)))


def half_a_greeting(attacker: Attacker) -> None:
    attacker.say(attacker.overheard[: HELLO.size // 2])


def greeting_and_close(attacker: Attacker) -> None:
    for rank in range(4):
        attacker.say(watchdog.pack_hello(b"?" * watchdog.SECRET_BYTES, rank, 1, "attacker")).close()


def greeting_again(attacker: Attacker) -> None:
    """Claim to be a rank that is connected already; the secret alone does not allow that."""
    assert is_closed(attacker.say(attacker.overheard + watchdog.pack_message(Message.ABORT)))


def random_bytes(attacker: Attacker) -> None:
    numbers = random.Random(0)
    for _ in range(20):
        attacker.say(numbers.randbytes(numbers.randrange(1, 5000)))


def byte_by_byte(attacker: Attacker) -> None:
    connection = attacker.connect()
    with suppress(ConnectionError):
        for byte in attacker.overheard[:100]:
            connection.sendall(bytes([byte]))
            time.sleep(0.001)


def reset(attacker: Attacker) -> None:
    for data in (b"", attacker.overheard[:10]):
        connection = attacker.say(data)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def messages_without_greeting(attacker: Attacker) -> None:
    attacker.say(
        watchdog.pack_message(Message.ABORT)
        + watchdog.pack_message(Message.LATE, 0, 1e9, "barrier")
    )


Attack = Callable[[Attacker], None]
ATTACKS: tuple[Attack, ...] = (
    brackets,
    endless_line,
    idle_connections,
    wrong_secret,
    half_a_greeting,
    greeting_and_close,
    greeting_again,
    random_bytes,
    byte_by_byte,
    reset,
    messages_without_greeting,
)
