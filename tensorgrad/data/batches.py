"""Batches by number: what the loaders share, and the thread that prepares batches ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any, Generic, TypeVar, cast

import numpy as np

from tensorgrad.core.checks import check_integer, check_seed
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.operands import integer_array

Ids = np.ndarray[Any, np.dtype[np.int32]]
_Batch = TypeVar("_Batch", bound=tuple[Any, ...])

IGNORED = -100  # a target whose loss does not count
_AHEAD = 2  # batches


class StepLoader(Generic[_Batch]):
    """Base of loaders whose batch number `step` is a pure function of `step`.

    So a run may resume at any step.

    Args:
        seed: the seed of the order, 0 to 2^64 - 1.
        rank: the number of this process, 0 to ranks - 1.
        ranks: the number of ranks.
    """

    def __init__(self, seed: int, rank: int = 0, ranks: int = 1) -> None:
        name = type(self).__name__
        check_seed(name, seed)
        check_integer(name, "ranks", ranks, 1)
        check_integer(name, "rank", rank)
        if not 0 <= rank < ranks:
            raise ArgumentError(f"{name}: rank has {rank}, expected 0 to {ranks - 1}")
        self._seed, self._rank, self._ranks = seed, rank, ranks

    def batch(self, step: int) -> _Batch:
        """Return this rank's rows of batch number `step`, 0 or more."""
        raise NotImplementedError

    def iterate(self, start_step: int = 0) -> Iterator[_Batch]:
        """Yield batch(start_step), batch(start_step + 1), ... without end; see `read_ahead`."""
        return read_ahead(self.batch, start_step)


class EpochLoader(StepLoader[_Batch]):
    """Base of loaders whose epochs visit every row once, in an order that depends on the seed.

    Of n ranks, rank r gets the r-th of n equal parts of the rows of each batch, where missing rows
    are padding whose targets do not count.

    Args:
        seed, rank, ranks: as for `StepLoader`.
        batches: the number of batches in an epoch.
        padding: the value of each array of a batch in rows of padding.
        parts: the number of equal parts into which the rows of a rank must divide.
    """

    def __init__(
        self,
        seed: int,
        batches: int,
        rank: int = 0,
        ranks: int = 1,
        padding: Sequence[int] = (),
        parts: int = 1,
    ) -> None:
        super().__init__(seed, rank, ranks)
        self.batches, self._padding, self._parts = batches, padding, parts
        self._order: tuple[int, Sequence[np.ndarray[Any, Any]]] | None = None

    def batch(self, step: int) -> _Batch:
        """Return this rank's rows of batch number `step`, 0 or more.

        Raises:
            ArgumentError: step is negative.
        """
        check_integer(f"{type(self).__name__}.batch", "step", step, 0)
        epoch, place = divmod(step, self.batches)
        if self._order is None or self._order[0] != epoch:
            bits = np.random.Philox(key=np.array([self._seed, epoch], np.uint64))
            self._order = epoch, self._shuffled(bits)
        return self._part(self._read(self._order[1][place]))

    def _part(self, batch: _Batch) -> _Batch:
        """Return this rank's rows of a batch."""
        if self._ranks * self._parts == 1:
            return batch
        rows = -(-len(batch[0]) // (self._ranks * self._parts)) * self._parts
        first = self._rank * rows
        parts = []
        for array, padding in zip(batch, self._padding, strict=True):
            part = array[first : first + rows]
            missing = ((0, rows - len(part)), *((0, 0) for _ in part.shape[1:]))
            parts.append(np.pad(part, missing, constant_values=padding))
        return cast(_Batch, tuple(parts))

    def _shuffled(self, bits: np.random.Philox) -> Sequence[np.ndarray[Any, Any]]:
        """Return the numbers of the rows of each batch of an epoch."""
        raise NotImplementedError

    def _read(self, numbers: np.ndarray[Any, Any]) -> _Batch:
        """Return the batch of the rows with these numbers."""
        raise NotImplementedError


def read_ahead(batch_of: Callable[[int], _Batch], start_step: int = 0) -> Iterator[_Batch]:
    """Yield batch_of(start_step), batch_of(start_step + 1), ... without end.

    A thread computes two batches ahead. Closing or deleting the iterator ends the thread; an error
    in the thread is raised here. Where no thread can be started, each batch is computed when it is
    asked for.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="read_ahead")
    ahead: deque[Future[_Batch]] = deque()
    try:
        with suppress(RuntimeError):  # no thread can be started, as under a limit (ulimit -u)
            ahead.append(pool.submit(batch_of, start_step))
        for step in count(start_step + 1) if ahead else ():
            ahead.append(pool.submit(batch_of, step))
            if len(ahead) > _AHEAD:
                yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
    yield from map(batch_of, count(start_step))


def as_int32(op: str, name: str, values: Any) -> Ids:
    """Return integers as int32.

    Raises:
        DtypeError: they are not integers.
        ArgumentError: one does not fit.
    """
    array = np.asarray(integer_array(op, name, values))
    found: Ids = array.astype(np.int32)
    wrong = array[found != array]
    if wrong.size:
        raise ArgumentError(f"{op}: {name} has {wrong[0]}, expected -2^31 to 2^31 - 1")
    return found
