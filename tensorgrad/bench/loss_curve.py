"""The loss of a GPT-2 that is trained here and in PyTorch, from equal weights on equal batches.

    tensorgrad prepare books.txt tokens --vocab 50257
    python -m examples.bench.loss_curve --data tokens --batch 16
    python -m examples.bench.loss_curve --data tokens --batch 16 --dtype bfloat16

Both take a step on a batch before either takes the next. Equal are the weights at the start, as
--dtype rounds them, the batches, AdamW with its options, the schedule of the learning rate and
clipping. PyTorch uses autocast for both bfloat16 dtypes and, on a GPU, fused AdamW and
torch.compile. Our steps are captured. The vocabulary is as large as the token embedding, so that
padding is the same on both sides.

OUT/loss_curve.csv has a row for each step, written every 10 steps and when interrupted;
OUT/loss_curve.png both curves, their running means and the difference of these. The exit status is
1 if the running means differ by more than --most nats anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from tensorgrad import backend, graph, nn, random
from tensorgrad.bench.pictures import new_figure, save
from tensorgrad.bench.torch_gpt2 import gpt2
from tensorgrad.command import command
from tensorgrad.data import TokenFile, TokenLoader, is_prepared
from tensorgrad.errors import ArgumentError
from tensorgrad.files import make_folder
from tensorgrad.models.gpt2 import GPT2, PRESETS, GPT2Config
from tensorgrad.tensor import Tensor
from tensorgrad.train.settings import TrainSettings

DTYPES = ("bfloat16-parameters", "bfloat16", "float32")
COLUMNS = ("step", "lr", "tensorgrad", "pytorch")
_EVERY = 10  # steps between reading losses, for which the host waits

TrainStep = Callable[[Any, Any, float], Any]  # tokens, targets, learning rate: the loss
Row = tuple[int, float, float, float]  # COLUMNS


def read_tokens(data: str, vocab_size: int) -> Any:
    """Return the tokens of a .npy file, or those to train on of a prepared folder."""
    path = Path(data, "train.npy") if is_prepared(data) else data
    return TokenFile.open(path, vocab_size).tokens


def our_step(model: GPT2, settings: TrainSettings, device: str) -> TrainStep:
    """Return a captured training step of tensorgrad."""
    optimizer = settings.optimizer(model.named_parameters())
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
    ours: TrainStep, theirs: TrainStep, batches: TokenLoader, settings: TrainSettings, path: Path
) -> list[Row]:
    """Return a row for each step; all that are finished are in the file, however this ends."""
    rows: list[Row] = []
    pending: list[tuple[int, float, Any, Any]] = []
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)

        def read() -> None:
            new = [(step, lr, float(a), float(b)) for step, lr, a, b in pending]
            pending.clear()
            rows.extend(new)
            writer.writerows(new)
            file.flush()

        try:
            for step in tqdm(range(settings.steps), desc="steps", disable=None):
                x, y = batches.batch(step)
                lr = settings.learning_rate(step)
                pending.append((step + 1, lr, ours(x, y, lr), theirs(x, y, lr)))
                if len(pending) == _EVERY:
                    read()
        finally:
            read()
    return rows


def running_means(rows: Sequence[Row], window: int) -> tuple[Any, Any, Any]:
    """Return the last step of each window, and the means of both losses in it."""
    steps, _, ours, theirs = np.array(rows, np.float64).T
    mean = np.full(window, 1 / window)
    return (steps[window - 1 :], *(np.convolve(each, mean, "valid") for each in (ours, theirs)))


def draw(rows: Sequence[Row], window: int, title: str) -> Any:
    """Return a figure of both curves above the difference of their running means."""
    figure = new_figure(rows=2, title=title)
    curves, differences = figure.subplots(2, sharex=True)
    steps, *means = running_means(rows, window)
    for name, color, raw, mean in zip(
        ("tensorgrad", "PyTorch"), ("C0", "C1"), np.array(rows).T[2:], means, strict=True
    ):
        curves.plot(range(1, len(rows) + 1), raw, color=color, alpha=0.25, linewidth=0.6)
        curves.plot(steps, mean, color=color, linewidth=1.2, label=name)
    curves.set_ylabel(f"loss in nats, and means of {window} steps")
    curves.legend()
    differences.plot(steps, means[0] - means[1], color="C2", linewidth=1.2)
    differences.axhline(0, color="gray", linewidth=0.6)
    differences.set_ylabel("tensorgrad - PyTorch, of the means")
    differences.set_xlabel("step")
    for axes in (curves, differences):
        axes.grid(alpha=0.3)
    return figure


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, help="a folder of `tensorgrad prepare`, or a .npy file of tokens")
    add("--preset", choices=tuple(PRESETS), default="gpt2-124M", help="(default: gpt2-124M)")
    for name in ("layers", "heads", "width", "context"):
        add(f"--{name}", type=int, help="of the model (default: the preset's)")
    add("--vocab", type=int, default=50304, help="tokens of the model (default: 50304)")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="as in training (default: the first)")
    add("--grad-dtype", choices=("float32", "bfloat16"), default="float32",
        help="of ours; bfloat16: with --dtype bfloat16-parameters (default: float32)")  # fmt: skip
    add("--steps", type=int, default=1000, help="(default: 1000)")
    add("--batch", type=int, default=8, help="sequences of a step (default: 8)")
    add("--lr", type=float, default=6e-4, help="peak learning rate (default: 6e-4)")
    add("--warmup", type=int, help="warmup steps (default: 5 %% of --steps)")
    add("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    add("--window", type=int, default=50, help="steps of a running mean (default: 50)")
    add("--most", type=float, default=0.03,
        help="largest difference of running means, in nats (default: 0.03)")  # fmt: skip
    add("--no-compile", action="store_true", help="without torch.compile")
    add("--device", default="auto", help="cpu, cuda, cuda:N, or auto: a GPU if there is one")
    add("--out", type=Path, default=Path("runs/loss_curve"), help="(default: runs/loss_curve)")
    return parser


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Train both, write the curves, and return 1 where they are too far apart."""
    given = options().parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        raise ArgumentError("loss_curve: PyTorch is not installed; run `pip install torch`")
    if not 1 <= given.window <= given.steps:
        raise ArgumentError(f"--window: got {given.window}, expected 1 to --steps, {given.steps}")
    settings = TrainSettings(
        steps=given.steps, batch=given.batch, lr=given.lr, warmup=given.warmup, dtype=given.dtype,
        grad_dtype=given.grad_dtype, seed=given.seed,
    )  # fmt: skip
    preset = PRESETS[given.preset]
    sizes = {name: getattr(given, name) or getattr(preset, name)
             for name in ("layers", "heads", "width", "context")}  # fmt: skip
    config = GPT2Config(vocab_size=given.vocab, **sizes)
    tokens = read_tokens(given.data, config.vocab_size)
    batches = TokenLoader(tokens, settings.batch, config.context, settings.seed)
    device = backend.use_device(given.device)
    make_folder(given.out)
    torch = importlib.import_module("torch")
    random.seed(settings.seed)
    with nn.init.on(device):
        model = GPT2(config)
    model.to(device, settings.parameter_dtype)
    theirs = peer_step(
        torch, model, settings, device, compiled=device != "cpu" and not given.no_compile
    )
    ours = our_step(model, settings, device)
    path = given.out / "loss_curve.csv"
    try:
        rows = train_both(ours, theirs, batches, settings, path)
    except KeyboardInterrupt as stop:
        stop.add_note(f"finished rows are in {path}")
        raise
    title = f"{given.preset}, {given.dtype}, batch {given.batch} x {config.context}"
    save(draw(rows, given.window, title), path.with_suffix(".png"))
    return int(not _report(rows, given.window, given.most, path))


def _report(rows: Sequence[Row], window: int, most: float, path: Path) -> bool:
    """Print how far the curves are apart; return whether that is near enough."""
    steps, ours, theirs = running_means(rows, window)
    apart = abs(ours - theirs)
    worst = int(apart.argmax())  # NaN is the largest
    print(
        f"after {len(rows):,} steps, mean of the last {window}: tensorgrad {ours[-1]:.4f}, "
        f"PyTorch {theirs[-1]:.4f} nats\n"
        f"largest difference of running means: {apart[worst]:.4f} nats up to step "
        f"{steps[worst]:,.0f}, expected {most:g} or less; mean difference "
        f"{(ours - theirs).mean():+.4f}\n{path}, {path.with_suffix('.png').name}"
    )
    return bool(apart[worst] <= most)


if __name__ == "__main__":
    sys.exit(main())
