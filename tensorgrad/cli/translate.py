"""`tensorgrad translate`: translate text with a trained translation model."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tensorgrad.core.errors import ArgumentError
from tensorgrad.data.text import standard_input
from tensorgrad.io.command import harmless
from tensorgrad.train.load import load_translator

_LINES = 1000  # lines of a file in a batch


def translate(
    run: Path,
    text: str | None = None,
    /,
    *,
    checkpoint: Literal["best", "last", "averaged"] = "best",
    beams: int = 4,
    length_penalty: float = 0.6,
    batch: int = 128,
    device: str = "auto",
) -> int:
    """Translate text with a trained translation model.

    Without a text the lines of the input are translated: from a terminal one by one, from a file or
    a pipe in batches.

    Args:
        run: folder of a run of `tensorgrad train translation`.
        text: to translate; without it, the lines of the input.
        checkpoint: the best by validation loss, the last, or the average of the last ones.
        beams: of beam search; 1: greedy.
        length_penalty: exponent; larger favours long translations.
        batch: sequences at a time.
        device: cpu, cuda, cuda:N, or auto: a GPU if there is one.
    """
    if text is not None and not text.strip():
        raise ArgumentError("text: it is empty, expected something to translate")
    translator = load_translator(run, checkpoint, device)
    for lines in _batches(text):
        for line in translator(lines, beams, length_penalty, batch):
            one = " ".join(line.splitlines())  # for each input line
            print(harmless(one), flush=True)
    return 0


def _batches(text: str | None) -> Iterator[list[str]]:
    """Yield batches of lines."""
    if text is not None:
        yield text.splitlines()
        return
    lines = iter(standard_input().readline, "")
    while batch := list(itertools.islice(lines, 1 if sys.stdin.isatty() else _LINES)):
        yield [line.removeprefix("\ufeff") for line in batch]  # a byte order mark is not text
