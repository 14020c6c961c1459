"""Batches of labelled texts of similar length, padded; batch `step` depends on `step` alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from tensorgrad.data.token_loader import as_int32, read_ahead
from tensorgrad.errors import DataError, ShapeError
from tensorgrad.ops.operand import check_integer, check_seed

Numbers = np.ndarray[Any, np.dtype[np.int32]]
Batch = tuple[Numbers, Numbers, Numbers]  # tokens, lengths, labels

_POOL = 50  # batches whose texts are sorted by length together


def pad(rows: Sequence[Sequence[int]], longest: int | None = None) -> tuple[Numbers, Numbers]:
    """Return token ids as one array, filled up with 0 on the right, and how many each row has.

    Args:
        rows: the ids of each text.
        longest: cut rows after so many ids, 1 or more.
    Returns:
        (B, T) int32, T at least 1, and (B,) int32.
    Raises:
        ArgumentError: longest is below 1, or an id too large.
        DtypeError: ids are not integers.
    """
    if longest is not None:
        check_integer("pad", "longest", longest, 1)
        rows = [row[:longest] for row in rows]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), max(1, lengths.max(initial=0))), np.int32)
    inside = np.arange(tokens.shape[1]) < lengths[:, None]
    tokens[inside] = as_int32("pad", "rows", list(chain.from_iterable(rows)))
    return tokens, lengths


class LabelledLoader:
    """Batches for training and evaluation.

    An epoch visits every text once, in an order of its own; a last batch that is not full is
    filled up with texts from the beginning of the epoch. Of the texts of each 50 batches those of
    similar length share a batch, so that there is little padding.

    Attributes:
        batches: in an epoch.
        tokens: the mean number of a batch, without padding.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        labels: Sequence[int] | Numbers,
        batch: int,
        seed: int = 0,
        longest: int | None = None,
    ) -> None:
        """Describe the batches.

        Args:
            rows: the token ids of each text.
            labels: of each text.
            batch: B, rows of a batch.
            seed: chooses the order, 0 to 2^64 - 1.
            longest: cut texts after so many tokens.
        Raises:
            ArgumentError: an argument is out of its range.
            DataError: there is no text.
            ShapeError: there are not as many labels as texts.
            DtypeError: labels are not integers.
        """
        check_integer("LabelledLoader", "batch", batch, 1)
        if longest is not None:
            check_integer("LabelledLoader", "longest", longest, 1)
        check_seed("LabelledLoader", seed)
        if not len(rows):
            raise DataError("LabelledLoader: rows is empty, expected one text or more")
        self._labels = as_int32("LabelledLoader", "labels", labels)
        if self._labels.shape != (len(rows),):
            raise ShapeError(
                f"LabelledLoader: labels has shape {self._labels.shape}, expected ({len(rows)},)"
            )
        self._rows = rows
        self._lengths = np.array([len(row) for row in rows])
        self._batch, self._seed, self._longest = batch, seed, longest
        self._order: tuple[int, np.ndarray[Any, Any]] | None = None
        self.batches = -(-len(rows) // batch)
        self.tokens = batch * float(
            np.minimum(self._lengths, longest or self._lengths.max()).mean()
        )

    def batch(self, step: int) -> Batch:
        """Return batch number `step`.

        Args:
            step: 0 or more.
        Returns:
            tokens (B, T), lengths (B,) and labels (B,), int32; see `pad`.
        Raises:
            ArgumentError: step is negative.
        """
        check_integer("LabelledLoader.batch", "step", step, 0)
        epoch, place = divmod(step, self.batches)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._shuffled(epoch)
        return self._read(self._order[1][place])

    def iterate(self, start_step: int = 0) -> Iterator[Batch]:
        """Yield batch(start_step), batch(start_step + 1), ... without end; see `read_ahead`."""
        return read_ahead(self.batch, start_step)

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield every text once, the shortest first; the last batch may have fewer rows."""
        order = np.argsort(self._lengths, kind="stable")
        for first in range(0, len(order), self._batch):
            yield self._read(order[first : first + self._batch])

    def _shuffled(self, epoch: int) -> np.ndarray[Any, Any]:
        """Return the numbers of the texts of each batch of an epoch, (batches, B)."""
        bits = np.random.Philox(key=np.array([self._seed, epoch], np.uint64))
        order = np.argsort(bits.random_raw(len(self._rows)), kind="stable")
        order = np.resize(order, self.batches * self._batch)
        for first in range(0, len(order), _POOL * self._batch):
            pool = order[first : first + _POOL * self._batch]
            pool[:] = pool[np.argsort(self._lengths[pool], kind="stable")]
        batches = np.argsort(bits.random_raw(self.batches), kind="stable")
        return order.reshape(self.batches, self._batch)[batches]

    def _read(self, numbers: np.ndarray[Any, Any]) -> Batch:
        tokens, lengths = pad([self._rows[number] for number in numbers], self._longest)
        return tokens, lengths, self._labels[numbers]
