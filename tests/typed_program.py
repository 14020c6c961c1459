"""A program as users write it, which type checkers understand from an installed package."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np

import tensorgrad as tg
from tensorgrad import Tensor, nn
from tensorgrad.data import DataLoader, TensorDataset, Tokenizer, TokenLoader
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.optim import AdamW, Scheduler, clip_grad_norm, schedule
from tensorgrad.parallel import DataParallel, world
from tensorgrad.train import Outcome, Trainer, TrainSettings

Ids = np.ndarray[Any, np.dtype[np.int32]]
FloatArray = np.ndarray[Any, Any]


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        self.norm = nn.LayerNorm(3)
        self.body = nn.Sequential(nn.Linear(3, width), nn.GELU(), nn.Linear(width, 2))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.body(self.norm(x)) * scale


def fit(steps: int) -> float:
    model = Net(8)
    optimizer = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scheduler = Scheduler(optimizer, schedule.cosine, steps=steps + 1)
    rows = TensorDataset(tg.ones((8, 3)), np.zeros((8, 2), "float32"))
    loss = tg.tensor(0.0)
    for x, y in DataLoader(rows, batch_size=4, shuffle=True):
        optimizer.zero_grad()
        loss = assert_type(nn.functional.mse_loss(model(x, scale=2.0), y), Tensor)
        loss.backward()
        assert_type(clip_grad_norm(optimizer.flat, 1.0), FloatArray)
        assert_type(optimizer.step(), FloatArray | None)
        scheduler.step()
    assert_type(model(tg.ones((1, 3))), Tensor)
    assert_type(model.state_dict(), dict[str, Tensor])
    return assert_type(optimizer.lr, float) + float(loss)


def weighted(x: Tensor, weight: Tensor | float) -> Tensor:
    return (x * weight).sum()


def differentiate() -> Tensor:
    slope = assert_type(tg.grad(lambda t: (t * t).sum())(tg.ones((3,))), Tensor)
    value, slopes = tg.value_and_grad(lambda t: tg.sin(t).mean())(tg.linspace(0, 1, 5))
    both = assert_type(tg.concatenate([slope, assert_type(slopes, Tensor)[:2]]), Tensor)
    pair = tg.value_and_grad(weighted, argnums=(0, 1))(both, both)
    assert_type(pair, tuple[Tensor, tuple[Tensor, ...]])
    assert_type(tg.grad(weighted, argnums=1)(both, 2.0), Tensor)
    assert_type(tg.grad(weighted, (0, 1))(both, both), tuple[Tensor, ...])
    assert_type(both.grad, FloatArray | None)
    with tg.no_grad(), tg.autocast("bfloat16"):
        assert_type(tg.where(both > 0, both, 0).reshape(-1, 1) @ tg.zeros((1, 4)), Tensor)
    both += 1 - both / 2
    assert_type(divmod(both, 2), tuple[Tensor, Tensor])
    assert_type((both == 0).any(axis=0).T, Tensor)
    return assert_type(value, Tensor)


def train(folder: str) -> Outcome:
    model = tg.models.GPT2(GPT2Config(vocab_size=256, context=8, layers=1, heads=1, width=8))
    settings, loader = TrainSettings(steps=2, batch=4, warmup=0), TokenLoader(np.arange(99), 4, 8)
    assert_type(loader.batch(0), tuple[Ids, Ids])
    assert_type(tg.models.generate(assert_type(model, GPT2), [1, 2], 4), list[int])
    assert_type(tg.data.Tokenizer.train(["a b"] * 9, 260), Tokenizer)
    assert_type((tg.backend.gpu_count(), tg.dtypes.is_float(tg.float32)), tuple[int, bool])
    assert_type(tg.isdtype(tg.int8, "integral") or tg.can_cast("int8", "int16"), bool)
    assert_type(str(tg.errors.DataError("no text")), str)
    strategy, rate = DataParallel(world()), settings.learning_rate
    optimizer = strategy.prepare(model, lambda parameters: AdamW(parameters, lr=settings.lr))
    batches = loader.iterate
    return Trainer(
        model, optimizer, model, batches, rate, settings, folder, strategy=strategy
    ).run()
