"""Byte-level BPE with the course's interface: training with its rule for ties, and a tokenizer."""

from __future__ import annotations

import heapq
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

from tensorgrad.data import Tokenizer
from tensorgrad.data.text import END_OF_TEXT
from tensorgrad.data.tokenizer_file import ALPHABET, BYTE_OF

Pair = tuple[bytes, bytes]
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's rule
CUT = re.compile(r"(?<=\S)(?=[ \t\n\r\f\v])")  # where words end, whatever follows


def _special_pattern(special_tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern with one group that finds special tokens, the longest first."""
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else "(?!)()")


class _Candidate:
    """A pair in the heap: the most frequent comes first, and among equals the greatest bytes."""

    def __init__(self, count: int, pair: Pair) -> None:
        self.count, self.pair = count, pair

    def __lt__(self, other: _Candidate) -> bool:
        return (self.count, self.pair) > (other.count, other.pair)


def train(
    input_path: str | os.PathLike[str], vocab_size: int, special_tokens: Sequence[str]
) -> tuple[dict[int, bytes], list[Pair]]:
    """Return the vocabulary and the merges that the course's rules give.

    `tensorgrad.data.Tokenizer.train` has another rule for pairs that are equally frequent (the
    smaller ids; here the greater bytes), so its merges differ.

    Args:
        input_path: the text. Special tokens in it are skipped, and words end there.
        vocab_size: the number of tokens, with the 256 bytes and the special tokens.
        special_tokens: texts that are never split.
    """
    text = Path(input_path).read_text(encoding="utf-8")
    counts: Counter[str] = Counter()
    for part in _special_pattern(special_tokens).split(text):
        if part not in special_tokens:
            counts.update(word for word, _ in WORDS.pre_tokenize_str(part))
    words = [[bytes([BYTE_OF[ord(c)]]) for c in word] for word in counts]
    merges = list(_merges(words, list(counts.values()), vocab_size - 256 - len(special_tokens)))
    tokens = [
        *(token.encode() for token in special_tokens),
        *(bytes([byte]) for byte in range(256)),
        *(left + right for left, right in merges),
    ]
    return dict(enumerate(tokens)), merges


def _merges(words: list[list[bytes]], frequencies: list[int], most: int) -> Iterator[Pair]:
    """Yield the most frequent pair of neighbours, merge it, and so on; `words` change."""
    counts: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for number, word in enumerate(words):
        for pair in pairwise(word):
            counts[pair] += frequencies[number]
            places[pair].add(number)
    heap = [_Candidate(count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    for _ in range(most):
        while heap and counts[heap[0].pair] != heap[0].count:
            heapq.heappop(heap)  # its count has changed since
        if not heap or heap[0].count < 1:
            return
        best = heap[0].pair
        changed = set()
        for number in places.pop(best):
            word = words[number]
            merged = _merge(word, best)
            for tokens, sign in ((word, -1), (merged, 1)):
                for pair in pairwise(tokens):
                    counts[pair] += sign * frequencies[number]
                    changed.add(pair)
                    if sign > 0:
                        places[pair].add(number)
            words[number] = merged
        for pair in changed:
            heapq.heappush(heap, _Candidate(counts[pair], pair))
        yield best


def _merge(word: list[bytes], pair: Pair) -> list[bytes]:
    """Return a word with each occurrence of a pair as one token."""
    merged: list[bytes] = []
    i = 0
    while i < len(word):
        if tuple(word[i : i + 2]) == pair:
            merged.append(pair[0] + pair[1])
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return merged


class CourseTokenizer:
    """`tensorgrad.data.Tokenizer` with ids of one's own, and special tokens that `encode` returns.

    Args:
        vocab: the bytes of each id.
        merges: in order of priority.
        special_tokens: texts that are one token each; those that the vocabulary lacks are added.
    """

    def __init__(
        self,
        vocab: Mapping[int, bytes],
        merges: Sequence[Pair],
        special_tokens: Sequence[str] | None = None,
    ) -> None:
        self._bytes = dict(vocab)
        id_of = {token: index for index, token in self._bytes.items()}
        for text in special_tokens or ():
            if text.encode() not in id_of:
                id_of[text.encode()] = max(self._bytes) + 1
                self._bytes[max(self._bytes) + 1] = text.encode()
        self._special = {text: id_of[text.encode()] for text in special_tokens or ()}
        self._pattern = _special_pattern(self._special)
        self._longest = max(map(len, self._special), default=0)
        tokens = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *map(b"".join, merges)])
        self._inner = _tokenizer(list(tokens), merges)
        self._ids = [id_of.get(token) for token in tokens]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text.

        Raises:
            MemoryError: there is too little memory. (Without asking first, the tokenizers library
                would end the process.)
        """
        bytearray(64 * len(text))
        ids: list[int] = []
        for part in self._pattern.split(text):
            special = self._special.get(part)
            if special is not None:
                ids.append(special)
            elif part:
                ids += [self._ids[i] for i in self._inner.encode(part)]  # type: ignore[misc]
        return ids

    def encode_iterable(self, iterable: Iterable[str]) -> Iterator[int]:
        """Yield the ids of a text that comes in pieces; they are those of the whole text."""
        rest = ""
        for piece in iterable:
            rest += piece
            cut = self._last_cut(rest)
            yield from self.encode(rest[:cut])
            rest = rest[cut:]
        yield from self.encode(rest)

    def _last_cut(self, text: str) -> int:
        """Return the last place to cut the text: at the end of a word, in no special token."""
        end = len(text) - self._longest  # a special token may be half there
        cuts = (match.start() for match in CUT.finditer(text))
        cut = max((place for place in cuts if place <= end), default=0)
        for special in self._pattern.finditer(text):
            if special.start() < cut < special.end():
                return special.start()
        return cut

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join([self._bytes[i] for i in ids]).decode("utf-8", errors="replace")


def _tokenizer(tokens: Sequence[bytes], merges: Sequence[Pair]) -> Tokenizer:
    """Return a tokenizer whose ids are the places of the tokens, with GPT-2's rule for words."""

    def name(token: bytes) -> str:
        return "".join(ALPHABET[byte] for byte in token)

    vocabulary = {name(token): index for index, token in enumerate(tokens)}
    pairs = [(name(left), name(right)) for left, right in merges]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    inner.pre_tokenizer = WORDS
    inner.add_special_tokens([END_OF_TEXT])
    return Tokenizer(inner, "the vocabulary of the course")
