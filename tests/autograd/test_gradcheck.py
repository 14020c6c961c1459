"""The gradient checker finds what is wrong, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, autograd, gradcheck
from tensorgrad.errors import ArgumentError, GradError


def squared_with(slope: float) -> Any:
    """Return x * x with `slope` * x as its derivative."""

    def square(x: Tensor) -> Tensor:
        y = x.data * x.data
        return autograd.record("square", y, (x,), lambda dy, s, n: (dy * s[0] * slope,), (x.data,))

    return square


def test_right_gradients_pass() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 4)), rng.standard_normal((5, 4)).astype("float32")
    gradcheck(lambda x, w: tg.tanh(tg.linear(x, w)), [Tensor(x), weight])
    gradcheck(lambda x: (tg.sin(x), x * 3), [x])
    assert gradcheck(squared_with(2.0), [np.array(1.5)]) is True
    gradcheck(tg.take, [x, np.array([0, 2, 2])])
    gradcheck(lambda x: tg.topk(x, 2), [x])


def test_wrong_gradients_are_named_with_both_numbers() -> None:
    with pytest.raises(GradError, match=r"gradient of input 0 along a direction is .*, expected"):
        gradcheck(squared_with(2.001), [np.ones((3, 4))])
    with pytest.raises(GradError, match="gradcheck: the gradient of input 1 along"):
        gradcheck(lambda x, y: x + squared_with(1.0)(y), [np.ones(2), np.ones(2)])
    with pytest.raises(GradError, match="gradient of input 0 along a direction is nan"):
        gradcheck(squared_with(float("nan")), [np.ones(2)])


def test_one_wrong_element_shows() -> None:
    def almost(x: Tensor) -> Tensor:
        wrong = np.ones(100)
        wrong[57] = 1.01
        return autograd.record("almost", x.data, (x,), lambda dy, s, n: (dy * wrong,), ())

    with pytest.raises(GradError, match="gradient of input 0"):
        gradcheck(almost, [np.ones(100)])


def test_missing_gradients_are_named() -> None:
    with pytest.raises(GradError, match="gradcheck: input 1 got no gradient, expected one"):
        gradcheck(lambda x, y: x * y.detach(), [np.ones(2), np.ones(2)])
    with pytest.raises(ArgumentError, match="gradcheck: inputs hold no floats"):
        gradcheck(lambda x: x, [np.ones(2, int)])


def test_a_function_comes_first() -> None:
    with pytest.raises(ArgumentError, match="gradcheck: f is a Tensor, expected a function"):
        gradcheck(Tensor(np.ones(2)), [np.ones(2)])  # type: ignore[arg-type]


def test_inputs_stay_as_they_are() -> None:
    x = Tensor(np.ones(3), requires_grad=True)
    gradcheck(tg.exp, [x])
    assert x.grad is None
    assert x.tolist() == [1, 1, 1]


def test_the_tolerance_is_relative_to_the_number_and_the_length() -> None:
    x = np.array([1.0])
    assert gradcheck(lambda x: x * 0, [x], tolerance=0)
    for slope in (2.1, 1.9):
        assert gradcheck(squared_with(slope), [x], tolerance=0.03)
        with pytest.raises(GradError, match="gradient of input 0"):
            gradcheck(squared_with(slope), [x], tolerance=0.003)
