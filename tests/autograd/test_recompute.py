"""Checkpointed functions: same bits, less memory, whatever the function closes over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor, autograd, checkpoint, no_grad, random
from tensorgrad.amp import autocast
from tensorgrad.autograd import record
from tensorgrad.core import backend, modes
from tensorgrad.dtypes import bfloat16, float32
from tensorgrad.errors import GradError
from tensorgrad.models.gpt2 import GPT2, GPT2Config

Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _generator() -> Iterator[None]:
    """Leave the generator as other tests expect it."""
    state = random.get_state()
    yield
    random.set_state(state)


def plain(f: Function) -> Function:
    return f


def normal(*shape: int, seed: int, device: str = "cpu", dtype: Any = float32) -> Tensor:
    array = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return Tensor(backend.to_device(array, device), requires_grad=True)


class Block:
    """Two layers whose weights are reached through self, not through the arguments."""

    def __init__(self, seed: int, device: str = "cpu", dtype: Any = float32) -> None:
        self.first = normal(16, 8, seed=seed, device=device, dtype=dtype)
        self.second = normal(8, 16, seed=seed + 1, device=device, dtype=dtype)
        self.gain = normal(8, seed=seed + 2, device=device, dtype=dtype)

    def __call__(self, x: Tensor) -> Tensor:
        hidden = tg.gelu(tg.linear(x, self.first))
        return x + tg.linear(hidden, self.second) * self.gain


def train(wrap: Callable[[Function], Function], device: str, dtype: Any = float32) -> list[bytes]:
    """Return the bits of the result and of every gradient of a chain of blocks."""
    blocks = [Block(10 * i, device, dtype) for i in range(4)]
    x = normal(5, 8, seed=99, device=device, dtype=dtype)
    y = x
    for block in blocks:
        y = wrap(block)(y)
    y.backward(normal(5, 8, seed=98, device=device, dtype=dtype).data)
    leaves = [x, *[t for b in blocks for t in (b.first, b.second, b.gain)]]
    assert all(leaf.grad is not None for leaf in leaves)
    return [backend.to_numpy(a).tobytes() for a in (y.data, *[leaf.grad for leaf in leaves])]


@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
def test_values_and_gradients_have_the_same_bits(device: str, dtype: Any) -> None:
    assert train(checkpoint, device, dtype) == train(plain, device, dtype)


def test_checkpoints_nest(device: str) -> None:
    def both(f: Function) -> Function:
        return checkpoint(lambda x: checkpoint(f)(x))

    assert train(both, device) == train(plain, device)


def test_random_numbers_are_drawn_again(device: str) -> None:
    def noisy(wrap: Callable[[Function], Function]) -> Callable[[Function], Function]:
        return lambda f: wrap(lambda x: tg.dropout(f(tg.dropout(x, 0.2)), 0.3))

    def run(wrap: Callable[[Function], Function]) -> tuple[list[bytes], dict[str, int]]:
        random.seed(7)
        return train(noisy(wrap), device), random.get_state()

    def twice(f: Function) -> Function:
        return checkpoint(lambda x: checkpoint(f)(x))

    once, state = run(plain)
    assert run(checkpoint) == (once, state)
    assert run(twice) == (once, state)
    random.seed(8)
    assert train(noisy(checkpoint), device) != once, "nothing was random"


def test_autocast_is_restored(device: str) -> None:
    def cast(wrap: Callable[[Function], Function]) -> Callable[[Function], Function]:
        def wrapped(f: Function) -> Function:
            def run(x: Tensor) -> Tensor:
                with autocast("bfloat16"):
                    return wrap(f)(x)

            return run

        return wrapped

    assert train(cast(checkpoint), device) == train(cast(plain), device)
    assert train(cast(plain), device) != train(plain, device)


def test_gradients_reach_a_buffer_and_hooks_once() -> None:
    block, x = Block(0), normal(5, 8, seed=1)
    seen: list[Tensor] = []
    buffer = np.zeros((16, 8), np.float32)
    block.first.grad = buffer
    autograd.on_grad_ready(block.first, seen.append)
    y = checkpoint(block)(checkpoint(block)(x))
    y.backward(np.ones((5, 8), np.float32))
    assert seen == [block.first]
    assert block.first.grad is buffer
    other = Block(0)
    other(other(normal(5, 8, seed=1))).backward(np.ones((5, 8), np.float32))
    np.testing.assert_allclose(buffer, other.first.grad, rtol=1e-5)  # type: ignore[arg-type]


def test_a_wide_gradient_of_a_16_bit_leaf_stays_wide() -> None:
    def run(wrap: Callable[[Function], Function]) -> Any:
        leaf = Tensor(np.ones(3, bfloat16), requires_grad=True)
        leaf.grad = np.zeros(3, np.float32)

        def backward(dy: Any, saved: Any, needs: Any) -> Any:
            return (np.full(3, 1 + 2.0**-20, np.float32),)

        y = wrap(lambda x: record("wide", x.data, (x,), backward, ()))(leaf)
        y.backward(np.ones(3, bfloat16))
        return leaf.grad

    assert (run(checkpoint) == 1 + 2.0**-20).all()
    assert (run(plain) == run(checkpoint)).all()


def test_a_closure_over_a_result_joins_the_outer_graph() -> None:
    def run(wrap: Callable[[Function], Function]) -> tuple[Any, Any]:
        w, x = normal(4, 4, seed=1), normal(3, 4, seed=2)
        scale = tg.exp(w)  # recorded outside, used inside and outside
        y = wrap(lambda a: tg.tanh(a @ scale))(x)
        (y @ scale).backward(np.ones((3, 4), np.float32))
        assert w.grad is not None
        return w.grad.tobytes(), x.grad.tobytes()  # type: ignore[union-attr]

    assert run(checkpoint) == run(plain)


def test_the_graph_can_be_kept() -> None:
    x = normal(3, seed=1)
    y = checkpoint(lambda a: tg.exp(a) * a)(x)
    y.backward(np.ones(3), retain_graph=True)
    assert x.grad is not None
    once = x.grad.copy()
    y.backward(np.ones(3))
    np.testing.assert_array_equal(x.grad, 2 * once)
    with pytest.raises(GradError, match=r"the graph of checkpoint\(<lambda>\) was freed"):
        y.backward(np.ones(3))


def test_functional_gradients_pass_through() -> None:
    def loss(wrap: Callable[[Function], Function], x: Tensor) -> Tensor:
        return wrap(lambda a: tg.exp(a) * a)(x)

    value, dx = autograd.value_and_grad(lambda x: loss(checkpoint, x))(normal(1, seed=0))
    expected = autograd.value_and_grad(lambda x: loss(plain, x))(normal(1, seed=0))
    np.testing.assert_array_equal(value.numpy(), expected[0].numpy())
    np.testing.assert_array_equal(dx.numpy(), expected[1].numpy())


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: x,
        lambda x, w: w,
        lambda x, w: tg.reshape(x, (4,)) * 1,
        lambda x, w: x * x.detach(),
    ],
    ids=["argument", "other argument", "view", "detached"],
)
def test_functions_that_do_little(f: Function) -> None:
    def run(wrap: Callable[[Function], Function]) -> list[Any]:
        x, w = normal(2, 2, seed=1), normal(2, 2, seed=2)
        y = wrap(f)(x * 1, w=w * 2)
        y.backward(np.ones(y.shape))
        return [None if t.grad is None else t.grad.tolist() for t in (x, w)]

    assert run(checkpoint) == run(plain)


def test_without_a_graph_it_is_the_function() -> None:
    x = normal(3, seed=1)
    with no_grad():
        assert checkpoint(tg.exp)(x).node is None
    assert checkpoint(tg.exp)(x.detach()).node is None
    assert not checkpoint(tg.exp)(x.detach()).requires_grad


def test_it_runs_twice_and_keeps_nothing_in_between() -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0

    def forward(x: Tensor) -> Tensor:
        nonlocal most
        for _ in range(10):
            x = tg.tanh(x)
            alive.append(weakref.ref(x.data))
        most = max(most, sum(ref() is not None for ref in alive))
        return x

    def run(wrap: Callable[[Function], Function]) -> int:
        nonlocal most
        alive.clear()
        most = 0
        x = normal(4, 4, seed=0)
        y = x
        for _ in range(10):
            y = wrap(forward)(y)
        kept = sum(ref() is not None for ref in alive)
        y.backward(np.ones((4, 4), np.float32))
        del y
        assert sum(ref() is not None for ref in alive) == 0
        assert len(alive) == (100 if wrap is plain else 200)
        return kept

    assert run(plain) == 100
    assert most == 100
    assert run(checkpoint) == 10  # arrays that pass from one to the next
    assert most <= 20  # and what is inside one of them


def test_a_failure_leaves_the_mode_as_it_was() -> None:
    calls = 0

    def fails(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError
        return tg.dropout(x * x)

    with autocast("bfloat16"):
        y = checkpoint(fails)(normal(3, seed=1))
    state = random.get_state()
    with no_grad():
        with pytest.raises(ZeroDivisionError):
            y.backward(np.ones(3))
        assert not modes.mode.grad_enabled
    assert modes.mode.autocast is None
    assert random.get_state() == state


def test_a_function_that_gives_no_tensor_is_refused() -> None:
    def pair(x: Tensor) -> Any:
        return x, x

    with pytest.raises(GradError, match=r"checkpoint\(pair\) returned a tuple, expected one tens"):
        checkpoint(pair)(normal(3, seed=1))


def test_a_function_that_changes_its_mind_is_noticed() -> None:
    weights = [normal(3, seed=1), normal(3, seed=2)]
    y = checkpoint(lambda x: x * weights[0])(normal(3, seed=3))
    weights.reverse()
    with pytest.raises(GradError, match="a graph that differs from the first run"):
        y.backward(np.ones(3))


@pytest.mark.parametrize("which", ["argument", "parameter"])
def test_an_argument_that_was_assigned_to_is_refused(which: str) -> None:
    x, w = normal(3, seed=3), normal(3, seed=1)
    y = checkpoint(lambda a: a * w)(x)
    with no_grad():
        (x if which == "argument" else w)[0] = 5.0
    with pytest.raises(GradError, match="assigned to after the op ran"):
        y.backward(np.ones(3))


def test_it_is_exported() -> None:
    assert tensorgrad.checkpoint is checkpoint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_of_norms_computed_again_give_the_same_bits(device: str, dtype: str) -> None:
    """With each op that saves an operand, and a graph that is walked twice."""
    found = []
    for again in (False, True):
        x, up, down = (
            normal(*shape, seed=i, device=device, dtype=dtype)
            for i, shape in enumerate(((5, 16), (24, 16), (16, 24)))
        )
        gain, b, c = (
            normal(n, seed=3 + i, device=device, dtype=dtype) for i, n in enumerate((16, 24, 16))
        )
        with modes.replaced(modes.mode, recompute_norms=again):
            normed = tg.layer_norm(x, gain, c)
            total, second = tg.add_rms_norm(x, normed, gain)
            results = [
                tg.linear(normed, up, b), tg.linear_gelu(second, up, b),
                tg.feed_forward(second, up, b, down, c, total), tg.gated_linear(second, up, up),
            ]  # fmt: skip
        y = tg.concatenate(results, axis=1).sum()
        y.backward(retain_graph=True)
        y.backward()
        bits = [backend.to_numpy(each.data).tobytes() for each in results]
        found.append(bits + [backend.to_numpy(t.grad).tobytes() for t in (x, up, down, gain, b, c)])
    assert found[0] == found[1]


def test_outputs_of_norms_are_dropped_and_their_inputs_watched() -> None:
    x, w = normal(5, 16, seed=0), normal(24, 16, seed=1)
    for again in (False, True):
        with modes.replaced(modes.mode, recompute_norms=again):
            normed = tg.layer_norm(x * 2)
        y, output = tg.linear(normed, w), weakref.ref(normed.data)
        del normed
        assert (output() is None) is again
        y.sum().backward()
    with modes.replaced(modes.mode, recompute_norms=True):
        data = Tensor(x.data.copy())
        y = tg.linear(tg.layer_norm(data), w)
        with no_grad():
            data[0] = 7
    with pytest.raises(GradError, match="assigned"):
        y.sum().backward()


@pytest.mark.parametrize("changed", ["output", "input", "weight"])
def test_outputs_of_norms_are_saved_where_they_would_be_others(changed: str) -> None:
    """An assignment between the norm and the op that takes its output."""
    gradients = []
    for again in (False, True):
        x, gain = (Tensor(normal(*shape, seed=3).data) for shape in ((5, 16), (16,)))
        w = normal(24, 16, seed=1)
        with modes.replaced(modes.mode, recompute_norms=again):
            normed = tg.layer_norm(x, gain)
            with no_grad():
                {"output": normed, "input": x, "weight": gain}[changed][0] = 7
            y = tg.linear(normed, w)
        y.sum().backward()
        gradients.append(w.grad)
    np.testing.assert_array_equal(gradients[0], gradients[1])


@pytest.mark.parametrize("blocks", [False, True])
def test_a_model_recomputes_norms(blocks: bool) -> None:
    tokens = np.random.default_rng(0).integers(0, 40, (2, 16))
    found = []
    for again in (False, True):
        tg.manual_seed(3)
        model = GPT2(GPT2Config(vocab_size=40, context=16, layers=2, heads=2, width=16))
        model.recompute, model.recompute_norms = blocks, again
        loss = model(tokens, tokens)
        loss.backward()
        gradients = [backend.to_numpy(p.grad).tobytes() for p in model.parameters()]
        found.append([loss.numpy().tobytes(), *gradients])
        assert not modes.mode.recompute_norms
    assert found[0] == found[1]
