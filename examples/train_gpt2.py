"""Train a GPT-2 on text and print a sample: by default a small one, on Python's own library.

    python examples/train_gpt2.py
    python examples/train_gpt2.py --data my_texts --preset gpt2-124M --dtype bfloat16 --batch 32
    python examples/train_gpt2.py --resume runs/gpt2-1

The folder of a run gets config.json, tokenizer.json, metrics.jsonl, times.jsonl, samples.jsonl,
loss.png and checkpoints/. On Ctrl-C the run writes a checkpoint; --resume continues from it to the
same bits.

To follow a step: model, batches and loss are in tensorgrad/train/gpt2.py, the loop is in
tensorgrad/train/loop.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tensorgrad.command import command
from tensorgrad.parallel.program import run_program
from tensorgrad.train.language import LanguageModeling


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run_program(LanguageModeling, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
