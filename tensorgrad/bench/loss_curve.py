"""`tensorgrad bench loss`: the loss of a GPT-2 that is trained here and in PyTorch.

Both take a step on a batch before either takes the next. Equal are the weights at the start, as
the dtype rounds them, the batches, AdamW with its options, the schedule of the learning rate and
clipping. PyTorch uses autocast for both bfloat16 dtypes and, on a GPU, fused AdamW and
torch.compile. Our steps are captured. The vocabulary is as large as the token embedding, so that
padding is the same on both sides. The row has both curves, and the largest difference of their
running means. Tests: tests/parity/test_loss_curve.py.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad import graph, nn, random
from tensorgrad.bench.pictures import new_figure
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.torch_gpt2 import gpt2
from tensorgrad.data import TokenFile, TokenLoader, is_prepared
from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2, PRESETS, GPT2Config
from tensorgrad.tensor import Tensor
from tensorgrad.train.settings import TrainSettings

DTYPES = ("bfloat16-parameters", "bfloat16", "float32")
_EVERY = 10  # steps between reading losses, for which the host waits
_SIZES = ("layers", "heads", "width", "context")

TrainStep = Callable[[Any, Any, float], Any]  # tokens, targets, learning rate: the loss


def read_tokens(data: str, vocab_size: int) -> Any:
    """Return the tokens of a .npy file, or those to train on of a prepared folder."""
    path = Path(data, "train.npy") if is_prepared(data) else data
    return TokenFile.open(path, vocab_size).tokens


def our_step(model: GPT2, settings: TrainSettings, device: str) -> TrainStep:
    """Return a captured training step of tensorgrad."""
    optimizer = settings.make_optimizer(model.named_parameters())
    precision = settings.precision()

    def step(x: Any, y: Any) -> Tensor:
        optimizer.zero_grad()
        with precision():
            loss = model.forward(Tensor(x), Tensor(y))
        loss.backward()
        optimizer.step(settings.clip)
        return loss

    captured = graph.capture(step, device)

    def at_rate(x: Any, y: Any, lr: float) -> Tensor:
        optimizer.lr = lr
        loss: Tensor = captured(x, y)
        return loss

    return at_rate


def peer_step(
    torch: Any, model: GPT2, settings: TrainSettings, device: str, compiled: bool
) -> TrainStep:
    """Return a training step of PyTorch, whose model gets the weights that ours has now."""
    peer = gpt2(model.config).to(device)
    copy_weights(torch, model, peer)
    decayed = [weight for weight in peer.parameters() if weight.ndim > 1]
    others = [weight for weight in peer.parameters() if weight.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        settings.lr, (settings.beta1, settings.beta2), 1e-8, settings.weight_decay,
        fused=device != "cpu",
    )  # fmt: skip
    run = torch.compile(peer) if compiled else peer
    kind, wide = device.partition(":")[0], settings.dtype == "float32"

    def step(x: Any, y: Any, lr: float) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = lr
        x, y = (torch.from_numpy(each.astype(np.int64)).to(device) for each in (x, y))
        with contextlib.nullcontext() if wide else torch.autocast(kind, torch.bfloat16):
            loss = run(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

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
    ours: TrainStep, theirs: TrainStep, batches: TokenLoader, settings: TrainSettings
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


def loss_cases(
    data: str,
    preset: str = "gpt2-124M",
    *,
    vocab: int = 50304,
    dtype: str = DTYPES[0],
    grad_dtype: str = "float32",
    steps: int = 1000,
    batch: int = 8,
    lr: float = 6e-4,
    warmup: int | None = None,
    seed: int = 0,
    window: int = 50,
    compiled: bool = True,
    **sizes: int | None,
) -> list[Case]:
    """Return the case of a sweep.

    Args: see `tensorgrad bench loss --help`.
    Raises:
        ArgumentError: an argument is out of its range.
        DataError, OSError: the tokens cannot be read.
    """
    if not 1 <= window <= steps:
        raise ArgumentError(f"--window: got {window}, expected 1 to --steps, {steps}")
    model = {name: sizes.get(name) or getattr(PRESETS[preset], name) for name in _SIZES}
    case: Case = {
        "data": data, "preset": preset, **model, "vocab": vocab, "dtype": dtype,
        "grad_dtype": grad_dtype, "steps": steps, "batch": batch, "lr": lr, "warmup": warmup,
        "seed": seed, "window": window, "compiled": compiled,
    }  # fmt: skip
    settings_of(case)
    read_tokens(data, config_of(case).vocab_size)
    return [case]


def config_of(case: Case) -> GPT2Config:
    """Return the model of a case."""
    return GPT2Config(vocab_size=case["vocab"], **{name: case[name] for name in _SIZES})


def settings_of(case: Case) -> TrainSettings:
    """Return the training of a case."""
    names = "steps", "batch", "lr", "warmup", "dtype", "grad_dtype", "seed"
    return TrainSettings(**{name: case[name] for name in names})


def measure_loss(case: Case, device: str) -> Row:
    """Return both curves, their last means and how far the running means are apart."""
    torch = importlib.import_module("torch")
    config, settings = config_of(case), settings_of(case)
    tokens = read_tokens(case["data"], config.vocab_size)
    batches = TokenLoader(tokens, settings.batch, config.context, settings.seed)
    random.seed(settings.seed)
    with nn.init.on(device):
        model = GPT2(config)
    model.to(device, settings.parameter_dtype)
    theirs = peer_step(torch, model, settings, device, case["compiled"] and device != "cpu")
    losses = train_both(our_step(model, settings, device), theirs, batches, settings)
    means = [running_means(each, case["window"]) for each in losses]
    apart = abs(means[0] - means[1])
    worst = int(apart.argmax())  # NaN is the largest
    return {
        "tensorgrad": float(means[0][-1]),
        "pytorch": float(means[1][-1]),
        "largest_difference": float(apart[worst]),
        "at_step": worst + case["window"],
        "mean_difference": float((means[0] - means[1]).mean()),
        **{name: " ".join(f"{loss:.6g}" for loss in each)
           for name, each in zip(_CURVES, losses, strict=True)},
    }  # fmt: skip


def running_means(losses: Sequence[float], window: int) -> Any:
    """Return the means of each window."""
    return np.convolve(losses, np.full(window, 1 / window), "valid")


def draw_loss(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a figure of both curves above the difference of their running means."""
    row = rows[-1]
    window, title = row["window"], f"{row['preset']}, {row['dtype']}, batch {row['batch']}"
    figure = new_figure(rows=2, title=f"{title} x {row['context']}, {row['device']}")
    curves, differences = figure.subplots(2, sharex=True)
    losses = [[float(word) for word in str(row[name]).split()] for name in _CURVES]
    means = [running_means(each, window) for each in losses]
    steps = range(window, row["steps"] + 1)
    for number, (name, raw, mean) in enumerate(
        zip(("tensorgrad", "PyTorch"), losses, means, strict=True)
    ):
        curves.plot(range(1, len(raw) + 1), raw, color=f"C{number}", alpha=0.25, linewidth=0.6)
        curves.plot(steps, mean, color=f"C{number}", linewidth=1.2, label=name)
    curves.set_ylabel(f"loss in nats, and means of {window} steps")
    curves.legend()
    differences.plot(steps, means[0] - means[1], color="C2", linewidth=1.2)
    differences.axhline(0, color="gray", linewidth=0.6)
    differences.set_ylabel("tensorgrad - PyTorch, of the means")
    differences.set_xlabel("step")
    for axes in (curves, differences):
        axes.grid(alpha=0.3)
    return {"": figure}


_CURVES = ("tensorgrad_losses", "pytorch_losses")
LOSS = Sweep(
    "loss",
    (
        *("data", "preset", *_SIZES, "vocab", "dtype", "grad_dtype", "steps", "batch", "lr"),
        *("warmup", "seed", "window", "compiled"),
    ),
    ("tensorgrad", "pytorch", "largest_difference", "at_step", "mean_difference", *_CURVES),
    draw_loss,
    hidden=_CURVES,
)
