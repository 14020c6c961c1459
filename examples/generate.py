"""Generate text with a trained model, from a prompt, from each line of a file, or interactively.

    python examples/generate.py --checkpoint runs/gpt2-1 --prompt "def main("
    python examples/generate.py --checkpoint my_gpt2 --prompts questions.txt --temperature 0
    python examples/generate.py --checkpoint runs/gpt2-1

The checkpoint is a run of train_gpt2.py, one of its checkpoints (runs/gpt2-1/checkpoints/step-...),
a folder with a GPT-2 in the layout of Hugging Face transformers, or a file that parallel.merge has
made of the checkpoint of several ranks. Without a prompt the program reads prompts, a line each.
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
            a model file of `tensorgrad.parallel.merge`.
        which: checkpoint of a run, "best" by validation loss or "last".
        tokenizer: a tokenizer.json; None: the one beside the model.
    Raises:
        CheckpointError: the checkpoint is none of these, or damaged.
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
        written = load_metadata(checkpoint).get("tokenizer", "{}")
        state = {"tokenizer": parse_json(written, f"the header of {checkpoint}")}
        return _merged(checkpoint), _tokenizer(Checkpoint(checkpoint, state), beside)
    what = "has none of these" if checkpoint.is_dir() else "is not a folder"
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
            f"load: the header of {path} lacks the sizes of the model, expected a file of "
            f"tensorgrad.parallel.merge: {error}"
        ) from error
    return restore(GPT2, GPT2Config, sizes, load_arrays(path), str(path))


def _tokenizer(checkpoint: Checkpoint, path: Path) -> Tokenizer:
    """Return a tokenizer; fail if the model was trained with another one."""
    tokenizer = Tokenizer.load(path)
    if checkpoint.state.get("tokenizer"):
        check_same(checkpoint, "tokenizer", {"sha256": tokenizer.digest})
    return tokenizer


def _published_tokenizer(folder: Path, tokenizer: Path | None) -> Tokenizer:
    if tokenizer is None and (folder / "vocab.json").is_file():
        return Tokenizer.from_gpt2(folder / "vocab.json", folder / "merges.txt")
    return Tokenizer.load(tokenizer or folder / "tokenizer.json")


def choose_dtype(dtype: str, device: str) -> str:
    """Return the dtype to compute in: for "auto" 16 bits on a GPU, float32 on the CPU."""
    if dtype != "auto":
        return dtype
    index = backend.gpu_index(device)
    if index is None:
        return "float32"
    modern = int(backend.cupy.cuda.Device(index).compute_capability) >= 80
    return "bfloat16" if modern else "float16"


class Generator:
    """A model, its tokenizer and the sampling options."""

    def __init__(self, model: GPT2, tokenizer: Tokenizer, given: argparse.Namespace) -> None:
        self._model, self._tokenizer, self._given = model, tokenizer, given
        self._how = Sampling(
            given.temperature, given.top_k or None, given.top_p, given.repetition_penalty
        )
        self._end = () if given.ignore_end else (tokenizer.end_of_text,)

    def pieces(self, prompt: str) -> Iterator[str]:
        """Return the text after a prompt: a piece for each token, which may be empty, and the rest.

        Arguments are checked by the call, before the first piece.
        """
        text = TextStream(self._tokenizer, self._given.stop)
        steps = stream(
            self._model, [self._tokens(prompt)], self._given.max_new_tokens,
            **vars(self._how), seed=self._given.seed,
        )  # fmt: skip
        return self._decoded(text, steps)

    def _decoded(self, text: TextStream, steps: Iterator[Any]) -> Iterator[str]:
        for tokens in steps:
            if tokens[0] in self._end:
                break
            yield text.add(int(tokens[0]))
            if text.ended:
                break
        yield text.rest()

    def texts(self, prompts: Sequence[str]) -> Iterator[str]:
        """Return the text after each prompt; arguments are checked by the call."""
        TextStream(self._tokenizer, self._given.stop)
        tokens = [self._tokens(prompt) for prompt in prompts]
        return self._texts(tokens)

    def _texts(self, prompts: Sequence[list[int]]) -> Iterator[str]:
        """Yield the text after each prompt; --rows prompts are generated at a time."""
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


def _read_prompts(generator: Generator) -> bool:
    """Read and answer prompts until the input ends; return whether all of them were valid."""
    lines, asking, failed = standard_input(), sys.stdin.isatty(), False
    while True:
        print("> " if asking else "", end="", flush=True)
        line = lines.readline()
        if not line:
            break
        if not line.strip():
            continue
        try:
            _show(generator, _text(line))
        except TensorgradError as error:
            log.error("%s", error)
            failed = True
    print("\n" if asking else "", end="")
    return not failed


def _text(line: str) -> str:
    """Return a line of the input without its end and a byte order mark."""
    return line.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")


def _show(generator: Generator, prompt: str) -> None:
    """Print a prompt and the text after it token by token, then log the speed."""
    began = time.perf_counter()
    pieces = generator.pieces(prompt)
    print(prompt, end="", flush=True)
    count = -1  # the last piece is the rest
    for piece in pieces:
        print(piece, end="", flush=True)
        count += 1
    print(flush=True)
    log.info("[%d tokens, %.0f a second]", count, count / (time.perf_counter() - began))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="run, checkpoint or model file"
    )
    parser.add_argument(
        "--which", choices=("best", "last"), default="best",
        help="checkpoint of a run: the best by validation loss (default), or the last",
    )  # fmt: skip
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json (default: the model's)")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", help="text to continue (default: read prompts from the input)")
    prompts.add_argument(
        "--prompts", type=Path, help="file with a prompt a line; -: standard input"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=200, help="largest number of tokens (default: 200)"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0: greedy (default: 0.8)")
    parser.add_argument(
        "--top-k", type=int, default=0,
        help="sample from the k most likely tokens only (default: 0, all tokens)",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", type=float, default=0.95,
        help="sample from the fewest tokens that together have this probability (default: 0.95)",
    )  # fmt: skip
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0,
        help="above 1: earlier tokens are less likely (default: 1, no penalty)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument(
        "--stop", action="append", default=[], help="text that ends the output; may be repeated"
    )
    parser.add_argument(
        "--ignore-end", action="store_true", help="continue after an end-of-text token"
    )
    parser.add_argument("--rows", type=int, default=32, help="prompts at a time (default: 32)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default)")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
        help="to compute in; auto (default): bfloat16 on a GPU, float16 if it lacks that; float32 "
        "on the CPU",
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
        generator = Generator(model.to(device, dtype), tokenizer, given)
        if given.prompt is not None:
            _show(generator, given.prompt)
        elif given.prompts is not None:
            from_input = str(given.prompts) == "-"
            whole = standard_input() if from_input else read_lines(given.prompts)
            prompts = [_text(line) for line in whole if line.strip()]
            for prompt, text in zip(prompts, generator.texts(prompts), strict=True):
                print(f"{prompt}{text}\n", flush=True)
        elif not _read_prompts(generator):
            return 1
    except KeyboardInterrupt:
        print()  # ends the unfinished line
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
