"""Train a GPT-2 on text and print a sample: by default a small one, on Python's own library.

    python examples/train_gpt2.py
    python examples/train_gpt2.py --data my_texts --layers 4 --width 256
    python examples/train_gpt2.py --resume runs/gpt2-1
    tensorgrad generate runs/gpt2-1 "def "

The folder of a run gets config.json, tokenizer.json, metrics.jsonl, times.jsonl, samples.jsonl,
loss.png and checkpoints/. On Ctrl-C the run writes a checkpoint; --resume continues from it to the
same bits. `tensorgrad train` takes the same steps and has more options: 16-bit training, captured
steps, gradient accumulation, presets, weights to start from.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensorgrad import backend, random, tensor
from tensorgrad.data import Tokenizer, TokenLoader, prepare
from tensorgrad.io.command import command, printable
from tensorgrad.models.generation import generate
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.optim import AdamW, Optimizer, decays_matrices, schedule
from tensorgrad.parallel.comm.launch import check_one_process
from tensorgrad.train import ScriptRun, ScriptSettings, measure_loss
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


def train_step(model: GPT2, optimizer: Optimizer, x: Any, y: Any) -> tuple[float, Any]:
    """Take a step; return the loss of the batch, and the gradient norm before clipping."""
    device = next(model.parameters()).device
    loss = model(tensor(x, device=device), tensor(y, device=device))  # forward
    optimizer.zero_grad()
    loss.backward()
    norm = optimizer.step(max_norm=1.0)  # clip and update
    return float(loss), norm


def evaluate(model: GPT2, validation: TokenLoader, last: bool) -> dict[str, float]:
    """Return the loss on a part of the validation text, at the end on the whole text too."""
    found = measure_loss(model, model, validation.evaluation_batches(20))
    whole = measure_loss(model, model, validation.evaluation_batches()) if last else {}
    return found | {f"final_{name}": value for name, value in whole.items()}


def sample(model: GPT2, tokenizer: Tokenizer, prompt: str) -> str:
    """Return the prompt and the text that the model continues it with."""
    start, end = tokenizer.encode_prompt(prompt), [tokenizer.end_of_text]
    tokens = generate(model, start, 200, temperature=0.7, top_p=0.95, seed=0, stop_tokens=end)
    return prompt + tokenizer.decode(tokens, skip_special_tokens=True)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    check_one_process("train_gpt2.py")
    settings, folder, resuming = read_command_line(Settings, __doc__, arguments)
    batch, context, steps = settings.batch, settings.context, settings.steps
    with ScriptRun(settings, folder, resuming) as run:
        sizes = GPT2Config(settings.vocab, context, settings.layers, settings.heads, settings.width)
        device = backend.use_device(settings.device)
        corpus = prepare(settings.data, settings.cache, settings.vocab, progress=run.progress)
        tokenizer = corpus.tokenizer
        training = TokenLoader(corpus.train, batch, context, settings.seed)
        validation = TokenLoader(corpus.validation, batch, context, settings.seed)

        random.seed(settings.seed)
        sizes = replace(sizes, vocab_size=tokenizer.vocab_size)  # a short text has fewer
        model = GPT2(sizes).to(device)
        optimizer = AdamW(
            model.named_parameters(), betas=(0.9, 0.95), weight_decay=0.1, decay=decays_matrices
        )
        step = run.resume(model, optimizer, sizes, corpus)
        if step == 0:
            run.log_evaluation(step, evaluate(model, validation, last=False))
        while step < steps and not run.stopping():
            lr, warmup = settings.lr, settings.warmup_steps
            optimizer.lr = schedule.cosine(step, lr, steps, warmup, minimum=0.1 * lr)
            loss, norm = train_step(model, optimizer, *training.batch(step))
            step += 1
            run.log_step(step, loss, optimizer.lr, norm)
            if step % 200 == 0 or step == steps:
                run.log_evaluation(step, evaluate(model, validation, last=step == steps))
            if step % 100 == 0:
                run.save(step)
        run.save(step)  # also after Ctrl-C
        if step == steps:
            text = sample(model, tokenizer, "def ")
            run.log_sample(step, "def ", text)
            print(printable(text))
    return run.status


if __name__ == "__main__":
    sys.exit(main())
