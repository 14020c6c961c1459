"""Train a decoder to translate, German to English by default, and measure it by BLEU.

    python examples/train_translation.py --data phrases    # no download, minutes on two CPU cores
    python examples/train_translation.py --dtype bfloat16  # IWSLT14, which datasets downloads
    python examples/train_translation.py --data my_folder --preset large --dtype bfloat16
    python examples/train_translation.py --resume workdir_vocab10000_lr0.001_embd256
    python examples/train_translation.py --resume workdir_vocab10000_lr0.001_embd256 --beams 4

A folder has train, valid and test files with one sentence a line: train.de, train.en and so on.
After each epoch the run's folder gets eval_results_epoch{n}.json, with loss, BLEU and all
translations, and a checkpoint. translate.py translates with it. A run that is over and is resumed
averages and translates again, as with other beams.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad import backend, random
from tensorgrad.command import command
from tensorgrad.data import (
    PairCorpus,
    PairLoader,
    Tokenizer,
    encode_pairs,
    language_token,
    read_pairs,
    train_tokenizer,
)
from tensorgrad.data.pair_loader import IGNORED, Batch
from tensorgrad.errors import ArgumentError, DataError
from tensorgrad.files import finite, replacing
from tensorgrad.models.generation.search import LARGEST_PENALTY
from tensorgrad.models.translation import TranslationConfig, TranslationModel, generate
from tensorgrad.nn import evaluating
from tensorgrad.tensor import Tensor
from tensorgrad.train import OneProcess, Outcome, Trainer, TrainSettings, average_checkpoints
from tensorgrad.train import config as run_config
from tensorgrad.train.checkpoint import list_checkpoints, step_of
from tensorgrad.train.config import check, option
from tensorgrad.train.device import choose_device
from tensorgrad.train.folder import run_folder
from tensorgrad.train.run import report_stop, resume_run
from tensorgrad.weights import save_arrays

log = logging.getLogger("train_translation")

AVERAGED = "averaged.safetensors"

# What --preset says besides the defaults.
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
class Settings(TrainSettings):
    """What can be said on the command line."""

    data: str = option(
        "hf:bbaaaa/iwslt14-de-en-preprocess",
        "pairs: a folder, hf:NAME[:CONFIG], or phrases, which are made by rules",
    )
    also: str = option("", "a second such source, whose training pairs are added")
    source: str = option("de", "language to translate from, as files and columns call it")
    target: str = option("en", "language to translate into")
    lowercase: bool = option(True, "train on lower case, and ignore case in BLEU")
    preset: str = option(
        "",
        "defaults for the options below; none: phrases for --data phrases, else small",
        choices=("", *PRESETS),
    )
    epochs: int = option(10, "passes through the training pairs", low=1, grows=True)
    steps: int = option(0, "optimizer steps in all; 0: those of --epochs", low=0, grows=True)
    batch: int = option(8192, "tokens of a step, padding included", low=1)
    accumulate: int = option(
        1, "parts of a batch", refused="a batch has tokens, not rows; see --batch for less memory"
    )
    warmup: int | None = option(
        None,
        "steps in which the learning rate rises, fewer than all; none: a twentieth of --steps, or "
        "without it as the preset says",
        low=0,
    )
    weight_decay: float = option(0.01, "decay of matrices, times the learning rate", low=0)
    beta2: float = option(0.98, "AdamW: decay of the mean square", low=0, high=1)
    lr_end: float = option(0.02, "learning rate at the end, as a share of --lr", low=0, high=1)
    vocab: int = option(10000, "tokens of both languages together", low=259)
    layers: int = option(4, "blocks", low=1)
    heads: int = option(8, "attention heads", low=1)
    width: int = option(256, "width of the model", low=1)
    context: int = option(256, "tokens of source and target that the model sees", low=4)
    tied: bool = option(True, "use the table of tokens as the head too")
    prefix: bool = option(False, "let the tokens of a source see each other in both directions")
    dropout: float = option(0.1, "probability of leaving out an activation", low=0, high=1)
    attention_dropout: float | None = option(
        None, "probability of leaving out an attention weight; none: as --dropout", low=0, high=1
    )
    activation_dropout: float = option(
        0.0, "probability of leaving out an activation inside a feed-forward layer", low=0, high=1
    )
    label_smoothing: float = option(
        0.1, "share of a target's probability for all tokens", low=0, high=1
    )
    evaluate_every: int = option(
        1, "steps between two evaluations", refused="each epoch is evaluated; see --bleu-every"
    )
    checkpoint_every: int = option(
        1, "steps between two checkpoints", refused="epochs count here; see --save-every"
    )
    bleu_every: int = option(1, "epochs between two translations of the test set", low=1, free=True)
    save_every: int = option(1, "epochs between two checkpoints", low=1, free=True)
    test_limit: int | None = option(
        None, "translate so many test sentences at most", low=1, free=True
    )
    beams: int = option(1, "beams of the translations; 1 is greedy", low=1, free=True)
    length_penalty: float = option(
        0.6, "of beam search; more favours long ones", low=0, high=LARGEST_PENALTY, free=True
    )
    rows: int = option(128, "sequences to generate at a time", low=1, free=True)
    average: int = option(5, "last checkpoints to average at the end; 0: none", low=0)
    log_every: int = option(
        10, "steps between two looks at the loss, each of which waits for the GPU", low=1, free=True
    )
    keep: int = option(5, "newest checkpoints to keep, besides the best", low=1, free=True)
    device: str = option("auto", "cpu, cuda, cuda:N, or auto: a GPU if there is one", free=True)
    out: str = option(
        "", "folder of the run; workdir_vocab{V}_lr{lr}_embd{C} if none is given", free=True
    )

    def __post_init__(self) -> None:
        check(self)
        if self.steps:
            super().__post_init__()
        if self.average > self.keep:
            raise ArgumentError(
                f"--average: got {self.average}, expected at most --keep, {self.keep}"
            )

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        name = f"workdir_vocab{self.vocab}_lr{self.lr}_embd{self.width}"
        return Path(self.out or name)

    def with_steps(self, epoch: int) -> Settings:
        """Return settings that evaluate after every epoch of so many steps."""
        steps, saves = self.steps or self.epochs * epoch, self.save_every * epoch
        return replace(
            self,
            steps=steps,
            warmup=None if self.warmup is None else min(self.warmup, steps - 1),
            evaluate_every=epoch,
            checkpoint_every=saves,
        )

    def model(self, vocab_size: int) -> TranslationConfig:
        """Return the sizes of the model."""
        return TranslationConfig(
            vocab_size,
            self.context,
            self.layers,
            self.heads,
            self.heads,
            self.width,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            activation_dropout=self.activation_dropout,
            tied=self.tied,
            label_smoothing=self.label_smoothing,
            prefix=self.prefix,
        )


def read_command_line(arguments: Sequence[str] | None = None) -> tuple[Settings, Path, bool]:
    """Return the settings, the folder of the run, and whether it goes on from a checkpoint."""

    def complete(given: dict[str, Any]) -> dict[str, Any]:
        phrases = given.get("data") == "phrases"
        preset = given.get("preset") or ("phrases" if phrases else "small")
        short = {"warmup": None} if given.get("steps") else {}  # a preset's suits its epochs
        return {**PRESETS[preset], **short, **given, "preset": preset}

    description = __doc__.splitlines()[0] if __doc__ else ""
    return run_config.read_command_line(
        Settings, description, lambda settings: settings.folder, arguments, complete
    )


class Bleu:
    """BLEU by sacreBLEU, of texts as people read them.

    Raises:
        DataError: the sacrebleu package is missing.
    """

    def __init__(self, lowercase: bool) -> None:
        try:
            metrics = importlib.import_module("sacrebleu.metrics")
        except ImportError as error:
            raise DataError(
                "BLEU needs the sacrebleu package: pip install 'tensorgrad-cupy[text]'"
            ) from error
        self._metric = metrics.BLEU(lowercase=lowercase)

    def __call__(self, texts: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
        """Return BLEU, 0 to 100, and the signature that says how it was computed."""
        score = self._metric.corpus_score(list(texts), [list(references)])
        return {"bleu": score.score, "signature": str(self._metric.get_signature())}


class Run:
    """A translation run: corpus, tokenizer, model, and how they are measured."""

    def __init__(self, settings: Settings, folder: Path, device: str, resuming: bool) -> None:
        self.folder = folder
        self.bleu = Bleu(settings.lowercase)
        self.corpus = read_corpus(settings)
        known = folder / "tokenizer.json"
        self.tokenizer = (
            Tokenizer.load(known)
            if resuming and known.exists()
            else train_tokenizer(
                self.corpus.train, settings.vocab, (settings.source, settings.target)
            )
        )
        self.train, self.validation = (
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
        self.settings = settings.with_steps(self.train.batches)
        # What interrupts leave is kept besides, so that what is averaged stays there.
        more = len(self._checkpoints(regular=False))
        self.settings = replace(self.settings, keep=settings.keep + more)
        self.precision = settings.precision()
        random.seed(settings.seed)
        self.model = TranslationModel(settings.model(self.tokenizer.vocab_size))
        self.model.to(device, settings.parameter_dtype)
        self.trainer = self._trainer()

    def loss(self, tokens: backend.Array, targets: backend.Array) -> Tensor:
        """Return the mean loss of a batch."""
        with self.precision():
            return self.model.forward(Tensor(tokens), Tensor(targets))

    def evaluate(self) -> dict[str, float]:
        """Return the validation loss and, after an epoch that wants it, BLEU on the test set."""
        step, settings = self.trainer.step, self.settings
        measured = {"validation_loss": self.validation_loss(self.validation.evaluation_batches())}
        epoch = -(-step // self.train.batches)
        if step and (epoch % settings.bleu_every == 0 or step == settings.steps):
            place, translated = {"epoch": epoch, "step": step}, self.translate(f"epoch {epoch}")
            results = {**place, **finite(measured), **translated}
            self.write(f"eval_results_epoch{epoch}.json", results)
            measured["bleu"] = results["bleu"]
        return measured

    def validation_loss(self, batches: Iterable[Batch]) -> float:
        """Return the mean negative log-likelihood of the target tokens, in nats."""
        total, count = np.zeros(()), 0
        with evaluating(self.model):
            for batch in batches:
                arrays = (backend.to_device(array, self.model.device) for array in batch)
                counted = int((batch[1] != IGNORED).sum())
                part = self.loss(*arrays).data.astype(np.float64) * counted
                total, count = (total + part if count else part), count + counted
        return float(total) / count

    def translate(self, desc: str) -> dict[str, Any]:
        """Translate the test set; return BLEU and all texts."""
        settings = self.settings
        keys = settings.source, settings.target
        pairs = self.corpus.test[: settings.test_limit]
        with self.precision():
            texts = generate(
                self.model,
                [dict(zip(keys, pair, strict=True)) for pair in pairs],
                *keys,
                self.tokenizer,
                settings.context,
                desc,
                beams=settings.beams,
                length_penalty=settings.length_penalty,
                rows=max(settings.rows, settings.beams),
            )
        score = self.bleu(texts, [reference for _, reference in pairs])
        entries = [
            {"source": source, "reference": reference, "translation": text}
            for (source, reference), text in zip(pairs, texts, strict=True)
        ]
        search: dict[str, Any] = {"beams": settings.beams}
        if settings.beams > 1:
            search["length_penalty"] = settings.length_penalty
        return {**score, **search, "translations": entries}

    def write(self, name: str, results: Mapping[str, Any]) -> None:
        """Write results as JSON into the folder of the run."""
        with replacing(self.folder / name) as file:
            file.write(json.dumps(results, indent=1, ensure_ascii=False).encode())

    def finish(self) -> None:
        """Average the last checkpoints, measure the mean and save it."""
        last = self._checkpoints(regular=True)[: self.settings.average]
        arrays = average_checkpoints(last)
        save_arrays(self.folder / AVERAGED, arrays)
        self.model.load_state_dict(arrays)
        loss = self.validation_loss(self.validation.evaluation_batches())
        results = {**finite({"validation_loss": loss}), **self.translate("averaged")}
        self.write("eval_results_averaged.json", results)
        log.info(
            "mean of the last %d checkpoints: validation loss %.3f, BLEU %.2f",
            *(len(last), loss, results["bleu"]),
        )

    def _checkpoints(self, regular: bool) -> list[Path]:
        """Return those that a run without interrupts has too, or the others, the newest first."""
        settings, found = self.settings, list_checkpoints(self.folder / "checkpoints")
        ends = {settings.steps, *range(0, settings.steps, settings.checkpoint_every)}
        return [path for path in found if (step_of(path) in ends) == regular]

    def _trainer(self) -> Trainer:
        settings, model = self.settings, self.model
        tokenizer = hashlib.sha256(self.tokenizer.to_json().encode()).hexdigest()
        said = ("batch", "seed", "source", "target", "lowercase")
        data = {"corpus": self.corpus.digest, **{name: getattr(settings, name) for name in said}}
        return Trainer(
            model,
            OneProcess().prepare(model, settings.optimizer),
            self.loss,
            self.train.iterate,
            settings.learning_rate,
            settings,
            self.folder,
            tokens_per_step=self.train.tokens // self.train.batches,
            evaluate=self.evaluate,
            belongs_to={
                "model": asdict(model.config),
                "tokenizer": {"sha256": tokenizer},
                "data": data,
            },
            scaler=settings.scaler(),
        )


def read_corpus(settings: Settings) -> PairCorpus:
    """Return the pairs, those of --also included."""
    keys = settings.source, settings.target
    corpus = read_pairs(settings.data, *keys, lowercase=settings.lowercase)
    if not settings.also:
        return corpus
    more = read_pairs(settings.also, *keys, lowercase=settings.lowercase, parts=["train"])
    return replace(corpus, train=corpus.train + more.train)


def train(settings: Settings, folder: Path, resuming: bool, device: str) -> Outcome:
    """Train, from the beginning or from the newest checkpoint, and say what came of it."""
    with run_folder(folder):
        return _train(settings, folder, resuming, device)


def _train(settings: Settings, folder: Path, resuming: bool, device: str) -> Outcome:
    began = time.perf_counter()
    run = Run(settings, folder, device, resuming)
    if resuming:
        resume_run(run.trainer)
    resumed = run.trainer.step
    run_config.save(settings, folder)
    run.tokenizer.save(folder / "tokenizer.json")
    log.info(
        "%s: %s parameters, vocabulary %s, %s pairs (%d cut, %d left out), %d batches of %s "
        "tokens an epoch, on %s",
        *(folder, f"{sum(p.size for p in run.model.parameters()):,}"),
        *(f"{run.tokenizer.vocab_size:,}", f"{len(run.corpus.train):,}"),
        *(run.train.cut, run.train.left_out, run.train.batches),
        *(f"{run.train.tokens // run.train.batches:,}", device),
    )
    outcome = run.trainer.run()
    if not outcome.finished:
        report_stop(outcome, run.settings.steps, folder)
        return outcome
    if settings.average:
        run.finish()
    elif resumed == outcome.step:
        run.evaluate()
    log.info(
        "all in %s after %.0f s, %s tokens/s in training; to use it: "
        "python examples/translate.py %s",
        *(folder, time.perf_counter() - began, f"{outcome.tokens_per_second:,.0f}", folder),
    )
    return outcome


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    settings, folder, resuming = read_command_line(arguments)
    settings, device = choose_device(settings)
    return train(settings, folder, resuming, device).status


if __name__ == "__main__":
    sys.exit(main())
