"""`tensorgrad classify`: classify sentences with a trained classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tensorgrad.data.text import standard_input
from tensorgrad.io.command import printable
from tensorgrad.train.load import load_classifier


def classify(
    run: Path, text: str | None = None, /, *, checkpoint: Literal["best", "last"] = "best"
) -> int:
    """Classify sentences with a trained classifier.

    Prints a line for each sentence: its class, the probability of it, and the sentence.

    Args:
        run: folder of a run of `tensorgrad train sentiment`.
        text: a sentence; without it, the lines of the input.
        checkpoint: the best by validation loss, or the last.
    """
    classifier = load_classifier(run, checkpoint)
    lines = [text] if text is not None else (line.strip() for line in standard_input())
    for line in lines:
        if line or text is not None:
            ((name, probability),) = classifier([line])
            print(printable(f"{name} ({probability:.1%}): {line}"), flush=True)
    return 0
