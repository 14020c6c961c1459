"""Matrix products against NumPy."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor, amp
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.ops import matmul
from tensorgrad.ops.matmul import product_into
from tensorgrad.testing import SIZES, Case, check

bfloat16 = tensorgrad.dtypes.bfloat16
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3,), (3,)),
    ((3,), (3, 5)),
    ((4, 3), (3,)),
    ((4, 3), (3, 5)),
    ((1, 1), (1, 1)),
    ((31, 33), (33, 65)),
    ((3,), (2, 3, 5)),
    ((2, 4, 3), (3,)),
    ((2, 4, 3), (3, 5)),
    ((4, 3), (2, 3, 5)),
    ((2, 4, 3), (2, 3, 5)),
    ((6, 1, 4, 3), (2, 3, 5)),
    ((1, 4, 3), (2, 1, 3, 5)),
    ((0, 3), (3, 5)),
    ((4, 0), (0, 5)),
    ((2, 4, 3), (3, 0)),
    ((0, 4, 3), (3, 2)),
    ((0, 4, 3), (1, 3, 2)),
    *(((n, 3), (3, 5)) for n in SIZES),
    *(((5, n), (n, 3)) for n in SIZES),
    *(((5, 3), (3, n)) for n in SIZES),
]


CASES = [
    *(Case(tg.matmul, [*shapes], np.matmul, terms=1025) for shapes in SHAPES),
    Case(lambda x: tg.matmul(x, x), [(3, 3)], lambda x: x @ x, terms=6, name="matmul-same"),
]


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (70, 5, 3), (5, 3, 90), (130, 40, 90)])
@pytest.mark.parametrize("add", [False, True])
def test_tiles_cover_a_product_once(
    shape: tuple[int, int, int], add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_TILE_ROWS", 32)
    monkeypatch.setattr(matmul, "_TILE_LEAST", 100)
    rows, length, columns = shape
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((rows, length)), rng.standard_normal((columns, length)).T
    y = np.ones((rows, 2 * columns))[:, ::2] if add else np.full((rows, columns), np.nan)
    finished = np.zeros((rows, columns), int)
    tiles: list[Any] = []

    def finish(*tile: slice) -> None:
        np.testing.assert_allclose(y[tile], (a @ b + add)[tile], rtol=1e-12)
        finished[tile] += 1
        tiles.append(tile)

    matmul.in_tiles(y, a, b, add, finish)
    np.testing.assert_array_equal(finished, 1)
    np.testing.assert_allclose(y, a @ b + add, rtol=1e-12)
    assert (len(tiles) > 2) == (rows > 3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


@pytest.mark.filterwarnings("ignore::tensorgrad.errors.WideningWarning")
@pytest.mark.parametrize(
    "a", ["float64", "float32", "float16", "bfloat16", "int64", "int8", "bool"]
)
@pytest.mark.parametrize("b", ["float64", "float32", "int64", "int8", "bool"])
def test_promotion_is_numpys(a: str, b: str) -> None:
    x = np.array([[1, 0, 1], [1, 1, 1]]).astype(tensorgrad.dtypes.as_dtype(a))
    y = x.T.astype(b)
    try:
        expected = np.result_type(x, y)
    except TypeError:
        with pytest.raises(DtypeError, match=f"matmul: a has dtype {a}, b has dtype {b}, expe"):
            tg.matmul(x, y)
        return
    got = tg.matmul(x, y)
    assert got.dtype == expected
    exact = np.matmul(x.astype(float), y.astype(float)).astype(expected)
    np.testing.assert_array_equal(got.numpy(), exact)


@pytest.mark.parametrize("dtype", [np.dtype("float16"), bfloat16], ids=str)
def test_sixteen_bits_round_once(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    x, weight, bias = [rng.standard_normal(s).astype(dtype) for s in ((9, 300), (5, 300), (5,))]
    wide = [a.astype("float32") for a in (x, weight, bias)]
    expected = (wide[0] @ wide[1].T + wide[2]).astype(dtype)
    np.testing.assert_array_equal(tg.linear(x, weight, bias).numpy(), expected)
    expected = (wide[0] @ wide[1].T).astype(dtype)
    np.testing.assert_array_equal(tg.matmul(x, weight.T).numpy(), expected)


def test_weight_gradients_of_sixteen_bits_stay_wide() -> None:
    x = Tensor(np.ones((3000, 2), "float16"))
    weight = Tensor(np.ones((3, 2), "float16"), requires_grad=True)
    bias = Tensor(np.ones(3, "float16"), requires_grad=True)
    weight.grad, bias.grad = np.zeros((3, 2), "float32"), np.zeros(3, "float32")
    tg.linear(x, weight, bias).backward(np.ones((3000, 3), "float16"))
    assert (weight.grad == 3000).all()  # float16 has 3000, but not 2999 + 2
    tg.linear(x, weight, bias).backward(np.full((3000, 3), 0.1, "float16"))
    assert weight.grad[0, 0] == pytest.approx(3000 + 3000 * float(np.float16(0.1)), rel=1e-6)
    assert weight.grad[0, 0] != np.float16(weight.grad[0, 0])
    np.testing.assert_allclose(bias.grad, weight.grad[:, 0], rtol=1e-6)
    assert weight.grad.dtype == np.float32


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6), (2, 3, 4, 6)])
def test_operands_with_gaps_are_multiplied_as_fast_ones(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal([2 * n for n in shape])[tuple([slice(None, None, 2)] * len(shape))]
    w = rng.standard_normal((8, 12))[::2, ::-2]
    np.testing.assert_allclose(tg.linear(x, w).numpy(), x @ w.T, rtol=1e-12)
    np.testing.assert_allclose(tg.matmul(x, w.T).numpy(), x @ w.T, rtol=1e-12)


def test_autocast_multiplies_in_sixteen_bits_and_returns_gradients_in_the_own_dtype() -> None:
    x = Tensor(np.array([[1.0, 2.0 + 2**-10]], "float32"), requires_grad=True)
    weight = Tensor(np.array([[1.0, 2.0]], "float32"), requires_grad=True)
    bias = Tensor(np.array([0.5], "float32"), requires_grad=True)
    with amp.autocast("bfloat16"):
        y = tg.linear(x, weight, bias)
        z = x @ weight.T
    assert y.dtype == z.dtype == bfloat16
    assert y.item() == 5.5  # 2 + 2**-10 rounds to 2
    y.backward(np.ones((1, 1), bfloat16))
    for leaf in (x, weight, bias):
        assert leaf.grad is not None
        assert leaf.grad.dtype == np.float32
    np.testing.assert_array_equal(weight.grad, [[1, 2]])
    assert (x @ weight.T).dtype == np.float32


def test_autocast_nests_and_is_switched_off() -> None:
    a = Tensor(np.ones((2, 2), "float32"))
    with amp.autocast("bfloat16"):
        with amp.autocast("float16"):
            assert (a @ a).dtype == np.float16
            with amp.autocast(enabled=False):
                assert (a @ a).dtype == np.float32
        assert (a @ a).dtype == bfloat16
        assert (a + a).dtype == np.float32
        with pytest.raises(RuntimeError), amp.autocast("float16"):
            raise RuntimeError
        assert (a @ a).dtype == bfloat16
    assert (a @ a).dtype == np.float32


def test_autocast_leaves_float64_integers_and_other_threads_alone() -> None:
    a = Tensor(np.ones((2, 2), "float32"))
    found = []
    with amp.autocast("bfloat16"):
        assert tg.matmul(np.ones((2, 2)), np.ones((2, 2))).dtype == np.float64
        assert tg.matmul(np.ones((2, 2), int), np.ones((2, 2), int)).dtype == np.int64
        thread = threading.Thread(target=lambda: found.append((a @ a).dtype))
        thread.start()
        thread.join()
    assert found == [np.float32]


def test_autocast_takes_no_other_dtype() -> None:
    with pytest.raises(DtypeError, match="autocast: dtype is float32, expected bfloat16, float16"):
        amp.autocast("float32").__enter__()


X: Any = Tensor(np.zeros((2, 3), "float32"))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: X @ X, ShapeError,
         r"matmul: b has shape \(2, 3\), expected 3 in axis -2 as a has shape \(2, 3\)"),
        (lambda: X @ Tensor(np.zeros(2)), ShapeError, r"b has shape \(2,\), expected 3 in axis -1"),
        (lambda: X @ 2, ShapeError, r"matmul: a has shape \(2, 3\), b \(\), expected an axis"),
        (lambda: tg.matmul(np.zeros((2, 1, 3)), np.zeros((3, 3, 1))), ShapeError,
         r"matmul: a has shape \(2, 1, 3\), b \(3, 3, 1\), expected leading axes that broadcast"),
        (lambda: tg.matmul(np.zeros((2, 3, 1, 4)), np.zeros((2, 4, 1))), ShapeError,
         r"matmul: a has shape \(2, 3, 1, 4\), b \(2, 4, 1\), expected leading axes that"),
        (lambda: tg.matmul(np.zeros((2, 1, 4)), np.zeros((2, 3, 4, 1))), ShapeError,
         r"matmul: a has shape \(2, 1, 4\), b \(2, 3, 4, 1\), expected leading axes that"),
        (lambda: 2 @ X, ShapeError, r"matmul: a has shape \(\), b \(2, 3\), expected an axis"),
        (lambda: tg.matmul(X, X.T, kernel="simt"), ArgumentError,
         "matmul: kernel is 'simt', expected None for arrays on a CPU"),
        (lambda: X @ "no", DtypeError,
         "matmul: b is a str, expected a tensor, array, number or list"),
        (lambda: tg.linear(X, X.T), ShapeError,
         r"linear: weight has shape \(3, 2\), expected \(out, 3\) \(last axis of x\)"),
        (lambda: tg.linear(X, np.zeros(3)), ShapeError, r"linear: weight has shape \(3,\), expe"),
        (lambda: tg.linear(X, X, np.zeros(3)), ShapeError,
         r"linear: bias has shape \(3,\), expected \(2,\) \(axis 0 of weight\)"),
        (lambda: tg.linear(np.zeros((2, 3), int), X), DtypeError,
         "linear: x has dtype int64, expected a float"),
    ],
)  # fmt: skip
def test_errors_name_argument_and_expectation(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_products_are_written_or_added() -> None:
    a, b = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
    y = np.full((2, 4), 5.0)
    product_into(y, a, b)
    np.testing.assert_array_equal(y, a @ b)
    product_into(y, a, b, add=True)
    np.testing.assert_array_equal(y, 2 * (a @ b))
