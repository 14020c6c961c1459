"""Batches of sentence pairs for a model that reads source and target as one sequence.

    tokens   s1 s2 s3 <sep> t1    t2  <end>    targets   --    t1 t2    <end> --
             s1 s2 <sep> t1 t2    t3  t4                 t1    t2 t3    t4    <end>

Rows are padded on the right. In a causal model no token attends to the padding, so no mask is
needed. Targets that do not count in the loss are -100 (--). They cover only the last columns of the
tokens, from the first one that counts in any row: the head computes nothing before it.

A batch has pairs of similar length, as many as fit into a number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tensorgrad.checks import check_integer
from tensorgrad.data.batches import EpochLoader, Ids, as_int32
from tensorgrad.errors import ArgumentError, DataError

PairBatch = tuple[Ids, Ids]  # tokens, targets
EncodedPair = tuple[Sequence[int], Sequence[int]]

IGNORED = -100  # a target whose loss does not count
_MULTIPLE = 8  # of the columns of a batch: few shapes, and aligned ones


class PairLoader(EpochLoader[PairBatch]):
    """Batches of tokens (B, T) and targets (B, n) for the last n of the T columns, int32.

    Pairs are sorted by length, rounded up to a multiple of 8, and cut into batches. Each epoch
    shuffles the pairs of equal rounded length, and the batches; their number and shapes stay.

    Attributes:
        batches: in an epoch.
        tokens: in an epoch, without padding.
        targets: in an epoch, those that count in the loss.
        skipped: the number of pairs whose source alone fills the context.
        cut: the number of pairs longer than the context, of which the model sees the beginning.
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
        """Sort the pairs and cut them into batches.

        Args:
            pairs: token ids of source and target.
            separator: the token between them.
            end: the token after the target and in the padding.
            batch_tokens: tokens of a batch, with padding; at least context.
            context: T, the context length of the model.
            seed: of the order, 0 to 2^64 - 1.
        Raises:
            ArgumentError: an argument is out of its range, or a token too large.
            DataError: no pair is left.
            DtypeError: tokens are not integers.
        """
        check_integer("PairLoader", "context", context, 2)
        check_integer("PairLoader", "batch_tokens", batch_tokens)
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
        # The last id of a row is only a target.
        rows = [
            as_int32("PairLoader", "pairs", [*source, separator, *target, end][: context + 1])
            for source, target in kept
        ]
        beyond = np.full(context + 1, end, np.int32)  # reads beyond the last row stay inside
        self._ids = np.concatenate([*rows, beyond])
        ends = np.cumsum([len(row) for row in rows])
        self._sources = np.array([len(source) for source, _ in kept])
        self._lengths = np.array([len(row) - 1 for row in rows])
        self._starts = ends - self._lengths - 1
        self.cut = sum(len(s) + 1 + len(t) > context for s, t in kept)
        self.tokens = int(self._lengths.sum())
        self.targets = int((self._lengths - self._sources).sum())
        self._widths = np.minimum(-(-self._lengths // _MULTIPLE) * _MULTIPLE, context)
        self._cuts = _cuts(np.sort(self._widths), batch_tokens)
        super().__init__(seed, len(self._cuts) - 1)

    def mean_keys(self, prefix: bool) -> float:
        """Return the mean number of keys that a token attends to.

        That is half the length of its row with a causal mask, as sum(T^2) / 2 sum(T) in all.

        Args:
            prefix: whether the tokens of a source, and the separator, attend in both directions.
        """
        squares = (self._lengths**2).sum()
        if prefix:
            squares += ((self._sources + 1) ** 2).sum()
        return float(squares / (2 * self.tokens))

    def evaluation_batches(self) -> Iterator[PairBatch]:
        """Yield every pair once, the shortest first."""
        rows = np.argsort(self._widths, kind="stable")
        for first, last in zip(self._cuts[:-1], self._cuts[1:], strict=True):
            yield self._read(rows[first:last])

    def _shuffled(self, bits: np.random.Philox) -> Sequence[np.ndarray[Any, Any]]:
        rows = np.lexsort((bits.random_raw(len(self._starts)), self._widths))
        order = np.argsort(bits.random_raw(self.batches), kind="stable")
        return [rows[self._cuts[number] : self._cuts[number + 1]] for number in order]

    def _read(self, numbers: np.ndarray[Any, Any]) -> PairBatch:
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
