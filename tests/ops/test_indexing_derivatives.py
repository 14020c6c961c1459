"""Second derivatives of indexing, scattering and sorting.

Most of the ops are linear, so what is differentiated is the square of their results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.functions import jvp
from tests.derivatives import check_derivatives

RNG = np.random.default_rng(0)
X, CUBE = RNG.standard_normal((3, 5)), RNG.standard_normal((2, 3, 4))
VALUES = RNG.standard_normal((2, 5))
MASK = X > 0
AT = np.array([2, 0, 2])
LINES = np.array([[4, 0], [1, 1], [0, 3]])

# (function, its inputs)
CASES: dict[str, tuple[Any, ...]] = {
    "a row": (lambda x: x[1], X),
    "an element": (lambda x: x[1, -1], X),
    "slices": (lambda x: x[::-2, None, 1:4], X),
    "an ellipsis": (lambda x: x[..., 0], CUBE),
    "no element": (lambda x: x[3:], X),
    "an element of a 0-d tensor": (lambda x: x[()], 0.5),
    "a row beside the rows": (lambda x: x[0] * x, X),
    "an array": (lambda x: x[AT], X),
    "arrays that repeat elements": (lambda x: x[AT, [1, 1, 1]], X),
    "an array of columns": (lambda x: x[:, [[0, 4], [4, 4]]], X),
    "an array between slices": (lambda x: x[1, AT, ::2], CUBE),
    "a mask": (lambda x: x[MASK], X),
    "a mask of rows": (lambda x: x[np.array([True, False, True]), 1:], X),
    "an index array that is a tensor": (lambda x: x[Tensor(AT)], X),
    "take": (lambda x: tg.take(x, [[1, 1], [0, -1]], 1), X),
    "take, flattened": (lambda x: tg.take(x, [7, 2, 7]), X),
    "take_along_axis": (lambda x: tg.take_along_axis(x, LINES, 1), X),
    "take_along_axis, flattened": (lambda x: tg.take_along_axis(x, AT, None), X),
    "take_along_axis that broadcasts": (lambda x: tg.take_along_axis(x, AT[None], 1), X),
    "index_put": (lambda x, v: tg.index_put(x, [2, 0], v), X, VALUES),
    "index_put of constants": (lambda x: tg.index_put(x, [2, 0], VALUES), X),
    "index_put into constants": (lambda v: tg.index_put(X, [2, 0], v), VALUES),
    "index_put twice": (lambda x, v: tg.index_put(x, [1, 1], v), X, VALUES),
    "index_put that broadcasts": (lambda x, v: tg.index_put(x, MASK, v), X, 0.5),
    "index_put that adds": (
        lambda x, v: tg.index_put(x, [1, 1], v, accumulate=True), X, VALUES),
    "index_put that adds constants": (
        lambda x: tg.index_put(x, [1, 1], VALUES, accumulate=True), X),
    "index_put that adds to constants": (
        lambda v: tg.index_put(X, [1, 1], v, accumulate=True), VALUES),
    "index_put of what it replaces": (lambda x: tg.index_put(x, 0, x[1] * x[0]), X),
    "scatter": (lambda x, v: tg.scatter(x, 1, LINES, v), X, X[:, :2] + 1),
    "scatter of a longer source": (lambda x, v: tg.scatter(x, 0, AT[None], v), X, VALUES),
    "scatter_add": (lambda x, v: tg.scatter_add(x, 1, LINES, v), X, X[:, :2] + 1),
    "index_add": (lambda x, v: tg.index_add(x, 0, [1, 1], v, alpha=3), X, VALUES),
    "index_copy": (lambda x, v: tg.index_copy(x, 0, [2, 0], v), X, VALUES),
    "index_fill": (lambda x, v: tg.index_fill(x, 1, [0, 2], v), X, 0.5),
    "select_scatter": (lambda x, v: tg.select_scatter(x, v, 1, 0), X, X[:, 0] + 1),
    "slice_scatter": (lambda x, v: tg.slice_scatter(x, v, 0, 0, 3, 2), X, VALUES),
    "diagonal_scatter": (lambda x, v: tg.diagonal_scatter(x, v, 1), X, X[:, 0] + 1),
    "sort": (lambda x: tg.sort(x, descending=True), X),
    "sort, flattened": (lambda x: tg.sort(x, None), X),
    "topk": (lambda x: tg.topk(x, 2, 0)[0], CUBE),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_derivatives_match_differences(name: str) -> None:
    function, *inputs = CASES[name]
    check_derivatives(lambda *xs: function(*xs) ** 2, *inputs)


def test_the_last_of_repeated_values_has_the_tangent() -> None:
    values, t = Tensor(np.ones(3)), Tensor(np.array([1.0, 2.0, 4.0]))
    _, dy = jvp(lambda v: tg.index_put(np.zeros(2), [1, 0, 1], v), [values], [t])
    np.testing.assert_array_equal(dy.numpy(), [2, 4])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_tangent_is_in_the_dtype_of_the_result(dtype: str) -> None:
    x = tg.astype(Tensor(X), dtype)
    for values in (tg.ones(5, dtype), tg.ones(5, "float64")):
        y, dy = jvp(lambda a, v: tg.index_put(a, 1, v), [x, values], [x, values])
        assert dy.dtype == y.dtype == dtype
        np.testing.assert_array_equal(dy.numpy(), y.numpy())  # the op is linear
