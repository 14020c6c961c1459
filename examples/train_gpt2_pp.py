"""Train a GPT-2 by pipeline parallelism: each rank computes some of the layers.

    mpirun -n 2 python examples/train_gpt2_pp.py
    mpirun -n 4 python examples/train_gpt2_pp.py --layers 8 --micro-batches 8 --batch 16
    mpirun -n 2 python examples/train_gpt2_pp.py --resume runs/gpt2-1

Runs on CPUs, or with one GPU per rank. Options, data and results are those of train_gpt2.py. A run
may be resumed with another number of stages, also one. `mpirun -n 4 tensorgrad train --pp 2` has
several pipelines that share the batch, and other schedules.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tensorgrad import backend, random
from tensorgrad.data import Tokenizer, TokenLoader, prepare
from tensorgrad.io.command import printable
from tensorgrad.models.generation import generate
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.optim import AdamW, Optimizer, decays_matrices, schedule
from tensorgrad.parallel import Comm, Pipeline
from tensorgrad.parallel.script import command_on_ranks, read_on_ranks
from tensorgrad.train import ScriptRun, ScriptSettings, Strategy, measure_loss
from tensorgrad.train.command_line import read_command_line
from tensorgrad.train.config import option
from tensorgrad.train.loop import check_parts
from tensorgrad.train.strategy import Batch


@dataclass(frozen=True)
class Settings(ScriptSettings):
    """The options, besides those of all scripts: --steps, --batch, --data, --out and others."""

    lr: float = option(3e-3, "peak learning rate", low=0)
    layers: int = option(2, "transformer blocks", low=1)
    heads: int = option(4, "attention heads", low=1)
    width: int = option(192, "width of the model", low=1)
    context: int = option(128, "context length in tokens", low=1)
    micro_batches: int = option(4, "parts of a batch in a pipeline", low=1, by_ranks=True)
    vocab: int = option(1024, "size of the vocabulary", low=257)


def train_step(
    model: GPT2, optimizer: Optimizer, strategy: Strategy, parts: Sequence[Batch]
) -> tuple[float, Any]:
    """Take a step; return the loss of the batch, and the gradient norm before clipping."""
    optimizer.zero_grad()
    # Forward and backward of the micro-batches, one after the other: while a stage computes on one,
    # the stages before it compute on the next. Activations go forward, their gradients back.
    total = strategy.compute_gradients(model, parts)
    norm = optimizer.step(max_norm=1.0, reduce_norm=strategy.reduce_norm)  # norm of all stages
    return float(total) / len(parts), norm


def cut(batch: Batch, parts: int, device: str) -> list[Batch]:
    """Return micro-batches of equal size."""
    size = len(batch[0]) // parts
    arrays = [backend.to_device(array, device) for array in batch]
    return [tuple(a[i : i + size] for a in arrays) for i in range(0, parts * size, size)]


def evaluate(
    model: GPT2, validation: TokenLoader, strategy: Strategy, last: bool
) -> dict[str, float]:
    """Return the loss on a part of the validation text, at the end on the whole text too."""
    found = measure_loss(model, model, validation.evaluation_batches(20), strategy)
    whole = measure_loss(model, model, validation.evaluation_batches(), strategy) if last else {}
    return found | {f"final_{name}": value for name, value in whole.items()}


def sample(model: GPT2, tokenizer: Tokenizer, prompt: str) -> str:
    """Return the prompt and the text that the model continues it with."""
    start, end = tokenizer.encode_prompt(prompt), [tokenizer.end_of_text]
    tokens = generate(model, start, 200, temperature=0.7, top_p=0.95, seed=0, stop_tokens=end)
    return prompt + tokenizer.decode(tokens, skip_special_tokens=True)


@command_on_ranks
def main(comm: Comm) -> int:
    """Run the command, on all ranks."""
    settings, folder, resuming = read_on_ranks(
        comm, Settings, lambda: read_command_line(Settings, __doc__)
    )
    strategy = Pipeline(comm)
    batch, context, steps = settings.batch, settings.context, settings.steps
    with ScriptRun(settings, folder, resuming, strategy) as run:
        sizes = GPT2Config(settings.vocab, context, settings.layers, settings.heads, settings.width)
        check_parts(batch, settings.micro_batches, 1)
        device = comm.select_device(settings.device)
        corpus = prepare(settings.data, settings.cache, settings.vocab, progress=run.progress)
        tokenizer = corpus.tokenizer
        training = TokenLoader(
            corpus.train, batch, context, settings.seed, strategy.rank, strategy.ranks
        )
        validation = TokenLoader(
            corpus.validation, batch, context, settings.seed, strategy.rank, strategy.ranks
        )

        random.seed(settings.seed)
        sizes = replace(sizes, vocab_size=tokenizer.vocab_size)  # a short text has fewer
        model = GPT2(sizes).to(device)
        adamw = partial(AdamW, betas=(0.9, 0.95), weight_decay=0.1, decay=decays_matrices)
        optimizer = strategy.prepare(model, adamw)  # keeps the layers of this stage
        step = run.resume(model, optimizer, sizes, corpus)
        if step == 0:
            run.log_evaluation(step, evaluate(model, validation, strategy, last=False))
        while step < steps and not run.stopping():
            lr, warmup = settings.lr, settings.warmup_steps
            optimizer.lr = schedule.cosine(step, lr, steps, warmup, minimum=0.1 * lr)
            parts = cut(training.batch(step), settings.micro_batches, device)
            loss, norm = train_step(model, optimizer, strategy, parts)
            step += 1
            run.log_step(step, loss, optimizer.lr, norm)
            if step % 200 == 0 or step == steps:
                run.log_evaluation(step, evaluate(model, validation, strategy, last=step == steps))
            if step % 100 == 0:
                run.save(step)
        run.save(step)  # also after Ctrl-C
        if step == steps:
            text = sample(model, tokenizer, "def ")
            run.log_sample(step, "def ", text)
            if strategy.is_main:
                print(printable(text))
    return run.status


if __name__ == "__main__":
    sys.exit(main())
