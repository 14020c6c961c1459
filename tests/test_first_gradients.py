"""Gradients that count as zeros are overwritten by what is added first, or get their zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, accumulation, backend, graph, nn, optim
from tensorgrad.accumulation import count_as_zeros, forget, is_first, settle

RNG = np.random.default_rng(3)
W, X = RNG.standard_normal((4, 3)), RNG.standard_normal((5, 3))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    left = len(accumulation._unwritten)
    forget()
    assert left == 0


def leaves() -> Any:
    """Return a weight, a bias and an unused leaf, whose gradients hold anything."""
    found = tuple(Tensor(a.copy(), requires_grad=True) for a in (W, W[:, 0], W[0]))
    for leaf in found:
        leaf.grad = np.full(leaf.shape, np.nan)
    return found


def test_backward_overwrites_once_and_zeroes_what_it_does_not_reach() -> None:
    w, b, unused = leaves()
    count_as_zeros([each.grad for each in (w, b, unused)])
    tg.linear(X, w, b).sum().backward()
    expected = np.ones((5, 4)).T @ X
    np.testing.assert_allclose(w.grad, expected)
    np.testing.assert_array_equal(b.grad, 5)
    np.testing.assert_array_equal(unused.grad, 0)
    tg.linear(X, w, b).sum().backward()  # is added
    np.testing.assert_allclose(w.grad, 2 * expected)
    np.testing.assert_array_equal(b.grad, 10)


def test_the_zeros_are_written_where_nothing_follows() -> None:
    w, b, _ = leaves()
    count_as_zeros([w.grad, b.grad])
    assert is_first(w.grad)
    assert not is_first(w.grad)
    settle()
    assert np.isnan(w.grad).all()  # the caller's to write
    np.testing.assert_array_equal(b.grad, 0)


def test_a_part_of_a_gradient_is_added_to_zeros() -> None:
    w, _, _ = leaves()
    count_as_zeros([w.grad])
    w[1:2].sum().backward()
    np.testing.assert_array_equal(w.grad, np.eye(4)[1][:, None] * np.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("micro_batches", [0, 1, 3])
def test_captured_steps_have_the_gradients_of_eager_ones(micro_batches: int, dtype: str) -> None:
    """A model with tied weights, norms, an unused parameter; without backward too."""
    rng = np.random.default_rng()
    ids = [rng.integers(0, 50, (4, 8)).astype("int32") for _ in range(max(1, micro_batches))]

    class Model(nn.Module):
        def __init__(self) -> None:
            self.embedding, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
            self.unused = nn.Linear(3, 5)

        def forward(self, ids: Any) -> Tensor:
            x = self.embedding(ids)
            x = x + self.down(tg.gelu(self.up(self.norm(x))))
            return tg.linear_cross_entropy(x, self.embedding.weight, ids)

    def train(captures: bool) -> list[list[Any]]:
        tg.manual_seed(4)
        model = Model().to("cuda", dtype)
        optimizer = optim.AdamW(model.named_parameters(), lr=0.01)
        batches = [backend.to_device(each, "cuda") for each in ids]

        def step() -> Any:
            optimizer.zero_grad()
            for batch in batches[:micro_batches]:
                model(batch).backward()
            return optimizer.step(1.0)

        run, states = graph.capture(step) if captures else step, []
        for _ in range(5):
            run()
            arrays = [p.grad for p in model.parameters()] + [p.data for p in model.parameters()]
            states.append([backend.to_numpy(a).astype("float64") for a in arrays])
        names = [name for name, _ in model.named_parameters()]
        assert not states[-1][names.index("unused.weight")].any()
        return states

    for one, two in zip(train(False), train(True), strict=True):
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(a, b)
