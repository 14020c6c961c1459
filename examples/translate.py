"""Translate a sentence with a model trained by train_translation.py, on the CPU or a GPU.

    python examples/translate.py workdir_vocab10000_lr0.001_embd256 "wie geht es dir?"

`tensorgrad translate` has options, and translates files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App

from tensorgrad.io.command import command
from tensorgrad.train.command_line import run_app
from tensorgrad.train.load import load_translator


def translate(run: Path, text: str, /) -> None:
    """Translate a sentence.

    Args:
        run: folder of a run of train_translation.py.
        text: to translate.
    """
    translator = load_translator(run)
    print(translator([text], beams=4)[0])


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_app(App("python examples/translate.py", default_command=translate), arguments)


if __name__ == "__main__":
    sys.exit(main())
