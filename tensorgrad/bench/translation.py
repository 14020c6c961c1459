"""`tensorgrad bench translation`: training of a translation model beside PyTorch eager.

Ours is captured. The two alternate on the same batches of one epoch. Each first trains on all of
them twice, so that neither compilation nor the capture of steps is timed. PyTorch has the same
model, its fused AdamW and, for both bfloat16 dtypes, autocast; for tf32 TF32 too. Tokens are
counted without padding. Tests: tests/bench/test_translation.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from tensorgrad import graph
from tensorgrad.bench.options import Peer, is_measured
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import seconds_of, to_torch, windows_in_turns
from tensorgrad.bench.torch_ddp import TorchTrainer
from tensorgrad.bench.torch_transformer_lm import transformer_lm
from tensorgrad.core import backend
from tensorgrad.data.pair_loader import PairBatch
from tensorgrad.profile.training_step import TrainingStep
from tensorgrad.train.command_line import read_command_line
from tensorgrad.train.device import choose_device
from tensorgrad.train.translation import Translation, TranslationSettings

TrainStep = Callable[[Any, Any], object]  # takes tokens and targets on the device


def ours(task: Translation, device: str) -> TrainStep:
    """Return a training step of tensorgrad, captured: forward, backward, clipping, optimizer."""
    step = TrainingStep(task.settings, task.model, task.loss)
    return graph.capture(step, device, task.graphs)


def theirs(torch: Any, task: Translation, device: str) -> TrainStep:
    """Return the same of PyTorch."""
    settings, config = task.settings, task.config
    torch.set_float32_matmul_precision("high" if settings.dtype == "tf32" else "highest")
    model = partial(transformer_lm, config, config.label_smoothing, config.prefix)
    trainer = TorchTrainer(settings, model, device)
    return lambda tokens, targets: trainer.step([(tokens, targets)])


def spread(task: Translation, count: int) -> list[PairBatch]:
    """Return the first batches of an epoch, which have mixed lengths."""
    return [task.training.batch(step) for step in range(min(count, task.training.batches))]


def translation_sweep(
    *options: Annotated[str, Parameter(allow_leading_hyphen=True)],
    timed: int = 100,
    turns: int = 3,
    peer: Peer = None,
) -> Iterator[Sweep]:
    """Measure training of a translation model, captured, beside the same model in PyTorch eager.

    Args:
        options: --data, --preset, --dtype, --device and the others of `tensorgrad train
            translation`; weights are new.
        timed: batches.
        turns: of each library.
    """
    with TemporaryDirectory() as folder:  # for the tokenizer
        own = [] if any(word.startswith("--resume") for word in options) else ["--out", folder]
        given, _, _ = read_command_line(TranslationSettings, None, [*own, *options])
        settings, device = choose_device(given)
        sizes = {name: getattr(settings, name) for name in _SETTINGS}
        cases = [{**sizes, "timed": timed, "turns": turns, "peer": is_measured(peer)}]
        measure = partial(
            measure_translation, settings=settings, folder=Path(folder), device=device
        )
        rates = "tokens_per_second", "peer_tokens_per_second"
        results = ("ms", "peer_ms", *rates, "ratio", "tokens", "peer_clock_mhz", "peer_watts")
        draw = bars("Training a translation model", "tokens/s", ("width", "dtype"), rates)
        yield Sweep("translation", cases, measure, results, draw, device)


def measure_translation(
    case: Case, settings: TranslationSettings, folder: Path, device: str
) -> Row:
    """Return milliseconds a step and tokens a second of both.

    Args:
        case: of `translation_sweep`.
        settings: of training.
        folder: for the tokenizer.
        device: "cpu", "cuda" or "cuda:N".
    """
    task = Translation(settings, folder)
    task.prepare(device)
    batches = spread(task, case["timed"])
    tokens = sum(int((batch != task.tokenizer.end_of_text).sum()) for batch, _ in batches)
    arrays = [[backend.to_device(a.astype(np.int64), device) for a in b] for b in batches]
    steps: dict[str, tuple[TrainStep, list[list[Any]]]] = {"": (ours(task, device), arrays)}
    if case["peer"]:
        torch = importlib.import_module("torch")
        shared = [[to_torch(torch, a) for a in pair] for pair in arrays]
        steps["peer_"] = theirs(torch, task, device), shared
    epochs = {name: partial(_all, step, own) for name, (step, own) in steps.items()}
    for epoch in epochs.values():
        seconds_of(epoch, device, 2)
    times = windows_in_turns(epochs, device, case["turns"], dict.fromkeys(epochs, 1))
    row: Row = {"tokens": tokens}
    for name, timing in times.items():
        row |= {f"{name}{reading}": value for reading, value in timing.items()}
        row[f"{name}tokens_per_second"] = 1e3 * tokens / timing["ms"]
        row[f"{name}ms"] = timing["ms"] / len(batches)  # time of a batch, not of all
    if case["peer"]:
        row["ratio"] = row["peer_ms"] / row["ms"]
    return row


def _all(step: TrainStep, batches: Sequence[Sequence[Any]]) -> None:
    for tokens, targets in batches:
        step(tokens, targets)


_SETTINGS = (
    *("data", "preset", "layers", "width", "heads", "context", "vocab", "batch", "dropout"),
    "dtype",
)
