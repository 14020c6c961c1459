"""Order, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.dtypes import as_dtype
from tensorgrad.errors import ArgumentError, ShapeError
from tensorgrad.testing import SIZES, Case, check, sized


def reversed_sort(x: Any, axis: int) -> Any:
    return np.flip(np.sort(x, axis), axis)


def apart(*shape: int) -> Any:
    """Return different numbers in any order: numeric differences must not change the order."""
    size = int(np.prod(shape))
    return (np.random.default_rng(size).permutation(size) / 64 - 8).reshape(shape)


TIES = np.array([[3, 1, 2, 1], [2, 2, 2, 2], [0, 5, 0, 5]])
CASES = [
    *sized(tg.sort, lambda n: [apart(3, n)], np.sort),
    *(Case(tg.sort, [s], np.sort) for s in [(1,), (33,), (2, 3, 4), (0, 3)]),
    *sized(lambda x: tg.argsort(x), lambda n: [np.arange(3 * n).reshape(3, n) * 7 % 11],
           lambda x: np.argsort(x, kind="stable"), gradient=False, name="argsort"),
    *sized(lambda x: tg.topk(x, 1)[0], lambda n: [apart(3, n)],
           lambda x: reversed_sort(x, -1)[:, :1], sizes=SIZES[1:], name="topk"),
    Case(lambda x: tg.sort(x, 0), [(5, 3)], lambda x: np.sort(x, 0), name="sort-axis0"),
    Case(lambda x: tg.sort(x, None), [(5, 3)], lambda x: np.sort(x, None), name="sort-flat"),
    Case(lambda x: tg.sort(x, None), [()], lambda x: np.sort(x, None), name="sort-0d"),
    Case(lambda x: tg.sort(x, 1, descending=True), [(2, 5, 3)],
         lambda x: reversed_sort(x, 1), name="sort-descending"),
    Case(lambda x: tg.argsort(x), [TIES], lambda x: np.argsort(x, kind="stable"),
         gradient=False, name="argsort"),
    Case(lambda x: tg.argsort(x, 0), [TIES], lambda x: np.argsort(x, 0, kind="stable"),
         gradient=False, name="argsort-axis0"),
    Case(lambda x: tg.argsort(x, descending=True), [TIES],
         lambda x: np.argsort(-x, kind="stable"), gradient=False, name="argsort-descending"),
    Case(lambda x: tg.topk(x, 3)[0], [(4, 31)], lambda x: reversed_sort(x, -1)[:, :3],
         name="topk"),
    Case(lambda x: tg.topk(x, 2, axis=0, largest=False)[0], [(5, 3)],
         lambda x: np.sort(x, 0)[:2], name="topk-smallest"),
    Case(lambda x: tg.topk(x, 0)[0], [(4, 3)], lambda x: x[:, :0], name="topk-none"),
    Case(lambda x: tg.topk(x, 2)[1], [TIES], lambda x: np.argsort(-x, kind="stable")[:, :2],
         gradient=False, name="topk-indices"),
    *(Case(lambda s, v, side=side: tg.searchsorted(s, v, side), [np.array([1, 2, 2, 5]), values],
           lambda s, v, side=side: np.searchsorted(s, v, side),
           gradient=False, name=f"searchsorted-{side}")
      for side in ("left", "right")
      for values in (TIES, np.array(2), *(np.arange(n) % 7 for n in SIZES))),
    Case(tg.searchsorted, [np.array([-1.0, 0.5, 0.5, 2.0]), np.array([[0.5, 7.0], [-3.0, 1.0]])],
         np.searchsorted, gradient=False),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_nan_counts_as_largest(dtype: str, device: str) -> None:
    values = np.array([1, np.nan, -np.inf, np.inf, np.nan, 0]).astype(as_dtype(dtype))
    x = tg.to(Tensor(values), device)
    assert tg.argsort(x).tolist() == [2, 5, 0, 3, 1, 4]
    assert tg.argsort(x, descending=True).tolist() == [1, 4, 3, 0, 5, 2]
    assert tg.topk(x, 2, largest=False)[1].tolist() == [2, 5]
    assert tg.sort(x).dtype == values.dtype
    assert tg.sort(x).numpy()[:3].tolist() == [-np.inf, 0, 1]


@given(values=st.lists(st.integers(-3, 3), max_size=40), descending=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_sorting_is_stable(values: list[int], descending: bool) -> None:
    order = tg.argsort(Tensor(np.array(values, "int32")), descending=descending).tolist()
    sign = -1 if descending else 1
    assert order == sorted(range(len(values)), key=lambda i: (sign * values[i], i))


def test_a_sorter_sorts_the_sequence() -> None:
    x, values = np.array([5, 1, 3]), np.array([0, 1, 3, 9])
    order = np.argsort(x)
    for side in ("left", "right"):
        found = tg.searchsorted(x, values, side, sorter=order)
        np.testing.assert_array_equal(found, np.searchsorted(x, values, side, order))


def test_equal_elements_get_their_own_gradient() -> None:
    x = Tensor(np.array([2.0, 1.0, 2.0, 2.0]), requires_grad=True)
    tg.sort(x, descending=True).backward(np.array([10.0, 20.0, 30.0, 40.0]))
    np.testing.assert_array_equal(x.grad, [10, 40, 20, 30])


def test_booleans_and_unsigned_integers_sort() -> None:
    assert tg.sort(Tensor(np.array([True, False, True]))).tolist() == [False, True, True]
    x = Tensor(np.array([3, 0, 200], "uint8"))
    assert tg.argsort(x, descending=True).tolist() == [2, 0, 1]


X: Any = Tensor(np.zeros((2, 3)))
MIDDLE: Any = "middle"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tg.sort(X, 2), ArgumentError, "sort: axis is 2, expected -2 to 1"),
        (lambda: tg.argsort(Tensor(np.zeros(()))), ArgumentError, "argsort: axis is -1, expected"),
        (lambda: tg.topk(X, 4), ArgumentError, r"topk: k is 4, expected 0 to 3 \(axis 1 of x\)"),
        (lambda: tg.topk(X, -1), ArgumentError, "topk: k is -1, expected 0 to 3"),
        (lambda: tg.searchsorted(X, 1), ShapeError, "searchsorted: sorted_sequence has shape"),
        (lambda: tg.searchsorted("a", 1), TypeError, "sorted_sequence is a str, expected a t"),
        (lambda: tg.searchsorted(X[0], 1, MIDDLE), ArgumentError, "side is 'middle', expected"),
    ],
)  # fmt: skip
def test_errors_name_argument_and_expectation(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("op", "arguments"), [(tg.sort, (X,)), (tg.argsort, (X,)), (tg.topk, (X, 1)), (tg.unique, (X,))]
)
def test_dim_is_named_axis(op: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError, match=rf"^{op.__name__}: got dim=1, expected axis=1$"):
        op(*arguments, dim=1)
