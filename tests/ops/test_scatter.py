"""Replacing and adding elements out of place, against NumPy's assignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    OutOfRangeError,
    ShapeError,
    TensorgradError,
)
from tensorgrad.testing import SIZES, Case, Ulps, check, sized
from tests.gpu_array import on_gpu

ROWS = np.array([2, 0, -2])  # different ones
REPEATED = np.array([2, 0, 2, -1])  # -1 is 2 as well
MASK = np.array([[True, False, True, False], [False] * 4, [True] * 4])


def assigned(key: Any) -> Callable[[Any, Any], Any]:
    def reference(x: Any, values: Any) -> Any:
        y = x.copy()
        y[key] = values
        return y

    return reference


def added(key: Any, factor: float = 1) -> Callable[[Any, Any], Any]:
    def reference(x: Any, values: Any) -> Any:
        y = x.copy()
        np.add.at(y, key, values * factor)
        return y

    return reference


def scattered(index: Any, axis: int, add: bool) -> Callable[[Any, Any], Any]:
    def reference(x: Any, src: Any) -> Any:
        y = x.copy()
        for place in np.ndindex(*index.shape):
            to = list(place)
            to[axis] = index[place]
            y[tuple(to)] = src[place] + (y[tuple(to)] if add else 0)
        return y

    return reference


def put(key: Any, shape: tuple[int, ...], values: tuple[int, ...], add: bool = False) -> Case:
    text = " ".join(str(key).split())[:50]
    return Case(
        lambda x, v: tg.index_put(x, key, v, accumulate=add), [shape, values],
        (added if add else assigned)(key), terms=8, values=Ulps(2, "row"), captured=False,
        name=f"index_put[{text}]{'+' if add else ''}",
    )  # fmt: skip


def of_slices(
    name: str, key: Any, shape: Any, values: Any, reference: Any = None, **options: Any
) -> Case:
    return Case(
        lambda x, v: getattr(tg, name)(x, *key(v), **options), [shape, values], reference, terms=8,
        values=Ulps(2, "row"), captured=False, name=name,
    )  # fmt: skip


def line(index: Any, add: bool, shape: tuple[int, ...], src: tuple[int, ...], axis: int) -> Case:
    op = tg.scatter_add if add else tg.scatter
    return Case(
        lambda x, s: op(x, axis, index, s), [shape, src], scattered(index, axis, add), terms=8,
        values=Ulps(2, "row"), captured=False, name=op.__name__,
    )  # fmt: skip


def diagonal_reference(offset: int, axis1: int, axis2: int) -> Callable[[Any, Any], Any]:
    def reference(x: Any, src: Any) -> Any:
        y = x.copy()
        view = np.diagonal(y, offset, axis1, axis2)
        view.flags.writeable = True
        view[...] = src
        return y

    return reference


def on_every_second(n: int, name: str) -> Any:
    index = np.arange(0, n, 2)
    return {
        "index_put": lambda x, v: tg.index_put(x, index, v),
        "index_add": lambda x, v: tg.index_add(x, 0, index, v),
        "index_copy": lambda x, v: tg.index_copy(x, 0, index, v),
        "scatter": lambda x, v: tg.scatter(x, 0, index, v),
        "scatter_add": lambda x, v: tg.scatter_add(x, 0, index, v),
        "slice_scatter": lambda x, v: tg.slice_scatter(x, v, 0, 0, n, 2),
        "select_scatter": lambda x, v: tg.select_scatter(x[:, None], x * 2, 1, 0) + 0 * v.sum(),
        "diagonal_scatter": lambda x, v: tg.diagonal_scatter(x[:, None], x[:1] * 2) + 0 * v.sum(),
        "index_fill": lambda x, v: tg.index_fill(x, 0, index, 2.0) + 0 * v.sum(),
    }[name]


def reference_of(name: str) -> Callable[[Any, Any], Any]:
    def reference(x: Any, v: Any) -> Any:
        y = x.copy()
        if name == "select_scatter":
            return x[:, None] * 2
        if name == "diagonal_scatter":
            y = y[:, None]
            y[:1, 0] *= 2
            return y
        if name in ("index_add", "scatter_add"):
            y[::2] += v
        else:
            y[::2] = 2 if name == "index_fill" else v
        return y

    return reference


CASES = [
    put(ROWS, (3, 4), (3, 4)),
    put(REPEATED, (3, 4), (4, 4)),
    put((REPEATED, REPEATED), (3, 3), (4,)),
    put(REPEATED, (3,), ()),
    put((ROWS[:2], np.array([1, 3])), (3, 4), (2,)),
    put((slice(None), [1, 0, 3]), (3, 4), (1,)),
    put(MASK, (3, 4), (6,)),
    put((..., 1), (2, 3, 4), (2, 3)),
    put((None, slice(1, None)), (3, 4), (1, 2, 4)),
    put(2, (4,), ()),
    put(REPEATED, (3, 4), (4, 4), add=True),
    put((REPEATED, REPEATED), (3, 3), (4,), add=True),
    put(REPEATED, (3, 40), (40,), add=True),
    put(slice(0, 2), (3, 2), (2,), add=True),
    put(MASK, (3, 4), (), add=True),
    of_slices("index_add", lambda v: (1, REPEATED, v), (2, 3), (2, 4),
              added((slice(None), REPEATED), 0.5), alpha=0.5),
    of_slices("index_copy", lambda v: (-1, ROWS[:2], v), (2, 3), (2, 2),
              assigned((slice(None), ROWS[:2]))),
    Case(lambda x: tg.index_fill(x, 1, REPEATED, -2), [(2, 3)],
         lambda x: assigned((slice(None), REPEATED))(x, -2), captured=False, name="index_fill"),
    of_slices("select_scatter", lambda v: (v, 1, -1), (2, 3, 4), (2, 4),
              assigned((slice(None), -1))),
    of_slices("slice_scatter", lambda v: (v, 1, 1, None, 2), (2, 5), (2, 2),
              assigned((slice(None), slice(1, None, 2)))),
    *(of_slices("diagonal_scatter", lambda v, a=arguments: (v, *a), shape, src,
                diagonal_reference(*arguments))
      for arguments, shape, src in [((0, 0, 1), (3, 4), (3,)), ((-2, 0, 1), (3, 4), (1,)),
                                    ((7, 0, 1), (3, 4), (0,)), ((1, 2, 0), (4, 2, 3), (2, 3)),
                                    ((0, 1, 2), (2, 3, 3), (3,)), ((0, 0, -1), (3, 2, 4), ())]),
    line(np.array([[0, 1, 2, 0], [2, 0, 0, 1]]), False, (3, 5), (2, 4), 0),
    line(np.array([[0, 1], [2, 0], [-1, 2]]), False, (3, 4), (3, 3), 1),
    line(np.array([[0, 0, 2, 0], [2, 0, 2, -1]]), True, (3, 5), (2, 4), 0),
    line(np.array([[[1], [1]], [[0], [1]]]), True, (2, 3, 4), (2, 3, 1), -1),
    *(case for name in ("index_put", "index_add", "index_copy", "scatter", "scatter_add",
                        "slice_scatter", "select_scatter", "diagonal_scatter", "index_fill")
      for n in SIZES
      for case in sized(on_every_second(n, name), lambda n: [(n,), (-(-n // 2),)],
                        reference_of(name), sizes=[n], name=name, captured=False, terms=2000,
                        values=Ulps(4, "row"))),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


def test_integers_and_numbers() -> None:
    x = Tensor(np.zeros((2, 3), np.int32))
    y = tg.scatter_add(x, 1, [[0, 0, 2], [1, 1, 1]], Tensor(np.ones((2, 3), np.int64)))
    assert y.dtype == np.int32
    assert y.numpy().tolist() == [[2, 0, 1], [0, 3, 0]]
    assert tg.scatter(x, 0, np.array([[1, 0, 1]]), 7).numpy().tolist() == [[0, 7, 0], [7, 0, 7]]
    assert x.numpy().sum() == 0


def test_defaults_add_once_and_take_the_first_axes() -> None:
    x, v = np.zeros((2, 3)), np.array([1.0, 2.0])
    assert tg.index_put(x, [0, 0], v[:, None]).tolist() == [[2] * 3, [0] * 3]
    assert tg.index_add(x, 0, [0, 0], v[:, None]).tolist() == [[3] * 3, [0] * 3]
    assert tg.index_add(x, 0, [0], v[:1], alpha=2).tolist() == [[2] * 3, [0] * 3]
    assert tg.index_add(x, 1, 1, v).tolist() == [[0, 1, 0], [0, 2, 0]]
    assert tg.slice_scatter(x, 5).tolist() == [[5] * 3] * 2
    assert tg.slice_scatter(x, 5, start=1).tolist() == [[0] * 3, [5] * 3]
    assert tg.diagonal_scatter(x, v).tolist() == [[1, 0, 0], [0, 2, 0]]
    ints = np.zeros(2, int)
    assert tg.index_put(ints, [0, 0], [1, 2], accumulate=True).tolist() == [3, 0]
    assert tg.index_put(x * 1j, (0, [0, 0]), [1j, 2j], accumulate=True).tolist()[0] == [3j, 0, 0]


def test_gradients_reach_only_what_was_kept() -> None:
    x, v = (Tensor(np.ones(n), requires_grad=True) for n in (3, 2))
    (tg.index_put(x, [0, 2], v) * np.array([1.0, 2, 3])).sum().backward()
    assert x.grad is not None
    assert v.grad is not None
    assert x.grad.tolist() == [0, 2, 0]
    assert v.grad.tolist() == [1, 3]


X = Tensor(np.zeros((3, 4)))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tg.index_put(X, 3, 1.0), OutOfRangeError, "index_put: got index 3 for axis 0"),
        (lambda: tg.index_put(X, 1.5, 1.0), DtypeError, "index_put: the index is a float"),
        (lambda: tg.index_put(X, [0, 1], np.zeros(3)), ShapeError,
         r"index_put: values has shape \(3,\), expected one that broadcasts to \(2, 4\)"),
        (lambda: tg.index_put(X, 0, 1j), DtypeError,
         "index_put: values has dtype complex128, expected real numbers for"),
        (lambda: tg.scatter(X, 0, [0], 1.0), ShapeError,
         r"scatter: index has shape \(1,\), expected at most \(3, 4\) but for axis 0"),
        (lambda: tg.scatter(X, 0, [[0] * 5], 1.0), ShapeError, r"index has shape \(1, 5\)"),
        (lambda: tg.scatter_add(X, 1, [[0, 1]], np.zeros((1, 1))), ShapeError,
         r"scatter_add: src has shape \(1, 1\), expected at least \(1, 2\)"),
        (lambda: tg.scatter_add(X, 2, [[0]], 1.0), ArgumentError, "scatter_add: axis is 2"),
        (lambda: tg.index_add(X, 0, [[0]], 1.0), ShapeError,
         r"index_add: index has shape \(1, 1\), expected \(N,\) or \(\)"),
        (lambda: tg.index_add(X, 0, [0.5], 1.0), DtypeError, "index_add"),
        (lambda: tg.index_fill(X, 0, [0], [1.0]), ShapeError,
         r"index_fill: value has shape \(1,\), expected \(\)"),
        (lambda: tg.diagonal_scatter(X, 1.0, 0, 1, -1), ArgumentError,
         "diagonal_scatter: axis2 is -1, expected another axis than axis1"),
        (lambda: tg.scatter_add(X, 1, [[0, 1]], np.zeros(2)), ShapeError, r"src has shape \(2,\)"),
        (lambda: tg.index_put(Tensor(np.zeros(2, "int8")), 0, 300), ArgumentError,
         "index_put: values is 300, expected int8"),
        (lambda: tg.diagonal_scatter(X, np.zeros(4)), ShapeError,
         r"diagonal_scatter: src has shape \(4,\), expected one that broadcasts to \(3,\)"),
    ],
)  # fmt: skip
def test_errors_name_argument_and_expectation(
    call: Callable[[], Any], error: type[TensorgradError], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_operands_on_two_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="index_put: values"):
        tg.index_put(X, 0, Tensor(on_gpu(np.zeros(4))))
