"""Gradients that can be differentiated again: backward(create_graph=True), and graphs that end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, autograd, nn
from tensorgrad.errors import ArgumentError, GradError

Backward = Callable[[Tensor], None]


def leaf(*values: float, dtype: str = "float64") -> Tensor:
    return Tensor(np.array(values, dtype), requires_grad=True)


def value_of(x: Any) -> list[float]:
    """Return a gradient as numbers, whether it is an array or a tensor."""
    return x.tolist()  # type: ignore[no-any-return]


def recorded(x: Tensor) -> Tensor:
    """Return the gradient of a leaf, which is a tensor with a history."""
    found: Any = x.grad
    assert isinstance(found, Tensor)
    assert found.requires_grad
    return found


def test_gradients_have_a_history_that_backward_adds_to() -> None:
    x = leaf(1.0, 2.0)
    y = (x**3).sum()
    y.backward(create_graph=True)
    g = recorded(x)
    assert value_of(g) == [3, 12]
    (g * g).sum().backward()  # d (9 x^4)
    assert isinstance(x.grad, np.ndarray)
    assert value_of(x.grad) == [3 + 36, 12 + 288]
    assert value_of(g) == [3, 12]
    with pytest.raises(GradError, match="was freed by an earlier backward"):
        y.backward()


def test_a_loss_and_a_penalty_of_its_gradient() -> None:
    """The walk frees ops of the loss before it reaches the gradients that they have."""
    for places in ((0, 1), (1, 0)):
        x = leaf(1.0, 2.0)
        loss = tg.exp(x * x).sum()
        loss.backward(create_graph=True)
        terms = [loss, (recorded(x) ** 2).sum()]
        x.grad = None
        (terms[places[0]] + terms[places[1]]).backward()
        square, e = x.data**2, np.exp(x.data**2)
        expected = 2 * x.data * e + 2 * (2 * x.data * e) * e * (2 + 4 * square)
        assert isinstance(x.grad, np.ndarray)
        np.testing.assert_allclose(x.grad, expected)

    def total(x: Tensor) -> Tensor:
        value, g = tg.value_and_grad(lambda x: tg.exp(x * x).sum())(x)
        return value + (g**2).sum()

    np.testing.assert_allclose(tg.grad(total)(Tensor(x.data)).data, expected)


def test_third_order_by_backward() -> None:
    x = leaf(2.0)
    y = (x**5).sum()
    for expected in (80.0, 160.0, 240.0):
        x.grad = None
        y.backward(create_graph=True)
        y = recorded(x).sum()
        assert y.item() == expected
    x.grad = None
    y.backward()
    assert value_of(x.grad) == [240.0]


def test_gradients_add_up_with_and_without_a_history() -> None:
    x = leaf(1.0, 2.0)
    (x * 2).sum().backward()
    (x**3).sum().backward(create_graph=True)
    (x**2).sum().backward(create_graph=True)
    g = recorded(x)
    assert value_of(g) == [2 + 3 + 2, 2 + 12 + 4]
    g.sum().backward()
    assert value_of(x.grad) == [7 + 6 + 2, 18 + 12 + 2]
    x.grad = None
    (x**3).sum().backward(Tensor(np.array(2.0)), create_graph=True)
    assert value_of(recorded(x)) == [6, 24]


def test_a_history_of_the_first_gradient_is_kept() -> None:
    x, dy = leaf(1.0, 2.0), leaf(3.0, 4.0)
    (x * x).backward(dy, create_graph=True)
    g = recorded(x)
    assert dy.grad is None
    g.backward(np.ones(2))
    assert value_of(dy.grad) == [2, 4]


def test_backward_records_under_no_grad() -> None:
    x = leaf(2.0)
    y = (x**3).sum()
    with tg.no_grad():
        y.backward(create_graph=True)
    assert value_of(recorded(x)) == [12]


def test_a_gradient_may_be_set_to_a_tensor() -> None:
    x = leaf(1.0, 2.0)
    (x**3).sum().backward(create_graph=True)
    x.grad = recorded(x) * 2
    assert value_of(recorded(x)) == [6, 24]
    x.grad = recorded(x).data
    assert isinstance(x.grad, np.ndarray)
    x.grad = Tensor(np.array([1.0, 1.0]))
    assert isinstance(x.grad, np.ndarray)


def test_wrong_options_are_named() -> None:
    x = leaf(2.0)
    with pytest.raises(ArgumentError, match="retain_graph is False, expected True with create_gr"):
        (x * x).backward(retain_graph=False, create_graph=True)
    y = autograd.record("odd", x.data * 2, [x], lambda dy, saved, needs: [dy * 2], ())
    y.backward(create_graph=True)
    with pytest.raises(GradError, match="odd: the op has a gradient and no tangent"):
        recorded(x).backward()
    z = x * x
    w = Tensor(np.ones(1))
    y = z * w
    w[0] = 2.0
    with pytest.raises(GradError, match="multiply needs an array"):
        y.backward(create_graph=True)


def test_hooks_see_complete_gradients() -> None:
    x, y, seen = leaf(1.0), leaf(2.0), list[Any]()
    for each in (x, y):
        tg.on_grad_ready(each, lambda t: seen.append((t, value_of(t.grad))))
    (x * y + x * 2).backward(create_graph=True)
    assert sorted(value for _, value in seen) == [[1.0], [4.0]]
    assert {id(t) for t, _ in seen} == {id(x), id(y)}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_leaves_of_16_bits(dtype: str) -> None:
    x = leaf(1.0, 2.0).astype(dtype).detach()
    x.requires_grad = True
    (x**3).sum().backward(create_graph=True)
    assert str(recorded(x).dtype) == dtype
    recorded(x).sum().backward()
    assert x.grad is not None
    assert str(x.grad.dtype) == dtype
    assert value_of(x.grad) == [9, 24]
    x.grad = np.zeros(2, "float32")
    (x**3).sum().backward(create_graph=True)
    assert str(recorded(x).dtype) == "float32"
    assert value_of(recorded(x)) == [3, 12]


class Cube(nn.Module):
    def __init__(self, dtype: str = "float32") -> None:
        self.w = nn.Parameter(np.array([1.0, 2.0, 3.0], dtype))

    def forward(self) -> Tensor:
        return (self.w**3).sum()


def penalized(model: Cube) -> list[float]:
    """Add to the gradients of a model those of a penalty; return their sum."""
    model().backward(create_graph=True)
    recorded(model.w).sum().backward()
    w = model.w.data.astype("float64")
    return (3 * w**2 + 6 * w).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimizer_steps_with_such_gradients(dtype: str) -> None:
    model, other = Cube(dtype), Cube(dtype)
    optimizers = [tg.optim.SGD(m.parameters(), lr=0.0625) for m in (model, other)]
    for _ in range(2):
        expected = penalized(model)
        (other() + (other.w**2).sum() * 3).backward()
        for each in (model, other):
            np.testing.assert_allclose(each.w.grad, expected, rtol=0.01)  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert value_of(model.w.grad) == [0, 0, 0]
        np.testing.assert_allclose(model.w.data, other.w.data, rtol=0.01)
        other.w.data[...] = model.w.data
    model().backward(create_graph=True)
    other().backward()
    for optimizer in optimizers:
        optimizer.step(max_norm=0.5)
    assert model.w.tolist() == other.w.tolist()
    assert value_of(recorded(model.w)) == value_of(other.w.grad)


@pytest.mark.parametrize("flat", [False, True])
def test_gradients_are_clipped_and_cleared(flat: bool) -> None:
    model = Cube()
    optimizer = tg.optim.SGD(model.parameters(), lr=0.1) if flat else None
    model().backward(create_graph=True)
    g, values = recorded(model.w), np.array([3.0, 12.0, 27.0])
    norm = float(np.sqrt((values**2).sum()))
    assert float(tg.optim.grad_norm(model.parameters())) == pytest.approx(norm)
    assert recorded(model.w) is g
    tg.optim.clip_grad_norm(optimizer.flat if optimizer else model.parameters(), 1.0)
    assert isinstance(model.w.grad, np.ndarray)
    np.testing.assert_allclose(model.w.grad, values / norm, rtol=1e-4)
    assert value_of(g) == values.tolist()
    model().backward(create_graph=True)
    model.zero_grad()
    assert value_of(model.w.grad) == [0, 0, 0]
    model().backward(create_graph=True)
    model.to("float64") if not flat else None
    assert isinstance(model.w.grad, np.ndarray) is not flat


def test_a_gradient_penalty_of_micro_batches() -> None:
    model = Cube()
    tg.optim.SGD(model.parameters(), lr=0.1)
    for expected in (1, 2):
        model().backward(create_graph=True)
        (recorded(model.w) * 0).sum().backward()
        assert value_of(model.w.grad) == [3 * expected, 12 * expected, 27 * expected]


def test_a_freed_graph_is_an_error_in_every_walk() -> None:
    w = leaf(2.0)
    inner = w * w
    inner.backward(np.ones(1))

    def f(x: Tensor) -> Tensor:
        return (x * inner).sum()

    with pytest.raises(GradError, match="graph of multiply was freed"):
        (f(leaf(1.0))).backward(create_graph=True)


def test_graphs_of_inner_derivatives_end_where_nothing_leads_on() -> None:
    x = Tensor(np.array([1.0, 2.0]))
    seen: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        inner = tg.grad(lambda y: (y * y).sum())(Tensor(np.array([3.0])))
        seen.append(inner)
        value, slope = tg.value_and_grad(lambda y: (y * x).sum())(x)
        seen.extend([value, slope])
        return (slope * x).sum() + inner.sum()

    assert tg.grad(f)(x).tolist() == [2, 4]
    assert [t.requires_grad for t in seen] == [False, True, True]
    seen.clear()
    _, dy = tg.jvp(f, (x,), (x,))
    assert dy.item() == 10.0
    assert [bool(getattr(t, "tangents", {})) for t in seen] == [False, True, True]
