"""Watchdog, a rank's side: it reports which call the rank is in, and obeys the watchdog.

Without a watchdog, ranks would hang when another rank is killed or hangs. A thread of each rank
answers the watchdog's questions: once a second, whether the rank waits in a collective.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tensorgrad.core.errors import CommError
from tensorgrad.parallel.comm import watchdog
from tensorgrad.parallel.comm.transport import Network
from tensorgrad.parallel.comm.watchdog import Command, Message

if sys.platform != "win32":
    import fcntl

_log = logging.getLogger(__name__)

TIMEOUT = 600.0  # seconds
_STUCK = 3.0  # seconds after which a rank reports that it waits for others
_CONNECT = 30.0  # seconds in which the watchdog must welcome a rank
_BACKLOG = 1024  # ranks that connect at once
_AGAIN = 0.2  # seconds between two attempts
_SPEAK = 30.0  # seconds after which a rank shows its error without permission
_PACKAGE = str(Path(__file__).parent.parent)
# Linux closes the files of an exiting process from the highest number down. With a high number the
# watchdog's connection closes before the launcher's, which then kills all other ranks.
_HIGH = 200


class LastCall:
    """The last collective of a rank, and whether the rank waits in it.

    Attributes:
        number, call: the count of calls, and the text of the last.
        since: when it was made, in seconds of `time.monotonic`.
        waits_since: since when the host waits in it; None when it does not wait.
        meets: whether it waits for others to make the same call, not for data in flight.
        event: CUDA event, done when the last GPU call is.
    """

    __slots__ = ("call", "event", "meets", "number", "since", "waits_since")

    def __init__(self) -> None:
        """Start before the first call."""
        self.number, self.call, self.since = 0, "the start", time.monotonic()
        self.waits_since: float | None = None
        self.meets = False
        self.event: Any = None

    def begin(self, call: str) -> None:
        """Record the next call."""
        self.number += 1
        self.call, self.since = call, time.monotonic()

    def waits(self) -> float | None:
        """Return since when the rank waits, on the host or for its GPU; None if it does not."""
        if self.waits_since is None and self.event is not None and self._is_pending():
            return self.since
        return self.waits_since

    def _is_pending(self) -> bool:
        if time.monotonic() - self.since < _STUCK:
            return False  # do not query the GPU while a program makes progress
        try:
            return not self.event.done
        except Exception as error:  # an event captured into a graph cannot be queried
            _log.debug("watch: %s", error)
            return False


class WatchdogClient:
    """The connection of one rank to the watchdog, and the thread that serves it.

    Args:
        rank: this rank.
        connection: to the watchdog, which has welcomed this rank.
        last: the last collective of this rank.
        host: the name of the watchdog's host.
        process: the watchdog, on the rank that has started it.
    Attributes:
        timeout: seconds that this rank waits in a call before all ranks are ended.
    """

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        last: LastCall,
        host: str,
        process: subprocess.Popen[bytes] | None,
    ) -> None:
        """Start the thread."""
        self.timeout = TIMEOUT
        self._rank, self._connection, self._last = rank, connection, last
        self._host, self._process = host, process
        self._sending = threading.Lock()
        self._leaving = self._failed = False
        self._answered = threading.Event()  # set when this rank may show its error
        os.register_at_fork(after_in_child=connection.close)  # a child would keep it open
        try:
            threading.Thread(target=self._run, name="tensorgrad watch", daemon=True).start()
        except RuntimeError as error:
            raise CommError(
                f"world: rank {rank} cannot start the thread that watches over the others "
                f"({error}); expected a higher limit of processes (ulimit -u) or of memory"
            ) from None

    def leave(self, how: Message = Message.GOODBYE) -> None:
        """Report that this rank exits, or with `Message.ABORT` that it ends the others."""
        if self._leaving:
            return
        self._leaving = True
        try:
            self._send(how)
        except OSError:
            return  # the watchdog is gone, and this rank is about to be
        if how is Message.GOODBYE and self._process is not None:
            self._process.wait()

    def wait_for_permission(self) -> None:
        """Wait for permission to show this rank's error; one rank alone gets it.

        The others are ended while they wait here.
        """
        if self._leaving:
            return  # it has permission already
        self._failed = True
        with suppress(OSError):  # without a watchdog it shows its error at once
            self._send(Message.FAILED)
            self._answered.wait(_SPEAK)

    def _send(
        self, message: Message, number: int = -1, seconds: float = 0.0, text: str = ""
    ) -> None:
        with self._sending:
            self._connection.sendall(watchdog.pack_message(message, number, seconds, text))

    def _run(self) -> None:
        try:
            while not self._leaving:
                words = self._connection.recv(4096)
                if not words:
                    raise ConnectionError("the watchdog has ended")
                for word in dict.fromkeys(words):  # questions of a time without answers are one
                    self._obey(word)
        except OSError as error:
            self._end_without_watchdog(error)

    def _obey(self, word: int) -> None:
        if word == Command.END:
            os._exit(1)
        elif word == Command.SPEAK:
            self._answered.set()
        elif word == Command.REPORT:
            self._report()

    def _report(self) -> None:
        """Tell the watchdog what this rank does, and whether it waits for too long."""
        last, now, waits = self._last, time.monotonic(), self._last.waits()
        waited = 0.0 if waits is None else now - waits
        if waited > self.timeout:
            self._send(Message.LATE, seconds=waited, text=last.call)
        if waits is None:
            doing = f"has worked {now - last.since:.0f} s since call {last.number}, {last.call}"
        else:
            doing = f"has waited {waited:.0f} s in call {last.number}, {last.call}"
        is_stuck = waited >= _STUCK and last.meets and last.waits_since is not None
        self._send(
            Message.REPORT,
            last.number if is_stuck else -1,
            waited if waited >= _STUCK else 0.0,
            f"{doing}; at {_place()}",
        )

    def _end_without_watchdog(self, error: OSError) -> None:
        if self._leaving or self._failed:
            self._answered.set()
            return
        time.sleep(0.2 * min(self._rank, 10))  # the first to report ends the others meanwhile
        message = (
            f"rank {self._rank} on {socket.gethostname()}: rank 0 or its host {self._host} is lost "
            f"({error}): all ranks end\n"
        )
        with suppress(OSError):  # if the standard error is closed, this rank ends all the same
            os.write(2, message.encode())
        os._exit(1)


def start(network: Network, last: LastCall) -> WatchdogClient | None:
    """Start the watchdog beside rank 0 and connect this rank; None where it cannot be reached.

    Args:
        network: of all ranks; every rank calls it.
        last: the last collective of this rank.
    """
    host = network.exchange(socket.gethostname())[0]
    addresses = _addresses_of_rank_0(network, host)
    secret = secrets.token_bytes(watchdog.SECRET_BYTES)
    process, where = None, ""
    if network.rank == 0:
        listener = _listen(addresses)
        if listener is not None:
            where = "{} {}".format(*listener.getsockname()) + f" {secret.hex()}"
            process = _start_watchdog(listener, network.size, secret)
    where = network.exchange(where)[0]
    if not where:
        if network.rank == 0:
            _log.warning(
                "other hosts know no address of %s, where rank 0 is (%s): if a rank is lost, "
                "others may hang",
                *(host, ", ".join(addresses) or "its name is unknown"),
            )
        return None
    address, port, shown = where.split()
    try:
        connection = _connect(network.rank, (address, int(port)), bytes.fromhex(shown))
    except OSError as error:
        _log.warning(
            "rank %d cannot reach rank 0 at %s, port %s (%s): if a rank is lost, others may hang",
            *(network.rank, address, port, error),
        )
        return None
    return WatchdogClient(network.rank, connection, last, host, process)


def _addresses_of_rank_0(network: Network, host: str) -> list[str]:
    """Return the IPv4 addresses under which ranks may reach rank 0's host, the likeliest first."""
    if network.local_size == network.size:
        return ["127.0.0.1"]
    try:
        found = socket.gethostbyname_ex(host)[2]
    except OSError:
        found = []
    known = Counter(word for text in network.exchange(" ".join(found)) for word in text.split())
    # A host may know itself as 127.0.1.1, so count what the others see.
    return [address for address, _ in known.most_common() if not address.startswith("127.")]


def _listen(addresses: list[str]) -> socket.socket | None:
    """Listen on the first address that belongs to this host, and on no other."""
    for address in addresses:
        with suppress(OSError):
            return socket.create_server((address, 0), backlog=_BACKLOG)
    return None


def _start_watchdog(listener: socket.socket, size: int, secret: bytes) -> subprocess.Popen[bytes]:
    """Start the process, and hand the socket over to it."""
    with listener:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog.__file__, str(listener.fileno()), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            start_new_session=True,  # signals to the ranks' process group must not reach it
        )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(secret)
    return process


def _connect(rank: int, address: tuple[str, int], secret: bytes) -> socket.socket:
    """Return a connection to the watchdog, which has welcomed this rank.

    It waits until the watchdog runs, which only then can tell which rank ends first. If too many
    ranks connect at once, a connection may be dropped; then it tries again.
    """
    until = time.monotonic() + _CONNECT
    greeting = watchdog.pack_hello(secret, rank, os.getpid(), socket.gethostname())
    while True:
        try:
            connection = _with_high_number(socket.create_connection(address, _CONNECT))
            try:
                connection.settimeout(_CONNECT)
                connection.sendall(greeting)
                if connection.recv(1) != bytes([Command.WELCOME]):
                    raise ConnectionError("it does not answer")
                connection.settimeout(None)
                watchdog.end_with_host(connection)
                return connection
            except BaseException:
                connection.close()
                raise
        except ConnectionError:
            if time.monotonic() > until:
                raise
            time.sleep(_AGAIN)


def _with_high_number(connection: socket.socket) -> socket.socket:
    """Return the connection under a high file number, where the system allows one."""
    if sys.platform == "win32":
        return connection
    try:
        number = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError as error:  # the limit of open files may be low (ulimit -n)
        _log.debug("watch: %s", error)
        return connection
    connection.close()
    return socket.socket(fileno=number)


def _place() -> str:
    """Return the source line outside this package at which the main thread is."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    inner = frame
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    frame = frame or inner
    if frame is None:
        return "its end"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
