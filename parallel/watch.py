"""A rank's side of the watch: what it does with others at the moment, for `watcher.py` to know.

Without it the ranks would wait for ever for one that was killed or that hangs. A thread of each
rank looks once a second whether the rank waits, and answers when the watcher asks.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tensorgrad.errors import CommError
from tensorgrad.parallel import watcher
from tensorgrad.parallel.transport import Network

if sys.platform != "win32":
    import fcntl

_log = logging.getLogger(__name__)

TIMEOUT = 600.0  # seconds
_TICK = 1.0  # seconds between two looks
_STUCK = 3.0  # seconds after which a rank says that it waits for others
_CONNECT = 10.0  # seconds
_PACKAGE = str(Path(__file__).parent)
# Linux closes the files of a process that ends from the highest number down. So the watcher hears
# of an end before the launcher, whose files have low numbers and which then kills all other ranks.
_HIGH = 200


class LastCall:
    """The last call that a rank made together with others.

    Attributes:
        number, call: how many calls there were, and the text of the last.
        since: when it was made, in seconds of `time.monotonic`.
        waits_since: since when the host waits in it; None when it does not.
        meets: whether it waits for others to come to the same call, not for data on its way.
        event: of CUDA, done when the last GPU call is.
    """

    __slots__ = ("call", "event", "meets", "number", "since", "waits_since")

    def __init__(self) -> None:
        """Begin before the first call."""
        self.number, self.call, self.since = 0, "the start", time.monotonic()
        self.waits_since: float | None = None
        self.meets = False
        self.event: Any = None

    def begin(self, call: str) -> None:
        """Note the next call."""
        self.number += 1
        self.call, self.since = call, time.monotonic()

    def waits(self) -> float | None:
        """Return since when the rank waits, if it does, on the host or for its GPU."""
        if self.waits_since is None and self.event is not None and self._is_pending():
            return self.since
        return self.waits_since

    def _is_pending(self) -> bool:
        if time.monotonic() - self.since < _STUCK:
            return False  # in a running program nothing is asked of the GPU
        try:
            return not self.event.done
        except Exception as error:  # of an event that was captured into a graph nothing is known
            _log.debug("watch: %s", error)
            return False


class Watch:
    """The connection of one rank to the watcher, and the thread that serves it.

    Args:
        rank: this rank.
        connection: to the watcher.
        token: proves to it that this rank belongs to the program.
        last: what this rank does with others.
        process: the watcher, on the rank that has started it.
    Attributes:
        timeout: seconds that this rank waits in a call before all ranks are ended.
    """

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        token: str,
        last: LastCall,
        process: subprocess.Popen[bytes] | None,
    ) -> None:
        """Greet the watcher, wait for its welcome and start the thread."""
        self.timeout = TIMEOUT
        connection = _with_high_number(connection)
        self._rank, self._connection, self._last, self._process = rank, connection, last, process
        self._leaving = False
        self._said_stuck: int | None = None
        self._said_late = False
        _end_with_host(connection)
        os.register_at_fork(after_in_child=connection.close)  # a child's copy would keep it open
        self._say(token=token, rank=rank, process=os.getpid(), host=socket.gethostname())
        # Before it runs, it could not tell which of several ranks has ended first.
        connection.settimeout(_CONNECT)
        connection.recv(4096)
        connection.settimeout(None)
        try:
            threading.Thread(target=self._run, name="tensorgrad watch", daemon=True).start()
        except RuntimeError as error:
            raise CommError(
                f"world: rank {rank} cannot start the thread that watches over the others "
                f"({error}); expected a higher limit of processes (ulimit -u) or of memory"
            ) from None

    def leave(self, word: str = "goodbye") -> None:
        """Say that this rank ends on purpose: "goodbye", or "abort" if it ends all others too."""
        if self._leaving:
            return
        self._leaving = True
        try:
            self._say(word=word)
        except OSError:
            return  # the watcher is gone, and this rank is about to be
        if word == "goodbye" and self._process is not None:
            self._process.wait()

    def _say(self, **said: object) -> None:
        self._connection.sendall(json.dumps(said).encode() + b"\n")

    def _run(self) -> None:
        text = b""
        while not self._leaving:
            try:
                readable, _, _ = select.select([self._connection], [], [], self._tick())
                if readable:
                    data = self._connection.recv(4096)
                    if not data:
                        raise ConnectionError("the watcher has ended")
                    *lines, text = (text + data).split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line)["word"])
                self._look()
            except OSError as error:
                self._end_without_watcher(error)

    def _tick(self) -> float:
        return min(_TICK, self.timeout / 4)

    def _obey(self, word: str) -> None:
        if word == "end":
            os._exit(1)
        self._say(word="report", stuck=self._stuck(), text=self._describe())

    def _look(self) -> None:
        """Say whether this rank waits, when that has changed."""
        waits = self._last.waits()
        late = waits is not None and time.monotonic() - waits > self.timeout
        if late and not self._said_late and waits is not None:
            self._say(word="late", seconds=time.monotonic() - waits, call=self._last.call)
        self._said_late = late
        stuck = self._stuck()
        if stuck != self._said_stuck:
            self._say(word="stuck", number=stuck)
        self._said_stuck = stuck

    def _stuck(self) -> int | None:
        """Return the number of the call in which this rank has waited for others for long."""
        last = self._last
        since = last.waits_since
        if since is None or not last.meets or time.monotonic() - since < _STUCK:
            return None
        return last.number

    def _describe(self) -> str:
        last, now = self._last, time.monotonic()
        waits = last.waits()
        if waits is not None:
            doing = f"has waited {now - waits:.0f} s in call {last.number}, {last.call}"
        else:
            doing = f"has worked {now - last.since:.0f} s since call {last.number}, {last.call}"
        return f"{doing}; at {_place()}"

    def _end_without_watcher(self, error: OSError) -> None:
        if self._leaving:
            return
        time.sleep(0.2 * min(self._rank, 20))  # the first to say it ends the others meanwhile
        message = f"rank {self._rank}: rank 0 or its host is lost ({error}): all ranks end\n"
        with suppress(OSError):  # when nobody can read it, this rank ends all the same
            os.write(2, message.encode())
        os._exit(1)


def start(network: Network, last: LastCall) -> Watch | None:
    """Start the watcher beside rank 0 and connect this rank; None where it cannot be reached.

    Args:
        network: of all ranks; every rank calls it.
        last: what this rank does with others.
    """
    process: subprocess.Popen[bytes] | None = None
    address: dict[str, Any] = {}
    if network.rank == 0:
        process, address = _start_watcher(network.size, network.local_size == network.size)
    address = json.loads(network.exchange(json.dumps(address))[0])
    for host in address["hosts"]:
        try:
            connection = socket.create_connection((host, address["port"]), _CONNECT)
        except OSError as error:
            _log.debug("watch: %s", error)
            continue
        return Watch(network.rank, connection, address["token"], last, process)
    _log.warning(
        "rank %d cannot reach rank 0 at %s, port %d: if a rank is lost, others may wait for ever",
        network.rank,
        " or ".join(address["hosts"]),
        address["port"],
    )
    return None


def _start_watcher(size: int, one_host: bool) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Start the process, and return it and where it listens."""
    listener = socket.create_server(("127.0.0.1" if one_host else "", 0))
    token = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(watcher.__file__), str(listener.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=(listener.fileno(),),
        start_new_session=True,  # what is sent to the ranks as a group does not reach it
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"size": size, "token": token}).encode() + b"\n")
    process.stdin.close()
    port = listener.getsockname()[1]
    listener.close()
    hosts = ["127.0.0.1"] if one_host else _names_of_this_host()
    return process, {"hosts": hosts, "port": port, "token": token}


def _names_of_this_host() -> list[str]:
    """Return under what other hosts may reach this one: its name, then its addresses."""
    name = socket.gethostname()
    try:
        found = socket.gethostbyname_ex(name)[2]
    except OSError:
        found = []
    return [name, *(each for each in found if not each.startswith("127."))]


def _with_high_number(connection: socket.socket) -> socket.socket:
    """Return the connection as a file with a high number, where the system has any to give."""
    if sys.platform == "win32":
        return connection
    try:
        number = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError as error:  # a process may have few files open (ulimit -n)
        _log.debug("watch: %s", error)
        return connection
    connection.close()
    return socket.socket(fileno=number)


def _end_with_host(connection: socket.socket) -> None:
    """Let the connection fail within some 20 s when the other host is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # Linux's names
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _place() -> str:
    """Return the line of the program at which the main thread is."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    inner = frame
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    frame = frame or inner
    if frame is None:
        return "its end"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
