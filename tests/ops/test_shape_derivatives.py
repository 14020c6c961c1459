"""Second derivatives of ops that move, view, join and repeat elements.

The ops are linear, so what is differentiated is the square of their results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.functions import jvp
from tests.derivatives import check_derivatives

RNG = np.random.default_rng(0)
X, CUBE, SQUARE = (RNG.standard_normal(shape) for shape in [(3, 5), (2, 3, 4), (3, 3)])
ROWS = RNG.standard_normal((2, 5))
EMPTY = np.zeros((0, 3))

# (function, its inputs)
CASES: dict[str, tuple[Any, ...]] = {
    "astype": (lambda x: tg.astype(x**3, "float64", copy=True), X),
    "astype between floats": (lambda x: tg.astype(x, "float64") * tg.astype(x, "float64"), X),
    "copy": (tg.copy, X),
    "reshape": (lambda x: tg.reshape(x, (5, -1)), X),
    "reshape a transposed view": (lambda x: x.T.reshape(-1), X),
    "ravel": (tg.ravel, CUBE),
    "transpose": (tg.transpose, CUBE),
    "transpose with axes": (lambda x: tg.transpose(x, (1, -1, 0)), CUBE),
    "swapaxes": (lambda x: tg.swapaxes(x, 0, -1), CUBE),
    "moveaxis": (lambda x: tg.moveaxis(x, (0, 1), (-1, 0)), CUBE),
    "expand_dims": (lambda x: tg.expand_dims(x, (0, -1)), X),
    "squeeze": (lambda x: tg.squeeze(x[None], 0), X),
    "broadcast_to": (lambda x: tg.broadcast_to(x, (2, 3, 5)), X),
    "broadcast_to of an axis of length 1": (lambda x: tg.broadcast_to(x[:, :1], (3, 4)), X),
    "concatenate": (lambda a, b: tg.concatenate([a, b]), X, ROWS),
    "concatenate, flattened": (lambda a, b: tg.concatenate([a, b], None), X, ROWS),
    "concatenate with constants": (lambda x: tg.concatenate([SQUARE, x, SQUARE], 1), X),
    "concatenate with another dtype": (lambda x: tg.concatenate([x, X.astype("f4")], 1), X),
    "concatenate twice the same": (lambda x: tg.concatenate([x, x * x, x], 1), X),
    "stack": (lambda a, b: tg.stack([a, b, a * b], 1), X, X + 1),
    "split": (lambda x: [y * y for y in tg.split(x, [1, 3], 1)], X),
    "split, one part": (lambda x: tg.split(x, 2)[1], CUBE),
    "repeat": (lambda x: tg.repeat(x, 3, 1), X),
    "repeat, flattened": (lambda x: tg.repeat(x, 2), X),
    "repeat with several counts": (lambda x: tg.repeat(x, [2, 0, 1], 0), X),
    "tile": (lambda x: tg.tile(x, (2, 1, 3)), X),
    "tile of the last axis": (lambda x: tg.tile(x, 2), CUBE),
    "flip": (tg.flip, X),
    "flip of one axis": (lambda x: tg.flip(x, -1), CUBE),
    "roll": (lambda x: tg.roll(x, 2), X),
    "roll of two axes": (lambda x: tg.roll(x, (1, -2), (0, 1)), X),
    "roll of one axis twice": (lambda x: tg.roll(x, (1, 1), (1, 1)), X),
    "pad": (lambda x: tg.pad(x, ((1, 0), (2, 3)), constant_values=3), X),
    "pad with its elements": (lambda x: tg.pad(x, 2, "reflect"), X),
    "hstack": (lambda a, b: tg.hstack([a, b[:, :1]]), X, X + 1),
    "meshgrid": (lambda x: tg.meshgrid(x[0], x[1])[0] * tg.meshgrid(x[0], x[1])[1], X),
    "rot90": (tg.rot90, X),
    "diagonal": (lambda x: tg.diagonal(x, 1, 0, 2), CUBE),
    "diag": (tg.diag, X[0]),
    "trace": (tg.trace, SQUARE),
    "block_diag": (tg.block_diag, X, SQUARE),
    "tril": (tg.tril, SQUARE),
    "0-d": (lambda x: tg.reshape(tg.expand_dims(tg.copy(x), 0), ()), 0.5),
    "without elements": (lambda x: tg.pad(tg.concatenate([x.T, x.T], 1), 1), EMPTY),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_derivatives_match_differences(name: str) -> None:
    function, *inputs = CASES[name]

    def squares(*xs: Tensor) -> Any:
        y = function(*xs)
        return [part * part for part in y] if isinstance(y, list) else y * y

    check_derivatives(squares, *inputs)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "function", [tg.ravel, tg.flip, lambda x: tg.tile(x, 2), lambda x: tg.stack([x, x.detach()])]
)
def test_tangent_is_in_the_dtype_of_the_result(
    function: Callable[[Tensor], Tensor], dtype: str
) -> None:
    x, t = (tg.astype(Tensor(a), dtype) for a in (X, X + 1))
    y, dy = jvp(function, [x], [t])
    assert dy.dtype == y.dtype == dtype
    assert dy.shape == y.shape


def test_tangent_of_a_cast_is_cast() -> None:
    _, dy = jvp(lambda x: tg.astype(x, "float16"), [Tensor(X)], [Tensor(X / 3)])
    assert dy.dtype == "float16"
    np.testing.assert_array_equal(dy.numpy(), (X / 3).astype("f2"))


def test_cast_to_integers_is_constant() -> None:
    _, dy = jvp(lambda x: x * tg.astype(x, "int64"), [Tensor(X)], [Tensor(np.ones_like(X))])
    np.testing.assert_array_equal(dy.numpy(), X.astype("i8"))
