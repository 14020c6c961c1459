"""The task of training a translation model, from sentence pairs to translations.

`tensorgrad train translation` runs it, see task.py; the benchmark of a training step uses it too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from tensorgrad.core.errors import ArgumentError
from tensorgrad.data import (
    PairCorpus,
    PairLoader,
    Tokenizer,
    encode_pairs,
    language_token,
    read_pairs,
    train_tokenizer,
)
from tensorgrad.io.files import finite, replacing, to_json
from tensorgrad.io.readers import needed, no_link
from tensorgrad.io.weights import load_arrays, save_arrays
from tensorgrad.models.generation.search import LARGEST_PENALTY
from tensorgrad.models.transformer_lm import OF_PUBLISHED
from tensorgrad.models.translation import TranslationConfig, TranslationModel, generate
from tensorgrad.train.average import average_checkpoints
from tensorgrad.train.checkpoint import list_checkpoints, step_of
from tensorgrad.train.config import option
from tensorgrad.train.progress import StageProgress
from tensorgrad.train.run import Outcome
from tensorgrad.train.settings import LARGEST_BATCH, EpochSettings, by_optimizer
from tensorgrad.train.strategy import OneProcess
from tensorgrad.train.task import Task

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
    preset: str | None = option(
        None,
        "defaults of the options below",
        shown="phrases for --data phrases, else small",
        choices=tuple(PRESETS),
    )
    batch: int = option(8192, "tokens of a step, with padding", low=1, high=LARGEST_BATCH)
    beta2: float | None = option(
        None, "decay of the mean squared gradient", low=0, high=1, by=by_optimizer("beta2", 0.98)
    )
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
        return {**cls.with_preset(PRESETS[preset], given), "preset": preset}

    def with_steps(self, epoch: int) -> Self:
        """Return the settings with the number of steps; evaluation is after each epoch."""
        settings = super().with_steps(epoch)
        return replace(settings, evaluate_every=epoch, checkpoint_every=self.save_every * epoch)

    def config(self, vocab_size: int) -> TranslationConfig:
        """Return the sizes of the model."""
        return TranslationConfig(vocab_size, kv_heads=self.heads, **self.sizes(TranslationConfig))

    def known_sizes(self) -> TranslationConfig:
        """Return the sizes with the largest vocabulary to train."""
        return self.config(self.vocab)


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
        metrics = needed("sacrebleu.metrics", "BLEU", "text")
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


class Translation(Task):
    """Train a translation model on pairs of sentences, and measure BLEU."""

    Settings = TranslationSettings
    settings: TranslationSettings
    model: TranslationModel

    def sizes(self) -> TranslationConfig:
        """Return the sizes with the largest vocabulary to train."""
        self.bleu = Bleu(self.settings.lowercase, self.settings.target)
        return self.settings.known_sizes()

    def read(self) -> None:
        """Read the pairs, and train or load the tokenizer."""
        settings, known = self.settings, self.folder / "tokenizer.json"
        self.corpus = read_corpus(settings, self.strategy.is_main)
        keys = settings.source, settings.target
        self.tokenizer = (
            Tokenizer.load(no_link(known))
            if self.resuming and known.exists()
            else train_tokenizer(self.corpus.train, settings.vocab, keys)
        )
        self.training = self._loader(self.corpus.train)
        self.validation = self._loader(self.corpus.validation)
        self.config = settings.config(self.tokenizer.vocab_size)
        training = self.training
        self.tokens_per_step = training.tokens // training.batches
        keys_seen = training.mean_keys(self.config.prefix)
        self.flops_per_token = self.config.training_flops(
            keys_seen, training.targets / training.tokens
        )
        self.steps_per_epoch, self.graphs = training.batches, len(training.shapes)
        self._interrupted = len(self._checkpoints(regular=False))

    @property
    def resolved(self) -> TranslationSettings:
        """The settings with the number of steps.

        Checkpoints of interrupts are kept in addition: those to average must stay.
        """
        settings: TranslationSettings = super().resolved
        return replace(settings, keep=settings.keep + self._interrupted)

    def build(self) -> TranslationModel:
        """Return the model."""
        self.check_model(self.config)
        return TranslationModel(self.config)

    def evaluate(self) -> dict[str, float]:
        """Return the validation loss, and BLEU on the test set every `bleu_every` epochs."""
        step, measured = self.step, self.measure_loss()
        epoch = -(-step // self.training.batches)
        if step and (epoch % self.settings.bleu_every == 0 or self.finished):
            place, translated = {"epoch": epoch, "step": step}, self.translate(f"epoch {epoch}")
            results = {**place, **finite(measured), **translated}
            self.write(f"eval_results_epoch{epoch}.json", results)
            measured["bleu"] = results["bleu"]
        return measured

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
        if self.strategy.is_main:
            with replacing(self.folder / name) as file:
                file.write(to_json(results, 1, name, escapes=False).encode())

    def fingerprint(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the sizes of the model, the tokenizer, and the pairs and their order."""
        names = ("batch", "seed", "source", "target", "lowercase")
        return {
            "model": _chosen_sizes(self.config),
            "tokenizer": {"sha256": self.tokenizer.digest},
            "data": {
                "corpus": self.corpus.digest,
                **{name: getattr(self.settings, name) for name in names},
                "shapes": self.training.shapes,
            },
        }

    def save(self) -> None:
        """Write the tokenizer."""
        self.tokenizer.save(self.folder / "tokenizer.json")

    def facts(self) -> Mapping[str, Any]:
        """Return the settings that others give, and the tokens and pairs for training."""
        return {
            "attention_dropout": self.settings.dropout,
            "training_tokens": self.training.tokens,
            "training_pairs": len(self.corpus.train),
        }

    def about(self) -> str:
        """Return the sizes of the vocabulary, the pairs and the batches."""
        batches, vocabulary = self.training, f"{self.tokenizer.vocab_size:,}"
        return (
            f"vocabulary {vocabulary}, {len(self.corpus.train):,} pairs ({batches.cut} cut, "
            f"{batches.skipped} skipped), {batches.batches} batches of {self.tokens_per_step:,} "
            f"tokens and {len(batches.shapes)} shapes an epoch"
        )

    def end(self, outcome: Outcome) -> str:
        """Average the last checkpoints, or translate again; return how to use the model.

        A finished run that is resumed averages and translates again, as with other --beams.
        """
        if self.settings.average:
            self._average()
        elif self.first_step == outcome.step:
            self.evaluate()
        return f"to use it: tensorgrad translate {self.folder}"

    def _average(self) -> None:
        """Average the last checkpoints, evaluate and save the averaged model: on the main rank."""
        if not self.strategy.is_main:
            return
        last = self._checkpoints(regular=True)[: self.settings.average]
        arrays = average_checkpoints(last)
        save_arrays(self.folder / AVERAGED, arrays)
        self._become(arrays)
        measured = self.measure_loss()
        results = {**finite(measured), **self.translate("averaged")}
        self.write("eval_results_averaged.json", results)
        _log.info(
            "mean of the last %d checkpoints: validation loss %.3f, BLEU %.2f",
            *(len(last), measured["validation_loss"], results["bleu"]),
        )

    def _become(self, arrays: Mapping[str, Any]) -> None:
        """Go on as one process with a whole model of these parameters."""
        device, self.strategy = self.model.device, OneProcess()
        self.model = TranslationModel(self.config).to(device, self.settings.parameter_dtype)
        self.model.load_state_dict(arrays)
        self.validation = self._loader(self.corpus.validation)

    @classmethod
    def trained_arrays(cls, path: Path, checkpoint: str) -> Mapping[str, Any]:
        """Return the arrays of a trained model; `checkpoint` may be "averaged" too."""
        if checkpoint == "averaged":
            return load_arrays(no_link(path / AVERAGED))
        return super().trained_arrays(path, checkpoint)

    def assess(self) -> Mapping[str, Any]:
        """Return the validation loss and BLEU."""
        measured, results = self.measure_loss(), self.translate("test set")
        return {**measured, "bleu": results["bleu"], "signature": results["signature"]}

    def _loader(self, pairs: Sequence[tuple[str, str]]) -> PairLoader:
        """Return this rank's batches of pairs."""
        settings, tokenizer = self.settings, self.tokenizer
        return PairLoader(
            encode_pairs(tokenizer, pairs),
            language_token(tokenizer, settings.target),
            tokenizer.end_of_text,
            settings.batch,
            settings.context,
            settings.seed,
            self.strategy.rank,
            self.strategy.ranks,
            settings.micro_batches,
        )

    def _checkpoints(self, regular: bool) -> list[Path]:
        """Return the checkpoints that an uninterrupted run has too, or the others, newest first."""
        settings = super().resolved
        found = list_checkpoints(self.folder / "checkpoints")
        ends = range(0, settings.steps, settings.checkpoint_every)
        return [
            path
            for path in found
            if (step_of(path) in ends or step_of(path) == settings.steps) == regular
        ]


def read_corpus(settings: TranslationSettings, shown: bool = False) -> PairCorpus:
    """Return the pairs of --data, with those of --also for training.

    Args:
        settings: of the run.
        shown: whether to show the progress.
    """
    keys, lowercase = (settings.source, settings.target), settings.lowercase
    with StageProgress(f"preparing {settings.data}", shown) as progress:
        corpus = read_pairs(settings.data, *keys, lowercase=lowercase, progress=progress)
        if not settings.also:
            return corpus
        options: dict[str, Any] = {"lowercase": lowercase, "parts": ["train"]}
        more = read_pairs(settings.also, *keys, **options, progress=progress)
    return replace(corpus, train=corpus.train + more.train)


def _chosen_sizes(config: TranslationConfig) -> dict[str, Any]:
    """Return the sizes that a checkpoint has: those of published models alone stay the default."""
    return {name: size for name, size in asdict(config).items() if name not in OF_PUBLISHED}
