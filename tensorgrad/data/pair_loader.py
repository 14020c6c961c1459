"""Batches of pairs for a model that reads source and target as one sequence.

    tokens   s1 s2 s3 <sep> t1    t2  <end>    targets   --    t1 t2    <end> --
             s1 s2 <sep> t1 t2    t3  t4                 t1    t2 t3    t4    <end>

Rows are padded on the right. What comes later cannot reach a causal model, so padding needs no
attention mask; targets are -100 (--) where the loss shall not count. They have a column for the
last places of the tokens only, from the first that counts in any row: the head of the model has
nothing to do before.

Pairs of similar length share a batch, of as many rows as fit into a number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tensorgrad.data.token_loader import as_int32, read_ahead
from tensorgrad.errors import ArgumentError, DataError
from tensorgrad.ops.operand import check_integer, check_seed

Batch = tuple[np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, np.dtype[np.int32]]]
EncodedPair = tuple[Sequence[int], Sequence[int]]

IGNORED = -100  # a target whose loss does not count
_MULTIPLE = 8  # of the columns of a batch: few shapes, and aligned ones


class PairLoader:
    """Batches of pairs, where batch number `step` is a pure function of `step`.

    Pairs are sorted by length, rounded up to a multiple of 8, and cut into batches. Each epoch
    mixes pairs of equal rounded length anew, and the batches; how many there are, and their
    shapes, stay the same.

    Attributes:
        batches: in an epoch.
        tokens: in an epoch, padding not included.
        skipped: pairs whose source alone fills the context.
        cut: pairs that are longer than the context: the model sees only their beginning.
    """

    def __init__(
        self,
        pairs: Sequence[EncodedPair],
        separator: int,
        end: int,
        batch_tokens: int,
        context: int,
        seed: int = 0,
    ) -> None:
        """Lay out the batches.

        Args:
            pairs: token ids of source and target.
            separator: the token between them.
            end: the token after the target; it also fills the rows up.
            batch_tokens: in a batch, padding included; at least context.
            context: how many tokens the model can see.
            seed: chooses the order, 0 to 2^64 - 1.
        Raises:
            ArgumentError: an argument is out of its range, or a token too large.
            DataError: no pair is left.
            DtypeError: tokens are not integers.
        """
        check_integer("PairLoader", "context", context, 2)
        check_integer("PairLoader", "batch_tokens", batch_tokens)
        check_seed("PairLoader", seed)
        if batch_tokens < context:
            raise ArgumentError(
                f"PairLoader: batch_tokens has {batch_tokens}, expected {context} or more "
                "(the context)"
            )
        kept = [pair for pair in pairs if len(pair[0]) < context]
        if not kept:
            raise DataError(
                f"PairLoader: of {len(pairs)} pairs none has a source shorter than the context, "
                f"{context}; expected some"
            )
        self.skipped = len(pairs) - len(kept)
        self._end = end
        self._seed = seed
        # The last id of a row is a target alone.
        rows = [
            as_int32("PairLoader", "pairs", [*source, separator, *target, end][: context + 1])
            for source, target in kept
        ]
        beyond = np.full(context + 1, end, np.int32)  # so that the last row may be read too far
        self._ids = np.concatenate([*rows, beyond])
        ends = np.cumsum([len(row) for row in rows])
        self._sources = np.array([len(source) for source, _ in kept])
        self._lengths = np.array([len(row) - 1 for row in rows])
        self._starts = ends - self._lengths - 1
        self.cut = sum(len(s) + 1 + len(t) > context for s, t in kept)
        self.tokens = int(self._lengths.sum())
        self._widths = np.minimum(-(-self._lengths // _MULTIPLE) * _MULTIPLE, context)
        self._cuts = _cuts(np.sort(self._widths), batch_tokens)
        self._order: tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None

    @property
    def batches(self) -> int:
        """The number of batches in an epoch."""
        return len(self._cuts) - 1

    def batch(self, step: int) -> Batch:
        """Return batch number `step`.

        Args:
            step: 0 or more.
        Returns:
            tokens (B, T) int32, and targets (B, n) int32 for the last n of the T columns.
        Raises:
            ArgumentError: step is negative.
        """
        check_integer("PairLoader.batch", "step", step, 0)
        epoch, place = divmod(step, self.batches)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, *self._shuffled(epoch)
        _, rows, batches = self._order
        number = batches[place]
        return self._read(rows[self._cuts[number] : self._cuts[number + 1]])

    def iterate(self, start_step: int = 0) -> Iterator[Batch]:
        """Yield batch(start_step), batch(start_step + 1), ... without end; see `read_ahead`."""
        return read_ahead(self.batch, start_step)

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield every pair once, the shortest first."""
        rows = np.argsort(self._widths, kind="stable")
        for first, last in zip(self._cuts[:-1], self._cuts[1:], strict=True):
            yield self._read(rows[first:last])

    def _shuffled(self, epoch: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the rows in the order of an epoch, by rounded length, and its order of batches."""
        bits = np.random.Philox(key=np.array([self._seed, epoch], np.uint64))
        rows = np.lexsort((bits.random_raw(len(self._starts)), self._widths))
        return rows, np.argsort(bits.random_raw(self.batches), kind="stable")

    def _read(self, numbers: np.ndarray[Any, Any]) -> Batch:
        first = int(self._sources[numbers].min()) // _MULTIPLE * _MULTIPLE
        columns = np.arange(self._widths[numbers].max())
        start, source, length = (
            each[numbers, None] for each in (self._starts, self._sources, self._lengths)
        )
        places, inside = start + columns, columns < length
        tokens = self._ids.take(places)
        tokens[~inside] = self._end
        targets = self._ids.take(places[:, first:] + 1)
        targets[~inside[:, first:] | (columns[first:] < source)] = IGNORED
        return tokens, targets


def _cuts(widths: np.ndarray[Any, Any], batch_tokens: int) -> np.ndarray[Any, Any]:
    """Return where batches begin and end among rows of rising width."""
    cuts = [0]
    for row, width in enumerate(widths.tolist()):
        if (row + 1 - cuts[-1]) * width > batch_tokens:
            cuts.append(row)
    return np.array([*cuts, len(widths)])
