"""Train a classifier that says whether a sentence is positive or negative.

    python examples/train_sentiment.py                      # SST-2, which datasets downloads
    python examples/train_sentiment.py --data my_folder --model transformer
    python examples/train_sentiment.py --data reviews       # synthetic sentences, no download
    python examples/train_sentiment.py --resume runs/sentiment-1
    tensorgrad classify runs/sentiment-1 "a warm , funny film"

A data folder has train.tsv and dev.tsv: a line with the names of the columns, then a label, 0 or 1,
and a sentence in each line. Accuracy on the dev set is measured after each epoch. To choose
settings, use --held-out: then it is measured on a held-out part of the training sentences.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tensorgrad.io.command import command
from tensorgrad.parallel.program import run_program
from tensorgrad.train.sentiment import Sentiment


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run_program(Sentiment, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
