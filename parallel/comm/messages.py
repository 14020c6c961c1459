"""Collectives of host arrays, built on MPI's point-to-point messages.

A transfer is a generator that yields while its messages are in flight. The progress engine advances
all transfers whenever a rank waits for any. So a rank that waits in one collective still does its
part of those that it began before, and ranks may finish them in any order.

Sums are computed here, in the order of ranks: each rank adds up its piece of the array, 16-bit
types in float32 with one rounding. So sums do not depend on how an array is divided, and an
all-reduce has the same bits as a reduce-scatter followed by an all-gather.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tensorgrad.core import dtypes
from tensorgrad.core.backend import Array
from tensorgrad.core.errors import CommError
from tensorgrad.parallel.comm.agreement import digest
from tensorgrad.parallel.comm.arguments import as_bytes
from tensorgrad.parallel.comm.transport import CommCall, Finish
from tensorgrad.parallel.comm.watchdog_client import LastCall

Transfer = Iterator[None]
Requests = list[Any]  # mpi4py's requests

# Arrays are reduced in parts that fit in the cache.
_PART_BYTES = 4 << 20
_SMALL_BYTES = 4096
# Below the 2^31 bytes that MPI allowed before version 4.
_MESSAGE_BYTES = 1 << 30
# A waiting rank lets others have its core between polls, this many times, then sleeps between them
# (seconds). MPI itself polls without pause: with more ranks than cores that would keep busy the
# cores that other ranks need.
_YIELDS, _PAUSE = 300, 100e-6
_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))

# Messages from one rank to another with the same tag arrive in order. The tag of a collective is
# its number, below the 2^15 that every MPI allows.
_SENT, _ANNOUNCED, _FIRST_NUMBERED, _TAGS = 0, 1, 2, 1 << 15
_ANNOUNCEMENT = 256  # bytes

_ADD: dict[str, Any] = {"sum": np.add, "mean": np.add, "max": np.maximum}


class _SentTask:
    """A pending transfer, and how it ended."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self.error: Exception | None = None
        self.done = False

    def advance(self) -> None:
        try:
            next(self._transfer)
        except StopIteration:
            self.done = True
        except Exception as error:  # raised where this transfer is finished
            self.done, self.error = True, error


class ProgressEngine:
    """Advances the pending transfers of a rank, in all its groups.

    Attributes:
        last: the rank's last collective, where waiting is recorded for the watchdog.
    """

    def __init__(self) -> None:
        """Start without transfers."""
        self.last = LastCall()
        self._tasks: list[_SentTask] = []

    def begin(self, transfer: Transfer, meets: bool = False) -> Finish:
        """Start a transfer, and return a function that waits until it is done.

        Args:
            transfer: what to advance.
            meets: whether it waits for another rank to make a call.
        """
        task = _SentTask(transfer)
        task.advance()
        if not task.done:
            self._tasks.append(task)

        def finish() -> None:
            self.wait_for(lambda: task.done, meets)
            if task.error is not None:
                raise task.error

        return finish

    def wait_for(self, done: Callable[[], bool], meets: bool) -> None:
        """Advance all transfers until `done` returns true."""
        polls, last = 0, self.last
        try:
            while not done():
                for task in self._tasks:
                    task.advance()
                self._tasks = [task for task in self._tasks if not task.done]
                polls += 1
                if polls < _YIELDS:
                    _yield_core()
                    continue
                if polls == _YIELDS:
                    last.meets, last.waits_since = meets, time.monotonic()
                time.sleep(_PAUSE)
        finally:
            last.waits_since = None


class HostTransport:
    """The transport of host arrays between the ranks of one group.

    Args:
        group: an mpi4py communicator that nothing else uses.
        ranks: numbers of its ranks in `world()`, which errors name.
        failure: the exception of mpi4py.
        progress: the progress engine of this rank.
    """

    def __init__(
        self, group: Any, ranks: Sequence[int], failure: type[Exception], progress: ProgressEngine
    ) -> None:
        """Use the communicator."""
        self._group, self._failure, self._progress = group, failure, progress
        self.ranks = tuple(ranks)
        self.rank, self.size = group.Get_rank(), group.Get_size()
        self._number = 0

    def begin(self, call: CommCall) -> Finish:
        """Begin a transfer."""
        return self._begin(call.name, _TRANSFERS[call.name](self, *call[1:5]))

    def close(self) -> None:
        """Do nothing: this process makes all transfers itself, and they are finished."""

    def announce(self, text: str, to: int) -> Finish:
        """Announce to one rank what will be sent to it; done when that rank has called `recv`."""
        return self._begin("send", self._announce(text, to), meets=True)

    def expect(self, text: str, source: int) -> Finish:
        """Receive an announcement; finishing raises CommError if it is not this text."""
        return self._begin("recv", self._expect(text, source), meets=True)

    def _begin(self, op: str, transfer: Transfer, meets: bool = False) -> Finish:
        def with_errors() -> Transfer:
            with self._errors(op):
                yield from transfer

        return self._progress.begin(with_errors(), meets)

    @contextmanager
    def _errors(self, op: str) -> Iterator[None]:
        """Raise CommError for an error of MPI."""
        try:
            yield
        except self._failure as error:
            raise CommError(f"{op}: MPI fails with {error}") from error

    def _tag(self) -> int:
        """Return the tag of the next collective."""
        self._number += 1
        return _FIRST_NUMBERED + self._number % (_TAGS - _FIRST_NUMBERED)

    def _send(self, data: Array, to: int, tag: int) -> Requests:
        return [self._group.Isend(part, to, tag) for part in parts_of(data, _MESSAGE_BYTES)]

    def _recv(self, data: Array, source: int, tag: int) -> Requests:
        return [self._group.Irecv(part, source, tag) for part in parts_of(data, _MESSAGE_BYTES)]

    def _finished(self, requests: Requests) -> Transfer:
        for request in requests:
            while not request.Test():
                yield

    def _deliver(self, data: Array, to: int, tag: int) -> Transfer:
        yield from self._finished(self._send(data, to, tag))

    def _fetch(self, data: Array, source: int, tag: int) -> Transfer:
        yield from self._finished(self._recv(data, source, tag))

    def _others(self) -> list[int]:
        """Return the other ranks, the next first, so that not all write to one at a time."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _exchange(self, pieces: Sequence[Array], rows: Sequence[Array], tag: int) -> Transfer:
        """Send piece r to rank r, and put what rank s sends into row s."""
        requests: Requests = []
        for r in self._others():
            requests += self._recv(as_bytes(rows[r]), r, tag)
        for r in self._others():
            requests += self._send(as_bytes(pieces[r]), r, tag)
        if _address(rows[self.rank]) != _address(pieces[self.rank]):
            rows[self.rank][...] = pieces[self.rank]
        yield from self._finished(requests)

    def _broadcast(self, data: Array, root: int, tag: int) -> Transfer:
        """Send along a binomial tree: each round doubles the number of ranks that have the data."""
        place = (self.rank - root) % self.size
        step = 1
        while step < self.size:
            if step <= place < 2 * step:
                source = (place - step + root) % self.size
                yield from self._fetch(data, source, tag)
            step *= 2
        steps = [1 << bit for bit in range(self.size.bit_length()) if place < 1 << bit]
        requests: Requests = []
        for step in steps:
            if place + step < self.size:
                requests += self._send(data, (place + step + root) % self.size, tag)
        yield from self._finished(requests)

    def _reduce_scatter(self, pieces: Array, out: Array, op: str, tag: int) -> Transfer:
        step = max(1, _PART_BYTES // (pieces.itemsize * self.size))
        rows = np.empty((self.size, min(step, out.size)), out.dtype)
        for begin in range(0, out.size, step):
            part = pieces[:, begin : begin + step]
            yield from self._reduce(part, out[begin : begin + step], rows, op, tag)

    def _all_reduce(self, flat: Array, op: str, tag: int) -> Transfer:
        if flat.nbytes <= _SMALL_BYTES:  # each rank reduces all: one round trip, not two
            rows = np.empty((self.size, flat.size), flat.dtype)
            yield from self._reduce([flat] * self.size, flat, rows, op, tag)
            return
        longest = min(_PART_BYTES // flat.itemsize, flat.size)
        rows = np.empty((self.size, -(-longest // self.size)), flat.dtype)
        for part in parts_of(flat, _PART_BYTES):
            pieces = np.array_split(part, self.size)
            mine = pieces[self.rank]
            yield from self._reduce(pieces, mine, rows, op, tag)
            yield from self._exchange([mine] * self.size, pieces, tag)

    def _reduce(
        self, pieces: Sequence[Array], out: Array, rows: Array, op: str, tag: int
    ) -> Transfer:
        """Reduce piece r of all ranks into `out` of rank r; `rows` holds one piece of each rank."""
        rows = rows[:, : out.size]
        yield from self._exchange(pieces, rows, tag)
        wide = dtypes.compute_dtype(out.dtype)
        total = out if wide == out.dtype else np.empty(out.shape, wide)
        with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN are valid results
            _ADD[op](rows[0], rows[1], out=total, dtype=wide)
            for row in rows[2:]:
                _ADD[op](total, row, out=total)
            if op == "mean":
                np.divide(total, self.size, out=total)
            if total is not out:
                out[...] = total

    def _announce(self, text: str, to: int) -> Transfer:
        yield from self._finished([self._group.Issend(_note(text), to, _ANNOUNCED)])

    def _expect(self, text: str, source: int) -> Transfer:
        found, expected = np.empty(_ANNOUNCEMENT, "uint8"), _note(text)
        yield from self._fetch(found, source, _ANNOUNCED)
        if found.tobytes() != expected.tobytes():
            raise CommError(
                f"recv: rank {self.ranks[source]} sends {_text(found)}, "
                f"rank {self.ranks[self.rank]} expects {text}"
            )


# The transfer of each call: of its data, out, op and root.
_TRANSFERS: dict[str, Callable[[Any, Array, Array, str, int], Transfer]] = {
    "all_reduce": lambda via, _, out, op, __: via._all_reduce(out, op, via._tag()),
    "reduce_scatter": lambda via, data, out, op, _: via._reduce_scatter(
        data.reshape(via.size, -1), out, op, via._tag()
    ),
    "all_gather": lambda via, data, out, *_: via._exchange(
        [data] * via.size, out.reshape(via.size, -1), via._tag()
    ),
    "broadcast": lambda via, _, out, __, root: via._broadcast(out, root, via._tag()),
    "all_to_all": lambda via, data, out, *_: via._exchange(
        data.reshape(via.size, -1), out.reshape(via.size, -1), via._tag()
    ),
    "send": lambda via, data, _, __, to: via._deliver(data, to, _SENT),
    "recv": lambda via, _, out, __, source: via._fetch(out, source, _SENT),
}


def _note(text: str) -> Array:
    """Return an announcement of fixed length; of a long text only the digest is complete."""
    note = np.zeros(_ANNOUNCEMENT, "uint8")
    note[:8].view("int64")[0] = digest(text)
    letters = np.frombuffer(text.encode()[: _ANNOUNCEMENT - 8], "uint8")
    note[8 : 8 + letters.size] = letters
    return note


def _text(note: Array) -> str:
    return bytes(note[8:]).rstrip(b"\0").decode(errors="replace")


def parts_of(flat: Array, length: int) -> Iterator[Array]:
    """Yield a 1-D array in parts of at most `length` bytes."""
    step = length // flat.itemsize
    for begin in range(0, flat.size, step):
        yield flat[begin : begin + step]


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
