"""`tensorgrad generate`: generate text with a trained or published language model."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tensorgrad.core import backend
from tensorgrad.core.dtypes import as_dtype
from tensorgrad.core.errors import ArgumentError, CheckpointError, TensorgradError
from tensorgrad.data import PublishedTokenizer, TextStream, Tokenizer
from tensorgrad.data.content import CHARACTERS, JSON_LINES
from tensorgrad.data.text import read_lines, standard_input
from tensorgrad.io.command import harmless
from tensorgrad.kernels.gpu import memory_bandwidth, name_of
from tensorgrad.models.generation import generate_batch, stream
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.ops.sampling import Sampling
from tensorgrad.train.load import load_language_model

_log = logging.getLogger("generate")
_PROMPTS = [kind for kind in CHARACTERS if kind != JSON_LINES]  # kinds of files


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """How to generate.

    Args:
        max_new_tokens: largest number of tokens to generate.
        temperature: divides the logits before sampling; 0: greedy.
        top_k: sample from the k most likely tokens only; 0: from all.
        top_p: sample from the fewest tokens that together have this probability.
        repetition_penalty: above 1: earlier tokens are less likely.
        seed: seed of the sampling.
        stop: text that ends the output; may be repeated.
        ignore_end: continue after an end-of-text token.
        batch: prompts of a file at a time.
        chat: prompts are messages to the model, in its chat template; prompts that are read one by
            one are a conversation.
        system: with --chat: what the model is told before the conversation.
    """

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    ignore_end: Annotated[bool, Parameter(negative=())] = False
    batch: int = 32
    chat: Annotated[bool, Parameter(negative=())] = False
    system: str | None = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ArgumentError(f"--batch: got {self.batch}, expected 1 or more")
        if self.system is not None and not self.chat:
            raise ArgumentError("--system: got a text without --chat, expected both")
        if not 0 <= self.seed < 2**64:
            raise ArgumentError(f"--seed: got {self.seed}, expected an integer from 0 to 2^64 - 1")


def generate(
    model: Path,
    prompt: str | None = None,
    /,
    *,
    prompts: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    checkpoint: Literal["best", "last"] = "best",
    tokenizer: Path | None = None,
    options: Options = Options(),
    device: str = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    download: Annotated[bool, Parameter(negative=())] = False,
    revision: str | None = None,
    model_file: Annotated[str, Parameter(name="--model")] = "",
) -> int:
    """Generate text with a trained or published language model.

    Without a prompt the lines of the input are prompts, answered one by one.

    Args:
        model: a run, one of its checkpoints, a folder in the layout of Hugging Face transformers
            (GPT-2, Llama, Mistral, Qwen, SmolLM), or a file of `python -m
            tensorgrad.parallel.merge`; with --download, the name of a model on the Hub.
        prompt: text to continue, or with --chat a message; "" begins a document.
        prompts: file with a prompt a line; -: standard input.
        checkpoint: checkpoint of a run: the best by validation loss, or the last.
        tokenizer: a tokenizer.json, or a folder with one, if not the model's.
        device: cpu, cuda, cuda:N, or auto: a GPU if there is one.
        dtype: dtype to compute in; auto: float32 on the CPU, bfloat16 on a GPU, float16 if it lacks
            that.
        download: download a model that is not a folder; needs huggingface_hub.
        revision: revision of the download: a branch, tag or commit.
        model_file: the Python file of the model, if it is your own; it is executed.
    """
    if prompt is not None and prompts is not None:
        raise ArgumentError(f"--prompts: got {prompts} and a prompt, expected one of them")
    try:
        device = backend.use_device(device)
        chosen = as_dtype(choose_dtype(dtype, device))
        found = load_language_model(
            model,
            checkpoint,
            tokenizer,
            chosen,
            file=model_file,
            download=download,
            revision=revision,
        )
        generator = PromptGenerator(found[0].to(device), found[1], options)
        if prompt is not None:
            _show(generator, prompt)
        elif prompts is not None:
            whole = standard_input() if str(prompts) == "-" else read_lines(prompts, _PROMPTS)
            lines = [_text(line) for line in whole if line.strip()]
            for line, text in zip(lines, generator.texts(lines), strict=True):
                print(harmless(f"{generator.shown(line)}{text}\n"), flush=True)
        elif not _read_prompts(generator):
            return 1
    except KeyboardInterrupt:
        print()  # ends the unfinished line
        raise
    return 0


def choose_dtype(dtype: str, device: str) -> str:
    """Return the dtype to compute in: for "auto" 16 bits on a GPU, float32 on the CPU."""
    if dtype != "auto":
        return dtype
    index = backend.gpu_index(device)
    if index is None:
        return "float32"
    modern = int(backend.cupy.cuda.Device(index).compute_capability) >= 80
    return "bfloat16" if modern else "float16"


class PromptGenerator:
    """A model, its tokenizer and the sampling options.

    Raises:
        CheckpointError: the tokenizer has more tokens than the model.
        ArgumentError: --chat is given for the model of a run.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer | PublishedTokenizer, given: Options
    ) -> None:
        if tokenizer.vocab_size > model.vocab_size:
            raise CheckpointError(
                f"load: the tokenizer has {tokenizer.vocab_size} tokens, expected at most "
                f"{model.vocab_size} (the vocabulary of the model)"
            )
        self._template = tokenizer if isinstance(tokenizer, PublishedTokenizer) else None
        if given.chat and self._template is None:
            raise ArgumentError(
                "generate: --chat is given for a model of a run, which has no chat template; "
                "expected a folder in the layout of Hugging Face transformers"
            )
        self._conversation = [] if given.system is None else [_message("system", given.system)]
        self._model, self._tokenizer, self._given = model, tokenizer, given
        self._how = Sampling(
            given.temperature,
            top_k=given.top_k or None,
            top_p=given.top_p,
            repetition_penalty=given.repetition_penalty,
        )
        self._end = () if given.ignore_end else tokenizer.end_tokens

    def shown(self, prompt: str) -> str:
        """Return what to print before the text: the prompt, but nothing before an answer."""
        return "" if self._given.chat else prompt

    def remember(self, prompt: str, answer: str) -> None:
        """Let the next message continue the conversation."""
        self._conversation += [_message("user", prompt), _message("assistant", answer)]

    def pieces(self, prompt: str) -> Iterator[str]:
        """Return the text after a prompt: a piece for each token, which may be empty, and the rest.

        Arguments are checked by the call, before the first piece.
        """
        text = self._text_stream()
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

    def _text_stream(self) -> TextStream:
        return TextStream(self._tokenizer, self._given.stop, begins=self._given.chat)

    def utilization(self, count: int, speed: float) -> str:
        """Return ", MBU 70 %" of the GPU, the memory bandwidth utilization, or nothing.

        Args:
            count: the number of tokens generated; the prompt counts as none.
            speed: in tokens a second.
        """
        index = backend.gpu_index(self._model.device)
        peak = None if index is None else memory_bandwidth(name_of(index))
        if peak is None:
            return ""
        return f", MBU {100 * self._model.step_bytes(1, count / 2) * speed / peak:.0f} %"

    def texts(self, prompts: Sequence[str]) -> Iterator[str]:
        """Return the text after each prompt; arguments are checked by the call."""
        self._text_stream()  # checks --stop
        tokens = [self._tokens(prompt) for prompt in prompts]
        return self._texts(tokens)

    def _texts(self, prompts: Sequence[list[int]]) -> Iterator[str]:
        """Yield the text after each prompt; --batch prompts are generated at a time."""
        for start in range(0, len(prompts), self._given.batch):
            found = generate_batch(
                self._model, prompts[start : start + self._given.batch], self._given.max_new_tokens,
                **vars(self._how), seed=(self._given.seed + start) % 2**64, stop_tokens=self._end,
            )  # fmt: skip
            for tokens in found:
                text = self._text_stream()
                yield "".join([*map(text.add, tokens), text.rest()])

    def _tokens(self, prompt: str) -> list[int]:
        if self._given.chat and self._template is not None:
            messages = [*self._conversation, _message("user", prompt)]
            tokens = self._template.encode_chat(messages)
        else:
            tokens = self._tokenizer.encode_prompt(prompt)
        if len(tokens) > self._model.context:
            raise ArgumentError(
                f"generate: the prompt has {len(tokens)} tokens ({prompt[:30]!r}...), expected at "
                f"most {self._model.context} (the model's context)"
            )
        return tokens


def _read_prompts(generator: PromptGenerator) -> bool:
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
            text = _text(line)
            generator.remember(text, _show(generator, text))
        except TensorgradError as error:
            _log.error("%s", error)
            failed = True
    print("\n" if asking else "", end="")
    return not failed


def _text(line: str) -> str:
    """Return a line of the input without its end and a byte order mark."""
    return line.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")


def _show(generator: PromptGenerator, prompt: str) -> str:
    """Print a prompt and the text after it token by token, then log the speed; return the text."""
    began = time.perf_counter()
    pieces = generator.pieces(prompt)
    print(harmless(generator.shown(prompt)), end="", flush=True)
    shown = []
    for piece in pieces:
        print(harmless(piece), end="", flush=True)
        shown.append(piece)
    print(flush=True)
    count = len(shown) - 1  # the last piece is the rest
    speed = count / (time.perf_counter() - began)
    _log.info("[%d tokens, %.0f a second%s]", count, speed, generator.utilization(count, speed))
    return "".join(shown)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
