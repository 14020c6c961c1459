"""Fused ops against the same formulas written with our own elementwise ops and reductions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import tensorgrad as tg
from examples.bench.timing import Job, Jobs
from tensorgrad import Tensor
from tensorgrad.bench.timing import random_array
from tensorgrad.dtypes import bfloat16

Function = Callable[..., Tensor]


def unfused_softmax(x: Tensor) -> Tensor:
    """Return softmax from five ops."""
    powers = tg.exp(x - tg.max(x, -1, keepdims=True))
    return powers / tg.sum(powers, -1, keepdims=True)


def attention_softmax(scores: Tensor) -> Tensor:
    """Return causal softmax of scaled scores, in one op."""
    return tg.softmax(scores, scale=0.125, causal=True)


def unfused_attention_softmax(scores: Tensor) -> Tensor:
    """Return the same from seven ops, with a given mask."""
    seen = _seen(scores.shape[-1], scores.device)
    return unfused_softmax(tg.where(seen, scores * 0.125, float("-inf")))


@cache
def _seen(size: int, device: str) -> Tensor:
    return tg.tril(tg.ones((size, size), "bool", device))


def unfused_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return layer_norm from nine ops."""
    centred = x - tg.mean(x, -1, keepdims=True)
    variance = tg.mean(centred * centred, -1, keepdims=True)
    return centred / tg.sqrt(variance + 1e-5) * weight + bias


LINES: tuple[tuple[str, Function, Function, tuple[int, ...], int], ...] = (
    ("softmax", tg.softmax, unfused_softmax, (2**18, 1024), 0),
    ("softmax", tg.softmax, unfused_softmax, (2048, 256), 0),
    ("attention softmax", attention_softmax, unfused_attention_softmax, (256, 1024, 1024), 0),
    ("attention softmax", attention_softmax, unfused_attention_softmax, (64, 128, 128), 0),
    ("layer_norm", tg.layer_norm, unfused_layer_norm, (2**17, 768), 2),
    ("layer_norm", tg.layer_norm, unfused_layer_norm, (2048, 256), 2),
)


def jobs(torch: Any) -> Jobs:
    """Yield forward, and the whole of `Tensor.backward`."""
    for dtype in ("float32", bfloat16):
        for name, fused, unfused, shape, parameters in LINES:
            size = f"{' x '.join(map(str, shape))} {'fp32' if dtype == 'float32' else 'bf16'}"
            yield from _pair(name, size, fused, unfused, shape, parameters, dtype)


def _pair(
    name: str,
    size: str,
    fused: Function,
    unfused: Function,
    shape: tuple[int, ...],
    parameters: int,
    dtype: Any,
) -> Jobs:
    inputs = [Tensor(random_array(shape, dtype), requires_grad=True)]
    for i in range(parameters):
        inputs.append(Tensor(random_array(shape[1:], dtype, 1 + i), requires_grad=True))
    dy = random_array(shape, dtype, 9)
    calls: list[Any] = []
    for function in (fused, unfused):

        def forward(_: int, function: Function = function) -> Any:
            return function(*inputs)

        y = function(*inputs)

        def backward(_: int, y: Tensor = y) -> None:
            for leaf in inputs:
                leaf.grad = None
            y.backward(dy, retain_graph=True)

        calls += [forward, backward]
    amount = inputs[0].data.nbytes
    yield Job(f"{name} forward", size, 2 * amount, calls[0], {"unfused": calls[2]})
    yield Job(f"{name} backward", size, 3 * amount, calls[1], {"unfused": calls[3]})
