"""Token files: a corpus as one flat .npy array of ids, streamed to disk, memory-mapped to read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tensorgrad.core.errors import DataError, DtypeError
from tensorgrad.data.published_tokenizer import PublishedTokenizer
from tensorgrad.data.tokenizer import Tokenizer
from tensorgrad.io.display import call_text
from tensorgrad.io.files import replacing
from tensorgrad.io.readers import map_array

Tokens = np.ndarray[Any, Any]  # (N,), uint16 or uint32

_BATCH_CHARACTERS = 1 << 20
_CHECKED_TOKENS = 1 << 24


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of the ids 0 to vocab_size - 1 in a token file.

    Args:
        vocab_size: the number of tokens, at most 2^32.

    Returns:
        uint16 up to 65,536 tokens, otherwise uint32.

    Example:
        >>> from tensorgrad.data import token_dtype
        >>> token_dtype(50257), token_dtype(128256)
        (dtype('uint16'), dtype('uint32'))
    """
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_tokens(
    path: str | os.PathLike[str],
    documents: Iterable[str],
    tokenizer: Tokenizer | PublishedTokenizer,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Encode documents into a token file, each followed by the end-of-text token.

    The documents are read one by one, so they may be larger than memory. The file appears under
    its name only when it is complete.

    Args:
        path: the .npy file to write or replace, of the dtype `token_dtype`.
        documents: the texts.
        tokenizer: the tokenizer that encodes them.
        progress: called now and then with the characters read and the tokens written so far.

    Returns:
        The number of tokens written.

    Raises:
        DataError: documents is empty, or the file cannot be written (a full disk); an existing
            file is then unchanged.
        DtypeError: the documents are one text instead of a list.

    Example:
        >>> from tensorgrad.data import Tokenizer, write_tokens
        >>> tokenizer = Tokenizer.train(["the cat sat"], 257)
        >>> write_tokens("train.npy", ["the", "cat"], tokenizer)
        8
        >>> tokenizer.decode(np.load("train.npy").tolist())
        'the<|endoftext|>cat<|endoftext|>'
    """
    if isinstance(documents, str):
        raise DtypeError("write_tokens: documents is a str, expected a list of them")
    dtype = token_dtype(tokenizer.vocab_size)
    characters = count = 0
    try:
        with replacing(path) as file:
            _write_header(file, dtype, 0)
            for batch in _batches(documents):
                ids = chain.from_iterable(
                    (*text, tokenizer.end_of_text) for text in tokenizer.encode_batch(batch)
                )
                array = np.fromiter(ids, dtype)
                file.write(array.data)
                count += array.size
                characters += sum(map(len, batch))
                if progress:
                    progress(characters, count)
            if count == 0:
                raise DataError("write_tokens: documents has no text, expected some")
            file.seek(0)
            _write_header(file, dtype, count)
    except OSError as error:
        raise DataError(
            f"write_tokens: cannot write {path} after {count:,} tokens: {error.strerror}; "
            "what was there before is unchanged"
        ) from error
    return count


@dataclass(frozen=True)
class TokenFile:
    """An open token file.

    Attributes:
        path: the .npy file.
        tokens: (N,) uint16 or uint32, memory-mapped: indexing reads from the disk.
        vocab_size: the number that all ids are below.

    Example:
        >>> from tensorgrad.data import TokenFile
        >>> np.save("train.npy", np.array([2, 0, 1], np.uint16))
        >>> file = TokenFile.open("train.npy", vocab_size=3)
        >>> file, file.tokens.tolist()
        (TokenFile('train.npy', tokens=3, vocab_size=3), [2, 0, 1])
    """

    path: Path
    tokens: Tokens
    vocab_size: int

    def __repr__(self) -> str:
        sizes = {"tokens": self.tokens.size, "vocab_size": self.vocab_size}
        return call_text(self, repr(str(self.path)), **sizes)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], vocab_size: int, *, check_ids: bool = True
    ) -> TokenFile:
        """Map a token file into memory.

        Args:
            path: a .npy file with one axis, uint16 or uint32.
            vocab_size: ids must be below it.
            check_ids: whether to read the whole file for ids outside the vocabulary.
        Returns:
            The open file.
        Raises:
            DataError: the file is missing, truncated, not such a file, empty, or holds an id
                outside the vocabulary (at which position).
        """
        path = Path(path)
        try:
            tokens = map_array(path)
        except OSError as error:
            raise DataError(f"TokenFile.open: cannot read {path}: {error.strerror}") from error
        if tokens.dtype not in (token_dtype(0), token_dtype(1 << 32)) or tokens.ndim != 1:
            raise DataError(
                f"TokenFile.open: {path} has dtype {tokens.dtype} and shape {tokens.shape}, "
                "expected uint16 or uint32 and one axis"
            )
        if not tokens.size:
            raise DataError(f"TokenFile.open: {path} has 0 tokens, expected some")
        if check_ids:
            _check_ids(path, tokens, vocab_size)
        return cls(path, tokens, vocab_size)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.tokens.size


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Group documents into batches of about a million characters to encode together."""
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_header(file: BinaryIO, dtype: np.dtype[Any], count: int) -> None:
    """Write the .npy header; NumPy pads it so that it has the same length for every count."""
    header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)


def _check_ids(path: Path, tokens: Tokens, vocab_size: int) -> None:
    """Raise DataError at the first id outside the vocabulary."""
    if vocab_size > np.iinfo(tokens.dtype).max:
        return
    for start in range(0, tokens.size, _CHECKED_TOKENS):
        part = tokens[start : start + _CHECKED_TOKENS]
        if part.max() >= vocab_size:
            position = int(np.argmax(part >= vocab_size))
            raise DataError(
                f"TokenFile.open: {path} has the id {part[position]} at position "
                f"{start + position:,}, expected 0 to {vocab_size - 1} "
                f"(a vocabulary of {vocab_size})"
            )
