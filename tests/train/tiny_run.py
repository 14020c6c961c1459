"""A training run of a second or two, for tests; also a program that tests may kill.

python -m tests.train.tiny_run FOLDER [--resume] [options of TrainSettings]
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from cyclopts import App

from tensorgrad import random
from tensorgrad.core.tensor import Tensor
from tensorgrad.data import TokenLoader
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.train import command_line
from tensorgrad.train.loop import Trainer, mean_loss
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.strategy import MakeOptimizer, OneProcess, Strategy

MODEL = GPT2Config(vocab_size=32, context=8, layers=1, heads=2, width=16, dropout=0.1)
SMALL: dict[str, Any] = {
    "steps": 24,
    "warmup": 4,
    "batch": 4,
    "lr": 1e-2,
    "evaluate_every": 6,
    "checkpoint_every": 5,
    "plot": False,
}


@cache
def tokens() -> np.ndarray[Any, Any]:
    """Return text of a kind: each token follows from the one before, mostly."""
    rng = np.random.default_rng(0)
    ids = np.zeros(2000, np.uint16)
    for i in range(1, len(ids)):
        ids[i] = (5 * ids[i - 1] + 3 + rng.integers(0, 2)) % 32
    return ids


def make_trainer(
    folder: Path,
    strategy: Strategy | None = None,
    model_config: GPT2Config = MODEL,
    fingerprint: Mapping[str, Mapping[str, Any]] | None = None,
    model_device: str = "cpu",
    make_optimizer: MakeOptimizer | None = None,
    **options: Any,
) -> Trainer:
    """Return a trainer at step 0; options are those of TrainSettings, whose optimizer is AdamW."""
    settings = TrainSettings(**{**SMALL, **options})
    random.seed(settings.seed)
    model = GPT2(model_config).to(model_device, settings.parameter_dtype)
    scaler = settings.scaler(model)
    precision = settings.precision(scaler)
    rank, count = (strategy.rank, strategy.ranks) if strategy else (0, 1)
    train, validation = (
        TokenLoader(part, settings.batch, model.context, settings.seed, rank, count)
        for part in (tokens()[:1800], tokens()[1800:])
    )

    def loss(x: Any, y: Any) -> Tensor:
        with precision():
            return model.forward(Tensor(x), Tensor(y))

    def evaluate() -> dict[str, float]:
        batches = validation.evaluation_batches(3)
        return {"validation_loss": mean_loss(model, loss, batches, strategy)}

    return Trainer(
        model,
        (strategy or OneProcess()).prepare(model, make_optimizer or settings.optimizer),
        loss,
        train.iterate,
        settings.learning_rate,
        settings,
        folder,
        tokens_per_step=settings.batch * model.context,
        evaluate=evaluate,
        fingerprint={"model": asdict(model_config)} if fingerprint is None else fingerprint,
        strategy=strategy,
        scaler=scaler,
    )


def given_options(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings that a command line gives."""
    given: dict[str, Any] = {}
    command = command_line.options_command(TrainSettings, given.update)
    words = [word for word in words if word != "--resume"]
    command_line.run_app(App(default_command=command, **command_line.STYLE), words)
    return given


def main() -> None:
    """Train in the folder that the command line names."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder, *rest = sys.argv[1:]
    resuming = "--resume" in rest
    trainer = make_trainer(Path(folder), **given_options(rest))
    if resuming:
        trainer.resume()
    print("ready", flush=True)
    outcome = trainer.run()
    print("finished" if outcome.finished else f"stopped after {outcome.step}", flush=True)


if __name__ == "__main__":
    main()
