"""The task of training a classifier of sentences.

`tensorgrad train sentiment` runs it, see task.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.errors import ArgumentError
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
from tensorgrad.data.batches import IGNORED
from tensorgrad.io.readers import no_link
from tensorgrad.models.sentiment import (
    Classifier,
    MeanClassifier,
    MeanConfig,
    TransformerClassifier,
    TransformerConfig,
)
from tensorgrad.nn import evaluating
from tensorgrad.ops.cross_entropy import cross_entropy
from tensorgrad.train.config import option
from tensorgrad.train.log import read_metrics
from tensorgrad.train.run import Outcome, without_checkpoint
from tensorgrad.train.settings import LARGEST_BATCH, SCHEDULES, EpochSettings, by_optimizer
from tensorgrad.train.task import Task

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
    batch: int = option(256, "sentences of a step", low=1, high=LARGEST_BATCH)
    lr: float = option(None, "peak learning rate", low=0, by=by_optimizer("lr", 3e-3))
    schedule: str = option("linear", "how the learning rate decays", choices=SCHEDULES)
    lr_end: float = option(0.0, "final learning rate, as a fraction of --lr", low=0, high=1)
    beta2: float | None = option(
        None, "decay of the mean squared gradient", low=0, high=1, by=by_optimizer("beta2", 0.99)
    )
    evaluate_every: int = option(0, "steps between evaluations; 0: an epoch", low=0)
    checkpoint_every: int = option(0, "steps between checkpoints; 0: an epoch", low=0, free=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vectors and self.tokens != "words":
            raise ArgumentError(f"--vectors: got --tokens {self.tokens}, expected words")

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
        return cls.with_preset({**PRESETS[model], **few}, given)

    def config(self, vocab_size: int) -> Any:
        """Return the sizes of the model."""
        _, kind = MODELS[self.model]
        sizes = {"classes": len(CLASSES), **self.sizes(kind)}
        return kind(vocab_size=vocab_size, **sizes)

    def known_sizes(self) -> Any:
        """Return the sizes with the largest vocabulary."""
        return self.config(self.vocab)

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


class Sentiment(Task):
    """Train a classifier of positive and negative sentences."""

    Settings = SentimentSettings
    settings: SentimentSettings
    model: Classifier

    def read(self) -> None:
        """Read the sentences, and make or load the vocabulary."""
        settings, strategy = self.settings, self.strategy
        self.texts = read_data(settings)
        self.vocabulary = make_vocabulary(settings, self.folder, self.texts[0].texts)
        self.training, self.validation = (
            LabelledLoader(
                encode(self.vocabulary, part.texts),
                part.labels,
                settings.batch,
                settings.seed,
                settings.context,
                strategy.rank,
                strategy.ranks,
                settings.micro_batches,
            )
            for part in self.texts
        )
        self.config = settings.config(self.vocabulary.vocab_size)
        tokens = max(1.0, self.training.tokens)  # tokens of a step
        flops = self.config.training_flops(tokens / settings.batch, self.training.keys)
        self.flops_per_token = settings.batch * flops / tokens
        self.tokens_per_step = round(self.training.tokens)
        self.steps_per_epoch = self.training.batches
        self.graphs = len(self.training.widths)

    def build(self) -> Classifier:
        """Return the model, at the beginning of a run with the vectors of --vectors."""
        self.check_model(self.config)
        make, _ = MODELS[self.settings.model]
        model: Classifier = make(self.config)
        if self.settings.vectors and self.begins:
            self._use_vectors(model, self.settings.vectors)
        return model

    def _use_vectors(self, model: Classifier, path: str) -> None:
        """Take the initial word vectors from a file."""
        assert isinstance(self.vocabulary, WordVocabulary)
        vectors, found = read_vectors(path, self.vocabulary.words, self.settings.width)
        model.use_vectors((np.flatnonzero(found) + 1).tolist(), vectors[found])
        _log.info("%s has %.1f %% of the words", path, 100 * found.mean())

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the accuracy on the validation sentences."""
        model, total, right, count = self.model, 0.0, 0, 0
        with evaluating(model), self.precision():
            for batch in self.validation.evaluation_batches():
                tokens, lengths, labels = (backend.to_device(a, model.device) for a in batch)
                logits = model(tokens, lengths)
                total += cross_entropy(logits, labels, reduction="sum").item()
                right += int((logits.data.argmax(1) == labels).sum())
                count += int((labels != IGNORED).sum())
        loss, accurate, texts = self.strategy.sum([total, right, count])
        return {"validation_loss": loss / texts, "accuracy": accurate / texts}

    def fingerprint(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the sizes of the model, the vocabulary, and the sentences and their order."""
        settings, (training, validation) = self.settings, self.texts
        return {
            "model": {"kind": settings.model, **asdict(self.config)},
            "vocabulary": {"sha256": self.vocabulary.digest},
            "data": {
                "train": training.digest,
                "validation": validation.digest,
                "batch": settings.batch,
                "seed": settings.seed,
                "widths": self.training.widths,
            },
        }

    def save(self) -> None:
        """Write the vocabulary."""
        self.vocabulary.save(self.folder / vocabulary_file(self.settings))

    def facts(self) -> Mapping[str, Any]:
        """Return the number of sentences for training."""
        return {"training_sentences": len(self.texts[0])}

    def about(self) -> str:
        """Return the numbers of sentences, and the size of the vocabulary."""
        training, validation = (f"{len(part):,}" for part in self.texts)
        vocabulary = f"{self.vocabulary.vocab_size:,}"
        return (
            f"vocabulary {vocabulary}, {training} sentences to train on, {validation} to measure "
            "with"
        )

    def end(self, outcome: Outcome) -> str:
        """Return the last accuracy and the highest one."""
        if not self.strategy.is_main:
            return ""
        measured = {
            record["step"]: record["accuracy"]
            for record in read_metrics(self.folder / "metrics.jsonl")
            if "accuracy" in record
        }
        if not measured and self.strategy.processes == 1:  # somebody has deleted what was written
            measured = {outcome.step: self.evaluate()["accuracy"]}
        best = max(measured, key=lambda step: measured[step])
        return (
            f"accuracy {100 * measured[outcome.step]:.2f} % at the end "
            f"(highest: {100 * measured[best]:.2f} % after step {best}"
            f"{without_checkpoint(self.folder, best)})"
        )
