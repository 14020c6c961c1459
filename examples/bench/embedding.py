"""Token and position embeddings of GPT-2, and rotary positions: rows for kernels.py."""

from __future__ import annotations

from typing import Any

import numpy as np

import tensorgrad as tg
from examples.bench.timing import Job, Jobs
from tensorgrad import Tensor, nn, no_grad
from tensorgrad.backend import asarray_like
from tensorgrad.bench.timing import random_array
from tensorgrad.dtypes import bfloat16
from tensorgrad.ops.indexing import add_rows

BATCH, STEPS, VOCABULARY, WIDTH, HEADS = 32, 1024, 50304, 768, 12
SETS = 4  # of inputs, so that none is found in the L2 cache


def jobs(torch: Any) -> Jobs:
    """Yield forward and backward for ids with Zipf's distribution, and for one frequent id."""
    yield from _embedding(torch, "words", _words())
    often = np.random.default_rng(1).random((SETS, BATCH, STEPS)) < 20000 / (BATCH * STEPS)
    yield from _embedding(torch, "one id 20,000 times", np.where(often, 7, _words()))
    yield from _rotary()


def _words() -> Any:
    """Return ids with Zipf's distribution, as words have."""
    frequency = 1 / np.arange(1, VOCABULARY + 1) ** 1.05
    p = frequency / frequency.sum()
    return np.random.default_rng(0).choice(VOCABULARY, (SETS, BATCH, STEPS), p=p)


def _embedding(torch: Any, name: str, words: Any) -> Jobs:
    weight = Tensor(random_array((VOCABULARY, WIDTH), bfloat16), requires_grad=True)
    positions = Tensor(random_array((STEPS, WIDTH), bfloat16, 1), requires_grad=True)
    dys = [random_array((BATCH, STEPS, WIDTH), bfloat16, 2 + i) for i in range(SETS)]
    ids = asarray_like(words, dys[0])
    total = random_array((VOCABULARY, WIDTH))
    size = 2 * BATCH * STEPS * WIDTH
    different = np.unique(words[0]).size * WIDTH
    peers: list[dict[str, Any]] = [{}, {}] if torch is None else _peers(torch, words)

    def forward(i: int) -> Tensor:
        with no_grad():
            return tg.embedding(weight, ids[i % SETS], positions)

    def backward(i: int) -> None:
        add_rows(total, ids[i % SETS].reshape(-1), dys[i % SETS].reshape(-1, WIDTH))

    yield Job("embedding + positions", name, 2 * size, forward, peers[0])
    yield Job("embedding backward", name, size + 8 * different, backward, peers[1])


def _peers(torch: Any, words: Any) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    ids = torch.as_tensor(words, device="cuda")
    weight = torch.randn((VOCABULARY, WIDTH), requires_grad=True, **options)
    positions = torch.randn((STEPS, WIDTH), **options)
    dy = torch.randn((BATCH, STEPS, WIDTH), **options)
    outputs = [torch.nn.functional.embedding(ids[i], weight) for i in range(SETS)]

    def embed(ids: Any, weight: Any, positions: Any) -> Any:
        return torch.nn.functional.embedding(ids, weight) + positions

    compiled = torch.compile(embed)
    frozen = weight.detach()

    def backward(i: int) -> Any:
        return torch.autograd.grad(outputs[i % SETS], weight, dy, retain_graph=True)

    forward = {
        "eager": lambda i: embed(ids[i % SETS], frozen, positions),
        "compiled": lambda i: compiled(ids[i % SETS], frozen, positions),
    }
    return [forward, {"eager": backward}]


def _rotary() -> Jobs:
    shape = (BATCH, STEPS, 3 * HEADS, WIDTH // HEADS)
    inputs = [Tensor(random_array(shape, bfloat16, i)) for i in range(SETS)]
    rotary = nn.RotaryEmbedding(WIDTH // HEADS)
    yield Job("rotary, q and k of q, k, v", "32 x 1024 x 36 x 64 bf16", 4 * inputs[0].size,
              lambda i: rotary(inputs[i % SETS], 0, 2 * HEADS))  # fmt: skip
