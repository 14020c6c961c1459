"""Softmax and log_softmax against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, ops
from tensorgrad.errors import ArgumentError, DtypeError
from tests.opcheck import Case, check

SHAPES: list[tuple[int, ...]] = [(7,), (1, 1), (33, 31), (2, 3, 1023), (5, 1025), (0, 4), (3, 0)]


def softmax(x: Any, axis: int = -1) -> Any:
    powers = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis, keepdims=True)


def log_softmax(x: Any, axis: int = -1) -> Any:
    return np.log(softmax(x, axis))


CASES = [
    *(Case(ops.softmax, [s], softmax, terms=s[-1]) for s in SHAPES),
    *(Case(ops.log_softmax, [s], log_softmax, terms=s[-1]) for s in SHAPES),
    *(
        Case(lambda x, a=a: ops.softmax(x, a), [(5, 33, 4)], lambda x, a=a: softmax(x, a),
             terms=33, name=f"softmax-axis{a}")
        for a in (0, 1, -3)
    ),
    Case(
        lambda x: ops.log_softmax(x, 0), [(65, 3)], lambda x: log_softmax(x, 0),
        terms=65, name="log_softmax-axis0",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_large_values_do_not_overflow(dtype: str) -> None:
    x = Tensor(np.array([[6e4, 5.9e4, 0]], dtype), requires_grad=True)
    np.testing.assert_array_equal(ops.softmax(x).numpy(), [[1, 0, 0]])
    y = ops.log_softmax(x)
    np.testing.assert_array_equal(y.numpy(), x.numpy() - x.numpy()[:, :1])
    y.backward(np.array([[1, 0, 0]], dtype))
    np.testing.assert_array_equal(x.grad, [[0, 0, 0]])


def test_values_of_minus_infinity_have_no_share() -> None:
    x = Tensor(np.array([0.0, -np.inf, 0.0]), requires_grad=True)
    y = ops.softmax(x)
    y.backward(np.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(y.numpy(), [0.5, 0, 0.5])
    np.testing.assert_array_equal(x.grad, [-0.5, 0, 0.5])


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(DtypeError, match="softmax: x has dtype int64, expected a float"):
        ops.softmax(Tensor(np.arange(3)))
    with pytest.raises(ArgumentError, match="log_softmax: axis is 2, expected -2 to 1"):
        ops.log_softmax(Tensor(np.ones((2, 3))), 2)
    with pytest.raises(ArgumentError, match="softmax: axis is -1, expected none: it has no axes"):
        ops.softmax(Tensor(np.ones(())))
