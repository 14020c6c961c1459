"""Encoding in a process of its own, for texts and tokenizers that may take long together.

Tests: tests/data/test_tokenizer_parts.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tokenizers

from tensorgrad.data import encode_program
from tensorgrad.data.limited import run_limited
from tensorgrad.errors import DataError
from tensorgrad.readers import parse_json

__all__ = ["encode_limited"]

_SECONDS, _MEMORY = 8.0, 2 << 30


def encode_limited(
    inner: tokenizers.Tokenizer, text: str, with_special: bool, name: str
) -> list[int]:
    """Return the ids of a text.

    Args:
        inner: the library's tokenizer.
        text: to encode.
        with_special: whether to add the special tokens that the model expects.
        name: of the tokenizer, for errors.
    Raises:
        DataError: it takes more than 8 s or 2 GB, or the text cannot be encoded.
    """
    given = {
        "path": [str(Path(tokenizers.__file__).parents[1])],
        "tokenizer": inner.to_str(),
        "text": text,
        "with_special": with_special,
    }
    command = [sys.executable, "-I", "-S", "-B", encode_program.__file__]
    output = (1 << 20) + 1000 * len(text)
    problem = f"PublishedTokenizer.encode: {text[:30]!r} cannot be encoded by that of {name}"
    try:
        finished = run_limited(
            command,
            ascii(given).encode(),
            seconds=_SECONDS,
            memory=_MEMORY,
            output=output,
            environment={"TOKENIZERS_PARALLELISM": "false"},
        )
        if finished.status == 0 and not finished.is_cut:
            found = parse_json(finished.output.decode(), "its ids", limit=output)
            ids: list[int] = found["ids"]
            return ids
    except TimeoutError as error:
        raise DataError(f"{problem}: it took more than {_SECONDS:g} s") from error
    except OSError as error:
        raise DataError(f"{problem}: {sys.executable!r} cannot be started: {error}") from error
    raise DataError(f"{problem}: its process ended with status {finished.status}")
