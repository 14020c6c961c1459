"""Byte-level BPE: text to token ids and back, lossless."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tensorgrad.core.checks import check_integer
from tensorgrad.core.errors import ArgumentError, DataError, DtypeError
from tensorgrad.data import tokenizer_file
from tensorgrad.data.limited_encoding import encode_limited
from tensorgrad.data.text import END_OF_TEXT, read_text, write_text
from tensorgrad.data.tokenizer_file import ALPHABET, BYTE_OF, TokenBytes, entry, named_errors
from tensorgrad.data.tokenizer_parts import PartError, check_added, takes_long
from tensorgrad.data.word_patterns import problem_of
from tensorgrad.io.display import call_text

SMALLEST_VOCABULARY = 257  # the bytes and the end of text
_LARGEST = 1 << 24  # the library takes memory for all tokens at once

# The BPE merges within words and never across them. GPT-2's rule for words in ASCII text:
_WORD = re.compile(
    r"'(?:[sdmt]|ll|re|ve)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII
)
# In any text a word ends before ASCII whitespace that follows a visible character. (Unicode has
# more whitespace, but Python and the tokenizers library do not agree on what it is.)
_CUT = re.compile(r"(?<=\S)(?=[ \t\n\r\f\v])")
# Runs longer than any word (the letters of a genome, say) would train for hours.
# The library's training takes n^2 steps for a word, or white space, of n characters.
_LONG_WORD = re.compile(r"(?<!\S)\S{1001}|(?<!\s)\s{1001}")
_SHORT_WORDS = re.compile(r"\s{0,1000}\S{1,1000}|\s{1,1000}")
_REMEMBERED = 1 << 21  # characters: a part may be a whole line where words have no spaces
_PIECE = 1 << 15  # characters; long strings cost the library much memory


class Tokenizer(TokenBytes):
    """A byte-level BPE vocabulary with GPT-2's rule for splitting text into words, or another.

    The 256 bytes are tokens, so any text can be encoded. A special token such as `<|endoftext|>`
    has an id, but `encode` never returns it: in a text it is encoded as text.
    Make one with `Tokenizer.train`, `Tokenizer.load` or `Tokenizer.from_gpt2`.

    Args:
        inner: a tokenizer of the tokenizers library.
        name: its description in errors, such as the path of its file.

    Raises:
        DataError: it is not a byte-level BPE of GPT-2's kind, lacks `<|endoftext|>` or one
            of the 256 bytes, its ids have gaps, or text gives a special token too.

    Example:
        >>> from tensorgrad.data import Tokenizer
        >>> tokenizer = Tokenizer.train(["low lower lowest"] * 9, vocab_size=260)
        >>> ids = tokenizer.encode("lower low")
        >>> [tokenizer.decode([id]) for id in ids]
        ['low', 'e', 'r', ' low']
    """

    def __init__(self, inner: tokenizers.Tokenizer, name: str) -> None:
        state = tokenizer_file.vocabulary_state(inner.to_str(), name)
        _check_kind(state, name)
        ids = inner.get_vocab(with_added_tokens=True)
        self._special = {t["content"]: int(t["id"]) for t in state["added_tokens"]}
        if END_OF_TEXT not in self._special:
            raise DataError(
                f"Tokenizer: {name} has the special tokens {list(self._special)!r:.200}, expected "
                f"{END_OF_TEXT!r} among them"
            )
        made = {*ALPHABET, *map("".join, tokenizer_file.merges_of(state["model"]["merges"], name))}
        text = sorted(made.intersection(self._special))
        if text:
            raise DataError(
                f"Tokenizer: {name} has the special token {text[0]!r}, which stands for text too; "
                "expected special tokens that are not a piece of a word, such as '<|user|>'"
            )
        inner.encode_special_tokens = True
        self._inner = inner
        self.special_ids = frozenset(self._special.values())
        self._pattern = _split_pattern(state)  # _parts cannot follow one
        self._takes_long, self._name = takes_long(state), name
        self._bytes = [self._bytes_of(token, name) for token in tokenizer_file.in_order(ids, name)]
        self._known: dict[str, list[int]] = {}
        self._remembered = 0  # characters
        self._byte_ids = [ids[character] for character in ALPHABET]

    def __repr__(self) -> str:
        return call_text(self, vocab_size=self.vocab_size, special_tokens=list(self._special))

    @classmethod
    def train(
        cls,
        documents: Iterable[str],
        vocab_size: int,
        special_tokens: Sequence[str] = (),
        *,
        pattern: str | None = None,
    ) -> Tokenizer:
        """Train a vocabulary on text; equal text gives an equal vocabulary.

        Args:
            documents: the text. Only its distinct words are held in memory.
            vocab_size: the number of tokens, including `<|endoftext|>` (id 0), the other special
                tokens and the 256 bytes. Little text may give fewer.
            special_tokens: more tokens that `encode` never returns.
            pattern: a regular expression (Oniguruma's, with `\\p{L}`) whose matches are the words;
                text between matches is a word too. None: GPT-2's rule. It is saved with the
                tokenizer.
        Returns:
            The tokenizer.
        Raises:
            ArgumentError: vocab_size is smaller than the bytes and special tokens, or a special
                token is empty or given twice, or the pattern is not a regular expression.
            DataError: the documents hold no text, or half of a surrogate pair.
            DtypeError: a document is not a str, or documents is a single str.
        Source: Sennrich et al. 2016, arXiv:1508.07909, section 3.2.
        """
        specials = [END_OF_TEXT, *special_tokens]
        if isinstance(special_tokens, str) or not all(isinstance(one, str) for one in specials):
            raise ArgumentError(
                f"Tokenizer.train: special_tokens is {special_tokens!r}, expected a list of texts"
            )
        for _ in _whole_characters("Tokenizer.train", specials):
            pass
        if len(set(specials)) != len(specials) or "" in specials:
            raise ArgumentError(
                f"Tokenizer.train: special_tokens has {list(special_tokens)}, "
                f"expected distinct, not empty, without {END_OF_TEXT!r}"
            )
        try:
            check_added([{"content": token} for token in specials])
        except PartError as error:
            part, expected = error.args
            raise ArgumentError(
                f"Tokenizer.train: special_tokens has {part}, expected {expected}"
            ) from error
        smallest = SMALLEST_VOCABULARY + len(special_tokens)
        check_integer("Tokenizer.train", "vocab_size", vocab_size)
        if not smallest <= vocab_size < _LARGEST:
            raise ArgumentError(
                f"Tokenizer.train: vocab_size has {vocab_size}, expected {smallest} or more "
                f"(256 bytes and {len(specials)} special tokens) and below 2^24"
            )
        check_pattern("Tokenizer.train", pattern)
        inner = tokenizers.Tokenizer(models.BPE())
        _complete(inner, pattern)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            show_progress=False,
            special_tokens=specials,
            initial_alphabet=ALPHABET,
        )
        texts = filter(None, _texts("Tokenizer.train", documents))
        first = next(texts, None)
        if first is None:
            raise DataError("Tokenizer.train: documents has no text, expected some")
        pieces = (piece for text in itertools.chain([first], texts) for piece in _pieces(text))
        inner.train_from_iterator(_whole_characters("Tokenizer.train", pieces), trainer)
        return cls(inner, "the trained vocabulary")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a tokenizer.json that `save` or the tokenizers library wrote, or that of a folder.

        A folder may have vocab.json and merges.txt of GPT-2 in place of tokenizer.json.

        Raises:
            DataError: the file is missing, damaged, or not a byte-level BPE of GPT-2's kind.
        """
        file = tokenizer_file.vocabulary_file(Path(path))
        if file.name == "vocab.json":
            return cls.from_gpt2(file, file.with_name("merges.txt"))
        text = read_text(file)
        state = tokenizer_file.vocabulary_state(text, str(file))
        _check_kind(state, str(file))
        tokenizer_file.check_file(state, str(file))
        return cls(tokenizer_file.inner_tokenizer(text, str(file)), str(file))

    @classmethod
    def from_gpt2(
        cls, vocab_file: str | os.PathLike[str], merges_file: str | os.PathLike[str]
    ) -> Tokenizer:
        """Read the two files in which GPT-2's vocabulary is published.

        Args:
            vocab_file: vocab.json, from token to id.
            merges_file: merges.txt, one pair a line in order of priority. Either may be .gz.
        Returns:
            The tokenizer; `<|endoftext|>` is its special token.
        Raises:
            DataError: a file is missing or damaged, or they do not fit together: the pairs of
                merges.txt must make all tokens of vocab.json and no others.
        """
        vocabulary = tokenizer_file.vocabulary_state(read_text(vocab_file), os.fspath(vocab_file))
        _check_needed(vocabulary, os.fspath(vocab_file))
        tokenizer_file.check_ids(vocabulary, len(vocabulary), os.fspath(vocab_file))
        lines = read_text(merges_file).split("\n")
        rules = [line.removesuffix("\r") for line in lines if not line.startswith("#version")]
        merges = list(tokenizer_file.merges_of(filter(None, rules), os.fspath(merges_file)))
        tokenizer_file.check_merges(merges, vocabulary, os.fspath(merges_file))
        made = {*ALPHABET, *map("".join, merges)}
        lost = [
            token
            for token in vocabulary
            if token not in made and (token[:1], token[-1:]) != ("<", ">")  # special ones
        ]
        if lost:
            raise DataError(
                f"Tokenizer.from_gpt2: {merges_file} has {len(merges):,} merges, none of which "
                f"makes {lost[0]!r:.80} of {vocab_file}, expected one for each token: is it cut "
                "short?"
            )
        with named_errors(
            f"Tokenizer.from_gpt2: {vocab_file} and {merges_file} do not fit together"
        ):
            inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        _complete(inner)
        inner.add_special_tokens([END_OF_TEXT])
        return cls(inner, str(vocab_file))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a tokenizer.json, which `load` and the tokenizers library read.

        Raises:
            DataError: the file cannot be written; an existing one is unchanged.
        """
        write_text("Tokenizer.save", path, self.to_json())

    def to_json(self) -> str:
        """Return the content of the file that `save` writes; equal tokenizers give equal text."""
        return self._inner.to_str(pretty=True)

    @property
    def digest(self) -> str:
        """The SHA-256 of `to_json`, in hexadecimal: equal for equal tokenizers."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def pattern(self) -> str | None:
        """The regular expression of its words; None: GPT-2's rule."""
        return self._pattern

    @property
    def end_of_text(self) -> int:
        """The id of `<|endoftext|>`, which ends every document of a token file."""
        return self._special[END_OF_TEXT]

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The ids that end a text: `<|endoftext|>` alone."""
        return (self.end_of_text,)

    @property
    def start_token(self) -> int:
        """The id after which a document begins: `<|endoftext|>`, which ended the one before."""
        return self.end_of_text

    @property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens and their ids."""
        return dict(self._special)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text.

        Raises:
            DataError: the text has half of a surrogate pair, which no UTF-8 text has, or `pattern`
                takes too long: see `encode_limited`.
            DtypeError: it is not a str.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, faster than one by one.

        Raises:
            DataError: as for `encode`.
            DtypeError: one is not a str, or texts is a single str.
        """
        texts = list(_texts("Tokenizer.encode", texts))
        if self._pattern is not None:
            whole = list(_whole_characters("Tokenizer.encode", texts))
            if self._takes_long:
                return encode_limited(self._inner, whole, False, f"Tokenizer.encode: {self._name}")
            encodings = self._inner.encode_batch_fast(whole, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        parts = [_parts(text) for text in texts]
        if self._remembered > _REMEMBERED:
            self._known, self._remembered = {}, 0
        known = self._known  # text repeats its words, and looking one up is fast
        distinct = {part for text in parts for part in text if part not in known}
        new = list(_whole_characters("Tokenizer.encode", distinct))
        encodings = self._inner.encode_batch_fast(new, add_special_tokens=False)
        known.update(zip(new, (encoding.ids for encoding in encodings), strict=True))
        self._remembered += sum(map(len, new))
        return [[i for part in text for i in known[part]] for text in parts]

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return ids that `decode_bytes` turns back into exactly these bytes, UTF-8 or not."""
        ids: list[int] = []
        # "surrogateescape" turns a byte b that is not UTF-8 into U+DC00 + b.
        pieces = re.split("([\udc80-\udcff]+)", data.decode("utf-8", "surrogateescape"))
        for position, piece in enumerate(pieces):
            if position % 2:
                ids += [self._byte_ids[ord(character) - 0xDC00] for character in piece]
            else:
                ids += self.encode(piece)
        return ids

    def _bytes_of(self, token: str, name: str) -> bytes:
        if token in self._special:
            return token.encode()
        try:
            return bytes([BYTE_OF[ord(character)] for character in token])
        except KeyError as error:
            raise DataError(
                f"Tokenizer: {name} has the token {token!r:.80}, "
                "expected only the characters that stand for bytes"
            ) from error


def check_pattern(op: str, pattern: str | None) -> None:
    """Raise ArgumentError unless a pattern is None or a regular expression for words."""
    if pattern is None:
        return
    if not isinstance(pattern, str) or not pattern:
        raise ArgumentError(f"{op}: pattern is {pattern!r:.80}, expected a regular expression")
    try:
        tokenizers.Regex(pattern)
    except Exception as error:  # the library raises plain ones
        raise ArgumentError(
            f"{op}: pattern is {pattern!r:.200}, expected a regular expression: {error}"
        ) from error
    problem = problem_of(pattern)
    if problem:
        raise ArgumentError(
            f"{op}: pattern is {pattern!r:.200}, expected one that is matched soon: {problem}"
        )


def _complete(inner: tokenizers.Tokenizer, pattern: str | None = None) -> None:
    """Set the pre-tokenizer, GPT-2's rule for words or a pattern, and the decoder."""
    words: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        words = pre_tokenizers.Sequence([split, words])
    inner.pre_tokenizer = words
    inner.decoder = decoders.ByteLevel()


def _split_pattern(state: Mapping[str, Any]) -> str | None:
    """Return the regular expression that splits text before the byte-level step, if there is one.

    Args:
        state: of a tokenizer.json.
    """
    match state.get("pre_tokenizer"):
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(pattern)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "use_regex": False},
            ],
        }:
            return pattern
    return None


def _check_needed(tokens: Collection[str], name: str) -> None:
    """Raise DataError where a byte or the end of text has no token."""
    missing = [token for token in (END_OF_TEXT, *ALPHABET) if token not in tokens]
    if missing:
        raise DataError(
            f"Tokenizer: {name} lacks {len(missing)} needed tokens, such as {missing[0]!r}; "
            f"expected {END_OF_TEXT!r} and one token for each of the 256 bytes"
        )


def _check_kind(state: dict[str, Any], name: str) -> None:
    """Raise DataError where the tokenizer does not merge as GPT-2's does, or splits otherwise."""
    words: Any = state.get("pre_tokenizer")
    normalizer = state.get("normalizer")
    has_pattern = _split_pattern(state) is not None
    if has_pattern:
        words = words["pretokenizers"][1]
    words = words if isinstance(words, dict) else {"type": words}
    normalizer = normalizer if isinstance(normalizer, dict) else {"type": normalizer}
    model = entry(state, "model", dict, name)
    added = entry(state, "added_tokens", list, name)
    for key, found, expected in (
        ("model", model.get("type", "BPE"), "BPE"),  # old files lack it
        ("pre_tokenizer", words.get("type"), "ByteLevel"),
        ("add_prefix_space", words.get("add_prefix_space"), False),
        ("use_regex", words.get("use_regex", True), not has_pattern),
        ("normalizer", normalizer.get("type"), None),
        ("dropout", model.get("dropout"), None),
        ("ignore_merges", bool(model.get("ignore_merges")), False),
        ("continuing_subword_prefix", model.get("continuing_subword_prefix") or None, None),
        ("end_of_word_suffix", model.get("end_of_word_suffix") or None, None),
        ("special", all(entry(token, "special", bool, name) for token in added), True),
    ):
        if found != expected:
            raise DataError(f"Tokenizer: {name} has {key} {found!r:.80}, expected {expected!r}")
    contents = [entry(token, "content", str, name) for token in added]
    _check_needed({*entry(model, "vocab", dict, name), *contents}, name)


def _texts(name: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts; raise DtypeError at one that is not a str."""
    if isinstance(texts, str):
        raise DtypeError(f"{name}: texts is a str, expected a list of them")
    for text in texts:
        if not isinstance(text, str):
            raise DtypeError(f"{name}: text is a {type(text).__name__}, expected a str")
        yield text


def _parts(text: str) -> list[str]:
    """Split a text where words end: at each end in ASCII text, only at certain ones in other."""
    return _WORD.findall(text) if text.isascii() else _CUT.split(text)


def _pieces(text: str) -> Iterator[str]:
    """Yield a text for training in pieces that end where words do; long words are cut."""
    if _LONG_WORD.search(text):
        yield from _SHORT_WORDS.findall(text)
        return
    start = 0
    while cut := _CUT.search(text, start + _PIECE):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _whole_characters(name: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts; raise DataError at half of a surrogate pair, which UTF-8 cannot write."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{name}: text has {text[error.start]!r}, half of a surrogate pair, "
                "expected text that can be written as UTF-8"
            ) from error
        yield text
