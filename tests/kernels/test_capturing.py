"""Launches that share while a CUDA graph is captured: the same bits as without a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, graph
from tensorgrad.core import backend
from tensorgrad.kernels import overlap
from tensorgrad.kernels.capturing import capturing, counters, is_capturing


def test_what_is_shared_ends_with_the_capture() -> None:
    assert not is_capturing()
    with capturing():
        assert is_capturing()
        counters()[3] = np.zeros(1, "uint32")
        assert list(counters()) == [3]
        with capturing():
            assert counters() == {}
        assert list(counters()) == [3]
    assert not is_capturing()
    counters()[3] = np.zeros(1, "uint32")
    assert counters() == {}


def test_kernels_overlap_only_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(overlap, "launch", lambda *args, **options: found.append(options))

    def kernel(*args: Any) -> None:
        found.append(args)

    overlap.launch_in_graph(kernel, (2,), (32,), ["x"], 8, writes=())
    with capturing():
        overlap.launch_in_graph(kernel, (2,), (32,), ["x"], 8, writes=("y",))
    assert found == [((2,), (32,), ("x",), 8), {"writes": ("y",)}]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [256, 2048, 5000])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_graph_of_layers_gives_the_bits_of_eager_launches(dtype: str, rows: int) -> None:
    rng = np.random.default_rng()
    width, heads = 256, 4

    def draw(*shape: int) -> Tensor:
        values = rng.standard_normal(shape) * 0.06
        return tg.tensor(values, dtype=dtype, device="cuda", requires_grad=True)

    x, weights = draw(rows, width), [draw(3 * width, width), draw(width, width)]
    wide, narrow = draw(4 * width, width), draw(width, 4 * width)
    leaves = [x, *weights, wide, narrow]

    def step() -> Any:
        y = x
        for _ in range(6):
            y, normed = tg.add_layer_norm(y, None)
            qkv = tg.linear(normed, weights[0]).reshape(1, rows, 3 * width)
            mixed = tg.attention_packed(qkv, heads, causal=True).reshape(rows, width)
            y = y + tg.linear(mixed, weights[1])
            y = y + tg.linear(tg.linear_gelu(y, wide), narrow)
        for leaf in leaves:
            leaf.grad = None
        (y * y).sum().backward()
        return y, *(Tensor(leaf.grad) for leaf in leaves)

    expected = [backend.to_numpy(each.data).tobytes() for each in step()]
    captured = graph.capture(step)
    for _ in range(4):
        found = [backend.to_numpy(each.data).tobytes() for each in captured()]
        assert found == expected
    assert captured.graphs == 2  # without and with gradients to be replaced
