"""The process that watches over the ranks of a program. It needs nothing but the standard library.

Rank 0 starts it beside itself. Every rank holds a connection to it; so the end of a rank's
process, however it came, closes a connection, at once. It is a process of its own because a
launcher kills all ranks when one has died: this process is left, can still say which one it was,
and its hold on the standard error makes the launcher wait until it has done so.

A rank opens with a `HELLO`, which shows the secret of the program, and then sends messages, all of
one size (`SAID`). The watcher answers with single bytes (`Command`). Of a stranger it reads no more
than a `HELLO`, and compares the secret before it looks at anything else. Once all ranks are there
it stops listening.
"""

from __future__ import annotations

import errno
import hmac
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
_STRANGERS = 64  # connections that have not yet shown it; of more the oldest is closed
_ANSWER = 5.0  # seconds in which a rank that can must answer, on a busy host too
_LOOK_AGAIN = 1.0  # seconds in which ranks that do not wait in vain come a step further
_CHOICE = 10.0  # seconds in which a rank that works may fail too, and show its error as the first
_END = 3.0  # seconds after which a rank that was told to end is killed

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # no more files can be opened
_PAUSE = 0.1  # seconds after which they perhaps can

_LAST_HEARD = 56  # where tcpi_last_ack_recv is in struct tcp_info

SECRET_BYTES = 32
_HOST_BYTES, _TEXT_BYTES = 256, 1007
HELLO = struct.Struct(f"!{SECRET_BYTES}sII{_HOST_BYTES}s")  # secret, rank, process, host
SAID = struct.Struct(f"!Bqd{_TEXT_BYTES}s")  # a Message, a number, seconds, a text


class Message(IntEnum):
    """What a rank says, and what of `SAID` it fills in."""

    GOODBYE = 1  # it ends on purpose
    ABORT = 2  # it ends all ranks, and has said why
    FAILED = 3  # it has an error to show
    WAITS = 4  # how it waits has changed; number: of the call in which it waits for others, or -1;
    # seconds: how long it waits for anything, 0 if it does not
    LATE = 5  # it has waited for too long; seconds; text: the call
    REPORT = 6  # an answer; number as in WAITS; text: what it does


class Command(IntEnum):
    """What the watcher tells a rank, in one byte."""

    WELCOME = 1
    REPORT = 2  # say what you do
    SPEAK = 3  # show your error: no other rank does
    END = 4


def hello(secret: bytes, rank: int, process: int, host: str) -> bytes:
    """Return what a rank opens its connection with."""
    return HELLO.pack(secret, rank, process, _short(host, _HOST_BYTES))


def said(message: Message, number: int = -1, seconds: float = 0.0, text: str = "") -> bytes:
    """Return a message of a rank; the middle of a text that is too long is omitted."""
    return SAID.pack(message, number, seconds, _short(text, _TEXT_BYTES))


def end_with_host(connection: socket.socket) -> None:
    """Let a connection fail some 20 s after the other host has gone without a word."""
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
    """A connection: of a stranger until it has shown the secret, then of a rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.since = connection, time.monotonic()
        self.data = b""  # the beginning of what will be a message
        self.error: OSError | None = None  # with which the connection ended
        self.number: int | None = None
        self.process, self.host = 0, ""
        self.failed = False
        self.stuck: int | None = None  # the number of the call in which it waits for others
        self.waits = False
        self.report: str | None = None

    def tell(self, word: Command) -> None:
        with suppress(OSError):  # where it is gone its connection will say so too
            self.connection.send(bytes([word]), socket.MSG_DONTWAIT)

    def has_gone(self) -> bool:
        """Whether its connection failed: without an end of its process, of which TCP tells."""
        return self.error is not None and self.error.errno != errno.ECONNRESET


class _Question:
    """All ranks are asked what they do, because of something that may be wrong."""

    def __init__(self, why: str, stuck: dict[int, int | None], ask_at: float) -> None:
        self.why, self.stuck = why, stuck
        self.ask_at, self.answers_at = ask_at, ask_at + _ANSWER
        self.asked = False


class Watchdog:
    """Knows which ranks live and wait, and ends all when one is lost or none can go on."""

    def __init__(self, listener: socket.socket, size: int, secret: bytes) -> None:
        """Watch `size` ranks, which prove with the secret that they belong to the program."""
        self._listener: socket.socket | None = listener
        self._size, self._secret = size, secret
        self._listens_until = time.monotonic() + _START
        self._strangers: list[_Rank] = []  # the oldest first
        self._ranks: dict[int, _Rank] = {}
        self._joined: set[int] = set()
        self._question: _Question | None = None
        self._choose_by: float | None = None  # until when a rank may show its error as the first
        self._chosen = False
        self._ending: float | None = None
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Watch until no rank is left."""
        while self._ranks or (not self._joined and self._listener is not None):
            self.step(self._patience())
            if self._ending is not None and time.monotonic() > self._ending:
                self._kill()
                break
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._stop_listening()
        for key in list(self._selector.get_map().values()):
            key.data.connection.close()
        self._selector.close()

    def step(self, patience: float | None) -> None:
        """Wait until somebody speaks or `patience` seconds are over, and do what is to be done."""
        ended = []
        for key, _ in self._selector.select(patience):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data.connection.fileno() >= 0 and not self._read(key.data):
                ended.append(key.data)
        lost = []
        for rank in sorted(ended, key=_silent_for, reverse=True):  # the first end first
            if self._close(rank):
                lost.append(rank)
        if lost and self._ending is None:
            self._end(_lost(lost, self._size))
        self._part_from_strangers()
        self._go_on_asking()
        self._choose()

    def _patience(self) -> float | None:
        """Return how many seconds there are until something must be done, if nobody speaks."""
        moments = [stranger.since + _GREETING for stranger in self._strangers[:1]]
        if self._listener is not None:
            moments.append(self._listens_until)
        if self._question is not None:
            moments.append(
                self._question.answers_at if self._question.asked else self._question.ask_at
            )
        if self._choose_by is not None:
            moments.append(self._choose_by)
        if self._ending is not None:
            moments.append(self._ending)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _FULL:
                if self._strangers:
                    self._close(self._strangers[0])
                else:
                    time.sleep(_PAUSE)
            return  # else it went before it was accepted
        try:
            end_with_host(connection)
        except OSError:  # it has gone
            connection.close()
            return
        stranger = _Rank(connection)
        self._strangers.append(stranger)
        self._selector.register(connection, selectors.EVENT_READ, stranger)
        if len(self._strangers) > _STRANGERS:
            self._close(self._strangers[0])

    def _part_from_strangers(self) -> None:
        """Close what did not show the secret in time, and all when no more ranks will come."""
        now = time.monotonic()
        if len(self._joined) == self._size or now >= self._listens_until:
            self._stop_listening()
        while self._strangers and (
            self._listener is None or now >= self._strangers[0].since + _GREETING
        ):
            self._close(self._strangers[0])

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _close(self, rank: _Rank) -> bool:
        """Close a connection; return whether a rank is lost by that."""
        self._selector.unregister(rank.connection)
        rank.connection.close()
        if rank.number is None:
            self._strangers.remove(rank)
        return rank.number is not None and self._ranks.pop(rank.number, None) is not None

    def _read(self, rank: _Rank) -> bool:
        """Take all that a rank has said; False when its connection has ended.

        Words before an end may not put it off to the next look: there another's would be first.
        """
        try:
            while data := rank.connection.recv(1 << 16, socket.MSG_DONTWAIT):
                rank.data += data
                if rank.number is None and len(rank.data) >= HELLO.size and not self._greet(rank):
                    return False
                if rank.number is not None and not self._take(rank):
                    return False
        except BlockingIOError:
            return True
        except OSError as error:
            rank.error = error
        return False

    def _greet(self, stranger: _Rank) -> bool:
        """Take a stranger for the rank that it says it is, if it shows the secret."""
        greeting, rest = stranger.data[: HELLO.size], stranger.data[HELLO.size :]
        if not hmac.compare_digest(greeting[:SECRET_BYTES], self._secret):
            return False
        _, number, process, host = HELLO.unpack(greeting)
        if number >= self._size or number in self._joined:
            return False
        self._strangers.remove(stranger)
        stranger.number, stranger.process, stranger.host = number, process, _text(host)
        stranger.data = rest
        self._ranks[number] = stranger
        self._joined.add(number)
        stranger.tell(Command.WELCOME)
        return True

    def _take(self, rank: _Rank) -> bool:
        """Hear the messages that are whole; False when one is none of ours."""
        while len(rank.data) >= SAID.size:
            kind, number, seconds, text = SAID.unpack(rank.data[: SAID.size])
            rank.data = rank.data[SAID.size :]
            try:
                self._hear(rank, Message(kind), number, seconds, _text(text))
            except ValueError:
                return False
        return True

    def _hear(self, rank: _Rank, message: Message, number: int, seconds: float, text: str) -> None:
        now = time.monotonic()
        if rank.number not in self._ranks:
            return  # it has said goodbye
        if message is Message.GOODBYE:
            del self._ranks[rank.number]
        elif message is Message.ABORT:  # the launcher will kill the others
            self._ending = self._ending or now + _END
        elif message is Message.FAILED:
            rank.failed = True
            if self._choose_by is None and not self._chosen:
                self._choose_by = now + _CHOICE
        elif message is Message.LATE:
            self._ask(f"rank {rank.number} of {self._size} has waited {seconds:.0f} s in {text}")
        else:
            rank.stuck = number if number >= 0 else None
            if message is Message.REPORT:
                rank.report = text
            else:
                rank.waits = seconds > 0
                self._ask_if_all_are_stuck()

    def _choose(self) -> None:
        """Let the first rank of those that fail show its error, when those before it will not."""
        if self._choose_by is None or self._ending is not None:
            return
        failed = [number for number, rank in self._ranks.items() if rank.failed]
        first = min(failed, default=self._size)
        before = [rank for number, rank in self._ranks.items() if number < first]
        if time.monotonic() >= self._choose_by or all(rank.waits for rank in before):
            self._choose_by, self._chosen = None, True
            if failed:
                self._ranks[first].tell(Command.SPEAK)

    def _ask_if_all_are_stuck(self) -> None:
        everyone = len(self._ranks) == self._size
        if everyone and all(rank.stuck is not None for rank in self._ranks.values()):
            self._ask("the ranks wait for each other", _LOOK_AGAIN)

    def _ask(self, why: str, later: float = 0.0) -> None:
        # What is late is late, whatever comes of a question whether ranks wait for each other.
        if self._question is None or (self._question.stuck and not later):
            stuck = {number: rank.stuck for number, rank in self._ranks.items()} if later else {}
            self._question = _Question(why, stuck, time.monotonic() + later)

    def _go_on_asking(self) -> None:
        question = self._question
        if question is None or self._ending is not None:
            return
        now = time.monotonic()
        if not question.asked:
            if now >= question.ask_at:
                question.asked, question.answers_at = True, now + _ANSWER
                for rank in self._ranks.values():
                    rank.report = None
                    rank.tell(Command.REPORT)
            return
        silent = [number for number, rank in self._ranks.items() if rank.report is None]
        if silent and now < question.answers_at:
            return
        self._question = None
        found = {
            number: None if number in silent else rank.stuck for number, rank in self._ranks.items()
        }
        if question.stuck and question.stuck != found:
            self._ask_if_all_are_stuck()  # one has come further, perhaps to wait again
            return
        lines = [f"{question.why}: all ranks end"]
        for number in sorted(self._ranks):
            lines.append(f"  rank {number}: {_told(self._ranks[number])}")
        self._end("\n".join(lines))

    def _end(self, message: str) -> None:
        with suppress(OSError):  # when nobody reads what goes wrong, the ranks end all the same
            os.write(2, f"{message}\n".encode())
        self._ending = time.monotonic() + _END
        for rank in self._ranks.values():
            rank.tell(Command.END)

    def _kill(self) -> None:
        """Kill the ranks of this host that did not end; the launcher kills those of others."""
        here = socket.gethostname()
        for rank in self._ranks.values():
            if rank.host == here:
                with suppress(ProcessLookupError):
                    os.kill(rank.process, signal.SIGKILL)


def _silent_for(rank: _Rank) -> int:
    """Return how many milliseconds ago a rank was last heard of, its end included."""
    if not hasattr(socket, "TCP_INFO"):  # Linux's
        return 0
    with suppress(OSError):
        info = rank.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_HEARD + 4)
        return int.from_bytes(info[_LAST_HEARD:], sys.byteorder)
    return 0


def _lost(lost: list[_Rank], size: int) -> str:
    """Return what to say of ranks in the order of their ends: a launcher kills all after one."""
    first, *others = (
        f"rank {rank.number} of {size} (process {rank.process} on {rank.host})" for rank in lost
    )
    how = (
        "its host is down or cut off" if lost[0].has_gone() else "killed, or crashed without a word"
    )
    then = f", and after it {', '.join(others)}" if others else ""
    return f"{first} is lost: {how}{then}: all ranks end"


def _told(rank: _Rank) -> str:
    if rank.report is None:
        return (
            f"does not answer (process {rank.process} on {rank.host}): stopped, or in code "
            "that lets no other thread run"
        )
    return rank.report


def _allow_many_files() -> None:
    """Raise the number of files that this process may open, one a rank, to what it may."""
    with suppress(ImportError, ValueError, OSError):  # Windows has no limit, some hosts one below
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Watch over a socket: its number and how many ranks are arguments, the secret is the input."""
    _allow_many_files()
    secret = sys.stdin.buffer.read(SECRET_BYTES)
    listener = socket.socket(fileno=int(sys.argv[1]))
    Watchdog(listener, int(sys.argv[2]), secret).run()


if __name__ == "__main__":
    main()
