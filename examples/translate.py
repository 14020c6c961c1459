"""Translate text with a model trained by train_translation.py.

    python examples/translate.py workdir_vocab10000_lr0.001_embd256 "wie geht es dir?"
    python examples/translate.py workdir_vocab10000_lr0.001_embd256 < german.txt > english.txt

Without a text the program translates the lines of its input: from a terminal one by one, from a
file or a pipe in batches.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorgrad import backend
from tensorgrad.command import command
from tensorgrad.data import Tokenizer
from tensorgrad.data.text import standard_input
from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.models.restore import restore
from tensorgrad.models.translation import TranslationConfig, TranslationModel, generate
from tensorgrad.train import load_best, load_latest
from tensorgrad.train.checkpoint import check_same
from tensorgrad.train.translation import AVERAGED
from tensorgrad.weights import load_arrays

log = logging.getLogger("translate")
LINES = 1000  # of a file in a batch


@dataclass(frozen=True)
class Translator:
    """A trained model with its tokenizer, languages and case."""

    model: TranslationModel
    tokenizer: Tokenizer
    source: str
    target: str
    lowercase: bool

    def __call__(
        self, lines: Sequence[str], beams: int = 1, length_penalty: float = 0.6, rows: int = 128
    ) -> list[str]:
        """Return the translations; empty lines stay empty, long ones are cut with a warning."""
        texts = [line.lower() if self.lowercase else line for line in map(str.strip, lines)]
        longest = self.model.context // 2 - 1
        for text, ids in zip(texts, self.tokenizer.encode_batch(texts), strict=True):
            if len(ids) > longest:
                log.warning(
                    "%r... has %d tokens, expected at most %d; the rest is omitted",
                    *(text[:40], len(ids), longest),
                )
        found = generate(
            self.model,
            [{self.source: text} for text in texts if text],
            *(self.source, self.target, self.tokenizer, self.model.context, "translating"),
            beams=beams,
            length_penalty=length_penalty,
            rows=rows,
        )
        translations = iter(found)
        return [next(translations) if text else "" for text in texts]


def load(folder: Path, checkpoint: str = "best", device: str = "auto") -> Translator:
    """Load the model of a run.

    Args:
        folder: of the run.
        checkpoint: "best" by validation loss, "last", or "averaged".
        device: "cpu", "cuda", "cuda:N", or "auto": a GPU if there is one.
    Raises:
        CheckpointError: the folder holds no translation run, lacks the checkpoint, or has another
            tokenizer than the checkpoint's.
        DataError: the tokenizer is missing or damaged.
        DeviceError: the device does not exist.
    """
    checkpoints = folder / "checkpoints"
    found = load_latest(checkpoints) if checkpoint == "last" else load_best(checkpoints)
    if found is None:
        raise CheckpointError(f"load: {checkpoints} has no checkpoint, expected one or more")
    data, sizes = found.entry("data"), found.entry("model")
    kinds = {"source": str, "target": str, "lowercase": bool}
    if not (isinstance(data, dict) and all(type(data.get(k)) is kinds[k] for k in kinds)):
        raise CheckpointError(f"load: {found.path} is of another kind of run, expected translation")
    averaged = folder / AVERAGED
    if checkpoint == "averaged" and not averaged.is_file():
        raise CheckpointError(
            f"load: {averaged} is missing; it comes at the end of a run with --average, "
            "expected that, or 'best' or 'last'"
        )
    arrays = load_arrays(averaged) if checkpoint == "averaged" else found.arrays("model")
    device = backend.use_device(device)
    name = str(averaged if checkpoint == "averaged" else found.path)
    model = restore(TranslationModel, TranslationConfig, sizes, arrays, name)
    model.to(device)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    check_same(found, "tokenizer", {"sha256": tokenizer.digest})
    return Translator(model, tokenizer, data["source"], data["target"], data["lowercase"])


def _batches(text: str | None) -> Iterator[list[str]]:
    """Yield batches of lines."""
    if text is not None:
        yield text.splitlines()
        return
    lines = iter(standard_input().readline, "")
    while batch := list(itertools.islice(lines, 1 if sys.stdin.isatty() else LINES)):
        yield [line.removeprefix("\ufeff") for line in batch]  # a byte order mark is not text


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="folder of a run of train_translation.py")
    parser.add_argument("text", nargs="?", help="text to translate (default: lines of the input)")
    choices = ("best", "last", "averaged")
    parser.add_argument("--checkpoint", choices=choices, default="best", help="(default: best)")
    parser.add_argument(
        "--beams", type=int, default=4, help="beams of beam search; 1: greedy (default: 4)"
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        default=0.6,
        help="larger favours long texts (default: 0.6)",
    )
    parser.add_argument("--rows", type=int, default=128, help="sequences at a time (default: 128)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default)")
    return parser.parse_intermixed_args(arguments)  # the text may stand behind options


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    given = _arguments(arguments)
    if given.text is not None and not given.text.strip():
        raise ArgumentError("text: it is empty, expected something to translate")
    translator = load(given.folder, given.checkpoint, given.device)
    for lines in _batches(given.text):
        for line in translator(lines, given.beams, given.length_penalty, given.rows):
            print(*line.splitlines(), flush=True)  # one line for each input line


if __name__ == "__main__":
    sys.exit(main())
