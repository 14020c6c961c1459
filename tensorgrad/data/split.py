"""The split of a corpus into training and validation text, the same on every run."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tensorgrad.core.errors import ArgumentError, DataError


@dataclass(frozen=True)
class Split:
    """A split by document: those with a hash below `threshold` are for validation.

    Where whole documents cannot make up the fraction (a single book, say), the last `tail`
    characters of the document whose hash is `threshold` are for validation too.

    Attributes:
        threshold: a hash, 0 to 2^64 - 1.
        tail: the number of characters cut off; 0: documents stay whole.
        documents, characters: the size of the corpus.

    Example:
        >>> from tensorgrad.data import Split, plan_split
        >>> split: Split = plan_split(["Once upon a time."], 0.25)
        >>> split.train("Once upon a time."), split.validation("Once upon a time.")
        ('Once upon a t', 'ime.')
    """

    threshold: int
    tail: int
    documents: int
    characters: int

    def train(self, document: str) -> str:
        """Return the training part of a document: all, nothing, or its beginning."""
        return document[: self._cut(document)]

    def validation(self, document: str) -> str:
        """Return the validation part of a document: the rest."""
        return document[self._cut(document) :]

    def _cut(self, document: str) -> int:
        """Return where the validation part begins: at a line, unless the document is one line."""
        value = _hash(document)
        if value != self.threshold:
            return 0 if value < self.threshold else len(document)
        position = max(len(document) - self.tail, 0)
        return document.rfind("\n", 0, position) + 1 or position


def plan_split(documents: Iterable[str], fraction: float) -> Split:
    """Choose documents by their hash until they hold `fraction` of all characters.

    Equal documents are on the same side, and the choice does not depend on their order. A document
    is cut only if whole ones would make up less than half of the fraction.

    Args:
        documents: the corpus; 16 bytes are kept for each.
        fraction: the fraction of the characters for validation, between 0 and 1.

    Returns:
        The split.

    Raises:
        ArgumentError: the fraction is not between 0 and 1.
        DataError: documents is empty, or has only one character.

    Example:
        >>> from tensorgrad.data import plan_split
        >>> documents = ["one", "two", "three", "four"]
        >>> split = plan_split(documents, 0.3)
        >>> [text for text in documents if split.validation(text)]
        ['two']
    """
    if not 0 < fraction < 1:
        raise ArgumentError(f"plan_split: fraction has {fraction}, expected between 0 and 1")
    hashes, lengths = array("Q"), array("Q")
    for document in documents:
        hashes.append(_hash(document))
        lengths.append(len(document))
    if not hashes:
        raise DataError("plan_split: documents has no text, expected some")
    values = np.frombuffer(hashes, np.uint64)
    order = np.argsort(values, kind="stable")
    values = values[order]
    ends = np.cumsum(np.frombuffer(lengths, np.uint64)[order])
    total = int(ends[-1])
    if total < 2:
        raise DataError("plan_split: documents has 1 character, expected 2 or more")
    wanted = min(max(1, round(total * fraction)), total - 1)
    boundary = values[np.searchsorted(ends, wanted, side="right")]  # the first that is too much
    begin, end = np.searchsorted(values, boundary), np.searchsorted(values, boundary, side="right")
    whole = int(ends[begin - 1]) if begin else 0
    tail = (wanted - whole) // int(end - begin) if whole < wanted / 2 else 0
    return Split(int(boundary), tail, len(hashes), total)


def _hash(document: str) -> int:
    data = document.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
