"""Gradients that count as zeros are overwritten by what is added first, or get their zeros.

Their memory is lent, and small contributions wait for others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, accumulation, autograd, backend, graph, nn, optim
from tensorgrad.accumulation import (
    add_waiting,
    count_as_zeros,
    forget,
    into,
    is_first,
    settle,
    wait_to_add,
)

RNG = np.random.default_rng(3)
W, X = RNG.standard_normal((4, 3)), RNG.standard_normal((5, 3))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    left = [*accumulation._unwritten, *accumulation._lent, *accumulation._waiting]
    forget()
    assert not left


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


TARGETS = np.array([3, 0, 1, 1, 2])


def head(w: Tensor) -> Tensor:
    """Return the loss of a vocabulary of 4, in two chunks."""
    return tg.linear_cross_entropy(X, w, TARGETS, chunk=3)


def head_gradient() -> Any:
    """Return the gradient of its weight, by the separate ops."""
    w = Tensor(W, requires_grad=True)
    tg.cross_entropy(tg.linear(X, w), TARGETS).backward()
    return w.grad


def test_a_head_writes_into_the_gradient_before_backward() -> None:
    w, expected = leaves()[0], head_gradient()
    count_as_zeros([w.grad])
    loss = head(w)
    np.testing.assert_allclose(w.grad, expected)  # though nobody may read it yet
    second = head(w)  # finds it lent
    (2 * loss).backward()
    np.testing.assert_allclose(w.grad, 2 * expected)
    second.backward()
    np.testing.assert_allclose(w.grad, 3 * expected)


def test_a_head_of_a_wider_dtype_than_its_weight_takes_memory_of_its_own() -> None:
    w = Tensor(W.astype("float32"), requires_grad=True)
    w.grad = np.full(W.shape, np.nan, "float32")
    count_as_zeros([w.grad])
    loss = tg.linear_cross_entropy(X, w, TARGETS, chunk=3)
    assert loss.dtype == "float64"
    assert np.isnan(w.grad).all()
    loss.backward()
    np.testing.assert_allclose(w.grad, head_gradient(), 1e-5)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_head_with_the_weight_of_an_embedding(order: tuple[int, int]) -> None:
    w, expected = leaves()[0], head_gradient()
    count_as_zeros([w.grad])
    losses = head(w), tg.embedding(w, np.array([1, 1, 3])).sum()
    (losses[order[0]] + losses[order[1]]).backward()
    np.testing.assert_allclose(w.grad, expected + np.array([[0], [2], [0], [1]]))


def test_a_head_leaves_before_others_write() -> None:
    w, b, _ = leaves()
    expected = head_gradient()
    count_as_zeros([w.grad])
    loss = head(w)
    tg.linear(X, w).sum().backward()
    loss.backward()
    np.testing.assert_allclose(w.grad, np.ones((5, 4)).T @ X + expected)
    count_as_zeros([w.grad])
    loss = head(w)
    b.sum().backward()  # writes the zeros of w
    loss.backward()
    np.testing.assert_allclose(w.grad, expected)


def test_a_head_without_backward_leaves_zeros() -> None:
    w, expected = leaves()[0], head_gradient()
    count_as_zeros([w.grad])
    loss = head(w)
    settle()
    np.testing.assert_array_equal(w.grad, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    np.testing.assert_allclose(w.grad, 2 * expected)


def test_contributions_wait_until_somebody_adds_to_their_gradient() -> None:
    added: list[list[str]] = []
    first, second = np.zeros(3), np.zeros(3)

    def wait(array: Any, of_leaf: bool, what: str, nbytes: int = 4) -> bool:
        return wait_to_add(into(array, of_leaf), what, nbytes, added.append)

    assert not wait(first, False, "the walk reads it")
    assert not wait_to_add(True, "what is there is unknown", 4, added.append)
    for _ in range(2):
        assert wait(first, True, "one")
        assert wait(second, True, "two")
        assert not is_first(np.zeros(3))
        assert not added
        assert not is_first(second)
        assert [sorted(each) for each in added] == [["one", "two"]]
        added.clear()
    assert wait(first, True, "large", 2**30)
    assert added.pop() == ["large"]
    assert wait(first, True, "the end")
    settle()
    assert added.pop() == ["the end"]
    add_waiting()
    assert wait(first, True, "of a step that fails")
    forget()
    assert accumulation._waiting_bytes == 0
    settle()
    assert not added


def test_hooks_find_what_has_waited() -> None:
    b = leaves()[1]
    b.grad[...] = 0
    found = []

    def backward(dy: Any, saved: Any, needs: Any) -> Any:
        def add(totals: list[Any]) -> None:
            totals[0] += 7

        assert wait_to_add(needs[0], needs[0].array, 8, add)
        return (None,)

    b.hooks = [lambda leaf: found.append(leaf.grad.copy())]
    autograd.record("op", b.data.copy(), (b,), backward, ()).sum().backward()
    np.testing.assert_array_equal(found, [[7, 7, 7, 7]])


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
