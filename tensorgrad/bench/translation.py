"""`tensorgrad bench translation`: training of a translation model beside PyTorch eager.

Ours is captured. The two alternate on the same batches of one epoch. Each first trains on all of
them twice, so that neither compilation nor the capture of steps is timed. PyTorch has the same
model, its fused AdamW and, for both bfloat16 dtypes, autocast; for tf32 TF32 too. Tokens are
counted without padding. Tests: tests/bench/test_translation.py.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad import backend, graph
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import seconds_of
from tensorgrad.bench.torch_arrays import to_torch
from tensorgrad.bench.torch_transformer_lm import transformer_lm
from tensorgrad.checks import check_integer
from tensorgrad.data.pair_loader import PairBatch
from tensorgrad.gpu import GpuMonitor, clock_and_watts
from tensorgrad.train.settings import has_narrow_products
from tensorgrad.train.translation import Translation, TranslationSettings

TrainStep = Callable[[Any, Any], object]  # takes tokens and targets on the device


def ours(run: Translation, device: str) -> TrainStep:
    """Return a training step of tensorgrad, captured: forward, backward, clipping, AdamW."""
    optimizer = run.settings.optimizer(run.model.named_parameters())
    clip = run.settings.clip or math.inf

    def step(tokens: Any, targets: Any) -> None:
        optimizer.zero_grad()
        run.loss(tokens, targets).backward()
        optimizer.step(clip)

    return graph.capture(step, device, run.graphs)


def theirs(torch: Any, run: Translation, device: str) -> TrainStep:
    """Return the same of PyTorch."""
    settings = run.settings
    torch.set_num_threads(backend.threads())
    torch.manual_seed(settings.seed)
    model = transformer_lm(run.model.config).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.lr, (0.9, settings.beta2),
        weight_decay=settings.weight_decay, fused=device != "cpu",
    )  # fmt: skip
    wide = not has_narrow_products(settings.dtype)
    torch.set_float32_matmul_precision("high" if settings.dtype == "tf32" else "highest")

    def step(tokens: Any, targets: Any) -> None:
        optimizer.zero_grad()
        kind = device.partition(":")[0]
        with contextlib.nullcontext() if wide else torch.autocast(kind, torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf)
        optimizer.step()

    return step


def spread(run: Translation, count: int) -> list[PairBatch]:
    """Return the first batches of an epoch, which have mixed lengths."""
    return [run.training.batch(step) for step in range(min(count, run.training.batches))]


def translation_cases(
    settings: TranslationSettings, timed: int, turns: int, peer: bool
) -> list[Case]:
    """Return the case of a sweep.

    Args: see `tensorgrad bench translation --help`.
    Raises:
        ArgumentError: a number is below 1.
    """
    for name, value in (("timed", timed), ("turns", turns)):
        check_integer("bench translation", name, value, 1)
    return [
        {**{name: getattr(settings, name) for name in _SETTINGS}, "timed": timed, "turns": turns,
         "peer": peer}
    ]  # fmt: skip


def measure_translation(
    case: Case, settings: TranslationSettings, folder: Path, device: str
) -> Row:
    """Return milliseconds a step and tokens a second of both.

    Args:
        case: of `translation_cases`.
        settings: of training.
        folder: for the tokenizer.
        device: "cpu", "cuda" or "cuda:N".
    """
    run = Translation(settings, folder)
    run.prepare(device)
    batches = spread(run, case["timed"])
    tokens = sum(int((batch != run.tokenizer.end_of_text).sum()) for batch, _ in batches)
    arrays = [[backend.to_device(a.astype(np.int64), device) for a in b] for b in batches]
    steps: dict[str, tuple[TrainStep, list[list[Any]]]] = {"": (ours(run, device), arrays)}
    if case["peer"]:
        torch = importlib.import_module("torch")
        shared = [[to_torch(torch, a) for a in pair] for pair in arrays]
        steps["peer_"] = theirs(torch, run, device), shared
    epochs = {name: partial(_all, step, own) for name, (step, own) in steps.items()}
    for epoch in epochs.values():
        seconds_of(epoch, device, 2)
    times: dict[str, list[float]] = {name: [] for name in epochs}
    readings: dict[str, list[dict[str, float]]] = {name: [] for name in epochs}
    with GpuMonitor(backend.gpu_index(device), 0.2) as monitor:
        for _ in range(case["turns"]):
            for name, epoch in epochs.items():
                monitor.take()
                times[name].append(seconds_of(epoch, device))
                readings[name].append(monitor.take())
    row: Row = {"tokens": tokens}
    for name, each in times.items():
        middle = statistics.median(each)
        row |= {f"{name}ms": 1e3 * middle / len(batches),
                f"{name}tokens_per_second": tokens / middle}  # fmt: skip
        load = clock_and_watts(*readings[name])
        row |= {f"{name}{value}": load[value] for value in load}
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
TRANSLATION = Sweep(
    "translation",
    (*_SETTINGS, "timed", "turns", "peer"),
    (
        *("ms", "tokens_per_second", "peer_ms", "peer_tokens_per_second", "ratio", "tokens"),
        *("peer_clock_mhz", "peer_watts"),
    ),
    bars(
        "Training a translation model",
        "tokens/s",
        ("width", "dtype"),
        ("tokens_per_second", "peer_tokens_per_second"),
    ),
)
