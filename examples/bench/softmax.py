"""softmax and log_softmax of the last axis: rows for kernels.py."""

from __future__ import annotations

from typing import Any

import tensorgrad as tg
from examples.bench.timing import Job, Jobs
from tensorgrad import Tensor
from tensorgrad.bench.timing import Call, random_array
from tensorgrad.dtypes import bfloat16

SHAPES = ((32, 12, 1024, 1024), (8192, 50304), (8192, 50257))


def jobs(torch: Any) -> Jobs:
    """Yield forward and backward for each shape, in bfloat16."""
    for shape in SHAPES:
        yield from _softmax(torch, shape)


def _softmax(torch: Any, shape: tuple[int, ...]) -> Jobs:
    size = " x ".join(map(str, shape)) + " bf16"
    x = Tensor(random_array(shape, bfloat16), requires_grad=True)
    dy = random_array(shape, bfloat16, 1)
    bytes_once = 2 * x.size
    node = tg.softmax(x).node
    assert node is not None
    backward, saved = node.backward, node.saved or ()
    peers: list[dict[str, Call]] = [{}, {}] if torch is None else _peers(torch, shape)
    yield Job("softmax forward", size, 2 * bytes_once, lambda _: tg.softmax(x), peers[0])
    yield Job("softmax backward", size, 3 * bytes_once, lambda _: backward(dy, saved, (True,)),
              peers[1])  # fmt: skip


def _peers(torch: Any, shape: tuple[int, ...]) -> list[dict[str, Call]]:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, dy = torch.randn(shape, requires_grad=True, **options), torch.randn(shape, **options)
    y = torch.softmax(x, -1)
    return [
        {"eager": lambda _: torch.softmax(x, -1)},
        {"eager": lambda _: torch.autograd.grad(y, x, dy, retain_graph=True)},
    ]
