"""Picking elements and adding gradients back, against NumPy."""

from __future__ import annotations

import array
import itertools
import math
import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.core import backend
from tensorgrad.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    GradError,
    OutOfRangeError,
    ShapeError,
    TensorgradError,
)
from tensorgrad.ops.indexing import add_rows
from tensorgrad.testing import SIZES, Case, check, sized

I = np.array([2, 0, 2, -1])  # noqa: E741  an index with a repeated and a negative entry
J = np.array([[1], [2], [1]])
MASK = np.array([[True, False, True, False], [False] * 4, [True] * 4])


# Keys of the host are copied to the GPU at each call, which a CUDA graph cannot: not captured.
def pick(key: Any, shape: tuple[int, ...] = (3, 4, 5)) -> Case:
    text = " ".join(str(key).split())[:50]
    return Case(lambda x: x[key], [shape], lambda x: x[key], terms=8, captured=False,
                name=f"getitem[{text}]")  # fmt: skip


def take(shape: tuple[int, ...], indices: Any, axis: int | None) -> Case:
    return Case(
        lambda x: tg.take(x, indices, axis),
        [shape],
        lambda x: np.take(x, indices, axis),
        terms=8,
        captured=False,
        name=f"take-axis{axis}",
    )


def along(shape: tuple[int, ...], indices: Any, axis: int | None) -> Case:
    return Case(
        lambda x: tg.take_along_axis(x, indices, axis),
        [shape],
        lambda x: np.take_along_axis(x, np.asarray(indices), axis),
        terms=8,
        captured=False,
        name=f"take_along_axis-{axis}",
    )


def put_along(x: Tensor) -> Tensor:
    y = tg.positive(x).detach()
    tg.put_along_axis(y, np.zeros((len(x), 1), int), [[2.5]], 1)
    return y


def put_along_numpy(x: Any) -> Any:
    y = x.copy()
    np.put_along_axis(y, np.zeros((len(x), 1), int), [[2.5]], 1)
    return y


COUNTED: list[tuple[Any, Any]] = [
    (tg.nonzero, np.nonzero),
    (tg.flatnonzero, np.flatnonzero),
    (tg.argwhere, np.argwhere),
    (tg.count_nonzero, np.count_nonzero),
]
CASES = [
    *(
        Case(
            f,
            [np.arange(math.prod(shape)).reshape(shape) % 3],
            reference,
            gradient=False,
            captured=f is tg.count_nonzero,
        )
        for f, reference in COUNTED
        for shape in [(33, 31), (1, 1025), (1023,), (0,)]
    ),
    *sized(
        put_along,
        lambda n: [(2, n)],
        put_along_numpy,
        sizes=SIZES[1:],
        gradient=False,
        name="put_along_axis",
    ),
    pick(1),
    pick(np.int64(-1)),
    pick(slice(1, None)),
    pick((slice(None), 2)),
    pick((..., slice(None, None, -2))),
    pick((1, 2, 3)),
    pick((None, 1, ..., None)),
    pick(()),
    pick(...),
    pick((), ()),
    pick((None, ...), ()),
    pick(slice(5, 2)),
    pick(I),
    pick([2, 0, 2, -1]),
    pick([]),
    pick([[0, 1], [1, 1]]),
    pick(((0, 0, 1), slice(None))),
    pick((slice(None), (1, 1, -1))),
    pick(range(2)),
    pick((..., range(4, 0, -2))),
    pick(((0, 1, 1), range(3))),
    pick(I.astype("int8")),
    pick(np.array([1, 1], "uint32")),
    pick(np.array(1)),
    pick((slice(None), I)),
    pick((I[:3, None], [0, 1])),
    pick((J, I)),
    pick((J, slice(1, 3), I)),
    pick((0, slice(None), I)),
    pick((..., I, None)),
    pick((I, I, I)),
    pick(MASK),
    pick(np.array([True, False, True])),
    pick((slice(None), np.array([True, False, True, True]))),
    pick((np.array([True, False, True]), I[:2])),
    pick((MASK, 1)),
    pick((MASK, slice(1, 3))),
    pick(np.zeros((3, 4, 5), bool)),
    pick(True),
    pick(I, (4, 129)),
    pick(np.repeat(I, 40), (4, 40)),
    pick(np.repeat(I, 40), (4, 2)),
    pick(np.zeros((2, 0), int), (4, 2)),
    pick(np.zeros(3, int), (4, 0)),
    *(pick(I, (4, n)) for n in SIZES),
    *(pick((slice(None), I % n), (3, n)) for n in SIZES[1:]),
    *(take((3, n), I % n, 1) for n in SIZES[1:]),
    *(
        Case(op, [shape, I % shape[axis]], reference, terms=4, name=name)
        for name, op, reference, axis in [
            ("getitem-array", lambda x, i: x[i], lambda x, i: x[i], 0),
            ("getitem-array-axis1", lambda x, i: x[:, i], lambda x, i: x[:, i], 1),
            ("take-array", lambda x, i: tg.take(x, i, 1), lambda x, i: np.take(x, i, 1), 1),
        ]
        for shape in [(4, 5), (7, 33), (33, 1025)]
    ),
    take((5,), 2, 0),
    take((3, 4, 5), I, 1),
    take((3, 4, 5), J - 2, -1),
    take((3, 4, 5), I, None),
    take((4, 50), np.repeat(I, 9), 0),
    take((3, 4), [], 1),
    take((3, 0), [], 1),
    take((0, 3), [0, 2, 2], 1),
    along((3, 4), MASK.astype(int), 1),
    along((3, 4), [[0, 2, 2, 1]], 0),
    *(along((3, n), np.arange(n)[None] % 3, 0) for n in SIZES),
    along((3, 4), [[3], [3], [-4]], -1),
    along((3, 4), [3, 3, 11, 0], None),
    along((1, 4), [[3], [3], [-4]], 1),
    along((2, 3, 4), np.zeros((2, 0, 4), int), 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


def picked_gradient(x: np.ndarray[Any, Any], key: Any, dy: Any) -> np.ndarray[Any, Any]:
    dx = np.zeros_like(x)
    np.add.at(dx, key, dy)
    return dx


@given(data=st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_key_follows_numpy(data: Any) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, max_side=4))
    x = np.arange(float(np.prod(shape))).reshape(shape)
    keys: list[Any] = [hnp.basic_indices(shape, allow_newaxis=True), hnp.arrays(bool, shape)]
    if shape:
        keys.append(hnp.integer_array_indices(shape))
        keys.append(hnp.arrays(bool, shape[:1]))
        mixed = [
            hnp.basic_indices((n,), allow_ellipsis=False)
            | hnp.integer_array_indices((n,), result_shape=st.just((2,)))
            for n in shape
        ]
        keys.append(st.tuples(*mixed).map(lambda parts: sum(
            [part if isinstance(part, tuple) else (part,) for part in parts], ())))  # fmt: skip
    key = data.draw(st.one_of(keys))
    t = Tensor(x, requires_grad=True)
    y = t[key]
    expected = x[key]
    assert type(y.data) is np.ndarray
    np.testing.assert_array_equal(y.numpy(), expected)
    if isinstance(expected, np.ndarray):
        assert np.shares_memory(y.data, x) == np.shares_memory(expected, x)
    dy = np.random.default_rng(0).integers(1, 9, expected.shape).astype(float)
    y.backward(dy)
    np.testing.assert_array_equal(t.grad, picked_gradient(x, key, dy))


class Index:
    """An integer by its `__index__` alone."""

    def __index__(self) -> int:
        return -1


PARTS: list[Any] = [
    0, -1, 7, np.int8(1), np.uint16(2), 2**70, Index(), True, False, np.True_, slice(None),
    slice(2, None, -1), None, ..., [0, 0, 1], (0, 0, 1), range(3), range(0), [], (),
    ((0, 1), (1, 1)), [[0, 1], range(2)], [True, False, True], (np.True_, False, True),
    [np.int8(0), 1], array.array("i", [1, 1]), np.array(1), np.array([1, 1]), np.array(True),
    np.array([0, 2], "uint64"), np.array([True, False, True]), np.zeros((0, 3), bool),
    np.array([]), 0.5, np.float32(1), [0.5], "a", b"a", {0}, [[0], [1, 2]], [slice(1)],
    (slice(1),), [None],
]  # fmt: skip
KEYS = [*PARTS, *[(part,) for part in PARTS], *itertools.product(PARTS, PARTS)]


def test_every_kind_of_key_follows_numpy() -> None:
    x = np.arange(27.0).reshape(3, 3, 3)
    for key in KEYS:
        t = Tensor(x.copy(), requires_grad=True)
        try:
            expected = np.asarray(x[key])
        except (IndexError, ValueError, TypeError):
            with pytest.raises(TensorgradError):
                t[key]
            with pytest.raises(TensorgradError), tensorgrad.no_grad():
                t[key] = 1
            continue
        y = t[key]
        np.testing.assert_array_equal(y.numpy(), expected, str(key))
        dy = np.arange(1.0, expected.size + 1).reshape(expected.shape)
        y.backward(dy)
        np.testing.assert_array_equal(t.grad, picked_gradient(x, key, dy), str(key))
        assigned = x.copy()
        assigned[key] = dy
        with tensorgrad.no_grad():
            t[key] = dy
        np.testing.assert_array_equal(t.numpy(), assigned, str(key))


def test_subclasses_of_arrays_are_arrays() -> None:
    rows: Any = np.array([0, 0, 2]).view(type("Mapped", (np.ndarray,), {}))  # like np.memmap
    x = Tensor(np.arange(12.0).reshape(4, 3), requires_grad=True)
    total = x[rows].sum() + x[rows, 1].sum() + tg.take(x, rows, 0).sum()
    (total + (x * rows + rows + x).sum()).backward()
    expected = np.array([[4, 6, 4], [0, 0, 0], [2, 3, 2], [0, 0, 0]]) + np.array([1, 1, 3])
    np.testing.assert_array_equal(x.grad, expected)
    with tensorgrad.no_grad():
        x[rows[1:]] = rows
    np.testing.assert_array_equal(x.numpy()[:3], [[0, 0, 2], [3, 4, 5], [0, 0, 2]])


def test_tensors_are_indices_too() -> None:
    x = Tensor(np.arange(12.0).reshape(3, 4), requires_grad=True)
    rows, columns = Tensor(np.array([2, 2])), Tensor(np.array([0, 3]))
    np.testing.assert_array_equal(x[rows, columns].numpy(), [8, 11])
    np.testing.assert_array_equal(x[[rows[0], 1]].numpy(), x.data[[2, 1]])
    np.testing.assert_array_equal(x[(rows[0], 1), :].numpy(), x.data[[2, 1]])
    np.testing.assert_array_equal(x[x > 9].numpy(), [10, 11])
    np.testing.assert_array_equal(x[Tensor(np.array(1))].numpy(), x.data[1])
    np.testing.assert_array_equal(tg.take(x, rows, 0).numpy(), x.data[[2, 2]])


def test_tensors_iterate_over_their_first_axis() -> None:
    x = Tensor(np.arange(6.0).reshape(3, 2), requires_grad=True)
    total = sum((i * row for i, row in enumerate(x)), start=Tensor(np.zeros(2)))
    total.backward(np.ones(2))
    np.testing.assert_array_equal(x.grad, [[0, 0], [1, 1], [2, 2]])


def test_gradients_of_many_views_are_collected_in_one_array(monkeypatch: Any) -> None:
    x = Tensor(np.zeros((50, 3), "float16"), requires_grad=True)
    y = x * 2
    total = sum([row * row for row in y], start=y[0] + y[:, 0][:3])
    made: list[Any] = []
    zeros = np.zeros

    def counted(*args: Any) -> Any:
        made.append(args)
        return zeros(*args)

    monkeypatch.setattr(np, "zeros", counted)
    total.backward(np.ones(3, "float16"))
    assert len(made) == 2  # for y, and for y[:, 0]
    np.testing.assert_array_equal(x.grad, [[4, 2, 2], [2, 0, 0], [2, 0, 0], *[[0, 0, 0]] * 47])


def test_parts_and_whole_gradients_add_up() -> None:
    for order in (0, 1):
        x = Tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
        y = x + 0
        squares, left = tg.einsum("ij,ij->", y, y), tg.einsum("ij->", y[:, :2])
        terms = [y[0, 1] * y[0, 1], squares, y[1, 2] * 3, left * 5]
        sum(terms[::-1] if order else terms, start=Tensor(np.zeros(()))).backward()
        np.testing.assert_array_equal(x.grad, [[0 + 5, 2 + 2 + 5, 4], [6 + 5, 8 + 5, 10 + 3]])


@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 400])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_adding_rows_adds_in_order(width: int, dtype: str, device: str) -> None:
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 7, 100)
    values = rng.standard_normal((100, width)).astype(dtype)
    expected = np.zeros((7, width))
    np.add.at(expected, rows, values)
    total, again = [backend.to_device(np.zeros((7, width), "float32"), device) for _ in range(2)]
    arrays = [backend.to_device(a, device) for a in (rows, values)]
    add_rows(total, *arrays)
    add_rows(again, *arrays)
    np.testing.assert_allclose(backend.to_numpy(total), expected, rtol=1e-5, atol=1e-5)
    assert backend.to_numpy(total).tobytes() == backend.to_numpy(again).tobytes()


def test_repeated_rows_are_summed_in_float32() -> None:
    x = Tensor(np.zeros((2, 1), "float16"), requires_grad=True)
    x.grad = np.zeros((2, 1), "float32")
    tg.take(x, np.zeros(5000, int), 0).backward(np.ones((5000, 1), "float16"))
    assert x.grad.tolist() == [[5000], [0]]
    wide = Tensor(np.zeros((2, 64), "float16"), requires_grad=True)
    wide.grad = np.zeros((2, 64), "float32")
    wide[np.ones(5000, int)].backward(np.ones((5000, 64), "float16"))
    assert (wide.grad[1] == 5000).all()


def test_assignment_takes_tensors_as_keys_and_values() -> None:
    x = Tensor(np.zeros((3, 4)))
    x[Tensor(np.array([0, 2]))] = Tensor(np.ones(4))
    x[1, Tensor(np.arange(4)) > 2] = 5
    np.testing.assert_array_equal(x.numpy(), [[1] * 4, [0, 0, 0, 5], [1] * 4])
    learned = Tensor(np.ones(4), requires_grad=True)
    with pytest.raises(GradError, match="assignment: the value requires a gradient"):
        x[0] = learned
    with tensorgrad.no_grad():
        x[0] = learned * 2
    assert x[0].tolist() == [2] * 4


def test_augmented_assignment_rounds_to_the_tensor() -> None:
    memory = np.array([1.0, 2.0], "float32")
    x: Any = Tensor(memory)
    x += np.array([1e-9, 2.5])
    x **= Tensor(np.array(2.0), requires_grad=True).detach()
    np.testing.assert_array_equal(memory, [1, 20.25])
    flat = Tensor(np.arange(6.0).reshape(2, 3))
    tg.put_along_axis(flat, [-6, 5], [7, 8], None)
    assert flat.tolist() == [[7, 1, 2], [3, 4, 8]]
    learned = Tensor(np.ones(2), requires_grad=True)
    with tg.no_grad():
        learned += learned
    assert learned.tolist() == [2, 2]


def test_an_assigned_index_is_noticed() -> None:
    index = Tensor(np.array([0, 1]))
    x = Tensor(np.zeros((3, 4)), requires_grad=True)
    for y in (x[index], x[:, index], tg.take(x, index, 0)):
        index[0] = 2
        with pytest.raises(GradError, match="was assigned to after the op ran"):
            y.backward(np.ones(y.shape))


X: Any = Tensor(np.zeros((3, 4)))
BYTES: Any = Tensor(np.zeros(3, "int8"))
FIXED: Any = tg.broadcast_to(Tensor(np.zeros(1)), 3)
LEARNED = Tensor(np.zeros(4), requires_grad=True)
OPERATORS: Any = operator


def put(key: Any, value: Any) -> None:
    X[key] = value


@pytest.mark.gpu
def test_devices_of_indices_and_values() -> None:
    on_gpu, on_cpu = X.to("cuda"), Tensor(np.array([0, 2]))
    assert on_gpu[on_cpu].tolist() == X[on_cpu].tolist()
    on_gpu[np.array([True, False, True])] = 3
    assert on_gpu[on_cpu].tolist() == [[3] * 4] * 2
    with pytest.raises(DeviceError, match="getitem: the index is on cuda:0, expected cpu like"):
        X[on_cpu.to("cuda")]
    with pytest.raises(DeviceError, match="assignment: the value is on cpu, expected cuda:0 like"):
        on_gpu[0] = np.ones(4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: X[3], OutOfRangeError, "getitem: got index 3 for axis 0, expected -3 to 2"),
        (lambda: X[3], IndexError, "getitem"),
        (lambda: X[0, -5], OutOfRangeError, "getitem: got index -5 for axis 1, expected -4 to 3"),
        (lambda: X[..., 4], OutOfRangeError, "getitem: got index 4 for axis 1, expected -4 to 3"),
        (lambda: X[[0, 7]], OutOfRangeError, "getitem: got index 7 for axis 0, expected -3 to 2"),
        (lambda: X[:, Tensor(np.array([9]))], OutOfRangeError, "got index 9 for axis 1"),
        (lambda: X[None, 0, 4], OutOfRangeError, "got index 4 for axis 1"),
        (lambda: X[0, 0, 0], ShapeError, "getitem: the index has 3 axes, expected at most 2"),
        (lambda: X[np.ones((3, 4), bool), 0], ShapeError, "the index has 3 axes, expected at mos"),
        (lambda: X[np.ones(4, bool)], ShapeError, r"the mask has shape \(4,\), expected \(3,\)"),
        (lambda: X[..., 0, np.ones(3, bool)], ShapeError, r"mask has shape \(3,\), expected \(4,"),
        (lambda: X[[0, 1], [0, 1, 2]], ShapeError, "getitem: .*broadcast"),
        (lambda: X[..., ...], ShapeError, "getitem: .*ellipsis"),
        (lambda: X[0.5], DtypeError, "getitem: the index is a float, expected an integer, slice"),
        (lambda: X["a"], DtypeError, "getitem: the index is a str, expected"),
        (lambda: X[Tensor(np.array([0.0]))], DtypeError, "the index has dtype float64, expected i"),
        (lambda: tg.take(X, 4, 1), OutOfRangeError, "take: indices is 4, expected -4 to 3"),
        (lambda: tg.take(X, [0, -13]), ArgumentError, r"take: indices\[1\] is -13, expected -12"),
        (lambda: tg.take(X, [0.5], 1), DtypeError, "take: indices has dtype float64, expected in"),
        (lambda: tg.take(X, 0, 2), ArgumentError, "take: axis is 2, expected -2 to 1"),
        (lambda: tg.take_along_axis(X, [0], 0), ShapeError, "indices has 1 axes, expected 2 as x"),
        (lambda: tg.take_along_axis(X, [[4]], 1), OutOfRangeError, r"indices\[0, 0\] is 4, exp"),
        (lambda: put(5, 1.0), OutOfRangeError, "assignment: got index 5 for axis 0, expected -3"),
        (lambda: put((0, 0, 0), 1.0), ShapeError, "assignment: the index has 3 axes, expected at"),
        (lambda: put(0, np.ones(3)), ShapeError, r"assignment: .*broadcast.*x, which is \(3, 4\)"),
        (lambda: put(0.5, 1.0), DtypeError, "assignment: the index is a float, expected an int"),
        (lambda: tg.nonzero(X[0, 0]), ShapeError, r"nonzero: x has shape \(\), expected \(N, \.\."),
        (lambda: tg.put_along_axis(X.data, [[0]], 1), DtypeError,
         "put_along_axis: x is a ndarray, expected a tensor to change"),
        (lambda: tg.put_along_axis(X, [0], 1), ShapeError, "indices has 1 axes, expected 2$"),
        (lambda: tg.put_along_axis(X, [[0]], 1, None), ShapeError, "has 2 axes, expected 1$"),
        (lambda: tg.put_along_axis(X, [12], 1, None), OutOfRangeError,
         r"put_along_axis: indices\[0\] is 12, expected -12 to 11 \(axis 0 has length 12\)"),
        (lambda: tg.put_along_axis(X, [-13], 1, None), OutOfRangeError, r"indices\[0\] is -13, e"),
        (lambda: OPERATORS.iadd(BYTES, [[1]] * 2), ShapeError, r"\+=: the result has shape \(2, 3"),
        (lambda: OPERATORS.itruediv(BYTES, 2), DtypeError, "/=: the result has dtype float64, whi"),
        (lambda: OPERATORS.imul(BYTES, 1j), DtypeError, r"\*=: the result has dtype complex"),
        (lambda: OPERATORS.isub(FIXED, 1), ArgumentError, "-=: the tensor's memory is read-only"),
        (lambda: FIXED.__setitem__(0, 1), ArgumentError, "assignment: the tensor's memory is rea"),
        (lambda: OPERATORS.iadd(X, LEARNED), GradError, r"\+=: the value .* write a = a \+ b"),
        (lambda: X.__setitem__(0, 10**400), ArgumentError, "the value is 10+, expected float64"),
        (lambda: BYTES.__setitem__(0, 300), ArgumentError, "the value is 300, expected int8"),
        (lambda: tg.take_along_axis(X, np.zeros((2, 1), int), 1), ShapeError,
         r"take_along_axis: indices has shape \(2, 1\), expected \(3, 4\) but for axis 1"),
    ],
)  # fmt: skip
def test_errors_name_argument_and_expectation(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("op", "arguments"), [(tg.take, (X, 0)), (tg.take_along_axis, (X, [[0]]))])
def test_dim_is_named_axis(op: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError, match=rf"^{op.__name__}: got dim=1, expected axis=1$"):
        op(*arguments, dim=1)
