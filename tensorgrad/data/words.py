"""Words as tokens: splitting text into words, a vocabulary, and word vectors from a file."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tensorgrad.core.checks import check_integer
from tensorgrad.core.errors import DataError
from tensorgrad.data.content import CHARACTERS
from tensorgrad.data.text import read_lines, read_text, write_text
from tensorgrad.io.display import call_text
from tensorgrad.io.readers import VOCABULARY_BYTES, parse_json

# The Penn treebank's words: do n't, it 's; and "well-made" and "3.5" are one word each.
_WORD = re.compile(
    r"[^\W\d_]+(?=n't\b)|n't\b|'(?:s|re|ve|ll|d|m)\b"
    r"|\w+(?:[-.,/]\w+|'(?!(?:s|re|ve|ll|d|m)\b)\w+)*"
    r"|\.\.+|--+|``|''|[!?]+|[^\w\s]"
)
_FORMAT = 1


def split_words(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, in lower case.

    Args:
        text: any text; "n't", "'s" and the like are words of their own, as in the Penn treebank.

    Returns:
        The words in their order.

    Example:
        >>> from tensorgrad.data import split_words
        >>> split_words("It isn't a well-made film!")
        ['it', 'is', "n't", 'a', 'well-made', 'film', '!']
    """
    return _WORD.findall(text.lower())


class WordVocabulary:
    """A token for each word of a list, and token 0 for unknown words.

    Args:
        words: one or more words, all different; word i has the id i + 1.

    Raises:
        DataError: words is empty or has a word twice.

    Example:
        >>> from tensorgrad.data import WordVocabulary
        >>> vocabulary = WordVocabulary(["good", "film"])
        >>> vocabulary.encode_batch(["A good film!"])
        [[0, 1, 2, 0]]
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._ids = {word: number for number, word in enumerate(self.words, 1)}
        if not self.words or len(self._ids) < len(self.words):
            raise DataError(
                f"WordVocabulary: words has {len(self.words)} words, {len(self._ids)} of them "
                "different, expected one or more, all different"
            )

    def __repr__(self) -> str:
        return call_text(self, words=len(self.words))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, at_least: int = 1) -> WordVocabulary:
        """Make a vocabulary of the most frequent words, in order of frequency and first occurrence.

        Args:
            texts: see `split_words`.
            vocab_size: the largest number of tokens, with token 0; 2 or more.
            at_least: omit words that occur less often.
        Raises:
            ArgumentError: vocab_size is below 2, or at_least below 1.
            DataError: no word is left.
        """
        check_integer("WordVocabulary", "vocab_size", vocab_size, 2)
        check_integer("WordVocabulary", "at_least", at_least, 1)
        counts = Counter(word for text in texts for word in split_words(text))
        common = counts.most_common(vocab_size - 1)
        return cls([word for word, count in common if count >= at_least])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> WordVocabulary:
        """Read what `save` wrote.

        Raises:
            DataError: the file is missing or not such a file.
        """
        found = parse_json(read_text(path), os.fspath(path), limit=VOCABULARY_BYTES)
        version, words = found.get("format"), found.get("words", ())
        texts = isinstance(words, list) and all(isinstance(word, str) for word in words)
        if version != _FORMAT or not texts:
            raise DataError(
                f"WordVocabulary.load: {path} has format {version!r:.80}, expected {_FORMAT} with "
                "words"
            )
        try:
            return cls(words)
        except DataError as error:
            raise DataError(f"WordVocabulary.load: {path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `load` reads.

        Raises:
            DataError: the file cannot be written; an existing one is unchanged.
        """
        write_text("WordVocabulary.save", path, self.to_json())

    def to_json(self) -> str:
        """Return what `save` writes; equal vocabularies give equal text."""
        return json.dumps({"format": _FORMAT, "words": self.words}, ensure_ascii=False, indent=0)

    @property
    def digest(self) -> str:
        """The SHA-256 of `to_json`, in hexadecimal: equal for equal vocabularies."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """The number of tokens; ids are 0 to vocab_size - 1."""
        return len(self.words) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of the words of each text; 0 for words that are not in the list."""
        find = self._ids.get
        return [[find(word, 0) for word in split_words(text)] for text in texts]


def read_vectors(
    path: str | os.PathLike[str], words: Sequence[str], width: int
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.bool_]]]:
    """Return the vectors of some words from a file.

    Args:
        path: UTF-8 text as GloVe publishes it, plain or .gz or .xz: a line has a word and its
            numbers, separated by spaces. A first line with two whole numbers, as word2vec writes,
            is skipped.
        words: the words to look up.
        width: C, the length of a vector.

    Returns:
        (words, C) float32, zeros where the file has no vector, and (words,) bool, true where it
        has one.

    Raises:
        DataError: the file is missing or damaged, its vectors have another width, or it has none
            of the words.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.data import read_vectors
        >>> _ = Path("vectors.txt").write_text("good 1 0.5\\nfilm 0 2")
        >>> vectors, is_known = read_vectors("vectors.txt", ["film", "bad"], width=2)
        >>> vectors.tolist(), is_known.tolist()
        ([[0.0, 2.0], [0.0, 0.0]], [True, False])
    """
    row_of = {word: row for row, word in enumerate(words)}
    vectors = np.zeros((len(words), width), np.float32)
    found = np.zeros(len(words), bool)
    first = 1
    for number, line in enumerate(read_lines(path, CHARACTERS), 1):
        if number == 1 and re.fullmatch(r"\d+ \d+", line):
            first = 2
            continue
        # A few words have spaces inside, but not the first one of a file.
        # A space at the end is word2vec's.
        word, *numbers = line.removesuffix(" ").rsplit(" ", -1 if number == first else width)
        if len(numbers) != width:
            raise DataError(
                f"read_vectors: {path}: line {number} has {len(numbers)} numbers, expected "
                f"{width}, the width of the model"
            )
        row = row_of.get(word)
        if row is not None and not found[row]:
            vectors[row] = _numbers(path, number, numbers)
            found[row] = True
    if not found.any():
        raise DataError(f"read_vectors: {path} has none of the {len(words):,} words, expected some")
    return vectors, found


def _numbers(path: Any, line: int, numbers: list[str]) -> np.ndarray[Any, Any]:
    try:
        values = np.array(numbers, np.float32)
    except ValueError as error:
        raise DataError(f"read_vectors: {path}: line {line} is damaged: {error}") from error
    if not np.isfinite(values).all():
        raise DataError(f"read_vectors: {path}: line {line} has {values}, expected finite numbers")
    return values
