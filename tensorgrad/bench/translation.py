"""Training speed of a translation model, captured, beside the same model in PyTorch eager.

    python -m examples.bench.translation --data FOLDER --preset large --dtype bfloat16

Takes the options of train_translation.py; --resume FOLDER reads the settings of that run, but not
its weights. The two alternate on the same batches of one epoch. Each first trains on all of them
twice, so that neither compilation nor the capture of steps is timed. PyTorch uses its fused AdamW
and, for both bfloat16 dtypes, autocast; for tf32 TF32 too. Tokens are counted without padding.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from examples.bench.torch_transformer_lm import transformer_lm
from tensorgrad import backend, graph
from tensorgrad.command import command
from tensorgrad.data.pair_loader import PairBatch
from tensorgrad.files import write_json
from tensorgrad.gpu import GpuMonitor, clock_and_watts, clock_and_watts_text
from tensorgrad.train.command_line import read_command_line
from tensorgrad.train.device import choose_device
from tensorgrad.train.settings import has_narrow_products
from tensorgrad.train.translation import TranslationRun, TranslationSettings

TrainStep = Callable[[Any, Any], object]  # takes tokens and targets on the device


def ours(run: TranslationRun, device: str) -> TrainStep:
    """Return a training step of tensorgrad, captured: forward, backward, clipping, AdamW."""
    optimizer, clip = run.optimizer, run.settings.clip or math.inf

    def step(tokens: Any, targets: Any) -> None:
        optimizer.zero_grad()
        run.loss(tokens, targets).backward()
        optimizer.step(clip)

    return graph.capture(step, device, len(run.batches.shapes))


def theirs(torch: Any, run: TranslationRun, device: str) -> TrainStep:
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


def seconds(step: TrainStep, batches: Sequence[Any], device: str) -> float:
    """Return the time of some steps, with the GPU's work."""
    began = time.perf_counter()
    for tokens, targets in batches:
        step(tokens, targets)
    if device != "cpu":
        backend.cupy.cuda.runtime.deviceSynchronize()
    return time.perf_counter() - began


def spread(run: TranslationRun, count: int) -> list[PairBatch]:
    """Return the first batches of an epoch, which have mixed lengths."""
    return [run.batches.batch(step) for step in range(min(count, run.batches.batches))]


def measure(
    settings: TranslationSettings, folder: Path, device: str, steps: int, turns: int
) -> Any:
    """Return milliseconds a step and tokens a second of both."""
    run = TranslationRun(settings, folder, device, False)
    batches = spread(run, steps)
    tokens = sum(int((batch != run.tokenizer.end_of_text).sum()) for batch, _ in batches)
    arrays = [tuple(backend.to_device(a.astype(np.int64), device) for a in b) for b in batches]
    kinds: dict[str, tuple[TrainStep, list[Any]]] = {"tensorgrad": (ours(run, device), arrays)}
    if importlib.util.find_spec("torch"):
        torch = importlib.import_module("torch")
        shared = [tuple(torch.from_dlpack(a) for a in pair) for pair in arrays]
        kinds["PyTorch"] = theirs(torch, run, device), shared
    for step, own in kinds.values():
        for _ in range(2):
            seconds(step, own, device)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    readings: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    with GpuMonitor(backend.gpu_index(device), 0.2) as monitor:
        for _ in tqdm(range(turns), desc="turns", disable=None):
            for name, (step, own) in kinds.items():
                monitor.take()
                times[name].append(seconds(step, own, device))
                readings[name].append(monitor.take())
    return {
        name: {
            "ms": statistics.median(each) / len(batches) * 1e3,
            "tokens/s": tokens / statistics.median(each),
            **clock_and_watts(*readings[name]),
        }
        for name, each in times.items()
    }


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], add_help=False)
    parser.add_argument("--timed", type=int, default=100, help="batches")
    parser.add_argument("--turns", type=int, default=3, help="of each library")
    parser.add_argument("--json", type=Path, help="file to write")
    own, rest = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        new = not any(word.startswith("--resume") for word in rest)
        arguments = [*(["--out", folder] if new else []), *rest]
        settings, _, _ = read_command_line(TranslationSettings, __doc__, arguments)
        settings, device = choose_device(settings)
        found = measure(settings, Path(folder), device, own.timed, own.turns)
    for name, values in found.items():
        text = f"{name:12} {values['ms']:8.2f} ms a step {values['tokens/s']:10,.0f} tokens/s"
        print(f"{text}  {clock_and_watts_text(values)}".rstrip())
    if len(found) == 2:
        print(f"ratio        {found['PyTorch']['ms'] / found['tensorgrad']['ms']:8.2f}")
    if own.json:
        write_json(own.json, {"device": device, **found}, 1)


if __name__ == "__main__":
    sys.exit(main())
