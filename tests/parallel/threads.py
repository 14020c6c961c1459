"""Ranks that are threads of this process, for tests with many groups of ranks.

They can agree and exchange small values, which is all that checkpoints ask of a `Comm`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tensorgrad.parallel import Comm

T = TypeVar("T")


class Board:
    """The values that the ranks pass to each other."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=120)


class ThreadNetwork:
    """The part of `transport.Network` that moves small values."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self.rank = self.local_rank = rank
        self.size = self.local_size = len(board.values)
        self.ranks = tuple(range(self.size))

    def begin_call(self, call: str) -> None:
        """Do nothing: there is no watchdog."""

    def same(self, number: int) -> bool:
        """Return whether all ranks pass the same number."""
        return len(set(self._all(number))) == 1

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        return self._all(text)

    def _all(self, value: Any) -> list[Any]:
        board = self._board
        board.values[self.rank] = value
        board.barrier.wait()
        values = list(board.values)
        board.barrier.wait()
        return values


def on_ranks(size: int, program: Callable[[Comm], T]) -> list[T]:
    """Run a program on `size` ranks and return their results; raise the error of the first."""
    board = Board(size)

    def run(rank: int) -> T:
        try:
            return program(Comm(ThreadNetwork(board, rank)))  # type: ignore[arg-type]  # no arrays
        except BaseException:
            board.barrier.abort()  # others wait for this rank in vain
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
