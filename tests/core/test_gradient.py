"""Gradients: what is added to them, and what counts as zeros, is lent or waits in a capture."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, autograd, graph, nn, optim
from tensorgrad.core import backend, modes
from tensorgrad.core.gradient import (
    Gradient,
    LeafGradient,
    Waiting,
    accumulated,
    add_at,
    out_of,
    parts_of,
    unwrapped,
)

RNG = np.random.default_rng(3)
W, X = RNG.standard_normal((4, 3)), RNG.standard_normal((5, 3))


@pytest.fixture
def step() -> Iterator[Any]:
    """Return what a captured step keeps of gradients; it holds during the test."""
    notes = graph._CaptureNotes()
    with modes.replaced(modes.mode, capture=notes):
        yield notes
    notes.end()


def leaves() -> Any:
    """Return a weight, a bias and an unused leaf, whose gradients hold anything."""
    found = tuple(Tensor(a.copy(), requires_grad=True) for a in (W, W[:, 0], W[0]))
    for leaf in found:
        leaf.grad = np.full(leaf.shape, np.nan)
    return found


def test_backward_overwrites_once_and_zeroes_what_it_does_not_reach(step: Any) -> None:
    w, b, unused = leaves()
    step.overwrite(each.gradient for each in (w, b, unused))
    tg.linear(X, w, b).sum().backward()
    expected = np.ones((5, 4)).T @ X
    np.testing.assert_allclose(w.grad, expected)
    np.testing.assert_array_equal(b.grad, 5)
    np.testing.assert_array_equal(unused.grad, 0)
    tg.linear(X, w, b).sum().backward()  # is added
    np.testing.assert_allclose(w.grad, 2 * expected)
    np.testing.assert_array_equal(b.grad, 10)


def test_the_zeros_are_written_where_nothing_follows(step: Any) -> None:
    w, b, unused = leaves()
    step.overwrite([w.gradient, b.gradient, unused.gradient])
    w.gradient.add(W)
    w.gradient.add(W)
    np.testing.assert_array_equal(b.grad, 0)  # for who reads it
    assert np.isnan(unused.gradient.array).all()
    step.settle()
    np.testing.assert_array_equal(w.grad, 2 * W)
    np.testing.assert_array_equal(unused.grad, 0)
    assert (w.gradient.is_touched, unused.gradient.is_touched) == (True, False)


def test_after_the_step_gradients_are_taken_as_they_are() -> None:
    b, step = leaves()[1], graph._CaptureNotes()
    step.overwrite([b.gradient])
    step.end()
    assert np.isnan(b.grad).all()
    b.gradient.add(W[:, 0])
    assert np.isnan(b.grad).all()


def test_a_part_of_a_gradient_is_added_to_zeros(step: Any) -> None:
    w, _, _ = leaves()
    step.overwrite([w.gradient])
    w[1:2].sum().backward()
    np.testing.assert_array_equal(w.grad, np.eye(4)[1][:, None] * np.ones(3))


def test_an_array_that_is_set_again_keeps_its_gradient() -> None:
    w, _, _ = leaves()
    gradient, array = w.gradient, w.grad
    w.grad = array
    assert w.gradient is gradient
    w.grad = array.copy()
    assert w.gradient is not gradient
    w.grad = None
    assert w.gradient is None


def test_contributions_to_an_edge_are_added_up_and_rounded_once() -> None:
    first, second = np.full(3, 1.0, "float16"), np.full(3, 2.0**-11, "float32")
    for rounds, dtype in ((True, "float16"), (False, "float32")):
        gradient = Gradient(first, dtype=first.dtype, rounds=rounds)
        gradient.add(second)
        gradient.add(second)
        assert gradient.array.dtype == dtype
        assert gradient.is_own
        np.testing.assert_array_equal(gradient.array, 1 if rounds else 1 + 2.0**-10)
    assert first.tolist() == [1] * 3
    scalar = Gradient(np.ones(()), dtype=np.dtype("float64"))
    scalar.add(np.ones(()))
    assert type(scalar.array) is np.ndarray


def test_kernels_get_no_array_of_the_cpu() -> None:
    gradient = LeafGradient(np.zeros(3))
    assert gradient.out(gradient.array.dtype) is None
    assert out_of(True, gradient.array.dtype) is None
    assert not gradient.is_touched
    found = add_at(True, slice(1, 2), np.ones(1), (3,))
    assert found is not None
    assert found.tolist() == [0, 1, 0]
    assert add_at(gradient, slice(1, 2), np.ones(1), (3,)) is None
    assert gradient.array.tolist() == [0, 1, 0]
    assert gradient.is_touched


class OnGPU:
    """An array on a GPU, as a gradient reads it."""

    def __init__(self, dtype: str, c_contiguous: bool = True) -> None:
        self.dtype = np.dtype(dtype)
        self.flags = types.SimpleNamespace(c_contiguous=c_contiguous)


def test_kernels_write_to_what_fits() -> None:
    wide, narrow = np.dtype("float32"), np.dtype("float16")
    for kept, writes, rounds, fits in (
        (OnGPU("float32"), wide, False, True),
        (OnGPU("float16"), narrow, False, True),
        (OnGPU("float16"), wide, False, False),
        (OnGPU("float16"), wide, True, True),
        (OnGPU("float32"), narrow, True, False),
        (OnGPU("float32", False), wide, False, False),
    ):
        found = Gradient(kept).out(writes, rounds)
        assert found == ((kept, 1) if fits else None)


def test_a_sum_is_complete_once_and_rounded_where_asked() -> None:
    narrow = np.dtype("float16")
    for rounds in (True, False):
        edge = Gradient(np.ones(2, "float32"), dtype=narrow, rounds=rounds)
        total = edge.complete()
        assert total is not None
        assert (total.tolist(), str(total.dtype)) == ([1, 1], "float16" if rounds else "float32")
        assert edge.array is None
        assert edge.complete() is None


def test_an_edge_that_is_wider_takes_what_it_gets() -> None:
    edge = Gradient(np.ones(2, "float32"), dtype=np.dtype("float32"))
    wider = np.ones(2)
    assert accumulated(wider, edge) is wider
    assert accumulated(wider, True) is wider
    assert accumulated(np.ones(2, "float32"), edge) is None
    assert edge.array.tolist() == [2, 2]
    edge.add_at(slice(1), np.ones(1, "float32"))
    assert edge.array.tolist() == [3, 2]
    assert parts_of(Gradient(wider, narrow := np.ones(1)))[1] is narrow
    assert parts_of(wider) == (wider, None)
    assert unwrapped(Gradient(wider)) is unwrapped(wider) is wider


TARGETS = np.array([3, 0, 1, 1, 2])


def head(w: Tensor) -> Tensor:
    """Return the loss of a vocabulary of 4, in two chunks."""
    return tg.linear_cross_entropy(X, w, TARGETS, chunk=3)


def head_gradient() -> Any:
    """Return the gradient of its weight, by the separate ops."""
    w = Tensor(W, requires_grad=True)
    tg.cross_entropy(tg.linear(X, w), TARGETS).backward()
    return w.grad


def test_a_head_writes_into_the_gradient_before_backward(step: Any) -> None:
    w, expected = leaves()[0], head_gradient()
    step.overwrite([w.gradient])
    loss = head(w)
    np.testing.assert_allclose(w.gradient.array, expected)  # though nobody may read it yet
    second = head(w)  # finds it lent
    (2 * loss).backward()
    np.testing.assert_allclose(w.grad, 2 * expected)
    second.backward()
    np.testing.assert_allclose(w.grad, 3 * expected)


def test_a_head_of_a_wider_dtype_than_its_weight_takes_memory_of_its_own(step: Any) -> None:
    w = Tensor(W.astype("float32"), requires_grad=True)
    w.grad = np.full(W.shape, np.nan, "float32")
    step.overwrite([w.gradient])
    loss = tg.linear_cross_entropy(X, w, TARGETS, chunk=3)
    assert loss.dtype == "float64"
    assert np.isnan(w.gradient.array).all()  # type: ignore[union-attr]
    loss.backward()
    np.testing.assert_allclose(w.grad, head_gradient(), 1e-5)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_head_with_the_weight_of_an_embedding(order: tuple[int, int], step: Any) -> None:
    w, expected = leaves()[0], head_gradient()
    step.overwrite([w.gradient])
    losses = head(w), tg.embedding(w, np.array([1, 1, 3])).sum()
    (losses[order[0]] + losses[order[1]]).backward()
    np.testing.assert_allclose(w.grad, expected + np.array([[0], [2], [0], [1]]))


def test_a_head_leaves_before_others_write(step: Any) -> None:
    w, b, _ = leaves()
    expected = head_gradient()
    step.overwrite([w.gradient])
    loss = head(w)
    tg.linear(X, w).sum().backward()
    loss.backward()
    np.testing.assert_allclose(w.grad, np.ones((5, 4)).T @ X + expected)
    step.overwrite([w.gradient])
    loss = head(w)
    b.sum().backward()  # writes the zeros of w
    loss.backward()
    np.testing.assert_allclose(w.grad, expected)


def test_a_head_without_backward_leaves_zeros(step: Any) -> None:
    w, expected = leaves()[0], head_gradient()
    step.overwrite([w.gradient])
    loss = head(w)
    step.settle()
    np.testing.assert_array_equal(w.grad, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    np.testing.assert_allclose(w.grad, 2 * expected)


def test_contributions_wait_until_somebody_adds_to_their_gradient() -> None:
    added: list[list[str]] = []
    first, second = LeafGradient(np.zeros(3)), LeafGradient(np.zeros(3))

    def wait(gradient: Gradient, what: str, nbytes: int = 4) -> bool:
        return gradient.waits(what, nbytes, added.append)

    assert not wait(Gradient(np.zeros(3)), "an edge: the walk reads it")
    waiting = Waiting()
    for gradient, what in ((first, "one"), (second, "two")):
        assert wait(gradient, what)
        waiting.note(gradient)
    LeafGradient(np.zeros(3)).add(np.ones(3))
    assert not added
    waiting.add()
    assert added.pop() == ["one", "two"]
    assert not waiting
    assert wait(first, "one")
    assert wait(first, "of another thread")
    assert added.pop() == ["one"]
    waiting.note(first)
    first.add(np.ones(3))
    assert added.pop() == ["of another thread"]
    waiting.add()
    for _ in range(2):
        assert wait(first, "large", 2**24)
        waiting.note(first)
        assert not added
        assert wait(second, "larger", 2**23 + 1)
        waiting.note(second)
        assert added.pop() == ["large", "larger"]
    assert wait(first, "the end")
    first.settle()
    assert added.pop() == ["the end"]
    first.settle()
    assert not added


def test_what_waits_is_added_at_the_end_of_a_walk() -> None:
    x, b, _ = leaves()
    b.grad = np.zeros(4)
    seen: list[Any] = []

    def add(totals: list[Any]) -> None:
        for total in totals:
            total += 7

    def backward(dy: Any, saved: Any, needs: Any) -> Any:
        (total, beta) = needs[0].array, needs[0]._begin()
        assert beta == 1
        assert needs[0].waits(total, 8, add)
        seen.append(total.copy())
        return (None,)

    def failing(dy: Any, saved: Any, needs: Any) -> Any:
        raise ValueError("after the other")

    op = autograd.record("op", b.data.copy(), (b,), backward, ())
    op.sum().backward()
    np.testing.assert_array_equal(seen, [[0, 0, 0, 0]])
    np.testing.assert_array_equal(b.gradient.array, [7, 7, 7, 7])
    other = autograd.record("failing", x.data.copy(), (x,), failing, ())
    op = autograd.record("op", b.data.copy(), (b,), backward, ())
    with pytest.raises(ValueError, match="after the other"):
        (other.sum() + op.sum()).backward()
    assert b.gradient.array[0] == 7 * len(seen)


def test_what_waits_in_a_step_that_is_not_captured_is_forgotten(step: Any) -> None:
    x, b, _ = leaves()
    step.overwrite([b.gradient])
    added: list[Any] = []

    def backward(dy: Any, saved: Any, needs: Any) -> Any:
        assert needs[0].waits("a kernel that never runs", 8, added.append)
        return (None,)

    def failing(dy: Any, saved: Any, needs: Any) -> Any:
        raise ValueError("cannot be captured")

    op = autograd.record("op", b.data.copy(), (b,), backward, ())
    other = autograd.record("failing", x.data.copy(), (x,), failing, ())
    with pytest.raises(ValueError, match="cannot be captured"):
        (other.sum() + op.sum()).backward()
    assert b.gradient.waiting is not None
    step.end()
    b.gradient.add(np.ones(4))
    step.settle()
    assert not added


def test_hooks_find_what_has_waited(step: Any) -> None:
    b = leaves()[1]
    b.grad[...] = 0
    step.overwrite([b.gradient])
    found = []

    def backward(dy: Any, saved: Any, needs: Any) -> Any:
        def add(totals: list[Any]) -> None:
            totals[0] += 7

        assert needs[0]._begin() == 0
        needs[0].array.fill(0)
        assert needs[0].waits(needs[0].array, 8, add)
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
