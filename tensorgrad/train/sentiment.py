"""Training a classifier of sentences: the settings, and a run from sentences to a classifier.

The program is examples/train_sentiment.py, or `tensorgrad train sentiment`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from tensorgrad import backend, random
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
from tensorgrad.errors import ArgumentError
from tensorgrad.models.sentiment import (
    Classifier,
    MeanClassifier,
    MeanConfig,
    TransformerClassifier,
    TransformerConfig,
)
from tensorgrad.nn import evaluating
from tensorgrad.ops.cross_entropy import cross_entropy
from tensorgrad.readers import no_link
from tensorgrad.tensor import Tensor
from tensorgrad.train import config
from tensorgrad.train.checkpoint import run_checkpoint
from tensorgrad.train.config import option
from tensorgrad.train.folder import run_folder
from tensorgrad.train.log import read_metrics
from tensorgrad.train.loggers import make_loggers
from tensorgrad.train.loop import Outcome, Trainer
from tensorgrad.train.options import in_options
from tensorgrad.train.ranks import OneProcess
from tensorgrad.train.run import (
    free_folder,
    report_stop,
    resume_run,
    save_facts,
    without_checkpoint,
)
from tensorgrad.train.settings import SCHEDULES, EpochSettings, by_optimizer, fitting
from tensorgrad.train.sizes import check_sizes

_log = logging.getLogger(__name__)

CLASSES = ("negative", "positive")
MODELS: dict[str, tuple[Any, Any]] = {
    "mean": (MeanClassifier, MeanConfig),
    "transformer": (TransformerClassifier, TransformerConfig),
}
# The options that --model changes.
PRESETS: dict[str, dict[str, Any]] = {
    "mean": {"warmup": 100},
    "transformer": {"batch": 128, "lr": 1e-3, "warmup": 200, "dropout": 0.2},
}
# The options that have no effect where another has a value.
UNUSED = {
    ("model", "mean"): ("heads",),
    ("model", "transformer"): ("hidden",),
    ("tokens", "bpe"): ("at_least",),
}
# The options that --data reviews changes for the mean: 2,000 sentences are few.
REVIEWS: dict[str, Any] = {"batch": 64, "epochs": 20}


@dataclass(frozen=True)
class SentimentSettings(EpochSettings):
    """The options of a program that trains a classifier."""

    task: str = option("sentiment", "what to train", choices=("sentiment",))
    data: str = option(
        "hf:stanfordnlp/sst2",
        "a folder with train.tsv and dev.tsv, hf:NAME[:CONFIG], or reviews (synthetic)",
        free=True,
        path=True,
    )
    text_column: str = option(
        "", "column of the sentences", shown="sentence, text or the only one", free=True
    )
    label_column: str = option("label", "column of the labels, which are 0 and 1", free=True)
    held_out: float = option(
        0.0,
        "fraction of the training sentences to validate with; 0: validate with the dev set",
        low=0,
        high=0.9,
    )
    model: str = option("mean", "mean of word vectors, or transformer", choices=tuple(PRESETS))
    tokens: str = option("words", "kind of tokens", choices=("words", "bpe"))
    vocab: int = option(20000, "largest size of the vocabulary", low=257)
    at_least: int = option(1, "omit words that occur less often", low=1)
    vectors: str = option(
        "", "initial word vectors: a text file in GloVe's format, of --width", path=True
    )
    width: int = option(64, "width of the word vectors", low=1)
    layers: int = option(1, "hidden layers, or blocks of the transformer", low=0)
    hidden: int = option(64, "width of the hidden layers", low=1)
    heads: int = option(4, "attention heads of the transformer", low=1)
    context: int = option(64, "context length: longer sentences are cut", low=1)
    dropout: float = option(0.5, "dropout probability", low=0, high=1)
    word_dropout: float = option(0.1, "probability of dropping a word", low=0, high=1)
    epochs: int = option(3, "passes over the training data", low=1, grows=True)
    batch: int = option(256, "sentences of a step", low=1)
    lr: float = option(None, "peak learning rate", low=0, by=by_optimizer("lr", 3e-3))
    schedule: str = option("linear", "how the learning rate decays", choices=SCHEDULES)
    lr_end: float = option(0.0, "final learning rate, as a fraction of --lr", low=0, high=1)
    beta2: float | None = option(
        None, "decay of the mean squared gradient", low=0, high=1, by=by_optimizer("beta2", 0.99)
    )
    evaluate_every: int = option(0, "steps between evaluations; 0: an epoch", low=0)
    checkpoint_every: int = option(0, "steps between checkpoints; 0: an epoch", low=0, free=True)
    out: str = option("", "folder of the run", shown="the first new runs/sentiment-N", free=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vectors and self.tokens != "words":
            raise ArgumentError(f"--vectors: got --tokens {self.tokens}, expected words")

    @property
    def folder(self) -> Path:
        """The folder of a new run."""
        return Path(self.out) if self.out else free_folder("runs/sentiment")

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options that were given, and those that follow from --model and --data."""
        chosen = {"model": "mean", "tokens": "words", **given}
        for (name, value), unused in UNUSED.items():
            for other in unused:
                if chosen[name] == value and other in given:
                    raise ArgumentError(
                        f"--{other.replace('_', '-')}: got {given[other]!r} with --{name} {value}, "
                        "expected none: it would do nothing"
                    )
        model = chosen["model"]
        few = REVIEWS if (model, given.get("data")) == ("mean", "reviews") else {}
        short = {"warmup": None} if given.get("steps") else {}  # a preset's suits its epochs
        return {**fitting(PRESETS[model], given), **few, **short, **given}

    def with_steps(self, epoch: int) -> Self:
        """Return the settings with the number of steps; by default evaluation is each epoch."""
        return replace(
            super().with_steps(epoch),
            evaluate_every=self.evaluate_every or epoch,
            checkpoint_every=self.checkpoint_every or epoch,
        )


Vocabulary = WordVocabulary | Tokenizer


def make_vocabulary(settings: SentimentSettings, folder: Path, texts: Sequence[str]) -> Vocabulary:
    """Return the vocabulary of the run in this folder, or a new one of these texts."""
    if (folder / vocabulary_file(settings)).exists():
        return load_vocabulary(settings, folder)
    if settings.tokens == "words":
        return WordVocabulary.train(texts, settings.vocab, settings.at_least)
    return Tokenizer.train([_spaced(text) for text in texts], settings.vocab)


def load_vocabulary(settings: SentimentSettings, folder: Path) -> Vocabulary:
    """Return the vocabulary of the run in this folder."""
    kind = WordVocabulary if settings.tokens == "words" else Tokenizer
    return kind.load(no_link(folder / vocabulary_file(settings)))


def vocabulary_file(settings: SentimentSettings) -> str:
    """Return the name of the file in the run's folder."""
    return "words.json" if settings.tokens == "words" else "tokenizer.json"


def encode(vocabulary: Vocabulary, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, in lower case and with a space before each word."""
    if isinstance(vocabulary, Tokenizer):
        texts = [_spaced(text) for text in texts]
    return vocabulary.encode_batch(texts)


def _spaced(text: str) -> str:
    """Return words with a space before each, so that equal words have equal tokens everywhere."""
    return "".join(f" {word}" for word in split_words(text))


def read_data(settings: SentimentSettings) -> tuple[LabelledTexts, LabelledTexts]:
    """Return the sentences for training and for validation."""

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


class SentimentRun:
    """A run that trains a classifier: sentences, vocabulary, model and trainer, at step 0."""

    def __init__(self, settings: SentimentSettings, folder: Path, device: str) -> None:
        self.folder = folder
        loggers = make_loggers(settings.loggers)
        make, kind = MODELS[settings.model]
        sizes = {"classes": len(CLASSES), **settings.sizes(kind)}
        kind(vocab_size=settings.vocab, **sizes)  # checked before a long text is read
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
        self.sentences = len(train)
        self.settings = settings.with_steps(self.train.batches)
        self.precision = settings.precision()
        random.seed(settings.seed)
        model_config = kind(vocab_size=self.vocabulary.vocab_size, **sizes)
        check_sizes(model_config, folder)
        self.model: Classifier = make(model_config)
        self.model.to(device, settings.parameter_dtype)
        _log.info(
            "%s: %s sentences to train on, %s to measure with, vocabulary %s, %s parameters, on %s",
            *(folder, f"{len(train):,}", f"{len(validation):,}", f"{self.vocabulary.vocab_size:,}"),
            *(f"{sum(p.size for p in self.model.parameters()):,}", device),
        )
        self.trainer = Trainer(
            self.model,
            OneProcess().prepare(self.model, settings.make_optimizer),
            self.loss,
            self.train.iterate,
            self.settings.learning_rate,
            self.settings,
            folder,
            tokens_per_step=round(self.train.tokens),
            flops_per_token=self._flops_per_token(),
            steps_per_epoch=self.train.batches,
            evaluate=self.measure,
            callbacks=loggers,
            belongs_to={
                "model": {"kind": settings.model, **asdict(self.model.config)},
                "vocabulary": {"sha256": self.vocabulary.digest},
                "data": {
                    "train": train.digest,
                    "validation": validation.digest,
                    "batch": settings.batch,
                    "seed": settings.seed,
                    "widths": self.train.widths,
                },
            },
            scaler=settings.scaler(),
            graphs=len(self.train.widths),
        )

    def loss(self, tokens: backend.Array, lengths: backend.Array, labels: backend.Array) -> Tensor:
        """Return the mean loss of a batch."""
        with self.precision():
            return self.model.forward(tokens, lengths, labels)

    def measure(self) -> dict[str, float]:
        """Return the loss and the accuracy on the validation sentences."""
        model, total, right, count = self.model, 0.0, 0, 0
        with evaluating(model), self.precision():
            for batch in self.validation.evaluation_batches():
                tokens, lengths, labels = (backend.to_device(a, model.device) for a in batch)
                logits = model(tokens, lengths)
                total += cross_entropy(logits, labels, reduction="sum").item()
                right += int((logits.data.argmax(1) == labels).sum())
                count += len(labels)
        return {"validation_loss": total / count, "accuracy": right / count}

    def _flops_per_token(self) -> float:
        texts, tokens = self.settings.batch, max(1.0, self.train.tokens)  # of a step
        return texts * self.model.config.training_flops(tokens / texts, self.train.keys) / tokens

    def use_vectors(self, path: str) -> None:
        """Take the initial word vectors from a file."""
        assert isinstance(self.vocabulary, WordVocabulary)
        vectors, found = read_vectors(path, self.vocabulary.words, self.settings.width)
        self.model.use_vectors((np.flatnonzero(found) + 1).tolist(), vectors[found])
        _log.info("%s has %.1f %% of the words", path, 100 * found.mean())


def evaluate(
    settings: SentimentSettings, folder: Path, device: str, checkpoint: str = "best"
) -> dict[str, float]:
    """Return the validation loss and accuracy of a trained classifier.

    Args:
        settings: of the run, perhaps with other data.
        folder: of the run.
        device: "cpu", "cuda" or "cuda:N".
        checkpoint: "best" or "last".
    """
    run = SentimentRun(settings, folder, device)
    run.model.load_state_dict(run_checkpoint(folder, checkpoint).arrays("model"))
    return run.measure()


def train(settings: SentimentSettings, folder: Path, resuming: bool, device: str) -> Outcome:
    """Train a classifier, from step 0 or from the newest checkpoint."""
    began = time.perf_counter()
    with in_options(settings), run_folder(folder, settings=None if resuming else settings):
        run = SentimentRun(settings, folder, device)
        if resuming:
            resume_run(run.trainer)
        if run.trainer.step == 0 and settings.vectors:
            run.use_vectors(settings.vectors)
        config.save(settings, folder)
        run.vocabulary.save(folder / vocabulary_file(settings))
        resolved = {"warmup": run.settings.warmup_steps}
        save_facts(
            folder, resolved, sum(p.size for p in run.model.parameters()),
            training_sentences=run.sentences,
        )  # fmt: skip
        outcome = run.trainer.run()
        _report(run, outcome, time.perf_counter() - began)
        return outcome


def _report(run: SentimentRun, outcome: Outcome, seconds: float) -> None:
    if not outcome.finished:
        report_stop(outcome, run.settings, run.folder)
        return
    measured = {
        record["step"]: record["accuracy"]
        for record in read_metrics(run.folder / "metrics.jsonl")
        if "accuracy" in record
    } or {outcome.step: run.measure()["accuracy"]}  # somebody has deleted what was written
    best = max(measured, key=lambda step: measured[step])
    _log.info(
        "accuracy %.2f %% at the end (%.2f %% after step %d%s was the highest) in %.0f s; "
        "all in %s",
        *(100 * measured[outcome.step], 100 * measured[best], best),
        *(without_checkpoint(run.folder, best), seconds, run.folder),
    )
