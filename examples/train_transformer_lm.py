"""Train a Llama-style model on text: rotary positions, RMSNorm, SwiGLU, grouped queries.

    python examples/train_transformer_lm.py
    python examples/train_transformer_lm.py --data my_texts --batch 32 --micro-batches 4
    python examples/train_transformer_lm.py --resume runs/transformer-lm-1

The run is that of train_gpt2.py with another model, and its step adds up the gradients of several
parts of a batch: only the activations of one part are in memory at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tensorgrad import backend, random, tensor
from tensorgrad.data import Tokenizer, TokenLoader, prepare
from tensorgrad.io.command import command, printable
from tensorgrad.models.generation import generate
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.optim import AdamW, Optimizer, decays_matrices, schedule
from tensorgrad.parallel.comm.launch import check_one_process
from tensorgrad.train import ScriptRun, ScriptSettings, measure_loss
from tensorgrad.train.command_line import read_command_line
from tensorgrad.train.config import option
from tensorgrad.train.loop import check_parts


@dataclass(frozen=True)
class Settings(ScriptSettings):
    """The options, besides those of all scripts: --steps, --batch, --data, --out and others."""

    model: str = option("transformer-lm", "the model", choices=("transformer-lm",))
    micro_batches: int = option(1, "parts of a batch, computed one by one", low=1)
    lr: float = option(3e-3, "peak learning rate", low=0)
    layers: int = option(2, "transformer blocks", low=1)
    heads: int = option(4, "query heads", low=1)
    kv_heads: int = option(2, "key and value heads, each shared by several query heads", low=1)
    width: int = option(192, "width of the model", low=1)
    context: int = option(128, "context length in tokens", low=1)
    vocab: int = option(1024, "size of the vocabulary", low=257)


def train_step(
    model: TransformerLM, optimizer: Optimizer, x: Any, y: Any, settings: Settings
) -> tuple[float, Any]:
    """Take a step; return the loss of the batch, and the gradient norm before clipping."""
    device, parts = next(model.parameters()).device, settings.micro_batches
    optimizer.zero_grad()
    total = 0.0
    for rows in np.split(np.arange(len(x)), parts):
        loss = model(tensor(x[rows], device=device), tensor(y[rows], device=device))  # forward
        (loss / parts).backward()  # adds to the gradients
        total += float(loss) / parts
    norm = optimizer.step(max_norm=1.0)  # clip and update
    return total, norm


def evaluate(model: TransformerLM, validation: TokenLoader, last: bool) -> dict[str, float]:
    """Return the loss on a part of the validation text, at the end on the whole text too."""
    found = measure_loss(model, model, validation.evaluation_batches(20))
    whole = measure_loss(model, model, validation.evaluation_batches()) if last else {}
    return found | {f"final_{name}": value for name, value in whole.items()}


def sample(model: TransformerLM, tokenizer: Tokenizer, prompt: str) -> str:
    """Return the prompt and the text that the model continues it with."""
    start, end = tokenizer.encode_prompt(prompt), [tokenizer.end_of_text]
    tokens = generate(model, start, 200, temperature=0.7, top_p=0.95, seed=0, stop_tokens=end)
    return prompt + tokenizer.decode(tokens, skip_special_tokens=True)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    check_one_process("train_transformer_lm.py")
    settings, folder, resuming = read_command_line(Settings, __doc__, arguments)
    batch, context, steps = settings.batch, settings.context, settings.steps
    with ScriptRun(settings, folder, resuming) as run:
        heads = settings.heads, settings.kv_heads
        sizes = TransformerLMConfig(
            settings.vocab, context, settings.layers, *heads, settings.width
        )
        check_parts(batch, settings.micro_batches, 1)
        device = backend.use_device(settings.device)
        corpus = prepare(settings.data, settings.cache, settings.vocab, progress=run.progress)
        training = TokenLoader(corpus.train, batch, context, settings.seed)
        validation = TokenLoader(corpus.validation, batch, context, settings.seed)

        random.seed(settings.seed)
        sizes = replace(sizes, vocab_size=corpus.tokenizer.vocab_size)  # a short text has fewer
        model = TransformerLM(sizes).to(device)
        optimizer = AdamW(
            model.named_parameters(), betas=(0.9, 0.95), weight_decay=0.1, decay=decays_matrices
        )
        step = run.resume(model, optimizer, sizes, corpus)
        if step == 0:
            run.log_evaluation(step, evaluate(model, validation, last=False))
        while step < steps and not run.stopping():
            lr, warmup = settings.lr, settings.warmup_steps
            optimizer.lr = schedule.cosine(step, lr, steps, warmup, minimum=0.1 * lr)
            loss, norm = train_step(model, optimizer, *training.batch(step), settings)
            step += 1
            run.log_step(step, loss, optimizer.lr, norm)
            if step % 200 == 0 or step == steps:
                run.log_evaluation(step, evaluate(model, validation, last=step == steps))
            if step % 100 == 0:
                run.save(step)
        run.save(step)  # also after Ctrl-C
        if step == steps:
            text = sample(model, corpus.tokenizer, "def ")
            run.log_sample(step, "def ", text)
            print(printable(text))
    return run.status


if __name__ == "__main__":
    sys.exit(main())
