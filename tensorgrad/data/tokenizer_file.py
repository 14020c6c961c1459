"""The parts that all tokenizers share: the bytes of tokens, and checks of a tokenizer.json.

The tokenizers library panics at some damaged files, or takes memory without end. Tests:
tests/data/test_tokenizer.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tensorgrad.core.errors import DataError, DtypeError
from tensorgrad.data.tokenizer_parts import check_parts
from tensorgrad.io.readers import VOCABULARY_BYTES, parse_json


def _byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in GPT-2's vocabulary files.

    Visible Latin-1 characters stand for themselves, the other bytes are numbered from U+0100.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


ALPHABET = _byte_alphabet()
# Counts in a tokenizer.json; published models have half a million tokens and pairs at most.
_VALUES = {",": 4_000_000, ":": 700_000, "{": 100_000, "[": 2_000_000}
BYTE_OF = {ord(character): byte for byte, character in enumerate(ALPHABET)}


class TokenBytes:
    """A vocabulary in which each token stands for bytes, whatever is around it.

    Attributes:
        special_ids: the ids of special tokens, such as `<|endoftext|>`.
        blanks: how many blanks `decode` drops before a text: SentencePiece adds one.
    """

    _bytes: Sequence[bytes]
    special_ids: frozenset[int]
    blanks = 0

    @property
    def vocab_size(self) -> int:
        """The number of tokens; ids are 0 to vocab_size - 1."""
        return len(self._bytes)

    @property
    def start_token(self) -> int | None:
        """The id after which a document begins; None where the tokenizer has none."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        raise NotImplementedError

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text to continue; an empty text begins a document.

        Raises:
            DataError: as for `encode`; or the text is empty and there is no `start_token`.
            DtypeError: it is not a str.
        """
        ids = self.encode(text)
        if ids:
            return ids
        if self.start_token is None:
            raise DataError(
                "Tokenizer.encode_prompt: text is empty and the tokenizer names no token that "
                "begins or ends a document, expected some text"
            )
        return [self.start_token]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: the tokens.
            skip_special_tokens: whether to omit special tokens.
        Raises:
            DataError: an id is outside the vocabulary.
            DtypeError: one is not an integer.
        """
        return self.decode_bytes(ids, skip_special_tokens).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], skip_special_tokens: bool = False) -> bytes:
        """Return the bytes of token ids; a token may end inside a character.

        Args:
            ids, skip_special_tokens: as for `decode`.
        Raises:
            DataError: an id is outside the vocabulary.
            DtypeError: one is not an integer.
        """
        ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        odd = [i for i in ids if not hasattr(i, "__index__")]
        if odd:
            raise DtypeError(f"Tokenizer.decode: ids has {odd[0]!r}, expected integers, one axis")
        unknown = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if unknown is not None:
            raise DataError(
                f"Tokenizer.decode: ids has {unknown}, expected 0 to {self.vocab_size - 1} "
                f"(a vocabulary of {self.vocab_size})"
            )
        skipped: frozenset[int] = self.special_ids if skip_special_tokens else frozenset()
        return b"".join([self._bytes[i] for i in ids if i not in skipped])


def vocabulary_file(path: Path) -> Path:
    """Return the file with the vocabulary: the path, or that of the tokenizer in a folder.

    A folder has tokenizer.json, or vocab.json of GPT-2 with merges.txt beside it.
    """
    if not path.is_dir():
        return path
    file, former = path / "tokenizer.json", path / "vocab.json"
    return former if former.exists() and not file.exists() else file


@contextmanager
def named_errors(problem: str) -> Iterator[None]:
    """Turn what the tokenizers library raises into a DataError that begins with the problem."""
    try:
        yield
    except BaseException as error:
        # A Rust panic is not an Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{problem}: {error!s:.300}") from error


def vocabulary_state(text: str, name: str) -> dict[str, Any]:
    """Return the object of a tokenizer.json or vocab.json, which may have half a million tokens.

    Raises:
        DataError: it is none, or has more values than can be read soon.
    """
    for sign, most in _VALUES.items():
        if text.count(sign) > most:
            raise DataError(
                f"Tokenizer: {name} has {text.count(sign):,} times {sign!r}, expected at most "
                f"{most:,}"
            )
    return parse_json(text, name, limit=VOCABULARY_BYTES)


def inner_tokenizer(text: str, name: str) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a tokenizer.json that was checked; raise DataError."""
    with named_errors(f"Tokenizer: {name} is not a tokenizer.json"):
        inner = tokenizers.Tokenizer.from_str(text)
        inner.no_truncation()
        inner.no_padding()
    return inner


def check_file(state: dict[str, Any], name: str) -> None:
    """Raise DataError for a tokenizer.json that is no BPE, or that the library must not read."""
    model, added = entry(state, "model", dict, name), entry(state, "added_tokens", list, name)
    if model.get("type", "BPE") != "BPE":  # old files lack it
        raise DataError(
            f"Tokenizer: {name} has a model of type {model['type']!r:.80}, expected 'BPE'"
        )
    vocabulary = entry(model, "vocab", dict, name)
    check_merges(merges_of(entry(model, "merges", list, name), name), vocabulary, name)
    ids = {entry(token, "content", str, name): token.get("id") for token in added}
    for tokens in (vocabulary, ids):
        check_ids(tokens, len(vocabulary | ids), name)
    check_parts(state, len(vocabulary | ids), name)


def in_order(ids: Mapping[str, int], name: str) -> list[str]:
    """Return the tokens by their ids; raise DataError where these have gaps."""
    tokens = sorted(ids, key=ids.__getitem__)
    if any(ids[token] != number for number, token in enumerate(tokens)):
        raise DataError(
            f"Tokenizer: {name} has {len(ids)} tokens with ids up to {ids[tokens[-1]]}, "
            f"expected ids 0 to {len(ids) - 1} without gaps"
        )
    return tokens


def check_ids(vocabulary: Mapping[str, Any], count: int, name: str) -> None:
    """Raise DataError at an id that is not one of 0 to count - 1.

    The library takes memory up to the largest id, and aborts the process when there is too little.
    """
    for token, index in vocabulary.items():
        if type(index) is not int or not 0 <= index < count:
            raise DataError(
                f"Tokenizer: {name} has the id {index!r:.80} for {token!r:.80}, "
                f"expected 0 to {count - 1} without gaps"
            )


def entry(state: Any, key: str, kind: type[Any], name: str) -> Any:
    """Return the value of a key of a JSON object; raise DataError unless it has the type."""
    found = state.get(key) if isinstance(state, dict) else None
    if not isinstance(found, kind):
        raise DataError(
            f"Tokenizer: {name} is not a tokenizer.json: it has {key} {found!r:.80}, "
            f"expected a {kind.__name__}"
        )
    return found


def merges_of(pairs: Iterable[Any], name: str) -> Iterator[tuple[str, str]]:
    """Yield the merges of a BPE; older files have a pair as one text."""
    for pair in pairs:
        parts = pair.split(" ") if isinstance(pair, str) else pair
        if not isinstance(parts, list) or [type(part) for part in parts] != [str, str]:
            raise DataError(f"Tokenizer: {name} has the merge {pair!r:.80}, expected two tokens")
        yield parts[0], parts[1]


def check_merges(
    merges: Iterable[tuple[str, str]], vocabulary: Mapping[str, Any], name: str
) -> None:
    """Raise DataError where a merge has or makes an unknown token: the library may panic."""
    for left, right in merges:
        lost = next((t for t in (left, right, left + right) if t not in vocabulary), None)
        if lost is not None:
            raise DataError(
                f"Tokenizer: {name} has the merge {(left, right)!r:.80}, expected tokens of the "
                f"vocabulary: {lost!r:.80} is not one"
            )
