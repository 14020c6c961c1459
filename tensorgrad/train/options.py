"""Errors in the words of the command line: the option that was typed, and what was meant.

The library names its arguments: `prepare: vocab_size is 0, expected 257 or more`. A user typed
--vocab, so a command says `--vocab: got 0, expected 257 or more`. `in_options` renames arguments,
`suggest` knows the names that other programs use; both serve every command.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tensorgrad.core.errors import ArgumentError, TensorgradError, TrainingError
from tensorgrad.train.config import Dataclass, flag

# Arguments of the library, and the options that set them. `op.argument` is for that op alone.
# Other arguments have the option of their name.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab",),
    "plan_split.fraction": ("validation",),
    "hold_out.share": ("held-out",),
    "source": ("data",),
    "target_key": ("target",),
    "TokenLoader.tokens": ("data",),
    "zero": ("parallel",),
    "fit.most": ("max-gpus",),
    "bucket": ("bucket-mb",),
    "megabytes": ("bucket-mb",),
    "stops": ("stop",),
    "sequence": ("sequence-parallel",),
}
# Names that PyTorch, transformers, nanoGPT and other programs use, and ours.
SYNONYMS = {
    "learning-rate": "lr", "min-lr": "lr-end", "lr-scheduler": "schedule", "scheduler": "schedule",
    "batch-size": "batch", "bs": "batch", "grad-accum": "micro-batches",
    "gradient-accumulation-steps": "micro-batches", "accumulate": "micro-batches",
    "max-steps": "steps", "num-steps": "steps", "iterations": "steps", "iters": "steps",
    "max-iters": "steps", "num-epochs": "epochs", "num-train-epochs": "epochs",
    "warmup-steps": "warmup", "warmup-iters": "warmup", "grad-clip": "clip",
    "max-grad-norm": "clip", "wd": "weight-decay", "random-seed": "seed",
    "block-size": "context", "seq-len": "context", "sequence-length": "context",
    "max-seq-len": "context", "n-ctx": "context", "context-length": "context",
    "n-layer": "layers", "n-layers": "layers", "num-layers": "layers", "depth": "layers",
    "n-head": "heads", "n-heads": "heads", "num-heads": "heads",
    "n-embd": "width", "hidden-size": "width", "d-model": "width", "dim": "width",
    "d-ff": "hidden", "n-inner": "hidden", "intermediate-size": "hidden",
    "vocab-size": "vocab", "model": "preset", "model-size": "preset", "size": "preset",
    "output": "out", "output-dir": "out", "out-dir": "out", "o": "out", "save": "out",
    "dataset": "data", "data-dir": "data", "input": "data", "file": "data", "text": "data",
    "gpu": "device", "eval-interval": "evaluate-every", "eval-every": "evaluate-every",
    "eval-steps": "evaluate-every", "save-every": "checkpoint-every",
    "save-steps": "checkpoint-every", "precision": "dtype", "mixed-precision": "dtype",
    "zero": "parallel", "gradient-checkpointing": "recompute", "compile": "capture",
    "max-length": "max-new-tokens", "max-tokens": "max-new-tokens", "length": "max-new-tokens",
    "tokens": "max-new-tokens", "num-tokens": "max-new-tokens",
    "num-beams": "beams", "beam": "beams", "num-gpus": "dp", "gpus": "dp",
    "fp16": "float16", "half": "float16", "f16": "float16", "bf16": "bfloat16",
    "fp32": "float32", "f32": "float32", "float": "float32",
    "gpt2-small": "gpt2-124M", "gpt2-medium": "gpt2-355M", "gpt2-large": "gpt2-774M",
    "gpt2-xl": "gpt2-1558M", "ddp": "overlap", "fsdp": "zero3", "finetune": "train",
    "sample": "generate", "test": "evaluate", "eval": "evaluate", "lm": "gpt2",
    "classification": "sentiment", "convert": "export", "benchmark": "bench",
}  # fmt: skip

# Options with paths that are texts, because they have other values too.
PATHS = {
    *("--data", "--also", "--tokenizer", "--init-from", "--vectors", "--out", "--cache", "DATA")
}

_ABOUT = re.compile(
    r"(?:(?P<op>[\w. ]+): )?(?P<name>--[\w-]+|\w+) (?:is|are|has|got) (?!given)(?P<rest>.+)", re.S
)
_GOT = re.compile(r"(?P<name>\w+): (?P<rest>.+)", re.S)
_OP = re.compile(r"^[A-Za-z_]\w*(?:\.\w+)*: ")
_MISSING = re.compile(
    "does not exist|[Nn]o such file|is not a folder|is missing|has no (config|checkpoint|tokenizer)"
)


@contextmanager
def in_options(options: Mapping[str, Any] | Dataclass) -> Iterator[None]:
    """Rename what an error is about, from the library's argument to the option that set it.

    Args:
        options: the values of a command by option, such as {"--vocab": 0, "DATA": "text.txt"}; or
            the settings of a run.
    Raises:
        TensorgradError: the same error in other words; an ArgumentError for an OSError about a
            path that an option gave.
    """
    try:
        yield
    except (TensorgradError, OSError) as error:
        if not isinstance(options, Mapping):
            # A folder that no option named has no option in errors; a command knows what was typed.
            named = [f for f in fields(options) if f.name != "out"]
            options = {flag(f): getattr(options, f.name) for f in named}
        line = _renamed(error, options)
        if line is None:
            raise
        if isinstance(error, OSError) and not isinstance(error, TensorgradError):
            raise ArgumentError(line) from error
        error.args = (line,)
        raise


def suggest(word: str, choices: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the choices that a word may stand for, or nothing.

    Args:
        word: that is unknown.
        choices: the words that are known, options with their dashes.
    """
    return _question(_meant(word, choices))


def _meant(word: str, choices: Iterable[str]) -> list[str]:
    """Return the choices that a word may stand for."""
    known = {_plain(choice): choice for choice in choices if choice != word}
    plain = _plain(word)
    meant = SYNONYMS.get(plain, "")
    if plain in known or _plain(meant) in known:
        return [known.get(plain) or known[_plain(meant)]]
    starts = [name for name in known if len(plain) > 2 and name.startswith(plain)]
    close = starts or get_close_matches(plain, known, n=1, cutoff=0.6)
    return [known[name] for name in close[:4]]


def _question(matches: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _renamed(error: Exception, options: Mapping[str, Any]) -> str | None:
    """Return the error as one line about an option; None where it is about none of them."""
    text = str(error)
    known = text.startswith(tuple(f"{name}{end}" for name in options for end in (":", " ")))
    if known or isinstance(error, TrainingError):  # errors of numbers, whatever folder they mention
        return None
    text = re.sub(r"^[\w. ]+: (?=--[a-z])", "", text)
    plain = _OP.sub("", text)
    if isinstance(error, OSError) and not isinstance(error, TensorgradError):
        if error.filename is None:
            return None
        text = plain = f"{os.fsdecode(error.filename)}: {error.strerror}"
    name, path = _named_path(text, options)
    lost = name and not path.startswith("hf:") and not os.path.lexists(path)
    if lost and "write" not in text and _MISSING.search(text):
        return _missing(name, path, text)
    about = _ABOUT.fullmatch(text)
    option = about and _option(about["op"] or "", about["name"], options)
    if about and option:
        return f"{option}: got {_related(about['rest'], options)}"
    got = _GOT.fullmatch(text)
    option = got and _option("", got["name"], options)
    if got and option:
        return f"{option}: {got['rest']}"
    if text.startswith("--"):
        return text
    return f"{name}: {plain}" if name else None


def _related(text: str, options: Mapping[str, Any]) -> str:
    """Return the rest of an error with the options that a value must divide or be divided by."""

    def renamed(match: re.Match[str]) -> str:
        return re.sub(r"[a-z]\w*", lambda name: _option("", name[0], options) or name[0], match[0])

    return re.sub(r"(?<= of )\w+(?: \* \w+)*(?=, )", renamed, text)


def _option(op: str, argument: str, options: Mapping[str, Any]) -> str | None:
    """Return the option that set an argument of an op, None if the command has none."""
    if argument.startswith("--"):
        return argument
    names = (
        *ARGUMENTS.get(f"{op}.{argument}", ()), *ARGUMENTS.get(argument, ()), argument,
        argument + "s",
    )  # fmt: skip
    forms = [form for name in names for form in (f"--{name.replace('_', '-')}", name.upper())]
    return next((form for form in forms if form in options), None)


def _named_path(text: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the option whose path an error names, and the path; the longest of several."""
    paths = [
        (str(path), name)
        for name, value in options.items()
        for path in (value if isinstance(value, tuple) else (value,))
        if isinstance(path, Path) or name in PATHS
    ]
    # A folder cannot be made where one of its parents is a file: the error names the parent.
    parents = [
        (str(p), name) for path, name in paths for p in Path(path).parents if len(str(p)) > 1
    ]
    for path, name in sorted([*paths, *parents], key=lambda each: -len(each[0])):
        beyond = r"\w-" if (path, name) in paths else r"\w/-"  # a parent is named alone
        whole = rf"(?<![\w./-]){re.escape(path)}(?![{beyond}])"
        if path and re.search(whole, text):
            return name, path
    return "", ""


def _missing(name: str, path: str, text: str) -> str:
    """Return the line about a path that is not there."""
    given = Path(path)
    beside = {each: str(given.parent / each) for each in _names(given.parent)}
    names = [*beside, *re.findall(r"'(\w+)'", text)]
    meant = _question([beside.get(each, each) for each in _meant(given.name, names)])
    expected = re.search(r"expected .*", text, re.S)
    more = f"; {expected[0]}" if expected else ""
    return f"{name} {path}: no such file or folder{meant or more}"


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
