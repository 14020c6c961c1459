"""Streaming detokenization. Tests: tests/data/test_text_stream.py."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tensorgrad.core.errors import ArgumentError
from tensorgrad.data.tokenizer_file import TokenBytes


class TextStream:
    """Turn tokens into text as they come, whole characters only, up to a stop text.

    A token may end inside a character: its bytes are held back until the next token. So is text
    that may be the beginning of one of `stops`. Bytes that are not UTF-8 become U+FFFD. Special
    tokens are skipped, unless one is in `stops`.

    Args:
        tokenizer: the Tokenizer or PublishedTokenizer of the tokens.
        stops: the first of these texts ends the stream and is not part of it.
        begins: whether the tokens begin a text instead of continuing one: SentencePiece's blank
            before the first word is then dropped.

    Attributes:
        ended: whether one of `stops` was found.

    Raises:
        ArgumentError: one of `stops` is empty.

    Example:
        >>> from tensorgrad.data import TextStream, Tokenizer
        >>> tokenizer = Tokenizer.train(["low lower lowest"], 257)
        >>> stream = TextStream(tokenizer, stops=["st."])
        >>> [stream.add(token) for token in tokenizer.encode("lowest. low")][:6]
        ['l', 'o', 'w', 'e', '', '']
        >>> stream.ended
        True
    """

    def __init__(
        self, tokenizer: TokenBytes, stops: Sequence[str] = (), begins: bool = False
    ) -> None:
        if "" in stops:
            raise ArgumentError("TextStream: stops has '', expected texts of a character or more")
        self.ended = False
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = ""
        self._blanks = tokenizer.blanks if begins else 0  # to drop

    def add(self, token: int) -> str:
        """Return the text that is complete with this token; it may be empty.

        Raises:
            DataError: the token is outside the vocabulary.
        """
        data = self._tokenizer.decode_bytes([token])
        if token in self._tokenizer.special_ids and data.decode() not in self._stops:
            return ""
        text = self._decoder.decode(data)
        while text and self._blanks:
            text, self._blanks = text.removeprefix(" "), self._blanks - 1 if text[0] == " " else 0
        return self._take(text, False)

    def rest(self) -> str:
        """Return the text held back, after the last token."""
        return self._take(self._decoder.decode(b"", True), True)

    def _take(self, text: str, last: bool) -> str:
        if self.ended:
            return ""
        text = self._waiting + text
        found = [(p + len(stop), p) for stop in self._stops if (p := text.find(stop)) >= 0]
        if found:
            self.ended, self._waiting = True, ""
            _, place = min(found)  # the first to end; among several, the longest
            return text[:place]
        kept = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._waiting = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that a stop begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
