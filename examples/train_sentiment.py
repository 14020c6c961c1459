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

from tensorgrad.command import command
from tensorgrad.parallel.comm.launch import check_one_process
from tensorgrad.train.command_line import read_command_line
from tensorgrad.train.device import choose_device
from tensorgrad.train.sentiment import SentimentSettings, train


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    check_one_process("train_sentiment.py")
    settings, folder, resuming = read_command_line(SentimentSettings, __doc__, arguments)
    settings, device = choose_device(settings)
    return train(settings, folder, resuming, device).status


if __name__ == "__main__":
    sys.exit(main())
