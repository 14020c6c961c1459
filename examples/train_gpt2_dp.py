"""Train a GPT-2 on several ranks, each of which computes its part of every batch.

    mpirun -n 2 python examples/train_gpt2_dp.py
    mpirun -n 8 python examples/train_gpt2_dp.py --data my_texts --batch 64
    mpirun -n 4 python examples/train_gpt2_dp.py --resume runs/gpt2-1

Runs on CPUs, or with one GPU per rank. Options, data and results are those of train_gpt2.py:
--batch counts the sequences of all ranks together, and any number of ranks takes the same steps. So
a run may be resumed on another number of ranks. Rank 0 prints. `mpirun -n 2 tensorgrad train` takes
the same steps, and has ZeRO, pipelines and tensor parallelism.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tensorgrad import random, tensor
from tensorgrad.data import Tokenizer, TokenLoader, prepare
from tensorgrad.io.command import printable
from tensorgrad.models.generation import generate
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.optim import AdamW, Optimizer, decays_matrices, schedule
from tensorgrad.parallel import Comm, DataParallel
from tensorgrad.parallel.script import command_on_ranks, read_on_ranks
from tensorgrad.train import ScriptRun, ScriptSettings, Strategy, measure_loss
from tensorgrad.train.command_line import read_command_line
from tensorgrad.train.config import option


@dataclass(frozen=True)
class Settings(ScriptSettings):
    """The options, besides those of all scripts: --steps, --batch, --data, --out and others."""

    lr: float = option(3e-3, "peak learning rate", low=0)
    layers: int = option(2, "transformer blocks", low=1)
    heads: int = option(4, "attention heads", low=1)
    width: int = option(192, "width of the model", low=1)
    context: int = option(128, "context length in tokens", low=1)
    vocab: int = option(1024, "size of the vocabulary", low=257)


def train_step(
    model: GPT2, optimizer: Optimizer, strategy: Strategy, x: Any, y: Any
) -> tuple[float, Any]:
    """Take a step; return the loss of the whole batch, and the gradient norm before clipping."""
    device = next(model.parameters()).device
    loss = model(tensor(x, device=device), tensor(y, device=device))  # forward, of this rank's rows
    optimizer.zero_grad()
    loss.backward()  # begins to send a bucket of gradients as soon as all of them are computed
    strategy.reduce_gradients()  # waits until every gradient is the mean over the ranks
    norm = optimizer.step(max_norm=1.0)  # clip and update, the same on all ranks
    (total,) = strategy.sum([float(loss)])
    return total / strategy.ranks, norm


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
    strategy = DataParallel(comm)
    batch, context, steps = settings.batch, settings.context, settings.steps
    with ScriptRun(settings, folder, resuming, strategy) as run:
        sizes = GPT2Config(settings.vocab, context, settings.layers, settings.heads, settings.width)
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
        optimizer = strategy.prepare(model, adamw)  # gradients in a flat buffer, in buckets
        step = run.resume(model, optimizer, sizes, corpus)
        if step == 0:
            run.log_evaluation(step, evaluate(model, validation, strategy, last=False))
        while step < steps and not run.stopping():
            lr, warmup = settings.lr, settings.warmup_steps
            optimizer.lr = schedule.cosine(step, lr, steps, warmup, minimum=0.1 * lr)
            loss, norm = train_step(model, optimizer, strategy, *training.batch(step))
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
