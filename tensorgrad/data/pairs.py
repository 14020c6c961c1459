"""Pairs of sentences with the same meaning: from files, Hugging Face data sets, or synthetic."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tensorgrad.core.errors import ArgumentError, DataError
from tensorgrad.data.phrases import Pair, phrases
from tensorgrad.data.rows import load_dataset
from tensorgrad.data.text import find_file, read_lines
from tensorgrad.data.tokenizer import Tokenizer
from tensorgrad.io.display import call_text

ProgressCallback = Callable[[str, int, int], object]
PHRASES = (12_000, 500, 500)  # for training, validation and test

_PAIRS = 10_000  # between calls of progress
_SPLITS = {
    "train": ("train",),
    "validation": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}


@dataclass(frozen=True)
class PairCorpus:
    """The parts of a parallel corpus, each a list of (source text, target text).

    Attributes:
        train, validation, test: the pairs of a part; empty where it was not read.

    Example:
        >>> from tensorgrad.data import PairCorpus
        >>> PairCorpus(train=[("ja", "yes"), ("nein", "no")], validation=[], test=[])
        PairCorpus(train=2, validation=0, test=0)
    """

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]

    def __repr__(self) -> str:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return call_text(self, **{name: len(pairs) for name, pairs in parts.items()})

    @property
    def digest(self) -> str:
        """A SHA-256 in hexadecimal, equal for equal corpora."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation, self.test):
            digest.update(b"%d " % len(part))
            for pair in part:
                digest.update("\0".join((*pair, "")).encode())
        return digest.hexdigest()


def read_pairs(
    source: str | os.PathLike[str],
    source_key: str = "de",
    target_key: str = "en",
    *,
    lowercase: bool = False,
    parts: Sequence[str] = ("train", "validation", "test"),
    progress: ProgressCallback | None = None,
) -> PairCorpus:
    """Return the pairs of a source.

    Pairs for training and validation with an empty side are skipped.

    Args:
        source: one of
            a folder with train, valid and test files, one sentence a line: train.de, train.en and
            so on, plain UTF-8 or compressed;
            `hf:NAME[:CONFIG]`: a Hugging Face data set whose rows have a column for either
            language, or one column "translation" with both, which needs the datasets package;
            `phrases`: synthetic German phrases with their English translations.
        source_key, target_key: the languages, as files and columns call them.
        lowercase: make both sides lower case.
        parts: the parts to read; the others stay empty.
        progress: called at times with the stage "reading", the pairs of a part read and 0.

    Returns:
        The pairs of each part, in the order of the source.

    Raises:
        ArgumentError: the source has a wrong form, a language is not one of the phrases, or a part
            is unknown.
        DataError: files or columns are missing or differ in the number of lines, or a part has no
            pair.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.data import read_pairs
        >>> for language, text in ("de", "Ja\\nNein"), ("en", "Yes\\nNo"):
        ...     _ = Path(f"train.{language}").write_text(text)
        >>> read_pairs(".", "de", "en", lowercase=True, parts=["train"]).train
        [('ja', 'yes'), ('nein', 'no')]
    """
    if source_key == target_key:
        raise ArgumentError(f"read_pairs: target_key is {target_key!r}, expected another language")
    source = os.fspath(source)
    unknown = [part for part in parts if part not in _SPLITS]
    if unknown:
        raise ArgumentError(f"read_pairs: parts has {unknown[0]!r}, expected some of {[*_SPLITS]}")
    keys = source_key, target_key
    found: dict[str, list[Pair]] = {name: [] for name in _SPLITS}
    read: Callable[[str], Iterable[Pair]] = partial(_file_pairs, Path(source), keys)
    if source == "phrases":
        read = _made(keys).__getitem__
    elif source.startswith("hf:"):
        read = partial(_dataset_pairs, source, load_dataset("read_pairs", source, None), keys)
    for part in parts:
        pairs = []
        for number, pair in enumerate(read(part)):
            if progress is not None and number % _PAIRS == 0:
                progress("reading", number, 0)
            if part == "test" or all(text.strip() for text in pair):
                pairs.append((pair[0].lower(), pair[1].lower()) if lowercase else pair)
        if not pairs:
            raise DataError(f"read_pairs: {source} has no pairs for {part}, expected some")
        found[part] = pairs
    return PairCorpus(**found)


def train_tokenizer(pairs: Sequence[Pair], vocab_size: int, languages: Sequence[str]) -> Tokenizer:
    """Train one vocabulary for all languages, with a special token for each.

    Args:
        pairs: the texts to train on.
        vocab_size: the largest number of tokens, with 256 bytes and all special tokens.
        languages: the languages, such as ["de", "en"] for the tokens <|de|> and <|en|>.

    Returns:
        The tokenizer.

    Raises:
        ArgumentError: vocab_size is smaller than the bytes and special tokens.
        DataError: pairs is empty.

    Example:
        >>> from tensorgrad.data import train_tokenizer
        >>> train_tokenizer([("ja", "yes"), ("nein", "no")], 300, ["de", "en"]).special_tokens
        {'<|endoftext|>': 0, '<|de|>': 1, '<|en|>': 2}
    """
    texts = (text for pair in pairs for text in pair)
    return Tokenizer.train(texts, vocab_size, [_name(language) for language in languages])


def language_token(tokenizer: Tokenizer, language: str) -> int:
    """Return the id of the special token that starts a translation into a language.

    Args:
        tokenizer: a tokenizer of `train_tokenizer`.
        language: the language, such as "en" for the token <|en|>.

    Returns:
        The token id.

    Raises:
        DataError: the tokenizer has no such token.

    Example:
        >>> from tensorgrad.data import language_token, train_tokenizer
        >>> language_token(train_tokenizer([("ja", "yes")], 300, ["de", "en"]), "en")
        2
    """
    found = tokenizer.special_tokens
    if _name(language) not in found:
        raise DataError(
            f"language_token: the tokenizer has the special tokens {list(found)}, expected "
            f"{_name(language)!r} among them"
        )
    return found[_name(language)]


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[Pair]) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of both sides of each pair.

    Args:
        tokenizer: the tokenizer of both languages.
        pairs: source and target text of each pair.

    Returns:
        Lists of ids, for `PairLoader`; there are no special tokens in them.

    Example:
        >>> from tensorgrad.data import encode_pairs, train_tokenizer
        >>> tokenizer = train_tokenizer([("ja", "yes")], 259, ["de", "en"])
        >>> [(source, target)] = encode_pairs(tokenizer, [("ja", "yes")])
        >>> tokenizer.decode(source), len(target)
        ('ja', 3)
    """
    sources, targets = (tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (0, 1))
    return list(zip(sources, targets, strict=True))


def _name(language: str) -> str:
    return f"<|{language}|>"


def _made(keys: tuple[str, str]) -> Mapping[str, list[Pair]]:
    """Return phrases for each part."""
    if sorted(keys) != ["de", "en"]:
        raise ArgumentError(f"read_pairs: phrases are in 'de' and 'en', got the languages {keys}")
    pairs: Iterator[Pair] = phrases(sum(PHRASES))
    if keys[0] == "en":
        pairs = ((english, german) for german, english in pairs)
    return {
        part: [next(pairs) for _ in range(count)]
        for part, count in zip(_SPLITS, PHRASES, strict=True)
    }


def _file_pairs(folder: Path, keys: tuple[str, str], part: str) -> Iterator[Pair]:
    forms = f"one with train, valid and test files in {keys[0]} and {keys[1]}, 'hf:NAME' or"
    paths = [
        find_file("read_pairs", folder, [f"{s}.{key}" for s in _SPLITS[part]], f"{forms} 'phrases'")
        for key in keys
    ]
    sides = [read_lines(path) for path in paths]
    for count, pair in enumerate(zip_longest(*sides)):
        if None in pair:
            of, to = (
                count + (text is not None) + sum(1 for _ in side)
                for text, side in zip(pair, sides, strict=True)
            )
            raise DataError(
                f"read_pairs: {paths[0]} has {of:,} lines and {paths[1]} {to:,}, expected equally "
                "many"
            )
        yield pair[0], pair[1]


def _dataset_pairs(source: str, whole: Any, keys: tuple[str, str], part: str) -> Iterator[Pair]:
    split = next((name for name in _SPLITS[part] if name in whole), None)
    if split is None:
        raise DataError(
            f"read_pairs: {source} has the splits {list(whole)!r:.200}, expected {part!r}"
        )
    columns = list(whole[split].features)
    if "translation" in columns:
        rows: Iterator[Any] = iter(whole[split]["translation"])
    elif all(key in columns for key in keys):
        rows = iter(whole[split])
    else:
        raise DataError(
            f"read_pairs: {source} has the columns {columns!r:.200}, expected {keys[0]!r} and "
            f"{keys[1]!r}, or 'translation'"
        )
    for number, row in enumerate(rows):
        one, other = map(row.get, keys) if isinstance(row, Mapping) else (None, None)
        if not (isinstance(one, str) and isinstance(other, str)):
            raise DataError(
                f"read_pairs: {source}: row {number} of {split} is {row!r:.80}, expected "
                f"texts under {keys[0]!r} and {keys[1]!r}"
            )
        yield one, other
