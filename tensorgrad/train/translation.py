"""Training a translation model: the settings, and a run from sentence pairs to translations.

The program is examples/train_translation.py, or `tensorgrad train translation`; the benchmark of a
training step uses the same run.
"""

from __future__ import annotations

import importlib
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from tensorgrad.data.pair_loader import PairBatch
from tensorgrad.distribution import install
from tensorgrad.errors import ArgumentError, DataError
from tensorgrad.files import finite, replacing, to_json
from tensorgrad.models.generation.search import LARGEST_PENALTY
from tensorgrad.models.transformer_lm import OF_PUBLISHED
from tensorgrad.models.translation import TranslationConfig, TranslationModel, generate
from tensorgrad.readers import no_link
from tensorgrad.tensor import Tensor
from tensorgrad.train import config
from tensorgrad.train.average import average_checkpoints
from tensorgrad.train.checkpoint import list_checkpoints, run_checkpoint, step_of
from tensorgrad.train.config import option
from tensorgrad.train.folder import run_folder
from tensorgrad.train.loggers import make_loggers
from tensorgrad.train.loop import Outcome, Trainer, mean_loss
from tensorgrad.train.options import in_options
from tensorgrad.train.ranks import OneProcess
from tensorgrad.train.run import report_stop, resume_run, save_facts
from tensorgrad.train.settings import EpochSettings
from tensorgrad.train.sizes import check_sizes
from tensorgrad.weights import load_arrays, save_arrays

_log = logging.getLogger(__name__)
# Other names of the languages that BLEU does not split at spaces.
_LANGUAGES = {"zho": "zh", "chi": "zh", "cmn": "zh", "jpn": "ja", "kor": "ko"}
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

    task: str = option("translation", "what to train", choices=("translation",))
    data: str = option(
        "hf:bbaaaa/iwslt14-de-en-preprocess",
        "sentence pairs: a folder, hf:NAME[:CONFIG], or phrases (synthetic)",
        free=True,
        path=True,
    )
    also: str = option("", "a second such source of training pairs", free=True, path=True)
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
    micro_batches: int = option(
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
        if self.batch < self.context:
            raise ArgumentError(
                f"--batch: got {self.batch} tokens, expected --context, {self.context}, or more"
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
        settings.model(settings.vocab)  # sizes are checked before a long text is read
        self.folder = folder
        self.corpus = read_corpus(settings)
        known, keys = folder / "tokenizer.json", (settings.source, settings.target)
        self.tokenizer = (
            Tokenizer.load(no_link(known))
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
        sizes = settings.model(self.tokenizer.vocab_size)
        check_sizes(sizes, folder)
        self.model = TranslationModel(sizes)
        self.model.to(device, settings.parameter_dtype)
        self.optimizer = OneProcess().prepare(self.model, settings.optimizer)

    def loss(self, tokens: backend.Array, targets: backend.Array) -> Tensor:
        """Return the mean loss of a batch."""
        with self.precision():
            return self.model.forward(Tensor(tokens), Tensor(targets))


class Bleu:
    """BLEU of detokenized text, computed by sacreBLEU with its tokenization for the language.

    Where the packages for Japanese or Korean words are missing, characters are compared, with a
    warning. The signature names the tokenization.

    Args:
        lowercase: whether case is ignored.
        language: of the translations: "en", "zh", "zh-CN", "jpn", ...
    Raises:
        DataError: the sacrebleu package is missing.
    """

    def __init__(self, lowercase: bool, language: str) -> None:
        try:
            metrics = importlib.import_module("sacrebleu.metrics")
        except ImportError as error:
            raise DataError(f"BLEU needs the sacrebleu package: {install('text')}") from error
        code = re.split("[-_.]", language.lower())[0]
        code = _LANGUAGES.get(code, code)
        try:
            self._metric = metrics.BLEU(lowercase=lowercase, trg_lang=code)
        except (ImportError, RuntimeError):  # sacreBLEU's answer to packages that are missing
            _log.warning(
                "BLEU of %s compares characters: words need pip install 'sacrebleu[%s]'",
                *(language, code),
            )
            self._metric = metrics.BLEU(lowercase=lowercase, tokenize="char")

    def __call__(self, texts: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
        """Return BLEU, 0 to 100, and sacreBLEU's signature."""
        score = self._metric.corpus_score(list(texts), [list(references)])
        return {"bleu": score.score, "signature": str(self._metric.get_signature())}


class EvaluatedRun(TranslationRun):
    """A run with its trainer, which evaluates the model after each epoch."""

    def __init__(
        self, settings: TranslationSettings, folder: Path, device: str, resuming: bool
    ) -> None:
        self.bleu, loggers = (
            Bleu(settings.lowercase, settings.target),
            make_loggers(settings.loggers),
        )
        super().__init__(settings, folder, device, resuming)
        # Checkpoints of interrupts are kept in addition: those to average must stay.
        more = len(self._checkpoints(regular=False))
        self.settings = replace(self.settings, keep=settings.keep + more)
        names = ("batch", "seed", "source", "target", "lowercase")
        self.trainer = Trainer(
            self.model,
            self.optimizer,
            self.loss,
            self.batches.iterate,
            self.settings.learning_rate,
            self.settings,
            folder,
            tokens_per_step=self.batches.tokens // self.batches.batches,
            flops_per_token=self._flops_per_token(),
            steps_per_epoch=self.batches.batches,
            evaluate=self.evaluate,
            callbacks=loggers,
            belongs_to={
                "model": _chosen_sizes(self.model.config),
                "tokenizer": {"sha256": self.tokenizer.digest},
                "data": {
                    "corpus": self.corpus.digest,
                    **{name: getattr(settings, name) for name in names},
                    "shapes": self.batches.shapes,
                },
            },
            scaler=settings.scaler(),
            graphs=len(self.batches.shapes),
        )

    def evaluate(self) -> dict[str, float]:
        """Return the validation loss, and BLEU on the test set every `bleu_every` epochs."""
        step, settings = self.trainer.step, self.settings
        measured = self.measure_loss()
        epoch = -(-step // self.batches.batches)
        if step and (epoch % settings.bleu_every == 0 or step == settings.steps):
            place, translated = {"epoch": epoch, "step": step}, self.translate(f"epoch {epoch}")
            results = {**place, **finite(measured), **translated}
            self.write(f"eval_results_epoch{epoch}.json", results)
            measured["bleu"] = results["bleu"]
        return measured

    def validation_loss(self, batches: Iterable[PairBatch]) -> float:
        """Return the mean negative log-likelihood of the target tokens, in nats."""
        return mean_loss(self.model, self.loss, batches)

    def measure_loss(self) -> dict[str, float]:
        """Return "validation_loss" and "validation_tokens", the number of target tokens."""
        loss = self.validation_loss(self.validation.evaluation_batches())
        return {"validation_loss": loss, "validation_tokens": self.validation.targets}

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
                desc=desc,
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
            file.write(to_json(results, 1, name, escapes=False).encode())

    def finish(self) -> None:
        """Average the last checkpoints, evaluate and save the averaged model."""
        last = self._checkpoints(regular=True)[: self.settings.average]
        arrays = average_checkpoints(last)
        save_arrays(self.folder / AVERAGED, arrays)
        self.model.load_state_dict(arrays)
        measured = self.measure_loss()
        results = {**finite(measured), **self.translate("averaged")}
        self.write("eval_results_averaged.json", results)
        _log.info(
            "mean of the last %d checkpoints: validation loss %.3f, BLEU %.2f",
            *(len(last), measured["validation_loss"], results["bleu"]),
        )

    def _flops_per_token(self) -> float:
        model, batches = self.model.config, self.batches
        keys = batches.mean_keys(model.prefix)
        return model.training_flops(keys, batches.targets / batches.tokens)

    def _checkpoints(self, regular: bool) -> list[Path]:
        """Return the checkpoints that an uninterrupted run has too, or the others, newest first."""
        settings, found = self.settings, list_checkpoints(self.folder / "checkpoints")
        ends = {settings.steps, *range(0, settings.steps, settings.checkpoint_every)}
        return [path for path in found if (step_of(path) in ends) == regular]


def evaluate(
    settings: TranslationSettings, folder: Path, device: str, checkpoint: str = "best"
) -> dict[str, Any]:
    """Return the validation loss and BLEU of a trained model, without writing anything.

    Args:
        settings: of the run, perhaps with other data or search options.
        folder: of the run.
        device: "cpu", "cuda" or "cuda:N".
        checkpoint: "best", "last" or "averaged".
    """
    run = EvaluatedRun(settings, folder, device, True)
    averaged = checkpoint == "averaged"
    run.model.load_state_dict(
        load_arrays(no_link(folder / AVERAGED))
        if averaged
        else run_checkpoint(folder, checkpoint).arrays("model")
    )
    measured, results = run.measure_loss(), run.translate("test set")
    return {**measured, "bleu": results["bleu"], "signature": results["signature"]}


def train(settings: TranslationSettings, folder: Path, resuming: bool, device: str) -> Outcome:
    """Train a translation model, from step 0 or from the newest checkpoint.

    A finished run that is resumed averages and translates again, as with other --beams.
    """
    began = time.perf_counter()
    with in_options(settings), run_folder(folder, settings=None if resuming else settings):
        run = EvaluatedRun(settings, folder, device, resuming)
        batches = run.batches
        if resuming:
            resume_run(run.trainer)
        resumed = run.trainer.step
        config.save(settings, folder)
        run.tokenizer.save(folder / "tokenizer.json")
        resolved = {"warmup": run.settings.warmup_steps, "attention_dropout": settings.dropout}
        save_facts(
            folder, resolved, run.model.config.parameters,
            training_tokens=batches.tokens, training_pairs=len(run.corpus.train),
        )  # fmt: skip
        _log.info(
            "%s: %s parameters, vocabulary %s, %s pairs (%d cut, %d skipped), %d batches of %s "
            "tokens and %d shapes an epoch, on %s",
            *(folder, f"{run.model.config.parameters:,}", f"{run.tokenizer.vocab_size:,}"),
            *(f"{len(run.corpus.train):,}", batches.cut, batches.skipped, batches.batches),
            *(f"{batches.tokens // batches.batches:,}", len(batches.shapes), device),
        )
        outcome = run.trainer.run()
        if not outcome.finished:
            report_stop(outcome, run.settings, folder)
            return outcome
        if settings.average:
            run.finish()
        elif resumed == outcome.step:
            run.evaluate()
        _log.info(
            "all in %s after %.0f s, %s tokens/s in training; to use it: tensorgrad translate %s",
            *(folder, time.perf_counter() - began, f"{outcome.tokens_per_second:,.0f}", folder),
        )
        return outcome


def read_corpus(settings: TranslationSettings) -> PairCorpus:
    """Return the pairs of --data, with those of --also for training."""
    keys = settings.source, settings.target
    corpus = read_pairs(settings.data, *keys, lowercase=settings.lowercase)
    if not settings.also:
        return corpus
    more = read_pairs(settings.also, *keys, lowercase=settings.lowercase, parts=["train"])
    return replace(corpus, train=corpus.train + more.train)


def _chosen_sizes(config: TranslationConfig) -> dict[str, Any]:
    """Return the sizes that a checkpoint has: those of published models alone stay the default."""
    return {name: size for name, size in asdict(config).items() if name not in OF_PUBLISHED}
