"""Shuffled batches of token windows, where batch number `step` is a pure function of `step`.

An epoch cuts the corpus into windows at a random offset and visits them in a random order. A
formula gives the order, not a stored permutation: any number of ranks can compute any step, in
constant memory, with the same result on every version of NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tensorgrad.core.checks import check_integer
from tensorgrad.core.errors import ArgumentError, DataError, DtypeError, ShapeError
from tensorgrad.data.batches import IGNORED, Ids, StepLoader
from tensorgrad.data.token_file import TokenFile, Tokens
from tensorgrad.io.display import call_text

TokenBatch = tuple[Ids, Ids]  # x and y
_Numbers = np.ndarray[Any, np.dtype[np.uint64]]

_ROUNDS = 12  # fewer leave a trace in epochs of ten windows


class TokenLoader(StepLoader[TokenBatch]):
    """Windows of a token file for training and evaluation.

    Every rank of a run makes a loader with the same arguments, except `rank`. Of n ranks, rank r
    gets rows r * B/n to (r + 1) * B/n of the batch that one process would get, so a run may resume
    at any step and on another number of ranks.

    Args:
        tokens: (N,), integers; nothing is read until there is a batch.
        batch: B, the rows of a batch on all ranks together; a multiple of `ranks`.
        context: T, the length of a window in tokens.
        seed: the seed of the order, 0 to 2^64 - 1.
        rank: the number of this process, 0 to ranks - 1.
        ranks: the number of ranks.

    Attributes:
        windows: the number of windows in an epoch.

    Raises:
        ArgumentError: an argument is out of its range, or batch not a multiple of ranks.
        DataError: there are fewer tokens than one window and the token after it.
        DtypeError, ShapeError: tokens is not an array of integers with one axis.

    Example:
        >>> from tensorgrad.data import TokenLoader
        >>> loader = TokenLoader(np.arange(100), batch=2, context=4)
        >>> x, y = loader.batch(0)
        >>> x.shape, (y - x).tolist()
        ((2, 4), [[1, 1, 1, 1], [1, 1, 1, 1]])
    """

    def __init__(
        self,
        tokens: TokenFile | Tokens,
        batch: int,
        context: int,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        array = tokens.tokens if isinstance(tokens, TokenFile) else tokens
        if not isinstance(array, np.ndarray):
            kind = type(array).__name__
            raise DtypeError(f"TokenLoader: tokens is a {kind}, expected an array of integers")
        if array.dtype.kind not in "iu":
            raise DtypeError(f"TokenLoader: tokens has dtype {array.dtype}, expected integers")
        if array.ndim != 1:
            raise ShapeError(f"TokenLoader: tokens has shape {array.shape}, expected one axis")
        check_integer("TokenLoader", "batch", batch, 1)
        check_integer("TokenLoader", "context", context, 1)
        super().__init__(seed, rank, ranks)
        if batch % ranks:
            raise ArgumentError(
                f"TokenLoader: batch has {batch}, expected a multiple of the {ranks} ranks"
            )
        if array.size < context + 1:
            raise DataError(
                f"TokenLoader: tokens has {array.size:,} tokens, expected {context + 1:,} or more "
                f"(context {context:,} and the token after it)"
            )
        self._tokens, self._batch, self._context = array, batch, context
        # With one window less than fits, the windows can be shifted by `context` or more.
        self.windows = max(1, (array.size - 1) // context - 1)
        self._offsets = array.size - self.windows * context

    def __repr__(self) -> str:
        settings = {
            name: getattr(self, f"_{name}")
            for name in ("batch", "context", "seed", "rank", "ranks")
        }
        return call_text(self, tokens=self._tokens.size, windows=self.windows, **settings)

    def epoch(self, step: int) -> float:
        """Return the number of epochs before `step`, a fraction included."""
        return step * self._batch / self.windows

    def batch(self, step: int) -> TokenBatch:
        """Return this rank's part of batch number `step`.

        Args:
            step: 0 or more.
        Returns:
            x and y, both (B / ranks, T) int32; y[i, t] is the token after x[i, t].
        Raises:
            ArgumentError: step is negative.
        """
        check_integer("TokenLoader.batch", "step", step)
        if not 0 <= step < (1 << 63) // self._batch:
            raise ArgumentError(
                f"TokenLoader.batch: step has {step}, expected 0 or more, and below 2^63 rows"
            )
        rows = self._batch // self._ranks
        first = step * self._batch + self._rank * rows
        epoch, position = np.divmod(np.arange(first, first + rows, dtype=np.uint64), self.windows)
        keys = _keys(self._seed, epoch)
        window = _shuffle(position, self.windows, keys)
        offset = keys[-1] % np.uint64(self._offsets)
        return self._read(offset + window * np.uint64(self._context))

    def evaluation_batches(self, limit: int | None = None) -> Iterator[TokenBatch]:
        """Yield windows of the whole text or, evenly spread over it, of a part; the same each time.

        The windows are adjacent, so all of them predict each token but the first once. The last one
        may be shorter: then its row is padded with targets of -100. Where the number of windows is
        not a multiple of B, the last batch has fewer rows, and some ranks may have none of them. So
        weight losses by targets, as `tensorgrad.train.mean_loss` does.

        Args:
            limit: the largest number of batches; None: all.
        Yields:
            x and y as from `batch`, with up to B / ranks rows, in the order of the text.
        Raises:
            ArgumentError: limit is below 1.
        """
        if limit is not None:
            check_integer("TokenLoader.evaluation_batches", "limit", limit, 1)
        windows = -(-(self._tokens.size - 1) // self._context)
        count = windows if limit is None else min(windows, limit * self._batch)
        for first in range(0, count, self._batch):
            rows = min(self._batch, count - first)
            begin, end = (first + rows * r // self._ranks for r in (self._rank, self._rank + 1))
            if begin < end:
                # The middle window of each of `count` equal parts.
                chosen = [(2 * number + 1) * windows // (2 * count) for number in range(begin, end)]
                yield self._read(np.array(chosen, np.uint64) * np.uint64(self._context))

    def _read(self, starts: _Numbers) -> TokenBatch:
        x = np.zeros((starts.size, self._context), np.int32)
        y = np.full_like(x, IGNORED)
        for row, start in enumerate(starts.tolist()):
            inside = min(self._context, self._tokens.size - 1 - start)
            x[row, :inside] = self._tokens[start : start + inside]
            y[row, :inside] = self._tokens[start + 1 : start + 1 + inside]
        return x, y


def _keys(seed: int, epoch: _Numbers) -> _Numbers:
    """Return (ROUNDS + 1, rows): the key of each round of the shuffle, and one for the offset."""
    key = _hash(_hash(np.full(epoch.shape, seed, np.uint64)) + epoch)
    return _hash(key + np.arange(_ROUNDS + 1, dtype=np.uint64)[:, None])


def _shuffle(position: _Numbers, length: int, keys: _Numbers) -> _Numbers:
    """Return the image of each position in a permutation of 0 to length - 1, given by its keys.

    A number is written as (row, column) of a table with just over `length` cells, and row and
    column are shifted in turn by a hash of the other. Every shift can be undone, so this is a
    permutation of the cells. A number that lands in a cell beyond `length` is permuted again.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 4 and 5.
    """
    rows = np.uint64(math.isqrt(length - 1) + 1)
    columns = np.uint64(-(-length // int(rows)))
    beyond = np.ones(position.shape, bool)
    while beyond.any():
        row, column = np.divmod(position, columns)
        for number in range(0, _ROUNDS, 2):
            column = (column + _hash(row ^ keys[number]) % columns) % columns
            row = (row + _hash(column ^ keys[number + 1]) % rows) % rows
        position = np.where(beyond, row * columns + column, position)
        beyond = position >= length
    return position


def _hash(values: _Numbers) -> _Numbers:
    """Mix the bits of each value; a permutation of the 64-bit numbers.

    Source: Steele et al. 2014, doi:10.1145/2660193.2660195, the output function of SplitMix64.
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
