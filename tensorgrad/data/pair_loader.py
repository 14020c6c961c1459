"""Batches of sentence pairs for a model that reads source and target as one sequence.

    tokens   s1 s2 s3 <sep> t1    t2  <end>    targets   --    t1 t2    <end> --
             s1 s2 <sep> t1 t2    t3  t4                 t1    t2 t3    t4    <end>

Rows are padded on the right. In a causal model no token attends to the padding, so no mask is
needed. Targets that do not count in the loss are -100 (--). They cover only the last columns of the
tokens, from the first one that counts in any row: the head computes nothing before it.

A batch has pairs of similar length, as many as fit into a number of tokens. The batches have few
shapes (shapes.py), since a CUDA graph serves one shape. Where the pairs of a shape do not divide
into equal batches, some batches get a row of padding. Its targets are all -100, so it changes
neither the loss nor a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.core.checks import check_integer
from tensorgrad.core.errors import ArgumentError, DataError
from tensorgrad.data.batches import IGNORED, EpochLoader, Ids, as_int32
from tensorgrad.data.shapes import few_shapes
from tensorgrad.io.display import call_text

PairBatch = tuple[Ids, Ids]  # tokens, targets
EncodedPair = tuple[Sequence[int], Sequence[int]]

_MULTIPLE = 8  # factor of the columns of a batch, for alignment


class PairShape(NamedTuple):
    """The shape of a batch.

    Attributes:
        columns: T of the tokens (rows, T).
        counted: n of the targets (rows, n) of the last n columns.
        rows: B of the batch.
    """

    columns: int
    counted: int
    rows: int


class PairLoader(EpochLoader[PairBatch]):
    """Batches of tokens (B, T) and targets (B, n) for the last n of the T columns, int32.

    Each pair belongs to one of at most 16 shapes (T, n), chosen from the lengths of all pairs: on
    IWSLT14 16 shapes make 1 to 2 % more tokens, with padding, than batches of any shape, and 12
    make 4 to 5 %. One more shape must save half a batch, so few pairs have few shapes.

    The pairs of a shape make as few batches as batch_tokens allows, of equal rows. Each epoch
    shuffles the pairs of each shape, and the batches; their number and shapes stay.

    Args:
        pairs: the token ids of source and target of each pair.
        separator: the token between them.
        end: the token after the target and in the padding.
        batch_tokens: the largest number of tokens of a batch, with padding; at least context.
        context: the largest T, the context length of the model.
        seed: the seed of the order, 0 to 2^64 - 1.
        rank, ranks: this process's part of the rows, and the number of parts; see EpochLoader.
        parts: the number of equal parts of the rows of this process, as for micro-batches.

    Attributes:
        batches: the number of batches in an epoch.
        shapes: the PairShape of the batches, by rising length.
        tokens: the number of tokens in an epoch, without padding.
        targets: the number of targets in an epoch that count in the loss.
        skipped: the number of pairs whose source alone fills the context.
        cut: the number of pairs longer than the context, of which the model sees the beginning.

    Raises:
        ArgumentError: an argument is out of its range, or a token too large.
        DataError: no pair is left.
        DtypeError: tokens are not integers.

    Example:
        >>> from tensorgrad.data import PairLoader
        >>> pairs = [([5, 6], [7, 8]), ([5], [7])]
        >>> loader = PairLoader(pairs, separator=2, end=0, batch_tokens=32, context=16)
        >>> tokens, targets = next(loader.evaluation_batches())
        >>> tokens.tolist()
        [[5, 6, 2, 7, 8, 0, 0, 0], [5, 2, 7, 0, 0, 0, 0, 0]]
        >>> targets[0].tolist()
        [-100, -100, 7, 8, 0, -100, -100, -100]
    """

    def __init__(
        self,
        pairs: Sequence[EncodedPair],
        separator: int,
        end: int,
        batch_tokens: int,
        context: int,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        parts: int = 1,
    ) -> None:
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
        widths = np.minimum(-(-self._lengths // _MULTIPLE) * _MULTIPLE, context)
        firsts = self._sources // _MULTIPLE * _MULTIPLE
        shapes, self._shape_of = few_shapes(widths, firsts, batch_tokens // 2)
        self.shapes: list[PairShape] = []
        self._groups: list[tuple[np.ndarray[Any, Any], int]] = []  # pairs of a shape, batches
        for number, (columns, counted) in enumerate(shapes):
            group = np.flatnonzero(self._shape_of == number)
            batches = -(-len(group) // (batch_tokens // columns))
            self._groups.append((group, batches))
            self.shapes.append(PairShape(columns, counted, -(-len(group) // batches)))
        batches = sum(batches for _, batches in self._groups)
        super().__init__(seed, batches, rank, ranks, (end, IGNORED), parts)

    def __repr__(self) -> str:
        settings = {name: getattr(self, name) for name in ("batches", "tokens", "skipped", "cut")}
        sizes = {"pairs": len(self._lengths), "shapes": len(self.shapes)}
        return call_text(self, **sizes, **settings, seed=self._seed)

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
        """Yield every pair once, the shortest shape first; one rank has no rows of padding."""
        for group, batches in self._groups:
            for numbers in np.array_split(group, batches):
                yield self._part(self._rows(numbers))

    def _shuffled(self, bits: np.random.Philox) -> Sequence[np.ndarray[Any, Any]]:
        keys = bits.random_raw(len(self._starts))
        parts = [
            part
            for group, batches in self._groups
            for part in np.array_split(group[np.argsort(keys[group], kind="stable")], batches)
        ]
        return [
            parts[number] for number in np.argsort(bits.random_raw(self.batches), kind="stable")
        ]

    def _read(self, numbers: np.ndarray[Any, Any]) -> PairBatch:
        tokens, targets = self._rows(numbers)
        missing = ((0, self.shapes[self._shape_of[numbers[0]]].rows - len(numbers)), (0, 0))
        return (
            np.pad(tokens, missing, constant_values=self._end),
            np.pad(targets, missing, constant_values=IGNORED),
        )

    def _rows(self, numbers: np.ndarray[Any, Any]) -> PairBatch:
        """Return the batch of the pairs with these numbers, which have one shape."""
        shape = self.shapes[self._shape_of[numbers[0]]]
        first, columns = shape.columns - shape.counted, np.arange(shape.columns)
        start, source, length = (
            array[numbers, None] for array in (self._starts, self._sources, self._lengths)
        )
        places, inside = start + columns, columns < length
        tokens = self._ids.take(places)
        tokens[~inside] = self._end
        targets = self._ids.take(places[:, first:] + 1)
        targets[~inside[:, first:] | (columns[first:] < source)] = IGNORED
        return tokens, targets
