"""Translate a sentence with a model trained by train_translation.py, on the CPU or a GPU.

    python examples/translate.py workdir_vocab10000_lr0.001_embd256 "wie geht es dir?"

`tensorgrad translate` has options, and translates files.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tensorgrad.train.load import load_translator

if __name__ == "__main__":
    run, text = sys.argv[1:]
    translator = load_translator(Path(run))
    print(translator([text], beams=4)[0])
