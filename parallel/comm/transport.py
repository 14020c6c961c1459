"""Transports: the interface between `Comm` and the modules that move arrays, on host and GPU.

A transfer begins at once, and a function is returned that finishes it, so a rank can compute in
between. Arrays are C-contiguous, not empty, and of a dtype of the library. Transfers without
arithmetic get bytes, reductions get bool as uint8. All ranks have agreed on the call before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tensorgrad.core.backend import Array

# Finishes a transfer. Afterwards results may be read and arguments may be written: on a GPU by
# work that is submitted to the current stream from then on.
Finish = Callable[[], None]


class CommCall(NamedTuple):
    """A collective or a message.

        all_reduce       reduce `data`, which is `out`, in place
        reduce_scatter   reduce piece r of `data` into `out` of rank r, which may be that piece
        all_gather       put the `data` of all ranks into `out`, one after the other
        broadcast        send `data`, which is `out`, of the rank `root` to all
        all_to_all       put piece r of `data` of rank s into piece s of `out` of rank r
        send, recv       send `data` to the rank `root`, or receive `out` from it

    Attributes:
        name: one of these.
        data, out: what is read and what is written, both 1-D.
        op: of a reduction: "sum", "mean" or "max".
        root: the other rank of a message, or the one that sends to all.
        launch: for a part of a shared array, submits the call to the current stream.
    """

    name: str
    data: Array
    out: Array
    op: str = ""
    root: int = 0
    launch: Callable[[], None] | None = None


class Transport(Protocol):
    """Moves arrays between the ranks of one group."""

    def begin(self, call: CommCall) -> Finish:
        """Begin a transfer."""

    def close(self) -> None:
        """Finish all transfers, at the end of the program."""


class Network(Transport, Protocol):
    """The transport of host arrays, which also starts the ranks and connects their GPUs."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    local_rank: int
    local_size: int

    def begin_call(self, call: str) -> None:
        """Record this rank's next collective, for the watchdog."""

    def same(self, number: int) -> bool:
        """Return on all ranks whether all pass the same number of 62 bits."""

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all ranks."""

    def announce(self, text: str, to: int) -> Finish:
        """Announce to one rank what will be sent to it; done when that rank has called `recv`."""

    def expect(self, text: str, source: int) -> Finish:
        """Receive an announcement; finishing raises CommError if it is not this text."""

    def split(self, ranks: Sequence[int]) -> Network:
        """Return the network of this rank's group; every rank calls it with its own group."""

    def connect_gpus(self, device: int) -> Transport:
        """Return the transport of the arrays of GPU `device`; every rank calls it.

        Where ranks share a GPU it is this network, which moves copies on the host.
        """

    def leave(self) -> None:
        """Report that this rank exits as planned."""

    def abort(self, status: int, why: str) -> None:
        """End all ranks at once; one of the ranks that fail first writes why, if not empty."""
