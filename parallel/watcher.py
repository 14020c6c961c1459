"""The process that watches over the ranks of a program. It needs nothing but the standard library.

Rank 0 starts it beside itself. Every rank holds a connection to it; so the end of a rank's
process, however it came, closes a connection, at once. It is a process of its own because a
launcher kills all ranks when one has died: this process is left, can still say which one it was,
and its hold on the standard error makes the launcher wait until it has done so.

Ranks and this process send each other lines of JSON.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

_START = 120.0  # seconds in which the first rank must connect
_ANSWER = 2.0  # seconds in which a rank that can must answer
_LOOK_AGAIN = 1.0  # seconds in which ranks that do not wait in vain come a step further
_END = 3.0  # seconds after which a rank that was told to end is killed

_LAST_HEARD = 56  # where tcpi_last_ack_recv is in struct tcp_info

Report = dict[str, Any]


class _Rank:
    """One rank: its connection, and what it has said."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.hello: dict[str, Any] = {}
        self.text = b""
        self.stuck: int | None = None  # the number of the call in which it waits for others
        self.report: Report | None = None

    def tell(self, word: str) -> None:
        try:
            self.connection.sendall(json.dumps({"word": word}).encode() + b"\n")
        except OSError:
            return  # it is gone, as its connection will say too


class _Question:
    """All ranks are asked what they do, because of something that may be wrong."""

    def __init__(self, why: str, stuck: dict[int, int | None], ask_at: float) -> None:
        self.why, self.stuck = why, stuck
        self.ask_at, self.answers_at = ask_at, ask_at + _ANSWER
        self.asked = False


class Watcher:
    """Knows which ranks live and wait, and ends all when one is lost or none can go on."""

    def __init__(self, listener: socket.socket, size: int, token: str) -> None:
        """Watch `size` ranks, which prove with the token that they belong to the program."""
        self._listener, self._size, self._token = listener, size, token
        self._ranks: dict[int, _Rank] = {}
        self._began = False
        self._question: _Question | None = None
        self._ending: float | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Watch until no rank is left."""
        start = time.monotonic()
        while self._ranks or (not self._began and time.monotonic() < start + _START):
            ended = []
            for key, _ in self._selector.select(self._patience(start)):
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    self._selector.register(connection, selectors.EVENT_READ, _Rank(connection))
                elif not self._read(key.data):
                    ended.append(key.data)
            lost = []
            for rank in sorted(ended, key=_silent_for, reverse=True):  # the first end first
                self._selector.unregister(rank.connection)
                rank.connection.close()
                number = rank.hello.get("rank")
                if self._ranks.pop(number, None) is not None:
                    lost.append((number, rank.hello))
            if lost and self._ending is None:
                self._end(_lost(lost, self._size))
            self._go_on_asking()
            if self._ending is not None and time.monotonic() > self._ending:
                self._kill()
                return

    def _patience(self, start: float) -> float | None:
        """Return how many seconds there are until something must be done, if nobody speaks."""
        moments = [] if self._ranks else [start + _START]
        if self._question is not None:
            moments.append(
                self._question.answers_at if self._question.asked else self._question.ask_at
            )
        if self._ending is not None:
            moments.append(self._ending)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _read(self, rank: _Rank) -> bool:
        """Take all that a rank has said; False when its connection has ended.

        Words before an end may not put it off to the next look: there another's would be first.
        """
        try:
            while data := rank.connection.recv(1 << 16, socket.MSG_DONTWAIT):
                if not self._take(rank, data):
                    return False
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _take(self, rank: _Rank, data: bytes) -> bool:
        """Hear the lines that are whole; False when it is not one of ours."""
        *lines, rank.text = (rank.text + data).split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                return False
            if not rank.hello:
                if not isinstance(said, dict) or said.get("token") != self._token:
                    return False
                rank.hello = said
                self._ranks[said["rank"]], self._began = rank, True
                rank.tell("welcome")
            else:
                self._hear(rank, said)
        return True

    def _hear(self, rank: _Rank, said: dict[str, Any]) -> None:
        word, number = said["word"], rank.hello["rank"]
        if word == "goodbye":
            del self._ranks[number]
        elif word == "abort":  # it has said why itself, and the launcher will kill the others
            self._ending = self._ending or time.monotonic() + _END
        elif word == "report":
            rank.report, rank.stuck = said, said["stuck"]
        elif word == "late":
            seconds, call = said["seconds"], said["call"]
            self._ask(f"rank {number} of {self._size} has waited {seconds:.0f} s in {call}")
        elif word == "stuck":
            rank.stuck = said["number"]
            self._ask_if_all_are_stuck()

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
                    rank.tell("report")
            return
        reports = {number: rank.report for number, rank in self._ranks.items()}
        if None in reports.values() and now < question.answers_at:
            return
        self._question = None
        found = {number: report and report["stuck"] for number, report in reports.items()}
        if question.stuck and question.stuck != found:
            self._ask_if_all_are_stuck()  # one has come further, perhaps to wait again
            return
        lines = [f"{question.why}: all ranks end"]
        for number in sorted(self._ranks):
            lines.append(f"  rank {number}: {_told(reports[number], self._ranks[number].hello)}")
        self._end("\n".join(lines))

    def _end(self, message: str) -> None:
        with suppress(OSError):  # when nobody reads what goes wrong, the ranks end all the same
            os.write(2, f"{message}\n".encode())
        self._ending = time.monotonic() + _END
        for rank in self._ranks.values():
            rank.tell("end")

    def _kill(self) -> None:
        """Kill the ranks of this host that did not end; the launcher kills those of others."""
        here = socket.gethostname()
        for rank in self._ranks.values():
            if rank.hello["host"] == here:
                with suppress(ProcessLookupError):
                    os.kill(rank.hello["process"], signal.SIGKILL)


def _silent_for(rank: _Rank) -> int:
    """Return how many milliseconds ago a rank was last heard of, its end included."""
    if not hasattr(socket, "TCP_INFO"):  # Linux's
        return 0
    with suppress(OSError):
        info = rank.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_HEARD + 4)
        return int.from_bytes(info[_LAST_HEARD:], sys.byteorder)
    return 0


def _lost(lost: list[tuple[int, dict[str, Any]]], size: int) -> str:
    """Return what to say of ranks in the order of their ends: a launcher kills all after one."""
    first, *others = (
        f"rank {number} of {size} (process {hello['process']} on {hello['host']})"
        for number, hello in lost
    )
    then = f", and after it {', '.join(others)}" if others else ""
    return f"{first} is lost: killed, or crashed without a word{then}: all ranks end"


def _told(report: Report | None, hello: dict[str, Any]) -> str:
    if report is None:
        return (
            f"does not answer (process {hello['process']} on {hello['host']}): stopped, or in code "
            "that lets no other thread run"
        )
    return str(report["text"])


def main() -> None:
    """Watch over the socket whose number is the argument; what to expect comes as a line."""
    settings = json.loads(sys.stdin.readline())
    listener = socket.socket(fileno=int(sys.argv[1]))
    Watcher(listener, settings["size"], settings["token"]).run()


if __name__ == "__main__":
    main()
