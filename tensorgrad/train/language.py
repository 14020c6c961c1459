"""The task of training a language model: a GPT-2, a TransformerLM or a model of the user's.

`tensorgrad train` runs it, see task.py. Tests: tests/cli/test_train.py, tests/train/test_task.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad import nn
from tensorgrad.core.errors import ArgumentError, TrainingError
from tensorgrad.data import Corpus, TokenLoader, is_prepared, open_prepared, prepare
from tensorgrad.data.corpus import IN_CACHE
from tensorgrad.data.published_tokenizer import load_tokenizer
from tensorgrad.io.readers import no_link
from tensorgrad.models.generation import generate
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.models.presets import MODELS, PRESETS, SIZES, model_name
from tensorgrad.models.restore import config_of
from tensorgrad.train.config import option
from tensorgrad.train.folder import free_folder
from tensorgrad.train.load import AnyTokenizer, load_trained
from tensorgrad.train.log import read_metrics
from tensorgrad.train.loop import measure_loss
from tensorgrad.train.progress import StageProgress
from tensorgrad.train.run import Outcome, without_checkpoint
from tensorgrad.train.settings import TrainSettings, by_optimizer
from tensorgrad.train.sizes import newest_entry
from tensorgrad.train.task import Task
from tensorgrad.train.user_file import is_file, made, model_class, sizes_of

_log = logging.getLogger(__name__)

# Settings that are sizes of a model, where its config has them.
_SIZES = (
    *("layers", "heads", "kv_heads", "width", "hidden", "head_width", "context", "rope_base"),
    *("norm_eps", "window", "tied", "qkv_bias", "qk_norm", "vocab_multiple", "dropout"),
)
# Settings that a model of --init-from has already. A shorter --context is one of the training.
_FREE_SIZES = ("context", "dropout")
_OF_MODEL = (
    *("model", "preset", *(name for name in _SIZES if name not in _FREE_SIZES)),
    *("vocab", "tokenizer"),
)


def _size(help: str, shown: str = "the preset's", low: int = 1) -> Any:
    """Declare a size of the model that a preset or the model gives."""
    return option(None, help, shown=shown, low=low)


@dataclass(frozen=True)
class LanguageSettings(TrainSettings):
    """The options of a program that trains a language model."""

    task: str = option("language-model", "what to train", choices=("language-model",))
    steps: int = option(800, "optimizer steps", low=1, grows=True)
    lr: float = option(None, "peak learning rate", low=0, by=by_optimizer("lr", 3e-3))
    data: str = option(
        "stdlib",
        "training text: a file, a folder, hf:NAME[:CONFIG][:SPLIT], or stdlib, Python's source; or "
        "a folder of `tensorgrad prepare`",
        free=True,
        path=True,
    )
    text_column: str = option(
        "", "column of the text in JSON lines, Parquet and hf: data", shown="text", free=True
    )
    model: str = option(
        "",
        f"the model: {', '.join(MODELS)}, or a Python file that defines one",
        shown="the preset's, or gpt2",
        path=True,
    )
    preset: str = option(
        "small",
        "sizes of the model; small and char are of any model, char those of nanoGPT's for "
        "characters, with a token for each byte",
        choices=(*SIZES, *PRESETS),
    )
    layers: int | None = _size("transformer blocks")
    heads: int | None = _size("attention heads")
    kv_heads: int | None = _size("heads of keys and values, if the model has fewer")
    width: int | None = _size("width of the model")
    hidden: int | None = _size("width inside the feed-forward layers", "the model's")
    head_width: int | None = _size("width of an attention head", "--width / --heads")
    context: int | None = _size(
        "context length in tokens; with --init-from, that of the training: at most the model's",
        shown="that of the preset or model",
    )
    rope_base: float | None = _size("base of the rotary angles", "10000")
    norm_eps: float | None = _size("added to the mean squares of norms", "the model's", 0)
    window: int | None = _size("tokens that a token attends to, itself included", "all")
    tied: bool | None = option(None, "tie the head to the token embedding", shown="the model's")
    qkv_bias: bool | None = option(None, "biases of queries, keys and values", shown="the model's")
    qk_norm: bool | None = option(None, "norms of queries and keys", shown="the model's")
    vocab: int | None = _size("size of the vocabulary", low=257)
    tokenizer: str = option(
        "", "a tokenizer.json to use", shown="train a tokenizer", free=True, path=True
    )
    init_from: str = option(
        "",
        "initial weights, sizes and tokenizer: a run, a checkpoint, a folder in Hugging Face's "
        "layout or a merged file; with --download, a name on the Hugging Face Hub",
        shown="random weights",
        path=True,
    )
    download: bool = option(
        False, "download the model of --init-from if it is not a folder; needs huggingface_hub",
        free=True,
    )  # fmt: skip
    revision: str = option(
        "", "revision of the download: a branch, tag or commit", shown="the newest", free=True
    )
    vocab_multiple: int = option(
        1, "pad the rows of the token embedding to a multiple of this; 128 suits GPUs", low=1
    )
    dropout: float = option(0.0, "dropout probability", low=0, high=1)
    attention: str = option(
        "flash",
        "how attention computes: one kernel (flash), a kernel for the softmax (fused-softmax), or "
        "op by op (unfused)",
        choices=nn.ATTENTION_KERNELS,
    )
    recompute: bool = option(
        False, "save only the inputs of blocks and compute them again in backward", free=True
    )
    recompute_norms: bool = option(
        False, "save no outputs of norms in blocks and compute them again in backward", free=True
    )
    validation: float = option(0.05, "fraction of the text for validation", low=0, high=1)
    evaluate_every: int = option(200, "steps between evaluations", low=1)
    evaluation_batches: int = option(
        20, "validation batches of an evaluation, spread over the text; at the end all count", low=1
    )
    out: str = option("", "folder of the run", shown="the first new runs/gpt2-N", free=True)
    cache: str = option("runs/data", "folder for tokenized text", free=True, known_by=IN_CACHE)
    prompt: str = option("def ", "prompt of the samples", free=True)
    sample: int = option(200, "tokens of a sample; 0: no samples", low=0, free=True)
    sample_every: int = option(
        0, "steps between samples; 0: one at the end of the run", low=0, free=True
    )
    temperature: float = option(0.7, "temperature of the samples; 0: greedy", low=0, free=True)
    top_p: float = option(
        0.95,
        "sample from the fewest tokens that together have this probability; 0: from all",
        low=0, high=1, free=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer and self.vocab is not None and not self.init_from:
            raise ArgumentError(
                f"--vocab: got {self.vocab} with --tokenizer, expected none: it has its own"
            )
        own = model_name(PRESETS.get(self.preset))
        if own and self.model and self.model != own:
            raise ArgumentError(
                f"--preset: got {self.preset} with --model {self.model}, expected one of "
                f"{', '.join(SIZES)}: it has the sizes of a {own}"
            )

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options that were given.

        Raises:
            ArgumentError: one of them is of --init-from's model already.
        """
        for name in _OF_MODEL:
            if name == "model" and is_file(given.get(name) or ""):
                continue  # the file of the model, which is executed
            if given.get("init_from") and given.get(name) is not None:
                raise ArgumentError(
                    f"--{name.replace('_', '-')}: got {given[name]} with --init-from, expected "
                    "none: the model has its own"
                )
        return given

    @property
    def folder(self) -> Path:
        """The folder of a new run."""
        name = (self.model or model_name(PRESETS.get(self.preset))).partition(".py")[0]
        return Path(self.out) if self.out else free_folder(f"runs/{Path(name).name or 'gpt2'}")

    @property
    def largest_vocab(self) -> int:
        """The size of the vocabulary to train; a small text gives fewer tokens."""
        if self.vocab or self.preset in SIZES:
            return self.vocab or SIZES[self.preset]["vocab_size"]
        size: int = PRESETS[self.preset].vocab_size
        return size

    @property
    def model_class(self) -> Any:
        """The class of the model, a LanguageModel that is made of its `Config`."""
        return model_class(self.model or model_name(PRESETS.get(self.preset)) or "gpt2")

    def _given(self, kind: type[Any], sizes: Sequence[str]) -> dict[str, Any]:
        """Return the settings that are sizes of a model; ArgumentError for one that it lacks."""
        names, defaults = (
            {f.name: f.default for f in fields(settings)} for settings in (kind, self)
        )
        given = {name: getattr(self, name) for name in sizes}
        for name, value in given.items():
            if name not in names and value != defaults[name]:
                model = kind.__name__.removesuffix("Config")
                raise ArgumentError(
                    f"--{name.replace('_', '-')}: got {value} for {model}, expected none: its "
                    f"config has no {name}"
                )
        return {name: value for name, value in given.items() if name in names}

    def with_dropout(self, sizes: Any) -> Any:
        """Return the sizes of a trained model with the dropout of these settings."""
        return replace(sizes, **self._given(type(sizes), ["dropout"]))

    def known_sizes(self) -> Any:
        """Return the sizes with the largest vocabulary; None: those of --init-from's model."""
        return None if self.init_from else self.config()

    def config(self, vocab_size: int | None = None) -> Any:
        """Return the sizes of the preset, replaced where an option gives another.

        Args:
            vocab_size: default: the largest vocabulary to train.
        Raises:
            ArgumentError: an option is none of the model's, or the sizes do not fit each other.
        """
        kind = self.model_class.Config
        names = {f.name for f in fields(kind)}
        given = self._given(kind, _SIZES)
        if self.init_from and self.vocab is not None:  # larger than its tokenizer's, perhaps
            vocab_size = self.vocab
        sizes = {name: value for name, value in given.items() if value is not None}
        sizes["vocab_size"] = self.largest_vocab if vocab_size is None else vocab_size
        if self.preset in PRESETS:
            return replace(PRESETS[self.preset], **sizes)
        usual = {name: size for name, size in SIZES[self.preset].items() if name in names}
        if "kv_heads" in usual and self.heads is not None:
            usual["kv_heads"] = self.heads
        return sizes_of(kind, {**usual, **sizes})


class LanguageModeling(Task):
    """Train a language model on text."""

    Settings = LanguageSettings
    settings: LanguageSettings
    model: LanguageModel

    def sizes(self) -> Any:
        """Return the sizes with the largest vocabulary; load what the run starts from."""
        settings = self.settings
        self._initial, self._tokenizer = self._start()
        if self._initial is not None:
            self.settings = settings = _with_sizes(settings, self._initial)
        settings.check_batch(self.strategy.ranks)
        tokenizer = self._tokenizer
        return self._config(tokenizer.vocab_size if tokenizer else settings.largest_vocab)

    def _start(self) -> tuple[LanguageModel | None, AnyTokenizer | None]:
        """Return the model that a run starts from, and the tokenizer where none is trained.

        Of a run with a checkpoint that has the weights.
        """
        settings, own = self.settings, no_link(self.folder / "tokenizer.json")
        if settings.init_from and self.begins:
            return load_trained(
                Path(settings.init_from),
                file=settings.model,
                download=settings.download,
                revision=settings.revision or None,
            )
        if settings.init_from:
            return None, load_tokenizer(own)
        if settings.tokenizer:
            moved = self.resuming and not Path(settings.tokenizer).exists()
            return None, load_tokenizer(own if moved else settings.tokenizer)
        return None, None

    def _config(self, vocab_size: int) -> Any:
        """Return the sizes of the model: those of --init-from, or of the settings."""
        settings = self.settings
        if self._initial is not None:
            return settings.with_dropout(self._initial.config)
        stored = newest_entry(self.folder, "model") if settings.init_from else None
        if stored is not None:
            return config_of(settings.model_class.Config, stored, str(self.folder))
        return settings.config(vocab_size)

    def read(self) -> None:
        """Read the text as tokens."""
        settings, strategy = self.settings, self.strategy
        self.corpus = prepare_corpus(settings, self._tokenizer, strategy.is_main)
        vocab_size, new = self.corpus.tokenizer.vocab_size, not (self.resuming or self._initial)
        if new and is_prepared(settings.data) and settings.vocab not in (None, vocab_size):
            raise ArgumentError(
                f"--vocab: got {settings.vocab} with --data {settings.data}, expected none: its "
                f"tokenizer has {vocab_size}"
            )
        self.config = self._config(self.corpus.tokenizer.vocab_size)
        context = settings.context or self.config.context
        if context > self.config.context:
            raise ArgumentError(
                f"--context: got {context} with --init-from, expected at most the model's, "
                f"{self.config.context}"
            )
        self.training, self.validation = (
            TokenLoader(
                tokens, settings.batch, context, settings.seed, strategy.rank, strategy.ranks
            )
            for tokens in (self.corpus.train, self.corpus.validation)
        )
        self.tokens_per_step = settings.batch * context
        self.flops_per_token = replace(self.config, context=context).training_flops()
        # With sequence parallelism one token alone has no logits.
        self.samples = settings.sample > 0 and not settings.sequence_parallel
        self.sample_every = settings.sample_every

    def build(self) -> LanguageModel:
        """Return the model, with the weights of --init-from where there are some."""
        self.check_model(self.config)
        initial, self._initial = self._initial, None
        model: LanguageModel = made(self.settings.model_class, self.config)
        if initial is not None:
            model.load_state_dict(initial.state_dict())
        return with_options(model, self.settings)

    def evaluate(self) -> Mapping[str, float]:
        """Return the loss on some of the validation text; at the end also on the whole."""
        some = self.validation.evaluation_batches(self.settings.evaluation_batches)
        found = measure_loss(self.model, self.loss, some, self.strategy)
        if not self.finished:
            return found
        whole = found
        if found["validation_tokens"] < len(self.corpus.validation) - 1:
            whole = self.measure_loss()
        return {**found, **{f"final_{name}": value for name, value in whole.items()}}

    def sample(self) -> tuple[str, str]:
        """Return the prompt, and the text that the model continues it with."""
        settings, tokenizer = self.settings, self.corpus.tokenizer
        tokens = generate(
            self.model,
            tokenizer.encode_prompt(settings.prompt)[-self.model.context :],
            settings.sample,
            temperature=settings.temperature,
            top_p=settings.top_p or None,
            seed=settings.seed,
            stop_tokens=[tokenizer.end_of_text],
        )
        text = tokenizer.decode_bytes(tokens, skip_special_tokens=True)  # with a blank before it
        return settings.prompt, settings.prompt + text.decode(errors="replace")

    def fingerprint(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the sizes of the model, the tokenizer, and the text and its order."""
        settings, corpus = self.settings, self.corpus
        return {
            "model": asdict(self.config),
            "tokenizer": {"sha256": corpus.tokenizer.digest},
            "data": {"corpus": corpus.digest, "batch": settings.batch, "seed": settings.seed},
        }

    def save(self) -> None:
        """Write the tokenizer."""
        self.corpus.tokenizer.save(self.folder / "tokenizer.json")

    def facts(self) -> Mapping[str, Any]:
        """Return the sizes that the preset gives, and the tokens of the text."""
        names = [
            name for name in ("layers", "heads", "width", "context") if hasattr(self.config, name)
        ]
        hidden = getattr(self.config, "hidden_width", None)
        return {
            **{name: getattr(self.config, name) for name in names},
            **({} if hidden is None else {"hidden": hidden}),
            "vocab": self.config.vocab_size,
            "training_tokens": len(self.corpus.train),
            "validation_tokens": len(self.corpus.validation),
        }

    def about(self) -> str:
        """Return the sizes of the vocabulary and of the text."""
        vocabulary = f"{self.corpus.tokenizer.vocab_size:,}"
        return f"vocabulary {vocabulary}, {len(self.corpus.train):,} tokens of text"

    def end(self, outcome: Outcome) -> str:
        """Return the validation losses of the run in words.

        Raises:
            TrainingError: the last one is not finite.
        """
        return _summary(self.folder) if self.strategy.is_main else ""

    @classmethod
    def measure(
        cls, settings: Any, path: Path, device: str, checkpoint: str = "best"
    ) -> Mapping[str, Any]:
        """Return the loss of a trained model on the whole validation text.

        Args:
            settings: whose data, cache, validation, batch, dtype, model and download count.
            path: see `load_trained`.
            device, checkpoint: as for `Task.measure`.
        Returns:
            "validation_loss" in nats a token, "perplexity", and "tokens", how many were predicted.
        """
        revision = settings.revision or None
        model, tokenizer = load_trained(
            path, checkpoint, file=settings.model, download=settings.download, revision=revision
        )
        task = cls(settings, path)
        task.corpus = prepare_corpus(settings, tokenizer)
        task.model = with_options(model.to(device, settings.parameter_dtype), settings)
        validation = task.corpus.validation
        task.validation = TokenLoader(validation, settings.batch, model.context, settings.seed)
        found = task.measure_loss()
        mean = found["validation_loss"]
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(mean))
        tokens = found["validation_tokens"]
        return {"validation_loss": mean, "perplexity": perplexity, "tokens": tokens}


def with_options(model: LanguageModel, settings: LanguageSettings) -> LanguageModel:
    """Return the model, which computes as the settings say."""
    nn.use_attention(model, settings.attention)
    model.recompute = settings.recompute
    model.recompute_norms = settings.recompute_norms
    return model


def _with_sizes(settings: LanguageSettings, model: LanguageModel) -> LanguageSettings:
    """Return the settings with the sizes of a model, as far as they are settings."""
    sizes = {
        name: getattr(model.config, name) for name in _SIZES[:-1] if hasattr(model.config, name)
    }
    sizes["context"] = settings.context or sizes["context"]
    name = settings.model or model_name(model.config)
    return replace(settings, model=name, vocab=model.vocab_size, **sizes)


def prepare_corpus(
    settings: LanguageSettings, tokenizer: AnyTokenizer | None = None, shown: bool = True
) -> Corpus:
    """Return the text as tokens: a prepared folder, or from the cache if it has them.

    Args:
        settings: see LanguageSettings.
        tokenizer: of the model; None: that of --tokenizer, or one to train.
        shown: whether to show the progress.
    Raises:
        ArgumentError: a prepared folder has another tokenizer than the model.
    """
    if tokenizer is None and settings.tokenizer:
        tokenizer = load_tokenizer(settings.tokenizer)
    with StageProgress(f"preparing {settings.data}", shown) as progress:
        if is_prepared(settings.data):
            corpus = open_prepared(settings.data, progress)
            if tokenizer is not None and tokenizer.digest != corpus.tokenizer.digest:
                raise ArgumentError(
                    f"--data: {settings.data} has another tokenizer than the model, expected the "
                    "same, or text to encode"
                )
            return corpus
        corpus = prepare(
            settings.data,
            settings.cache,
            settings.largest_vocab,
            validation=settings.validation,
            tokenizer=tokenizer,
            column=settings.text_column or None,
            progress=progress,
        )
    if shown and corpus.source_files:
        _log.info("%s: %s", settings.data, corpus.source_files)
    return corpus


def _summary(folder: Path) -> str:
    """Return the validation losses of a run in words.

    Raises:
        TrainingError: the last validation loss is not finite.
    """
    records = read_metrics(folder / "metrics.jsonl")
    measured = [record for record in records if "validation_loss" in record]
    last = measured[-1] if measured else {}
    known = {
        record["step"]: record["validation_loss"]
        for record in measured
        if record["validation_loss"] is not None
    }
    lowest = ""
    if known:
        best = min(known, key=known.__getitem__)
        unkept = without_checkpoint(folder, best)
        lowest = f"; the lowest was {known[best]:.4f}, at step {best:,}{unkept}"
    if None in last.values():
        raise TrainingError(
            f"train: the validation loss after the last step, {last['step']:,}, is not finite"
            f"{lowest}. Try a lower learning rate. All is in {folder}"
        )
    parts = []
    if "final_validation_loss" in last:
        tokens = f"{last['final_validation_tokens']:,}"
        parts.append(f"{last['final_validation_loss']:.4f} on the whole text, {tokens} tokens")
    if known:
        some = f" on {last['validation_tokens']:,} of them" if parts else ""
        first, end = (known[step] for step in (min(known), max(known)))
        parts.append(f"{first:.3f} -> {end:.3f}{some} ({lowest.removeprefix('; ')})")
    return f"validation loss {'; '.join(parts)}"
