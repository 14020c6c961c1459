"""Train a decoder to translate, by default from German to English, and measure BLEU.

    python examples/train_translation.py --data phrases    # no download, minutes on two CPU cores
    python examples/train_translation.py --dtype bfloat16  # IWSLT14, which datasets downloads
    python examples/train_translation.py --data my_folder --preset large --dtype bfloat16
    python examples/train_translation.py --resume workdir_vocab10000_lr0.001_embd256
    python examples/train_translation.py --resume workdir_vocab10000_lr0.001_embd256 --beams 4

A data folder has train, valid and test files with one sentence a line: train.de, train.en and so
on. After each epoch the run writes a checkpoint and eval_results_epoch{n}.json with loss, BLEU and
all translations. translate.py translates with the trained model. A finished run that is resumed
averages and translates again, as with other --beams.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tensorgrad.io.command import command
from tensorgrad.parallel.program import run_program
from tensorgrad.train.translation import Translation


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run_program(Translation, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
