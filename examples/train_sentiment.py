"""Train a classifier that says whether a sentence praises or blames, and ask it.

    python examples/train_sentiment.py                      # SST-2, which datasets downloads
    python examples/train_sentiment.py --data my_folder --model transformer
    python examples/train_sentiment.py --data reviews       # sentences made by rules, no download
    python examples/train_sentiment.py --resume runs/sentiment-1
    python examples/train_sentiment.py --resume runs/sentiment-1 --predict "a warm , funny film"

A folder has train.tsv and dev.tsv: a line with the names of the columns, then a label, 0 or 1, and
a sentence in each line. After every epoch the accuracy on the dev set is measured; with --held-out
it is measured on training sentences that are set aside instead: settings are to be chosen by that.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad import backend, ops, random
from tensorgrad.command import command, printable
from tensorgrad.data import (
    LabelledLoader,
    LabelledTexts,
    Tokenizer,
    WordVocabulary,
    hold_out,
    read_labelled,
    read_vectors,
    split_words,
)
from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.models.restore import restore
from tensorgrad.models.sentiment import (
    Classifier,
    MeanClassifier,
    MeanConfig,
    TransformerClassifier,
    TransformerConfig,
    class_probabilities,
)
from tensorgrad.nn import evaluating
from tensorgrad.tensor import Tensor
from tensorgrad.train import OneProcess, Outcome, Trainer, TrainSettings, load_best
from tensorgrad.train import config as run_config
from tensorgrad.train.config import check, option
from tensorgrad.train.device import choose_device
from tensorgrad.train.folder import run_folder
from tensorgrad.train.log import read_metrics
from tensorgrad.train.run import free_folder, report_stop, resume_run
from tensorgrad.train.settings import SCHEDULES

log = logging.getLogger("train_sentiment")

CLASSES = ("negative", "positive")
# What --model says besides the defaults.
PRESETS: dict[str, dict[str, Any]] = {
    "mean": {"warmup": 100},
    "transformer": {"batch": 128, "lr": 1e-3, "warmup": 200, "dropout": 0.2},
}
# What does nothing where another option has this value.
IDLE = {
    ("model", "mean"): ("heads",),
    ("model", "transformer"): ("hidden",),
    ("tokens", "bpe"): ("at_least",),
}
# And for the mean what --data reviews says: 2,000 sentences are few.
REVIEWS: dict[str, Any] = {"batch": 64, "epochs": 20}


@dataclass(frozen=True)
class Settings(TrainSettings):
    """What can be said on the command line."""

    data: str = option(
        "hf:stanfordnlp/sst2",
        "a folder with train.tsv and dev.tsv, hf:NAME[:CONFIG], or reviews, made by rules",
    )
    text_column: str = option("", "column of the sentences; none: sentence, text or the only one")
    label_column: str = option("label", "column of the labels, which are 0 and 1")
    held_out: float = option(
        0.0,
        "share of the training sentences to measure with, in place of the dev set",
        low=0,
        high=0.9,
    )
    model: str = option("mean", "mean of word vectors, or transformer", choices=tuple(PRESETS))
    tokens: str = option(
        "words", "what the vocabulary is of: words, or bpe", choices=("words", "bpe")
    )
    vocab: int = option(20000, "tokens at most", low=257)
    at_least: int = option(1, "leave out words that occur less often", low=1)
    vectors: str = option("", "word vectors to begin with: a text file as GloVe's, of that width")
    width: int = option(64, "width of the word vectors", low=1)
    layers: int = option(1, "hidden layers, or blocks of the transformer", low=0)
    hidden: int = option(64, "width of the hidden layers", low=1)
    heads: int = option(4, "attention heads of the transformer", low=1)
    context: int = option(64, "tokens of a sentence that the model sees", low=1)
    dropout: float = option(0.5, "probability of leaving out an activation", low=0, high=1)
    word_dropout: float = option(0.1, "probability of leaving out a word", low=0, high=1)
    epochs: int = option(3, "passes through the training sentences", low=1, grows=True)
    steps: int = option(0, "optimizer steps in all; 0: those of --epochs", low=0, grows=True)
    batch: int = option(256, "sentences of a step", low=1)
    lr: float = option(3e-3, "highest learning rate", low=0)
    warmup: int | None = option(
        None,
        "steps in which the learning rate rises, fewer than all; none: a twentieth of --steps, or "
        "without it as --model says",
        low=0,
    )
    schedule: str = option("linear", "how the learning rate falls", choices=SCHEDULES)
    lr_end: float = option(0.0, "learning rate at the end, as a share of --lr", low=0, high=1)
    weight_decay: float = option(0.01, "decay of matrices, times the learning rate", low=0)
    beta2: float = option(0.99, "AdamW: decay of the mean square", low=0, high=1)
    evaluate_every: int = option(0, "steps between evaluations; 0: an epoch", low=0)
    checkpoint_every: int = option(
        0, "steps between two checkpoints; 0: an epoch", low=0, free=True
    )
    device: str = option("auto", "cpu, cuda, cuda:N, or auto: a GPU if there is one", free=True)
    out: str = option(
        "", "folder of the run; runs/sentiment-1, -2, ... if none is given", free=True
    )
    predict: str | None = option(
        None,
        "train no more, but say what the best checkpoint of --resume makes of this",
        asks=True,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.steps:
            super().__post_init__()
        if self.vectors and self.tokens != "words":
            raise ArgumentError(f"--vectors: got --tokens {self.tokens}, expected words")

    def with_steps(self, epoch: int) -> Settings:
        """Return settings that say how many steps, where an epoch has so many."""
        steps = self.steps or self.epochs * epoch
        return replace(
            self,
            steps=steps,
            warmup=None if self.warmup is None else min(self.warmup, steps - 1),
            evaluate_every=self.evaluate_every or epoch,
            checkpoint_every=self.checkpoint_every or epoch,
        )


def read_command_line(arguments: Sequence[str] | None = None) -> tuple[Settings, Path, bool]:
    """Return the settings, the folder of the run, and whether it goes on from a checkpoint."""

    def complete(given: dict[str, Any]) -> dict[str, Any]:
        chosen = {"model": "mean", "tokens": "words", **given}
        for (name, value), idle in IDLE.items():
            for other in idle:
                if chosen[name] == value and other in given:
                    raise ArgumentError(
                        f"--{other.replace('_', '-')}: got {given[other]!r} with --{name} {value}, "
                        "expected none: it would do nothing"
                    )
        model = chosen["model"]
        few = REVIEWS if (model, given.get("data")) == ("mean", "reviews") else {}
        short = {"warmup": None} if given.get("steps") else {}  # a preset's suits its epochs
        return {**PRESETS[model], **few, **short, **given}

    def folder_of(settings: Settings) -> Path:
        return Path(settings.out) if settings.out else free_folder("runs/sentiment")

    description = __doc__.splitlines()[0] if __doc__ else ""
    return run_config.read_command_line(Settings, description, folder_of, arguments, complete)


Vocabulary = WordVocabulary | Tokenizer


def make_vocabulary(settings: Settings, folder: Path, texts: Sequence[str]) -> Vocabulary:
    """Return the vocabulary of the run in this folder, or a new one of these texts."""
    if (folder / vocabulary_file(settings)).exists():
        return load_vocabulary(settings, folder)
    if settings.tokens == "words":
        return WordVocabulary.train(texts, settings.vocab, settings.at_least)
    return Tokenizer.train([_spaced(text) for text in texts], settings.vocab)


def load_vocabulary(settings: Settings, folder: Path) -> Vocabulary:
    """Return the vocabulary of the run in this folder."""
    kind = WordVocabulary if settings.tokens == "words" else Tokenizer
    return kind.load(folder / vocabulary_file(settings))


def vocabulary_file(settings: Settings) -> str:
    """Return the name of the file in the run's folder."""
    return "words.json" if settings.tokens == "words" else "tokenizer.json"


def encode(vocabulary: Vocabulary, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, however it is written: in lower case, words spaced."""
    if isinstance(vocabulary, Tokenizer):
        texts = [_spaced(text) for text in texts]
    return vocabulary.encode_batch(texts)


def _spaced(text: str) -> str:
    """Return words with a space before each, so that equal words have equal tokens everywhere."""
    return "".join(f" {word}" for word in split_words(text))


def make_model(config: MeanConfig | TransformerConfig) -> Classifier:
    """Return a new model of some sizes."""
    if isinstance(config, MeanConfig):
        return MeanClassifier(config)
    return TransformerClassifier(config)


def model_config(settings: Settings, vocab_size: int) -> MeanConfig | TransformerConfig:
    """Return the sizes of a model of these settings."""
    kind = MeanConfig if settings.model == "mean" else TransformerConfig
    told = {f.name: getattr(settings, f.name) for f in fields(kind) if hasattr(settings, f.name)}
    return kind(vocab_size=vocab_size, classes=len(CLASSES), **told)


def read_data(settings: Settings) -> tuple[LabelledTexts, LabelledTexts]:
    """Return the sentences to train on and those to measure with."""

    def read(part: str) -> LabelledTexts:
        return read_labelled(
            settings.data,
            part,
            text_column=settings.text_column or None,
            label_column=settings.label_column,
            classes=len(CLASSES),
        )

    if settings.held_out:
        return hold_out(read("train"), settings.held_out, settings.seed)
    return read("train"), read("validation")


class Run:
    """A run: sentences, vocabulary, model, and how they are measured."""

    def __init__(self, settings: Settings, folder: Path, device: str) -> None:
        self.folder = folder
        train, validation = read_data(settings)
        self.vocabulary = make_vocabulary(settings, folder, train.texts)
        self.train, self.validation = (
            LabelledLoader(
                encode(self.vocabulary, part.texts),
                part.labels,
                settings.batch,
                settings.seed,
                settings.context,
            )
            for part in (train, validation)
        )
        self.settings = settings.with_steps(self.train.batches)
        self.precision = settings.precision()
        random.seed(settings.seed)
        config = model_config(settings, self.vocabulary.vocab_size)
        self.model = make_model(config)
        self.model.to(device, settings.parameter_dtype)
        log.info(
            "%s: %s sentences to train on, %s to measure with, vocabulary %s, %s parameters, on %s",
            *(folder, f"{len(train):,}", f"{len(validation):,}", f"{config.vocab_size:,}"),
            *(f"{sum(p.size for p in self.model.parameters()):,}", device),
        )
        self.trainer = Trainer(
            self.model,
            OneProcess().prepare(self.model, settings.optimizer),
            self.loss,
            self.train.iterate,
            self.settings.learning_rate,
            self.settings,
            folder,
            tokens_per_step=round(self.train.tokens),
            evaluate=self.measure,
            belongs_to={
                "model": {"kind": settings.model, **asdict(config)},
                "vocabulary": {"sha256": _sha256(self.vocabulary.to_json())},
                "data": {
                    "train": train.digest,
                    "validation": validation.digest,
                    "batch": settings.batch,
                    "seed": settings.seed,
                },
            },
            scaler=settings.scaler(),
        )

    def loss(self, tokens: backend.Array, lengths: backend.Array, labels: backend.Array) -> Tensor:
        """Return the mean loss of a batch."""
        with self.precision():
            return self.model.forward(tokens, lengths, labels)

    def measure(self) -> dict[str, float]:
        """Return loss and accuracy on the sentences to measure with."""
        model, total, right, count = self.model, 0.0, 0, 0
        with evaluating(model), self.precision():
            for batch in self.validation.evaluation_batches():
                tokens, lengths, labels = (backend.to_device(a, model.device) for a in batch)
                logits = model(tokens, lengths)
                total += ops.cross_entropy(logits, labels, reduction="sum").item()
                right += int((logits.data.argmax(1) == labels).sum())
                count += len(labels)
        return {"validation_loss": total / count, "accuracy": right / count}

    def use_vectors(self, path: str) -> None:
        """Begin with the vectors of a file."""
        assert isinstance(self.vocabulary, WordVocabulary)
        vectors, found = read_vectors(path, self.vocabulary.words, self.settings.width)
        self.model.use_vectors((np.flatnonzero(found) + 1).tolist(), vectors[found])
        log.info("%s has %.1f %% of the words", path, 100 * found.mean())


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def train(settings: Settings, folder: Path, resuming: bool, device: str) -> Outcome:
    """Train, from the beginning or from the newest checkpoint, and say what came of it."""
    with run_folder(folder):
        return _train(settings, folder, resuming, device)


def _train(settings: Settings, folder: Path, resuming: bool, device: str) -> Outcome:
    began = time.perf_counter()
    run = Run(settings, folder, device)
    if resuming:
        resume_run(run.trainer)
    if run.trainer.step == 0 and settings.vectors:
        run.use_vectors(settings.vectors)
    run_config.save(settings, folder)
    run.vocabulary.save(folder / vocabulary_file(settings))
    outcome = run.trainer.run()
    _report(run, outcome, time.perf_counter() - began)
    return outcome


def _report(run: Run, outcome: Outcome, seconds: float) -> None:
    if not outcome.finished:
        report_stop(outcome, run.settings.steps, run.folder)
        return
    measured = {
        record["step"]: record["accuracy"]
        for record in read_metrics(run.folder / "metrics.jsonl")
        if "accuracy" in record
    } or {outcome.step: run.measure()["accuracy"]}  # somebody has deleted what was written
    best = max(measured, key=lambda step: measured[step])
    log.info(
        "accuracy %.2f %% at the end (%.2f %% after step %d was the highest) in %.0f s; all in %s",
        *(100 * measured[outcome.step], 100 * measured[best], best, seconds, run.folder),
    )


def predict(settings: Settings, folder: Path, text: str) -> str:
    """Return what the best checkpoint of a run makes of a sentence.

    Raises:
        ArgumentError: there is no word in it.
        CheckpointError, DataError: the run has no whole checkpoint or vocabulary.
    """
    if not split_words(text):
        raise ArgumentError(f"--predict: got {text!r}, expected a sentence")
    found = load_best(folder / "checkpoints")
    sizes, arrays = found.entry("model"), found.arrays("model")
    sizes = {**sizes} if isinstance(sizes, dict) else {}
    model: Classifier
    if sizes.pop("kind", None) == "mean":
        model = restore(MeanClassifier, MeanConfig, sizes, arrays, str(found.path))
    else:
        model = restore(TransformerClassifier, TransformerConfig, sizes, arrays, str(found.path))
    vocabulary = load_vocabulary(settings, folder)
    if found.entry("vocabulary") != {"sha256": _sha256(vocabulary.to_json())}:
        raise CheckpointError(f"--predict: {found.path} is of another vocabulary than {folder} has")
    (probabilities,) = class_probabilities(model, encode(vocabulary, [text]), settings.context)
    best = int(probabilities.argmax())
    return f"{CLASSES[best]} ({probabilities[best]:.1%}): {text}"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    settings, folder, resuming = read_command_line(arguments)
    if settings.predict is not None:
        print(printable(predict(settings, folder, settings.predict)))
        return 0
    settings, device = choose_device(settings)
    return train(settings, folder, resuming, device).status


if __name__ == "__main__":
    sys.exit(main())
