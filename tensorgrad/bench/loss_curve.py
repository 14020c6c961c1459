"""`tensorgrad bench loss`: the loss of a GPT-2 that is trained here and in PyTorch.

Both take a step on a batch before either takes the next. Equal are the weights at the start, as
the dtype rounds them, the batches, AdamW with its options, the schedule of the learning rate and
clipping. PyTorch uses autocast for both bfloat16 dtypes and, on a GPU, fused AdamW and
torch.compile. Our steps are captured. The vocabulary is as large as the token embedding, so that
padding is the same on both sides. The row has both curves, and the largest difference of their
running means. Tests: tests/parity/test_loss_curve.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tensorgrad import graph
from tensorgrad.bench.options import PRESET, Device, Sizes, is_measured
from tensorgrad.bench.pictures import loss_curves, running_means
from tensorgrad.bench.steps import sizes_of, with_sizes
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.torch_ddp import TorchTrainer
from tensorgrad.bench.torch_gpt2 import gpt2
from tensorgrad.core.errors import ArgumentError
from tensorgrad.data import TokenFile, TokenLoader, is_prepared
from tensorgrad.models.gpt2 import GPT2, PRESETS, GPT2Config
from tensorgrad.profile.training_step import TrainingStep, language_step
from tensorgrad.train.language import LanguageSettings

DTYPES = ("bfloat16-parameters", "bfloat16", "float32")
_EVERY = 10  # steps between reading losses, for which the host waits
_SIZES = ("layers", "heads", "width", "context")

TrainStep = Callable[[Any, Any, float], Any]  # tokens, targets, learning rate: the loss


def read_tokens(data: str, vocab_size: int) -> Any:
    """Return the tokens of a .npy file, or those to train on of a prepared folder."""
    path = Path(data, "train.npy") if is_prepared(data) else data
    return TokenFile.open(path, vocab_size).tokens


def our_step(step: TrainingStep, device: str) -> TrainStep:
    """Return a captured training step of tensorgrad."""
    captured = graph.capture(step, device)

    def at_rate(x: Any, y: Any, lr: float) -> Any:
        step.optimizer.lr = lr
        return captured(x, y)

    return at_rate


def peer_step(ours: TrainingStep, device: str, compiled: bool) -> TrainStep:
    """Return a training step of PyTorch, whose model gets the weights that ours has now."""
    torch = importlib.import_module("torch")
    peer = gpt2(ours.model.config)
    copy_weights(torch, ours.model, peer)
    trainer = TorchTrainer(ours.settings, lambda: peer, device, matrices=True, compiled=compiled)

    def step(x: Any, y: Any, lr: float) -> Any:
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr
        x, y = (torch.from_numpy(tokens.astype(np.int64)).to(device) for tokens in (x, y))
        return trainer.step([(x, y)])

    return step


def copy_weights(torch: Any, model: GPT2, peer: Any) -> None:
    """Give the peer's parameters the values of ours; they have other names."""
    ours = {
        name.replace("attention.", "").replace("feed_forward.", ""): parameter
        for name, parameter in model.named_parameters()
    }
    theirs = dict(peer.named_parameters())
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for name, weight in theirs.items():
            weight.copy_(torch.from_numpy(ours[name].numpy().astype(np.float32)))


def train_both(
    ours: TrainStep, theirs: TrainStep, batches: TokenLoader, settings: LanguageSettings
) -> tuple[list[float], list[float]]:
    """Return both losses of each step."""
    losses: tuple[list[float], list[float]] = [], []
    pending: list[tuple[Any, Any]] = []
    for step in range(settings.steps):
        x, y = batches.batch(step)
        lr = settings.learning_rate(step)
        pending.append((ours(x, y, lr), theirs(x, y, lr)))
        if len(pending) == _EVERY or step == settings.steps - 1:
            for both in pending:
                for curve, loss in zip(losses, both, strict=True):
                    curve.append(float(loss))
            pending.clear()
    return losses


def loss_sweep(
    *,
    data: str,
    preset: Literal[tuple(PRESETS)] = "gpt2-124M",  # type: ignore[valid-type]
    sizes: Sizes = PRESET,
    dtype: Literal[DTYPES] = DTYPES[0],  # type: ignore[valid-type]
    grad_dtype: Literal["float32", "bfloat16"] = "float32",
    steps: int = 1000,
    batch: int = 8,
    lr: float = 6e-4,
    warmup: int | None = None,
    seed: int = 0,
    window: int = 50,
    most: float = 0.03,
    compiled: bool = True,
    device: Device = "auto",
) -> Iterator[Sweep]:
    """Train a GPT-2 here and in PyTorch, from equal weights on equal batches; compare the losses.

    Args:
        data: a folder of `tensorgrad prepare`, or a .npy file of tokens.
        preset: of the model; --vocab is 50304 by default.
        dtype: as in training.
        grad_dtype: of ours; bfloat16 with --dtype bfloat16-parameters.
        steps: of training.
        batch: sequences of a step.
        lr: peak learning rate.
        warmup: steps (default: 5 % of --steps).
        seed: of weights and batches.
        window: steps of a running mean.
        most: largest difference of running means, in nats; above it the exit status is 1.
        compiled: compile PyTorch's model, on a GPU.
    """
    is_measured(True)
    if not 1 <= window <= steps:
        raise ArgumentError(f"--window: got {window}, expected 1 to --steps, {steps}")
    model = sizes_of(PRESETS[preset]) | {"vocab": 50304} | sizes.given()
    case: Case = {
        "data": data, "preset": preset, **model, "dtype": dtype, "grad_dtype": grad_dtype,
        "steps": steps, "batch": batch, "lr": lr, "warmup": warmup, "seed": seed,
        "window": window, "compiled": compiled,
    }  # fmt: skip
    settings_of(case)
    read_tokens(data, config_of(case).vocab_size)

    def problem(row: Row) -> str:
        apart = row["largest_difference"]
        near = isinstance(apart, (int, float)) and apart <= most
        return "" if near else f"running means differ by {apart} nats, expected {most:g} or less"

    results = "tensorgrad", "pytorch", "largest_difference", "at_step", "mean_difference"
    yield Sweep(
        "loss", [case], partial(measure_loss, device=device), (*results, *_CURVES), draw_loss,
        device, hidden=_CURVES, problem=problem,
    )  # fmt: skip


def config_of(case: Case) -> GPT2Config:
    """Return the model of a case."""
    config: GPT2Config = with_sizes(GPT2Config(), case)
    return config


def settings_of(case: Case) -> LanguageSettings:
    """Return the training of a case."""
    names = "steps", "batch", "lr", "warmup", "dtype", "grad_dtype", "seed"
    return LanguageSettings(**{name: case[name] for name in names})


def measure_loss(case: Case, device: str) -> Row:
    """Return both curves, their last means and how far the running means are apart."""
    config, settings = config_of(case), settings_of(case)
    tokens = read_tokens(case["data"], config.vocab_size)
    batches = TokenLoader(tokens, settings.batch, config.context, settings.seed)
    ours = language_step(settings, config, device)
    theirs = peer_step(ours, device, case["compiled"] and device != "cpu")
    losses = train_both(our_step(ours, device), theirs, batches, settings)
    means = [running_means(loss, case["window"]) for loss in losses]
    apart = abs(means[0] - means[1])
    worst = int(apart.argmax())  # NaN is the largest
    return {
        "tensorgrad": float(means[0][-1]),
        "pytorch": float(means[1][-1]),
        "largest_difference": float(apart[worst]),
        "at_step": worst + case["window"],
        "mean_difference": float((means[0] - means[1]).mean()),
        **{name: " ".join(f"{loss:.6g}" for loss in curve)
           for name, curve in zip(_CURVES, losses, strict=True)},
    }  # fmt: skip


def draw_loss(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a figure of both curves above the difference of their running means."""
    row = rows[-1]
    title = "{preset}, {dtype}, batch {batch} x {context}, {device}".format(**row)
    curves = {name: [float(word) for word in str(row[f"{name}_losses"]).split()]
              for name in ("tensorgrad", "pytorch")}  # fmt: skip
    return loss_curves(title, curves, "pytorch", row["window"])


_CURVES = ("tensorgrad_losses", "pytorch_losses")
