"""Let a trained model write: on from a prompt, from each line of a file, or in a conversation.

    python examples/generate.py --checkpoint runs/gpt2-1 --prompt "def main("
    python examples/generate.py --checkpoint my_gpt2 --prompts questions.txt --temperature 0
    python examples/generate.py --checkpoint runs/gpt2-1

The checkpoint is a run of train_gpt2.py, one checkpoint of it (runs/gpt2-1/checkpoints/step-...),
a folder with a GPT-2 as Hugging Face transformers writes it, or a file of parallel.merge, which
makes one of what several ranks have written. Without a prompt it asks for one again and again.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorgrad import backend
from tensorgrad.command import command
from tensorgrad.data import TextStream, Tokenizer
from tensorgrad.data.text import read_lines, standard_input
from tensorgrad.dtypes import as_dtype
from tensorgrad.errors import ArgumentError, CheckpointError, DataError, TensorgradError
from tensorgrad.models.generation import generate_batch, stream
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.gpt2_weights import load_huggingface
from tensorgrad.models.restore import restore
from tensorgrad.ops.sampling import Sampling
from tensorgrad.readers import parse_json
from tensorgrad.train.checkpoint import (
    Checkpoint,
    check_same,
    load_best,
    load_checkpoint,
    load_latest,
)
from tensorgrad.weights import load_arrays, load_metadata

log = logging.getLogger("generate")


def load(
    checkpoint: Path, which: str = "best", tokenizer: Path | None = None
) -> tuple[GPT2, Tokenizer]:
    """Return a trained model, on the CPU, and its tokenizer.

    Args:
        checkpoint: the folder of a run, of one of its checkpoints, or in Hugging Face's layout; or
            a model file that `tensorgrad.parallel.merge` has made.
        which: of a run's checkpoints, "best" by validation loss or "last".
        tokenizer: a tokenizer.json, if not the one beside the model.
    Raises:
        CheckpointError: it is none of these, or damaged.
        DataError: the tokenizer is missing or damaged.
    """
    if (checkpoint / "checkpoints").is_dir():
        folder = checkpoint / "checkpoints"
        found = load_best(folder) if which == "best" else load_latest(folder)
        if found is None:
            raise CheckpointError(f"load: {folder} has no checkpoint, expected one or more")
        return _model(found), _tokenizer(found, tokenizer or checkpoint / "tokenizer.json")
    if (checkpoint / "state.json").is_file():
        run, found = checkpoint.parent.parent, load_checkpoint(checkpoint)
        return _model(found), _tokenizer(found, tokenizer or run / "tokenizer.json")
    if (checkpoint / "model.safetensors").is_file():
        return load_huggingface(checkpoint), _published_tokenizer(checkpoint, tokenizer)
    if checkpoint.is_file():
        beside = tokenizer or checkpoint.parent / "tokenizer.json"
        said = load_metadata(checkpoint).get("tokenizer", "{}")
        state = {"tokenizer": parse_json(said, f"the header of {checkpoint}")}
        return _merged(checkpoint), _tokenizer(Checkpoint(checkpoint, state), beside)
    what = "has none of these" if checkpoint.is_dir() else "is no folder"
    raise CheckpointError(
        f"load: --checkpoint {checkpoint} {what}, expected one with checkpoints/ (a run of "
        "train_gpt2.py), state.json (one of its checkpoints) or model.safetensors (Hugging Face's "
        "layout), or a file of tensorgrad.parallel.merge"
    )


def _model(checkpoint: Checkpoint) -> GPT2:
    sizes, arrays = checkpoint.entry("model"), checkpoint.arrays("model")
    return restore(GPT2, GPT2Config, sizes, arrays, str(checkpoint.path))


def _merged(path: Path) -> GPT2:
    try:
        sizes = parse_json(load_metadata(path).get("model", ""), f"the header of {path}")
    except DataError as error:
        raise CheckpointError(
            f"load: {path} does not say of which model it is, expected a file of "
            f"tensorgrad.parallel.merge: {error}"
        ) from error
    return restore(GPT2, GPT2Config, sizes, load_arrays(path), str(path))


def _tokenizer(checkpoint: Checkpoint, path: Path) -> Tokenizer:
    """Return a tokenizer; fail where it is not the one that the model was trained with."""
    tokenizer = Tokenizer.load(path)
    if checkpoint.state.get("tokenizer"):
        check_same(checkpoint, "tokenizer", {"sha256": tokenizer.digest})
    return tokenizer


def _published_tokenizer(folder: Path, tokenizer: Path | None) -> Tokenizer:
    if tokenizer is None and (folder / "vocab.json").is_file():
        return Tokenizer.from_gpt2(folder / "vocab.json", folder / "merges.txt")
    return Tokenizer.load(tokenizer or folder / "tokenizer.json")


def choose_dtype(dtype: str, device: str) -> str:
    """Return the type to compute in: for "auto" 16 bits on a GPU, float32 on the CPU."""
    if dtype != "auto":
        return dtype
    index = backend.gpu_index(device)
    if index is None:
        return "float32"
    modern = int(backend.cupy.cuda.Device(index).compute_capability) >= 80
    return "bfloat16" if modern else "float16"


class Writer:
    """A model that writes on, and how."""

    def __init__(self, model: GPT2, tokenizer: Tokenizer, given: argparse.Namespace) -> None:
        self._model, self._tokenizer, self._given = model, tokenizer, given
        self._how = Sampling(
            given.temperature, given.top_k or None, given.top_p, given.repetition_penalty
        )
        self._end = () if given.ignore_end else (tokenizer.end_of_text,)

    def write(self, prompt: str) -> Iterator[str]:
        """Return what follows a prompt: a piece for each token, which may be empty, and the rest.

        Wrong arguments are errors at once.
        """
        text = TextStream(self._tokenizer, self._given.stop)
        steps = stream(
            self._model, [self._tokens(prompt)], self._given.max_new_tokens,
            **vars(self._how), seed=self._given.seed,
        )  # fmt: skip
        return self._pieces(text, steps)

    def _pieces(self, text: TextStream, steps: Iterator[Any]) -> Iterator[str]:
        for tokens in steps:
            if tokens[0] in self._end:
                break
            yield text.add(int(tokens[0]))
            if text.ended:
                break
        yield text.rest()

    def write_all(self, prompts: Sequence[str]) -> Iterator[str]:
        """Return what follows each prompt, as it comes; wrong arguments are errors at once."""
        TextStream(self._tokenizer, self._given.stop)
        tokens = [self._tokens(prompt) for prompt in prompts]
        return self._texts(tokens)

    def _texts(self, prompts: Sequence[list[int]]) -> Iterator[str]:
        """Yield what follows each prompt, --rows of them at a time."""
        for start in range(0, len(prompts), self._given.rows):
            found = generate_batch(
                self._model, prompts[start : start + self._given.rows], self._given.max_new_tokens,
                **vars(self._how), seed=(self._given.seed + start) % 2**64, stop_tokens=self._end,
            )  # fmt: skip
            for tokens in found:
                text = TextStream(self._tokenizer, self._given.stop)
                yield "".join([*map(text.add, tokens), text.rest()])

    def _tokens(self, prompt: str) -> list[int]:
        tokens = self._tokenizer.encode(prompt)
        if not tokens:
            raise ArgumentError("generate: --prompt is empty, expected some text")
        if len(tokens) > self._model.context:
            raise ArgumentError(
                f"generate: --prompt has {len(tokens)} tokens ({prompt[:30]!r}...), expected at "
                f"most {self._model.context} (the model's context)"
            )
        return tokens


def _converse(writer: Writer) -> bool:
    """Ask for prompts until the input ends; return whether all of them could be used."""
    lines, asking, failed = standard_input(), sys.stdin.isatty(), False
    while True:
        print("> " if asking else "", end="", flush=True)
        line = lines.readline()
        if not line:
            break
        if not line.strip():
            continue
        try:
            _show(writer, _text(line))
        except TensorgradError as error:
            log.error("%s", error)
            failed = True
    print("\n" if asking else "", end="")
    return not failed


def _text(line: str) -> str:
    """Return a line of the input without its end, and without a byte order mark."""
    return line.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")


def _show(writer: Writer, prompt: str) -> None:
    """Print a prompt and what follows it, as it comes; then say how fast that was."""
    began = time.perf_counter()
    pieces = writer.write(prompt)
    print(prompt, end="", flush=True)
    count = -1  # the rest is of no token
    for piece in pieces:
        print(piece, end="", flush=True)
        count += 1
    print(flush=True)
    log.info("[%d tokens, %.0f a second]", count, count / (time.perf_counter() - began))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of a trained model")
    parser.add_argument("--which", choices=("best", "last"), default="best", help="of a run")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, if not the model's own")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", help="text to go on from; without one it asks")
    prompts.add_argument("--prompts", type=Path, help="file of prompts, one a line; - is the input")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="at most (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        help="draw from the k most likely tokens only; 0, the default: from all",
    )
    parser.add_argument("--top-p", type=float, default=0.95, help="or from this share (0.95)")
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="above 1 repeats less"
    )
    parser.add_argument("--seed", type=int, default=0, help="equal seeds write equal texts")
    parser.add_argument(
        "--stop", action="append", default=[], help="text that ends the output; may be repeated"
    )
    parser.add_argument("--ignore-end", action="store_true", help="go on after the end of a text")
    parser.add_argument("--rows", type=int, default=32, help="of --prompts at a time (default: 32)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default)")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
        help="to compute in; auto: on a GPU bfloat16, or float16 if it has no such, else float32",
    )  # fmt: skip
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    given = _arguments(arguments)
    try:
        if given.rows < 1:
            raise ArgumentError(f"generate: --rows is {given.rows}, expected 1 or more")
        if not 0 <= given.seed < 2**64:
            raise ArgumentError(
                f"generate: --seed is {given.seed}, expected an integer from 0 to 2^64 - 1"
            )
        device = backend.use_device(given.device)
        dtype = as_dtype(choose_dtype(given.dtype, device))
        model, tokenizer = load(given.checkpoint, given.which, given.tokenizer)
        if tokenizer.vocab_size > model.vocab_size:
            raise CheckpointError(
                f"load: the tokenizer has {tokenizer.vocab_size} tokens, expected at most "
                f"{model.vocab_size} (the vocabulary of {given.checkpoint})"
            )
        writer = Writer(model.to(device, dtype), tokenizer, given)
        if given.prompt is not None:
            _show(writer, given.prompt)
        elif given.prompts is not None:
            from_input = str(given.prompts) == "-"
            whole = standard_input() if from_input else read_lines(given.prompts)
            prompts = [_text(line) for line in whole if line.strip()]
            for prompt, text in zip(prompts, writer.write_all(prompts), strict=True):
                print(f"{prompt}{text}\n", flush=True)
        elif not _converse(writer):
            return 1
    except KeyboardInterrupt:
        print()  # ends the line that was being written
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
