"""Train a small GPT-2 by plain gradient descent, and draw the sharpness of its loss.

    python examples/edge_of_stability.py
    python examples/edge_of_stability.py --lr 0.02 --out runs/faster

The data is one batch, which every step takes. The sharpness, the largest eigenvalue of the loss's
Hessian, rises until gradient descent is no longer stable, which for a quadratic function begins at
2 / learning rate. There it stops rising, while the loss falls on, though not at every step. The
loss of this model grows more slowly than a quadratic function along that direction, so that the
sharpness settles some 25 % above 2 / learning rate, and higher at larger learning rates.

Source: Cohen et al. 2021, "Gradient descent on neural networks typically occurs at the edge of
stability", arXiv:2103.00065.

The folder of the run gets edge.png beside the files of train_gpt2.py. The picture needs matplotlib.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensorgrad import backend, random, tensor
from tensorgrad.bench.pictures import new_figure, save
from tensorgrad.curvature import eigenpairs, model_hessian
from tensorgrad.data import TokenLoader, prepare
from tensorgrad.io.command import command
from tensorgrad.io.readers import needed
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.optim import SGD
from tensorgrad.parallel.comm.launch import check_one_process
from tensorgrad.train import ScriptRun, ScriptSettings
from tensorgrad.train.command_line import read_command_line
from tensorgrad.train.config import option
from tensorgrad.train.log import read_metrics


@dataclass(frozen=True)
class Settings(ScriptSettings):
    """The options, besides those of all scripts: --steps, --batch, --data, --out and others."""

    steps: int = option(300, "steps", low=1, grows=True)
    warmup: int | None = option(0, "warmup steps", low=0)
    lr: float = option(0.01, "learning rate, the same at all steps", low=0)
    evaluate_every: int = option(15, "steps between measurements of the sharpness", low=1)
    layers: int = option(2, "transformer blocks", low=1)
    heads: int = option(4, "attention heads", low=1)
    width: int = option(192, "width of the model", low=1)
    context: int = option(128, "context length in tokens", low=1)
    vocab: int = option(1024, "size of the vocabulary", low=257)


def measure(model: GPT2, batch: tuple[Any, Any], lr: float) -> dict[str, float]:
    """Return the largest eigenvalue of the Hessian of the loss, beside 2 / learning rate."""
    operator = model_hessian(model, lambda model, x, y: model(x, y), [batch])
    sharpness = float(eigenpairs(operator, tolerance=0.05).values[0])
    return {"sharpness": sharpness, "threshold": 2 / lr}


def draw(folder: Path) -> None:
    """Draw the loss and the sharpness of the run in a folder."""
    records = read_metrics(folder / "metrics.jsonl")
    figure = new_figure(rows=2, title=folder.name, height=2.8)
    above, below = figure.subplots(2, 1, sharex=True)
    steps = [record for record in records if "loss" in record]
    above.plot([record["step"] for record in steps], [record["loss"] for record in steps])
    above.set_ylabel("loss (nats a token)")
    measured = [record for record in records if "sharpness" in record]
    places = [record["step"] for record in measured]
    below.plot(places, [record["sharpness"] for record in measured], "o-", label="sharpness")
    thresholds = [record["threshold"] for record in measured]
    below.plot(places, thresholds, "--", label="2 / learning rate")
    below.set_xlabel("step")
    below.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    save(figure, folder / "edge.png")


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    check_one_process("edge_of_stability.py")
    settings, folder, resuming = read_command_line(Settings, __doc__, arguments)
    needed("matplotlib", "edge_of_stability.py", "plot")
    with ScriptRun(settings, folder, resuming) as run:
        device = backend.use_device(settings.device)
        corpus = prepare(settings.data, settings.cache, settings.vocab, progress=run.progress)
        x, y = TokenLoader(corpus.train, settings.batch, settings.context, settings.seed).batch(0)
        batch = tensor(x, device=device), tensor(y, device=device)

        random.seed(settings.seed)
        sizes = GPT2Config(
            settings.vocab, settings.context, settings.layers, settings.heads, settings.width
        )
        sizes = replace(sizes, vocab_size=corpus.tokenizer.vocab_size)
        model = GPT2(sizes).to(device)
        optimizer = SGD(model.named_parameters(), lr=settings.lr)
        step = run.resume(model, optimizer, sizes, corpus)
        if step == 0:
            run.log_evaluation(step, measure(model, (x, y), settings.lr))
        while step < settings.steps and not run.stopping():
            loss = model(*batch)
            optimizer.zero_grad()
            loss.backward()
            norm = optimizer.step(max_norm=math.inf)  # which clips nothing
            step += 1
            run.log_step(step, float(loss), settings.lr, norm)
            if step % settings.evaluate_every == 0 or step == settings.steps:
                run.log_evaluation(step, measure(model, (x, y), settings.lr))
            if step % 100 == 0:
                run.save(step)
        run.save(step)  # also after Ctrl-C
        draw(folder)
    return run.status


if __name__ == "__main__":
    sys.exit(main())
