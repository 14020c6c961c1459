"""Watchdog: the process that ends all ranks when one crashes, hangs or loses its host.

Rank 0 starts it beside itself. It runs on the standard library alone. Every rank keeps a connection
to it open, so the end of a rank's process closes a connection at once, whatever the cause. It is a
separate process because a launcher kills all ranks when one has died. The watchdog survives that
and reports which rank died first; the launcher waits for it because it holds the standard error.

Protocol: a rank opens its connection with a `HELLO`, which contains the secret of the run. Once a
second the watchdog asks all ranks what they do. Its commands are single bytes (`Command`), messages
of ranks have one size (`MESSAGE`). Ranks that wait for others in the same calls at two questions in
a row wait for each other: all answers to the first had come when the second was asked. From an
unknown connection it reads at most one `HELLO`, and it compares the secret before anything else.
It stops listening as soon as all ranks are connected.
"""

from __future__ import annotations

import errno
import hmac
import math
import os
import selectors
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from enum import IntEnum

_START = 120.0  # seconds in which all ranks must connect
_GREETING = 10.0  # seconds in which a connection must show the secret
_UNAUTHENTICATED = 64  # connections without the secret; beyond that the oldest is closed
_ANSWER = 5.0  # seconds in which a responsive rank must answer, also on a busy host
_QUESTION = 1.0  # seconds between the answers to a question and the next one
_LOOK = 0.2  # seconds after which deadlines are looked at
_CHOICE = 10.0  # seconds in which a lower rank may fail too, to be the one that shows its error
_END = 3.0  # seconds after which a rank that was told to end is killed

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # too many open files
_PAUSE = 0.1  # seconds to wait before accepting again

_LAST_HEARD = 56  # where tcpi_last_ack_recv is in struct tcp_info

SECRET_BYTES = 32
_HOST_BYTES, _TEXT_BYTES = 256, 1007
HELLO = struct.Struct(f"!{SECRET_BYTES}sII{_HOST_BYTES}s")  # secret, rank, process, host
MESSAGE = struct.Struct(f"!Bqd{_TEXT_BYTES}s")  # a Message, a number, seconds, a text


class Message(IntEnum):
    """A message of a rank, and which fields of `MESSAGE` it fills in."""

    GOODBYE = 1  # it exits as planned
    ABORT = 2  # it ends all ranks, and has said why
    FAILED = 3  # it has an error to show
    LATE = 4  # it has waited longer than the time-out; seconds; text: the call
    REPORT = 5  # an answer; number: of the call in which it waits for others, or -1; seconds: how
    # long it has waited for anything, 0 if it does not wait; text: what it does


class Command(IntEnum):
    """A command of the watchdog to a rank, in one byte."""

    WELCOME = 1
    REPORT = 2  # say what you do
    SPEAK = 3  # show your error; no other rank does
    END = 4


def pack_hello(secret: bytes, rank: int, process: int, host: str) -> bytes:
    """Return the greeting with which a rank opens its connection."""
    return HELLO.pack(secret, rank, process, _short(host, _HOST_BYTES))


def pack_message(message: Message, number: int = -1, seconds: float = 0.0, text: str = "") -> bytes:
    """Return a message of a rank; a text that is too long loses its middle."""
    return MESSAGE.pack(message, number, seconds, _short(text, _TEXT_BYTES))


def end_with_host(connection: socket.socket) -> None:
    """Make a connection fail about 20 s after the other host has disappeared."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),  # seconds
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 20_000),  # milliseconds, for what was sent and not acknowledged
    ):
        if hasattr(socket, name):  # Linux's names
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _short(text: str, length: int) -> bytes:
    data = text.encode(errors="backslashreplace")
    if len(data) <= length:
        return data
    gap = b" ... "
    half = (length - len(gap)) // 2
    return data[:half] + gap + data[-half:]


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


class _Rank:
    """A connection: unknown until it has shown the secret, then of a rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.since = connection, time.monotonic()
        self.data = b""  # received bytes of an incomplete message
        self.error: OSError | None = None  # why the connection ended
        self.number: int | None = None
        self.process, self.host = 0, ""
        self.failed = False
        self.stuck = -1  # the number of the call in which it waits for others
        self.waits = False
        self.report: str | None = None  # its answer to the question

    def tell(self, word: Command) -> None:
        with suppress(OSError):  # a lost connection is noticed when it is read
            self.connection.send(bytes([word]), socket.MSG_DONTWAIT)

    def has_gone(self) -> bool:
        """Return whether its host is gone: TCP reports the end of a process, but not of a host."""
        return self.error is not None and self.error.errno != errno.ECONNRESET


class Watchdog:
    """Tracks which ranks live and wait, and ends all when one is lost or all are deadlocked."""

    def __init__(self, listener: socket.socket, size: int, secret: bytes) -> None:
        """Watch `size` ranks, which show the secret to prove that they belong to the run."""
        self._listener: socket.socket | None = listener
        self._size, self._secret = size, secret
        self._listens_until = time.monotonic() + _START
        self._unauthenticated: list[_Rank] = []  # oldest first
        self._ranks: dict[int, _Rank] = {}
        self._joined: set[int] = set()
        self._asked, self._due = False, math.inf  # when to ask, then when answers are due
        self._stuck: dict[int, int] = {}  # the calls in which ranks waited at the last question
        self._late = ""  # which rank has waited longer than the time-out
        self._choose_by: float | None = None  # when to choose the rank that shows its error
        self._chosen = False
        self._ending: float | None = None
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Watch until no rank is left."""
        while self._ranks or self._may_come():
            self.step()
            if self._ending is not None and time.monotonic() > self._ending:
                self._kill()
                break
        self.close()

    def _may_come(self) -> bool:
        """Whether a rank is expected: one that fails while all end must not find nobody to ask."""
        expected = not self._joined or self._ending is not None
        return expected and self._listener is not None

    def close(self) -> None:
        """Close all connections."""
        self._stop_listening()
        for key in list(self._selector.get_map().values()):
            key.data.connection.close()
        self._selector.close()

    def step(self, patience: float = _LOOK) -> None:
        """Wait for events, at most `patience` seconds, and handle all that are due."""
        ended = []
        for key, _ in self._selector.select(patience):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data.connection.fileno() >= 0 and not self._read(key.data):
                ended.append(key.data)
        ended.sort(key=_silent_for, reverse=True)  # the first to end comes first
        lost = [rank for rank in ended if self._close(rank)]
        if lost:
            self._end(_lost(lost, self._size))
        self._close_unauthenticated()
        if self._ending is None:
            self._ask()
            self._choose()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _FULL:
                if self._unauthenticated:
                    self._close(self._unauthenticated[0])
                else:
                    time.sleep(_PAUSE)
            return  # otherwise it was closed before it was accepted
        try:
            end_with_host(connection)
        except OSError:  # it was closed meanwhile
            connection.close()
            return
        peer = _Rank(connection)
        self._unauthenticated.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        if len(self._unauthenticated) > _UNAUTHENTICATED:
            self._close(self._unauthenticated[0])

    def _close_unauthenticated(self) -> None:
        """Close connections without the secret that are too old, or all once no rank is missing."""
        now = time.monotonic()
        if len(self._joined) == self._size or now >= self._listens_until:
            self._stop_listening()
        while self._unauthenticated and (
            self._listener is None or now >= self._unauthenticated[0].since + _GREETING
        ):
            self._close(self._unauthenticated[0])

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _close(self, rank: _Rank) -> bool:
        """Close a connection; return whether this loses a rank."""
        self._selector.unregister(rank.connection)
        rank.connection.close()
        if rank.number is None:
            self._unauthenticated.remove(rank)
        return rank.number is not None and self._ranks.pop(rank.number, None) is not None

    def _read(self, rank: _Rank) -> bool:
        """Read and handle everything a rank has sent; return False when its connection has ended.

        It reads up to the end at once: in the next step the end of another rank would come first.
        """
        try:
            while data := rank.connection.recv(1 << 16, socket.MSG_DONTWAIT):
                rank.data += data
                if rank.number is None and len(rank.data) >= HELLO.size and not self._greet(rank):
                    return False
                if rank.number is not None and not self._handle_messages(rank):
                    return False
        except BlockingIOError:
            return True
        except OSError as error:
            rank.error = error
        return False

    def _greet(self, peer: _Rank) -> bool:
        """Accept an unknown connection as the rank it claims to be, if it shows the secret."""
        greeting, rest = peer.data[: HELLO.size], peer.data[HELLO.size :]
        if not hmac.compare_digest(greeting[:SECRET_BYTES], self._secret):
            return False
        _, number, process, host = HELLO.unpack(greeting)
        if number >= self._size or number in self._joined:
            return False
        self._unauthenticated.remove(peer)
        peer.number, peer.process, peer.host = number, process, _text(host)
        peer.data = rest
        self._ranks[number] = peer
        self._joined.add(number)
        if len(self._joined) == self._size:
            self._due = time.monotonic() + _QUESTION
        peer.tell(Command.WELCOME)
        return True

    def _handle_messages(self, rank: _Rank) -> bool:
        """Handle the complete messages; return False for one that is not of the protocol."""
        while len(rank.data) >= MESSAGE.size:
            kind, number, seconds, text = MESSAGE.unpack(rank.data[: MESSAGE.size])
            rank.data = rank.data[MESSAGE.size :]
            try:
                self._handle(rank, Message(kind), number, seconds, _text(text))
            except ValueError:
                return False
        return True

    def _handle(
        self, rank: _Rank, message: Message, number: int, seconds: float, text: str
    ) -> None:
        now = time.monotonic()
        if rank.number not in self._ranks:
            return  # it has said GOODBYE
        if message is Message.GOODBYE:
            del self._ranks[rank.number]
        elif message is Message.ABORT:  # the launcher will kill the others
            self._ending = self._ending or now + _END
        elif message is Message.FAILED:
            rank.failed = True
            if self._choose_by is None and not self._chosen:
                self._choose_by = now + _CHOICE
                for other in self._ranks.values():  # their statements may no longer hold
                    other.waits = False
                self._due = self._due if self._asked else now
        elif message is Message.LATE:
            waited = f"rank {rank.number} of {self._size} has waited {seconds:.0f} s in {text}"
            self._late = self._late or waited
            self._due = self._due if self._asked else now
        else:
            rank.stuck, rank.waits, rank.report = number, seconds > 0, text

    def _choose(self) -> None:
        """Let the lowest failed rank show its error, when no lower rank can still fail."""
        if self._choose_by is None:
            return
        failed = [number for number, rank in self._ranks.items() if rank.failed]
        first = min(failed, default=self._size)
        before = [rank for number, rank in self._ranks.items() if number < first]
        are_here = self._joined.issuperset(range(first))
        if time.monotonic() >= self._choose_by or (are_here and all(rank.waits for rank in before)):
            self._choose_by, self._chosen = None, True
            if failed:
                self._ranks[first].tell(Command.SPEAK)

    def _ask(self) -> None:
        """Ask all ranks what they do, or end all for what they have answered."""
        now = time.monotonic()
        ranks = self._ranks
        if not self._asked and now >= self._due:
            self._asked, self._due = True, now + _ANSWER
            for rank in ranks.values():
                rank.report = None
                rank.tell(Command.REPORT)
        answered = {number: rank for number, rank in ranks.items() if rank.report is not None}
        if not self._asked or (len(answered) < len(ranks) and now < self._due):
            return
        stuck = {number: rank.stuck for number, rank in answered.items() if rank.stuck >= 0}
        if self._late or (len(stuck) == self._size and stuck == self._stuck):
            why = self._late or "the ranks wait for each other"
            lines = [f"  rank {number}: {_description(ranks[number])}" for number in sorted(ranks)]
            self._end("\n".join([f"{why}: all ranks end", *lines]))
        self._asked, self._due, self._stuck = False, now + _QUESTION, stuck

    def _end(self, message: str) -> None:
        if self._ending is not None:
            return
        with suppress(OSError):  # if the standard error is closed, the ranks end all the same
            os.write(2, f"{message}\n".encode())
        self._ending = time.monotonic() + _END
        for rank in self._ranks.values():
            rank.tell(Command.END)

    def _kill(self) -> None:
        """Kill the ranks of this host that did not end; the launcher kills those of other hosts."""
        here = socket.gethostname()
        for rank in self._ranks.values():
            if rank.host == here:
                with suppress(ProcessLookupError):
                    os.kill(rank.process, signal.SIGKILL)


def _silent_for(rank: _Rank) -> int:
    """Return the milliseconds since the last packet of a rank, its end included."""
    if not hasattr(socket, "TCP_INFO"):  # Linux only
        return 0
    with suppress(OSError):
        info = rank.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_HEARD + 4)
        return int.from_bytes(info[_LAST_HEARD:], sys.byteorder)
    return 0


def _lost(lost: list[_Rank], size: int) -> str:
    """Return the message for lost ranks, in the order of their ends."""
    first, *others = (
        f"rank {rank.number} of {size} (process {rank.process} on {rank.host})" for rank in lost
    )
    how = (
        "its host is down or cut off" if lost[0].has_gone() else "killed, or crashed without a word"
    )
    then = f", and after it {', '.join(others)}" if others else ""
    return f"{first} is lost: {how}{then}: all ranks end"


def _description(rank: _Rank) -> str:
    if rank.report is None:
        return (
            f"does not answer (process {rank.process} on {rank.host}): stopped, or in code "
            "that lets no other thread run"
        )
    return rank.report


def _allow_many_files() -> None:
    """Raise this process's limit of open files, one for each rank, as far as allowed."""
    with suppress(ImportError, ValueError, OSError):  # not on Windows; some hosts forbid it
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Watch over a socket: arguments are its number and the number of ranks, input the secret."""
    _allow_many_files()
    secret = sys.stdin.buffer.read(SECRET_BYTES)
    listener = socket.socket(fileno=int(sys.argv[1]))
    Watchdog(listener, int(sys.argv[2]), secret).run()


if __name__ == "__main__":
    main()
