"""Encoding in a process of its own, for texts and tokenizers that may take long together.

Tests: tests/data/test_tokenizer_parts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from tensorgrad.data import encode_program
from tensorgrad.data.limited import run_program
from tensorgrad.data.tokenizer_file import named_errors

_LONG = 2000  # characters of a text whose encoding may take long
_SECONDS, _MEMORY = 8.0, 2 << 30
_SLOWEST = 100_000  # characters a second, of a text that is too long for the limits above
_WIDEST = 1000  # bytes a character, likewise


def encode_limited(
    inner: tokenizers.Tokenizer, texts: Sequence[str], with_special: bool, op: str
) -> list[list[int]]:
    """Return the ids of each text: long ones are encoded in a process of their own.

    Args:
        inner: the library's tokenizer.
        texts: to encode.
        with_special: whether to add the special tokens that the model expects.
        op: what encodes, with the name of the tokenizer, for errors.
    Raises:
        DataError: a text cannot be encoded; or the long ones take more than 8 s or 2 GB, or where
            that is more 10 s and 1 GB a million characters.
    """
    short = [text for text in texts if len(text) <= _LONG]
    long = [text for text in texts if len(text) > _LONG]
    with named_errors(f"{op}: {''.join(short)[:30]!r} cannot be encoded"):
        encodings = inner.encode_batch_fast(short, add_special_tokens=with_special)
    ids = iter([encoding.ids for encoding in encodings])
    ids_of_long = iter(_run(inner, long, with_special, op) if long else [])
    return [next(ids_of_long if len(text) > _LONG else ids) for text in texts]


def _run(
    inner: tokenizers.Tokenizer, texts: Sequence[str], with_special: bool, op: str
) -> list[list[int]]:
    """Return the ids of each text, from the program."""
    given = {
        "path": [str(Path(tokenizers.__file__).parents[1])],
        "tokenizer": inner.to_str(),
        "special_as_text": inner.encode_special_tokens,
        "texts": list(texts),
        "with_special": with_special,
    }
    size = sum(map(len, texts))
    found = run_program(
        encode_program,
        given,
        f"{op}: {texts[0][:30]!r} cannot be encoded",
        seconds=max(_SECONDS, size / _SLOWEST),
        memory=max(_MEMORY, _WIDEST * size),
        output=(1 << 20) + 1000 * size,
    )
    ids: list[list[int]] = found["ids"]
    return ids
