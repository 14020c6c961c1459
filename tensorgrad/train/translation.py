"""Training a translation model: the settings, and data, model and optimizer of a run.

The program is examples/train_translation.py; the benchmark of a training step uses the same run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from tensorgrad import backend, random
from tensorgrad.data import (
    PairCorpus,
    PairLoader,
    Tokenizer,
    encode_pairs,
    language_token,
    read_pairs,
    train_tokenizer,
)
from tensorgrad.errors import ArgumentError
from tensorgrad.models.generation.search import LARGEST_PENALTY
from tensorgrad.models.translation import TranslationConfig, TranslationModel
from tensorgrad.tensor import Tensor
from tensorgrad.train.config import option
from tensorgrad.train.ranks import OneProcess
from tensorgrad.train.settings import EpochSettings

AVERAGED = "averaged.safetensors"  # the averaged model in the folder of a run

# The options that a preset changes.
PRESETS: dict[str, dict[str, Any]] = {
    "small": {"warmup": 400},
    # Two CPU cores and a few minutes.
    "phrases": {
        "vocab": 1000, "width": 128, "layers": 2, "heads": 4, "context": 160, "batch": 2048,
        "epochs": 6, "lr": 4e-3, "warmup": 100, "dropout": 0.0, "label_smoothing": 0.0,
        "lowercase": False, "average": 0,
    },
    "large": {
        "width": 512, "layers": 8, "heads": 8, "batch": 20480, "epochs": 54, "warmup": 1000,
        "dropout": 0.3, "activation_dropout": 0.3, "attention_dropout": 0.1, "prefix": True,
        "weight_decay": 0.05,
    },
}  # fmt: skip


@dataclass(frozen=True)
class TranslationSettings(EpochSettings):
    """The options of a program that trains a translation model."""

    data: str = option(
        "hf:bbaaaa/iwslt14-de-en-preprocess",
        "sentence pairs: a folder, hf:NAME[:CONFIG], or phrases (synthetic)",
    )
    also: str = option("", "a second such source of training pairs")
    source: str = option("de", "language to translate from, as files and columns call it")
    target: str = option("en", "language to translate into")
    lowercase: bool = option(True, "train on lower case, and ignore case in BLEU")
    preset: str = option(
        "",
        "defaults of the options below",
        shown="phrases for --data phrases, else small",
        choices=("", *PRESETS),
    )
    batch: int = option(8192, "tokens of a step, with padding", low=1)
    accumulate: int = option(
        1, "parts of a batch", refused="a batch has tokens, not rows; see --batch for less memory"
    )
    beta2: float = option(0.98, "AdamW: decay of the mean squared gradient", low=0, high=1)
    lr_end: float = option(0.02, "final learning rate, as a fraction of --lr", low=0, high=1)
    vocab: int = option(10000, "tokens of both languages together", low=259)
    layers: int = option(4, "transformer blocks", low=1)
    heads: int = option(8, "attention heads", low=1)
    width: int = option(256, "width of the model", low=1)
    context: int = option(256, "context length: tokens of source and target together", low=4)
    tied: bool = option(True, "tie the head to the token embedding")
    prefix: bool = option(False, "let the tokens of a source attend in both directions")
    dropout: float = option(0.1, "dropout probability", low=0, high=1)
    attention_dropout: float | None = option(
        None, "dropout probability of attention weights", shown="--dropout", low=0, high=1
    )
    activation_dropout: float = option(
        0.0, "dropout probability inside feed-forward layers", low=0, high=1
    )
    label_smoothing: float = option(
        0.1, "fraction of a target's probability spread over all tokens", low=0, high=1
    )
    evaluate_every: int = option(
        1, "steps between evaluations", refused="each epoch is evaluated; see --bleu-every"
    )
    checkpoint_every: int = option(
        1, "steps between checkpoints", refused="epochs count here; see --save-every"
    )
    bleu_every: int = option(1, "epochs between translations of the test set", low=1, free=True)
    save_every: int = option(1, "epochs between checkpoints", low=1, free=True)
    test_limit: int | None = option(
        None, "test sentences to translate", shown="all", low=1, free=True
    )
    beams: int = option(1, "beams of beam search; 1: greedy", low=1, free=True)
    length_penalty: float = option(
        0.6, "exponent of beam search's length penalty; larger favours long translations",
        low=0, high=LARGEST_PENALTY, free=True,
    )  # fmt: skip
    rows: int = option(128, "sequences to generate at a time", low=1, free=True)
    average: int = option(5, "last checkpoints to average at the end; 0: none", low=0)
    log_every: int = option(
        10, "steps between logged losses; logging waits for the GPU", low=1, free=True
    )
    keep: int = option(5, "newest checkpoints to keep, besides the best", low=1, free=True)
    out: str = option("", "folder of the run", shown="workdir_vocab{V}_lr{lr}_embd{C}", free=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.average > self.keep:
            raise ArgumentError(
                f"--average: got {self.average}, expected at most --keep, {self.keep}"
            )

    @property
    def folder(self) -> Path:
        """The folder of a new run."""
        return Path(self.out or f"workdir_vocab{self.vocab}_lr{self.lr}_embd{self.width}")

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options that were given, and those of the preset."""
        phrases = given.get("data") == "phrases"
        preset = given.get("preset") or ("phrases" if phrases else "small")
        short = {"warmup": None} if given.get("steps") else {}  # a preset's suits its epochs
        return {**PRESETS[preset], **short, **given, "preset": preset}

    def with_steps(self, epoch: int) -> Self:
        """Return the settings with the number of steps; evaluation is after each epoch."""
        settings = super().with_steps(epoch)
        return replace(settings, evaluate_every=epoch, checkpoint_every=self.save_every * epoch)

    def model(self, vocab_size: int) -> TranslationConfig:
        """Return the sizes of the model."""
        return TranslationConfig(vocab_size, kv_heads=self.heads, **self.sizes(TranslationConfig))


class TranslationRun:
    """The parts of a training run: pairs, tokenizer, batches, model and optimizer, at step 0.

    Args:
        settings: see TranslationSettings.
        folder: of the run.
        device: "cpu", "cuda" or "cuda:N".
        resuming: whether to use the tokenizer in the folder, if there is one.
    """

    def __init__(
        self, settings: TranslationSettings, folder: Path, device: str, resuming: bool
    ) -> None:
        self.folder = folder
        self.corpus = read_corpus(settings)
        known, keys = folder / "tokenizer.json", (settings.source, settings.target)
        self.tokenizer = (
            Tokenizer.load(known)
            if resuming and known.exists()
            else train_tokenizer(self.corpus.train, settings.vocab, keys)
        )
        self.batches, self.validation = (
            PairLoader(
                encode_pairs(self.tokenizer, pairs),
                language_token(self.tokenizer, settings.target),
                self.tokenizer.end_of_text,
                settings.batch,
                settings.context,
                settings.seed,
            )
            for pairs in (self.corpus.train, self.corpus.validation)
        )
        self.settings = settings.with_steps(self.batches.batches)
        self.precision = settings.precision()
        random.seed(settings.seed)
        self.model = TranslationModel(settings.model(self.tokenizer.vocab_size))
        self.model.to(device, settings.parameter_dtype)
        self.optimizer = OneProcess().prepare(self.model, settings.optimizer)

    def loss(self, tokens: backend.Array, targets: backend.Array) -> Tensor:
        """Return the mean loss of a batch."""
        with self.precision():
            return self.model.forward(Tensor(tokens), Tensor(targets))


def read_corpus(settings: TranslationSettings) -> PairCorpus:
    """Return the pairs of --data, with those of --also for training."""
    keys = settings.source, settings.target
    corpus = read_pairs(settings.data, *keys, lowercase=settings.lowercase)
    if not settings.also:
        return corpus
    more = read_pairs(settings.also, *keys, lowercase=settings.lowercase, parts=["train"])
    return replace(corpus, train=corpus.train + more.train)
