"""Train a GPT-2 on text and let it write: with the defaults a small one, on Python's own library.

    python examples/train_gpt2.py
    python examples/train_gpt2.py --data my_texts --preset gpt2-124M --dtype bfloat16 --batch 32
    python examples/train_gpt2.py --resume runs/gpt2-1

A run's folder gets config.json, tokenizer.json, metrics.jsonl, loss.png and checkpoints/. Ctrl-C
leaves a checkpoint behind, from which --resume goes on as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tensorgrad import backend, random
from tensorgrad.command import command, printable
from tensorgrad.data import Corpus, Tokenizer, TokenLoader, prepare
from tensorgrad.errors import ArgumentError
from tensorgrad.models.generation import generate
from tensorgrad.models.gpt2 import GPT2, PRESETS, GPT2Config
from tensorgrad.tensor import Tensor
from tensorgrad.train import config
from tensorgrad.train.config import option
from tensorgrad.train.device import choose_device
from tensorgrad.train.folder import run_folder
from tensorgrad.train.log import read_metrics
from tensorgrad.train.loop import Outcome, Trainer, check_parts, mean_loss
from tensorgrad.train.ranks import OneProcess, Ranks
from tensorgrad.train.run import free_folder, report_stop, resume_run
from tensorgrad.train.settings import TrainSettings

log = logging.getLogger("train_gpt2")

# Small enough for two CPU cores and a few minutes.
SMALL = GPT2Config(vocab_size=1024, context=128, layers=2, heads=4, width=192)
MODELS = {"small": SMALL, **PRESETS}


@dataclass(frozen=True)
class Settings(TrainSettings):
    """What can be said on the command line."""

    steps: int = option(800, "optimizer steps in all", low=1, grows=True)
    batch: int = option(8, "sequences of a step, on all ranks together", low=1)
    lr: float = option(3e-3, "highest learning rate", low=0)
    data: str = option(
        "stdlib",
        "text: a file, a folder, hf:NAME[:CONFIG][:SPLIT], or stdlib, Python's own source",
    )
    preset: str = option("small", "size of the model", choices=tuple(MODELS))
    layers: int | None = option(None, "blocks, if not the preset's", low=1)
    heads: int | None = option(None, "attention heads, if not the preset's", low=1)
    width: int | None = option(None, "width of the model, if not the preset's", low=1)
    context: int | None = option(None, "tokens the model sees, if not the preset's", low=1)
    vocab: int | None = option(None, "size of the vocabulary, if not the preset's", low=257)
    tokenizer: str = option("", "a tokenizer.json to use; without one a tokenizer is trained")
    vocab_multiple: int = option(
        1, "rows of the table of tokens are a multiple of this; 128 suits GPUs", low=1
    )
    dropout: float = option(0.0, "probability of leaving out an activation", low=0, high=1)
    validation: float = option(0.05, "share of the text to validate with", low=0, high=1)
    evaluate_every: int = option(200, "steps between two evaluations", low=1)
    evaluation_batches: int = option(20, "batches of validation text to measure with", low=1)
    device: str = option("auto", "cpu, cuda, cuda:N, or auto: a GPU if there is one", free=True)
    out: str = option("", "folder of the run; runs/gpt2-1, -2, ... if none is given", free=True)
    cache: str = option("runs/data", "folder where prepared text is kept", free=True)
    prompt: str = option("def ", "what the sample at the end begins with", free=True)
    sample: int = option(200, "tokens of the sample at the end", low=0, free=True)
    temperature: float = option(0.7, "of the sample; 0 is greedy", low=0, free=True)
    top_p: float = option(0.95, "of the sample: share of likely tokens", low=0, high=1, free=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer and self.vocab is not None:
            raise ArgumentError(
                f"--vocab: got {self.vocab} with --tokenizer, expected none: it has its own"
            )

    @property
    def samples(self) -> bool:
        """Whether to write a sample at the end."""
        return self.sample > 0

    def model(self, vocab_size: int) -> GPT2Config:
        """Return the preset with what was said otherwise."""
        given = {name: getattr(self, name) for name in ("layers", "heads", "width", "context")}
        changed = {name: value for name, value in given.items() if value is not None}
        return replace(
            MODELS[self.preset],
            vocab_size=vocab_size,
            vocab_multiple=self.vocab_multiple,
            dropout=self.dropout,
            **changed,
        )


def read_command_line(arguments: Sequence[str] | None = None) -> tuple[Settings, Path, bool]:
    """Return the settings, the folder of the run, and whether it goes on from a checkpoint."""
    description = __doc__.splitlines()[0] if __doc__ else ""
    return config.read_command_line(Settings, description, folder_of, arguments)


def folder_of(settings: Settings) -> Path:
    """Return the folder of a new run."""
    return Path(settings.out) if settings.out else free_folder("runs/gpt2")


def prepare_corpus(settings: Settings) -> Corpus:
    """Return the text as tokens; made once, then taken from the cache."""
    seen = set()

    def progress(stage: str, done: int, total: int) -> None:
        if stage not in seen:
            seen.add(stage)
            log.info("preparing %s: %s", settings.data, stage)

    return prepare(
        settings.data,
        settings.cache,
        settings.vocab or MODELS[settings.preset].vocab_size,
        validation=settings.validation,
        tokenizer=Tokenizer.load(settings.tokenizer) if settings.tokenizer else None,
        progress=progress,
    )


def make_trainer(
    settings: Settings, folder: Path, corpus: Corpus, device: str, ranks: Ranks
) -> Trainer:
    """Return what trains: model, optimizer, batches and evaluation, all at step 0."""
    random.seed(settings.seed)
    model = GPT2(settings.model(corpus.tokenizer.vocab_size))
    model.to(device, settings.parameter_dtype)
    precision = settings.precision()
    context = model.config.context
    train, validation = (
        TokenLoader(tokens, settings.batch, context, settings.seed, ranks.rank, ranks.ranks)
        for tokens in (corpus.train, corpus.validation)
    )
    check_parts(settings.batch // ranks.ranks, settings.accumulate, ranks.ranks)

    def loss(x: backend.Array, y: backend.Array) -> Tensor:
        with precision():
            return model.forward(Tensor(x), Tensor(y))

    def evaluate() -> dict[str, float]:
        batches = validation.evaluation_batches(settings.evaluation_batches)
        return {"validation_loss": mean_loss(model, loss, batches, ranks)}

    tokenizer = hashlib.sha256(corpus.tokenizer.to_json().encode()).hexdigest()
    return Trainer(
        model,
        ranks.prepare(model, settings.optimizer),
        loss,
        train.iterate,
        settings.learning_rate,
        settings,
        folder,
        tokens_per_step=settings.batch * context,
        evaluate=evaluate,
        belongs_to={
            "model": asdict(model.config),
            "tokenizer": {"sha256": tokenizer},
            "data": {"corpus": corpus.digest, "batch": settings.batch, "seed": settings.seed},
        },
        ranks=ranks,
        scaler=settings.scaler(),
    )


def write_sample(settings: Settings, model: GPT2, corpus: Corpus) -> str:
    """Return the prompt and what the model makes of it."""
    tokenizer = corpus.tokenizer
    prompt = tokenizer.encode(settings.prompt)[-model.config.context :]
    tokens = generate(
        model,
        prompt or [tokenizer.end_of_text],
        settings.sample,
        temperature=settings.temperature,
        top_p=settings.top_p or None,
        seed=settings.seed,
        stop_tokens=[tokenizer.end_of_text],
    )
    return settings.prompt + tokenizer.decode(tokens)


def train(
    settings: Settings,
    folder: Path,
    resuming: bool,
    ranks: Ranks,
    device: str,
    processes: int = 1,
) -> Outcome:
    """Train, from the beginning or from the newest checkpoint, and show what came of it."""
    with run_folder(folder, ranks.is_main):
        return _train(settings, folder, resuming, ranks, device, processes)


def _train(
    settings: Settings, folder: Path, resuming: bool, ranks: Ranks, device: str, processes: int
) -> Outcome:
    began = time.perf_counter()
    corpus = prepare_corpus(settings)
    trainer = make_trainer(settings, folder, corpus, device, ranks)
    if resuming:
        resume_run(trainer)
    if ranks.is_main:
        config.save(settings, folder)
        corpus.tokenizer.save(folder / "tokenizer.json")
        parameters = settings.model(corpus.tokenizer.vocab_size).parameters
        log.info(
            "%s: %s parameters, vocabulary %s, %s tokens of text, on %s",
            *(folder, f"{parameters:,}", f"{corpus.tokenizer.vocab_size:,}"),
            *(f"{len(corpus.train):,}", device),
        )
    outcome = trainer.run()
    if ranks.is_main:
        if outcome.finished:
            _report(folder, outcome, time.perf_counter() - began)
        else:
            report_stop(outcome, settings.steps, folder, processes)
    if outcome.finished and settings.samples and isinstance(trainer.model, GPT2):
        sample = write_sample(settings, trainer.model, corpus)  # by all: they may share the model
        if ranks.is_main:
            print(printable(sample))
    return outcome


def _report(folder: Path, outcome: Outcome, seconds: float) -> None:
    losses = [
        record["validation_loss"]
        for record in read_metrics(folder / "metrics.jsonl")
        if "validation_loss" in record
    ]
    log.info(
        "validation loss %.3f -> %.3f (%.0f %% lower) in %.0f s, %s tokens/s; all in %s",
        *(losses[0], losses[-1], 100 * (1 - losses[-1] / losses[0]), seconds),
        *(f"{outcome.tokens_per_second:,.0f}", folder),
    )


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    settings, folder, resuming = read_command_line(arguments)
    settings, device = choose_device(settings)
    return train(settings, folder, resuming, OneProcess(), device).status


if __name__ == "__main__":
    sys.exit(main())
