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
