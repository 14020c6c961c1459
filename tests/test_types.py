"""A type checker's answers to a user: `mypy tests` checks every line here."""

from __future__ import annotations

from typing import assert_type

import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn
from tensorgrad.errors import TensorgradError


class Net(nn.Module):
    def __init__(self) -> None:
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU())

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, float]:
        return self.layers(x) * scale, scale


def test_results_of_modules_and_methods_are_typed() -> None:
    x, model = tg.ones((4, 2)), Net()
    y, scale = model(x, scale=2.0)
    assert_type(y, Tensor)
    assert_type(scale, float)
    assert_type(nn.Linear(2, 3)(x), Tensor)
    assert_type(nn.Sequential(nn.Linear(2, 3))(x), Tensor)
    assert_type(nn.CrossEntropyLoss()(y, tg.zeros(4, "int64")), Tensor)
    assert_type(y.sum(), Tensor)
    assert_type(tg.relu(y) @ y.T + 1, Tensor)
    assert_type(y[0], Tensor)
    assert_type(y.shape, tuple[int, ...])
    y.sum().backward()


def test_wrong_arguments_of_a_module_are_found() -> None:
    model = Net()
    with pytest.raises(TypeError, match="unexpected keyword"):
        model(tg.ones((4, 2)), factor=2.0)  # type: ignore[call-arg]
    with pytest.raises(TensorgradError):
        model(tg.ones((4, 2)), "two")  # type: ignore[arg-type]


def squares(parameters: dict[str, Tensor], x: Tensor, y: list[Tensor]) -> Tensor:
    return (parameters["w"] * x * y[0]).sum()


def pair(x: Tensor) -> tuple[Tensor, int]:
    return (x * x).sum(), 3


def cube(x: Tensor) -> Tensor:
    return x**3


def named(x: Tensor) -> dict[str, Tensor]:
    return {"y": x}


def loss_of(net: Net) -> Tensor:
    return net(tg.ones((4, 2)))[0].sum()


def test_derivatives_have_the_types_of_arguments_and_results() -> None:
    x, p, net = tg.ones(2), {"w": tg.ones(2)}, Net()
    assert_type(tg.grad(squares)(p, x, [x]), dict[str, Tensor])
    assert_type(tg.grad(squares, 1)(p, x, [x]), Tensor)
    assert_type(tg.grad(loss_of)(net), Net)
    assert_type(tg.value_and_grad(squares)(p, x, [x]), tuple[Tensor, dict[str, Tensor]])
    assert_type(tg.grad(tg.grad(lambda t: (t**3).sum()))(2.0), Tensor)
    assert_type(tg.grad(lambda t, u: (t * u).sum())(x, x), Tensor)
    (value, aux), _ = tg.value_and_grad(pair, has_aux=True)(x)
    assert_type(value, Tensor)
    assert_type(aux, int)
    assert_type(tg.jvp(tg.sin, (x,), (x,)), tuple[Tensor, Tensor])
    assert_type(tg.jvp(pair, (x,), (x,), has_aux=True), tuple[Tensor, Tensor, int])
    assert_type(tg.jvp(named, (x,), (x,))[1], dict[str, Tensor])
    y, pullback = tg.vjp(tg.sin, x)
    assert_type(pullback(y), tuple[Tensor, ...])
    assert_type(tg.linearize(tg.sin, x)[1](x), Tensor)
    assert_type(tg.hvp(loss_of, (net,), (net,)), tuple[Net])
    assert_type(tg.hvp(squares, (p, x, [x]), (p, x, [x]))[0], dict[str, Tensor])
    assert_type(tg.ggnvp(tg.sin, tg.sum, (x,), (x,)), tuple[Tensor])
    assert_type(tg.jacobian(cube)(x), Tensor)
    assert_type(tg.hessian(cube)(x), Tensor)
    assert_type(tg.functional_call(net, {}, tg.ones((4, 2))), tuple[Tensor, float])


def test_wrong_calls_of_derivatives_are_found() -> None:
    x = tg.ones(2)
    with pytest.raises(TensorgradError):
        tg.hvp(tg.sum, x, (x,))  # type: ignore[type-var]
    with pytest.raises(TensorgradError):
        tg.grad(3.0)  # type: ignore[call-overload]
