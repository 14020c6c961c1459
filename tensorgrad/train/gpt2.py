"""Training a GPT-2: its settings, and a run from text to a sample of what the model writes.

`train` is the program of examples/train_gpt2.py in one process, and of parallel/train_gpt2.py on
several ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad import backend, nn, random
from tensorgrad.data import Corpus, Tokenizer, TokenLoader, is_prepared, open_prepared, prepare
from tensorgrad.data.tokenizer import SMALLEST_VOCABULARY
from tensorgrad.errors import ArgumentError, TrainingError
from tensorgrad.models.generation import generate
from tensorgrad.models.gpt2 import GPT2, PRESETS, GPT2Config
from tensorgrad.readers import no_link
from tensorgrad.tensor import Tensor
from tensorgrad.train import config
from tensorgrad.train.callbacks import Callback
from tensorgrad.train.checkpoint import list_checkpoints
from tensorgrad.train.config import option
from tensorgrad.train.folder import run_folder
from tensorgrad.train.load import load_gpt2
from tensorgrad.train.log import read_metrics
from tensorgrad.train.loggers import make_loggers
from tensorgrad.train.loop import Outcome, Trainer, check_parts, measure_loss
from tensorgrad.train.options import in_options
from tensorgrad.train.progress import StageProgress
from tensorgrad.train.ranks import Ranks
from tensorgrad.train.run import (
    free_folder,
    report_stop,
    resume_run,
    save_facts,
    without_checkpoint,
)
from tensorgrad.train.settings import TrainSettings, by_optimizer
from tensorgrad.train.sizes import check_sizes

_log = logging.getLogger(__name__)

# Small enough for two CPU cores and a few minutes.
SMALL = GPT2Config(vocab_size=1024, context=128, layers=2, heads=4, width=192)
# Of nanoGPT for characters: a token for each byte, and no merges.
CHAR = GPT2Config(vocab_size=SMALLEST_VOCABULARY, context=256, layers=6, heads=6, width=384)
MODELS = {"small": SMALL, "char": CHAR, **PRESETS}


@dataclass(frozen=True)
class GPT2Settings(TrainSettings):
    """The options of a program that trains a GPT-2."""

    task: str = option("gpt2", "what to train", choices=("gpt2",))
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
    preset: str = option(
        "small",
        "size of the model; char: of nanoGPT's for characters, with a token for each byte",
        choices=tuple(MODELS),
    )
    layers: int | None = option(None, "transformer blocks", shown="the preset's", low=1)
    heads: int | None = option(None, "attention heads", shown="the preset's", low=1)
    width: int | None = option(None, "width of the model", shown="the preset's", low=1)
    hidden: int | None = option(
        None, "width inside the feed-forward layers", shown="4 times --width", low=1
    )
    context: int | None = option(None, "context length in tokens", shown="the preset's", low=1)
    vocab: int | None = option(None, "size of the vocabulary", shown="the preset's", low=257)
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
    cache: str = option("runs/data", "folder for tokenized text", free=True)
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

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options that were given.

        Raises:
            ArgumentError: one of them is of --init-from's model already.
        """
        sizes = ("preset", "layers", "heads", "width", "hidden", "context", "vocab", "tokenizer")
        for name in (*sizes, "vocab_multiple"):
            if given.get("init_from") and given.get(name) is not None:
                raise ArgumentError(
                    f"--{name.replace('_', '-')}: got {given[name]} with --init-from, expected "
                    "none: the model has its own"
                )
        return given

    @property
    def samples(self) -> bool:
        """Whether the model writes samples."""
        return self.sample > 0

    @property
    def folder(self) -> Path:
        """The folder of a new run."""
        return Path(self.out) if self.out else free_folder("runs/gpt2")

    @property
    def largest_vocab(self) -> int:
        """The size of the vocabulary to train; a small text gives fewer tokens."""
        return self.vocab or MODELS[self.preset].vocab_size

    def model(self, vocab_size: int) -> GPT2Config:
        """Return the sizes of the preset, replaced where an option gives another."""
        given = {name: size for name, size in self.sizes(GPT2Config).items() if size is not None}
        if self.init_from and self.vocab is not None:  # larger than its tokenizer's, perhaps
            vocab_size = self.vocab
        return replace(MODELS[self.preset], vocab_size=vocab_size, **given)


def train(
    settings: GPT2Settings,
    folder: Path,
    resuming: bool,
    device: str,
    ranks: Ranks,
    processes: int = 1,
) -> tuple[Outcome, str | None]:
    """Train a GPT-2, from step 0 or from the newest checkpoint.

    Args:
        settings: see GPT2Settings.
        folder: of the run.
        resuming: whether the folder holds a run to resume.
        device: "cpu", "cuda" or "cuda:N".
        ranks: the processes that train together.
        processes: how many there are, for the command that resumes the run.
    Returns:
        How the run ended, and a sample of the model's text; None where none was asked for or the
        run was stopped.
    """
    began = time.perf_counter()
    new = None if resuming else settings
    with in_options(settings), run_folder(folder, ranks.is_main, new):
        callbacks = make_loggers(settings.loggers) if ranks.is_main else []
        initial, tokenizer = _initial_model(settings, folder, resuming)
        if initial is not None:
            settings = _with_sizes(settings, initial.config)
        # Checked before a long text is read.
        settings.model(tokenizer.vocab_size if tokenizer else settings.largest_vocab)
        check_parts(settings.batch // ranks.ranks, settings.micro_batches, ranks.ranks)
        corpus = prepare_corpus(settings, tokenizer, ranks.is_main)
        sizes = settings.model(corpus.tokenizer.vocab_size)
        make_loaders(settings, corpus, sizes.context, ranks)  # a short text is found out at once
        random.seed(settings.seed)
        check_sizes(sizes, folder)
        model = GPT2(sizes)
        if initial is not None:
            model.load_state_dict(initial.state_dict())
        model.to(device, settings.parameter_dtype)
        nn.use_attention(model, settings.attention)
        model.recompute = settings.recompute
        model.recompute_norms = settings.recompute_norms
        trainer = make_trainer(settings, folder, corpus, model, ranks, callbacks)
        if resuming:
            resume_run(trainer)
        if ranks.is_main:
            config.save(settings, folder)
            corpus.tokenizer.save(folder / "tokenizer.json")
            names = ("layers", "heads", "width", "context")
            resolved = {name: getattr(model.config, name) for name in names}
            resolved["hidden"] = model.config.hidden_width
            resolved |= {"vocab": model.config.vocab_size, "warmup": settings.warmup_steps}
            tokens = len(corpus.train)
            save_facts(
                folder, resolved, model.config.parameters,
                training_tokens=tokens, validation_tokens=len(corpus.validation),
            )  # fmt: skip
            _log.info(
                "%s: %s parameters, vocabulary %s, %s tokens of text, on %s",
                *(folder, f"{model.config.parameters:,}", f"{corpus.tokenizer.vocab_size:,}"),
                *(f"{tokens:,}", device),
            )
        outcome = trainer.run()
        if ranks.is_main and outcome.finished:
            _report(folder, outcome, time.perf_counter() - began)
        elif ranks.is_main:
            report_stop(outcome, settings, folder, processes)
        return outcome, trainer.sampled if outcome.finished else None


def _initial_model(
    settings: GPT2Settings, folder: Path, resuming: bool
) -> tuple[GPT2 | None, Tokenizer | None]:
    """Return the model that a run starts from at step 0, and the tokenizer where none is trained.

    Of a run with a checkpoint that has the weights, and config.json the sizes.
    """
    own = no_link(folder / "tokenizer.json")
    if settings.init_from and not (resuming and list_checkpoints(folder / "checkpoints")):
        return _load(settings, Path(settings.init_from))
    if settings.init_from:
        return None, Tokenizer.load(own)
    if settings.tokenizer:
        moved = resuming and not Path(settings.tokenizer).exists()
        return None, Tokenizer.load(own if moved else settings.tokenizer)
    return None, None


def _load(settings: GPT2Settings, path: Path, checkpoint: str = "best") -> tuple[GPT2, Tokenizer]:
    """Return a GPT-2 and its tokenizer, downloaded if the settings ask for it."""
    revision = settings.revision or None
    return load_gpt2(path, checkpoint, download=settings.download, revision=revision)


def _with_sizes(settings: GPT2Settings, model: GPT2Config) -> GPT2Settings:
    """Return the settings with the sizes of a model."""
    names = ("layers", "heads", "width", "hidden", "context", "vocab_multiple")
    sizes = {name: getattr(model, name) for name in names}
    return replace(settings, vocab=model.vocab_size, **sizes)


def prepare_corpus(
    settings: GPT2Settings, tokenizer: Tokenizer | None = None, shown: bool = True
) -> Corpus:
    """Return the text as tokens: a prepared folder, or from the cache if it has them.

    Args:
        settings: see GPT2Settings.
        tokenizer: of the model; None: that of --tokenizer, or one to train.
        shown: whether to show the progress.
    Raises:
        ArgumentError: a prepared folder has another tokenizer than the model.
    """
    if tokenizer is None and settings.tokenizer:
        tokenizer = Tokenizer.load(settings.tokenizer)
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


def evaluate(
    settings: GPT2Settings, path: Path, device: str, checkpoint: str = "best"
) -> dict[str, float]:
    """Return the loss of a trained model on the whole validation text.

    Args:
        settings: whose data, cache, validation, batch, dtype and download count.
        path: see `load_gpt2`.
        device: "cpu", "cuda" or "cuda:N".
        checkpoint: of a run: "best" or "last".
    Returns:
        "validation_loss" in nats a token, "perplexity", and "tokens", how many were predicted.
    """
    model, tokenizer = _load(settings, path, checkpoint)
    corpus = prepare_corpus(settings, tokenizer)
    model.to(device, settings.parameter_dtype)
    nn.use_attention(model, settings.attention)
    loader = TokenLoader(corpus.validation, settings.batch, model.config.context, settings.seed)
    precision = settings.precision()

    def loss(x: backend.Array, y: backend.Array) -> Tensor:
        with precision():
            return model.forward(Tensor(x), Tensor(y))

    found = measure_loss(model, loss, loader.evaluation_batches())
    mean = found["validation_loss"]
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(mean))
    return {"validation_loss": mean, "perplexity": perplexity, "tokens": found["validation_tokens"]}


def make_loaders(
    settings: GPT2Settings, corpus: Corpus, context: int, ranks: Ranks
) -> tuple[TokenLoader, TokenLoader]:
    """Return this rank's batches of the training text and of the validation text."""
    training, validation = (
        TokenLoader(tokens, settings.batch, context, settings.seed, ranks.rank, ranks.ranks)
        for tokens in (corpus.train, corpus.validation)
    )
    return training, validation


def make_trainer(
    settings: GPT2Settings,
    folder: Path,
    corpus: Corpus,
    model: GPT2,
    ranks: Ranks,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Return the trainer of a model: loss, batches, optimizer and evaluation, at step 0."""
    precision = settings.precision()
    context = model.config.context
    batches, validation = make_loaders(settings, corpus, context, ranks)
    check_parts(settings.batch // ranks.ranks, settings.micro_batches, ranks.ranks)

    def loss(x: backend.Array, y: backend.Array) -> Tensor:
        with precision():
            return model.forward(Tensor(x), Tensor(y))

    def evaluate() -> dict[str, float]:
        some = validation.evaluation_batches(settings.evaluation_batches)
        found = measure_loss(model, loss, some, ranks)
        if not trainer.finished:
            return found
        whole = found
        if found["validation_tokens"] < len(corpus.validation) - 1:
            whole = measure_loss(model, loss, validation.evaluation_batches(), ranks)
        return {**found, **{f"final_{name}": value for name, value in whole.items()}}

    def sample() -> tuple[str, str]:
        return settings.prompt, write_sample(settings, model, corpus)

    trainer = Trainer(
        model,
        ranks.prepare(model, settings.make_optimizer),
        loss,
        batches.iterate,
        settings.learning_rate,
        settings,
        folder,
        tokens_per_step=settings.batch * context,
        flops_per_token=model.config.training_flops,
        evaluate=evaluate,
        sample=sample if settings.samples else None,
        sample_every=settings.sample_every,
        callbacks=callbacks,
        belongs_to={
            "model": asdict(model.config),
            "tokenizer": {"sha256": corpus.tokenizer.digest},
            "data": {"corpus": corpus.digest, "batch": settings.batch, "seed": settings.seed},
        },
        ranks=ranks,
        scaler=settings.scaler(),
    )
    return trainer


def write_sample(settings: GPT2Settings, model: GPT2, corpus: Corpus) -> str:
    """Return the prompt and the text that the model continues it with."""
    tokenizer = corpus.tokenizer
    tokens = generate(
        model,
        tokenizer.encode_prompt(settings.prompt)[-model.config.context :],
        settings.sample,
        temperature=settings.temperature,
        top_p=settings.top_p or None,
        seed=settings.seed,
        stop_tokens=[tokenizer.end_of_text],
    )
    return settings.prompt + tokenizer.decode(tokens, skip_special_tokens=True)


def _report(folder: Path, outcome: Outcome, seconds: float) -> None:
    """Log what the run came to.

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
    _log.info(
        "validation loss %s in %.0f s, %s tokens/s; all in %s",
        *("; ".join(parts), seconds, f"{outcome.tokens_per_second:,.0f}", folder),
    )
