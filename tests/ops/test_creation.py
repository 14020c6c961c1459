"""Making tensors, against NumPy."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.dtypes import as_dtype, bfloat16
from tensorgrad.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    GradError,
    OutOfRangeError,
    ShapeError,
    TensorgradError,
)
from tensorgrad.testing import SIZES, Case, check

INF, NAN = math.inf, math.nan


def made(name: str, ours: Any, numpys: Any, shape: tuple[int, ...] = (3, 4)) -> Case:
    """Return the case of an op that depends on the dtype and device of x alone."""
    return Case(ours, [shape], numpys, gradient=False, name=name)


CASES = [
    made("zeros", lambda x: tg.zeros((2, 3), x.dtype, device=x.device), lambda x: np.zeros((2, 3))),
    made("zeros", lambda x: tg.zeros(3, x.dtype, device=x.device), lambda x: np.zeros(3)),
    made("ones", lambda x: tg.ones((2, 0), x.dtype, device=x.device), lambda x: np.ones((2, 0))),
    made("ones", lambda x: tg.ones((), x.dtype, device=x.device), lambda x: np.ones(())),
    made("full", lambda x: tg.full([2], 2.5, x.dtype, device=x.device),
         lambda x: np.full([2], 2.5)),
    made("empty", lambda x: tg.zeros_like(tg.empty((2, 3), x.dtype, device=x.device)),
         lambda x: np.zeros((2, 3))),
    made("zeros_like", tg.zeros_like, np.zeros_like),
    made("ones_like", tg.ones_like, np.ones_like, ()),
    made("full_like", lambda x: tg.full_like(x, -1.5), lambda x: np.full_like(x, -1.5)),
    made("empty_like", lambda x: tg.zeros_like(tg.empty_like(x)), np.zeros_like),
    made("arange", lambda x: tg.arange(7, dtype=x.dtype, device=x.device),
         lambda x: np.arange(7.0)),
    made("arange", lambda x: tg.arange(2, -3, -0.5, dtype=x.dtype, device=x.device),
         lambda x: np.arange(2, -3, -0.5)),
    made("arange", lambda x: tg.arange(5, 2, device=x.device).astype(x.dtype),
         lambda x: np.arange(5.0, 2)),
    made("linspace", lambda x: tg.linspace(-1, 2, 13, dtype=x.dtype, device=x.device),
         lambda x: np.linspace(-1, 2, 13)),
    made("linspace", lambda x: tg.linspace(0, 1, 4, False, dtype=x.dtype, device=x.device),
         lambda x: np.linspace(0, 1, 4, False)),
    made("linspace", lambda x: tg.linspace(3, 3, 1, dtype=x.dtype, device=x.device),
         lambda x: np.linspace(3, 3, 1)),
    made("identity", lambda x: tg.identity(3, x.dtype, device=x.device), lambda x: np.identity(3)),
    made("indices", lambda x: tg.indices((2, 3), x.dtype, device=x.device),
         lambda x: np.indices((2, 3))),
    made("logspace", lambda x: tg.logspace(-1, 2, 7, base=2, dtype=x.dtype, device=x.device),
         lambda x: np.logspace(-1, 2, 7, base=2)),
    made("geomspace", lambda x: tg.geomspace(-1, -8, 4, dtype=x.dtype, device=x.device),
         lambda x: np.geomspace(-1, -8, 4)),
    made("eye", lambda x: tg.eye(3, dtype=x.dtype, device=x.device), lambda x: np.eye(3)),
    made("eye", lambda x: tg.eye(3, 5, 1, x.dtype, device=x.device), lambda x: np.eye(3, 5, 1)),
    made("eye", lambda x: tg.eye(4, 2, -2, x.dtype, device=x.device), lambda x: np.eye(4, 2, -2)),
    Case(lambda i: tg.one_hot(i, 4), [np.array([[0, 3, 3], [1, 2, 0]])],
         lambda i: np.eye(4)[i], gradient=False, name="one_hot"),
    Case(lambda i: tg.one_hot(i), [np.array([[0, 3, 3], [1, 2, 0]])],
         lambda i: np.eye(4)[i], gradient=False, name="one_hot"),
    Case(lambda i: tg.one_hot(i, 4), [np.zeros((0, 2), int)],
         lambda i: np.zeros((0, 2, 4)), gradient=False, name="one_hot"),
    Case(lambda x: tg.tensor(x), [(3, 4)], lambda x: x, gradient=False, name="tensor"),
    Case(lambda x: tg.asarray(x), [(3, 4)], lambda x: x, name="asarray"),
    Case(lambda x: tg.asarray(x, "float64", device=x.device), [(3, 4)], lambda x: x,
         name="asarray"),
    *(Case(lambda i: tg.one_hot(i, 4), [np.arange(n) % 4], lambda i: np.eye(4)[i],
           gradient=False, name="one_hot") for n in SIZES),
    *(Case(op, [(3, n)], reference) for op, reference in ((tg.tril, np.tril), (tg.triu, np.triu))
      for n in SIZES),
    *(Case(lambda x, k=k: tg.tril(x, k), [shape], lambda x, k=k: np.tril(x, k), name=f"tril {k}")
      for shape in [(3, 3), (2, 5, 3), (2, 4), (0, 3)] for k in (-2, 0, 1)),
    *(Case(lambda x, k=k: tg.triu(x, k), [shape], lambda x, k=k: np.triu(x, k), name=f"triu {k}")
      for shape in [(3, 3), (2, 5, 3), (2, 4), (0, 3)] for k in (-2, 0, 1)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1, "int64"),
        (1.5, "float32"),
        (True, "bool"),
        ([1, 2], "int64"),
        ([1, 2.5], "float32"),
        ([[True], [False]], "bool"),
        ([], "float32"),
        (((1.0, 2.0), [3.0, 4.0]), "float32"),
        (np.float64(2), "float64"),
        (np.float16(2), "float16"),
        ([np.float64(1), 2.0], "float64"),
        (np.arange(3), "int64"),
        (np.ones(3), "float64"),
        (np.ones(3, bfloat16), "bfloat16"),
        (range(3), "int64"),
    ],
)
def test_what_has_no_dtype_gets_the_default(value: Any, dtype: str) -> None:
    for make in (tg.tensor, tg.asarray):
        x = make(value)
        assert type(x.data) is np.ndarray
        assert str(x.dtype) == dtype
        np.testing.assert_array_equal(x.numpy(), np.asarray(value))


def test_default_dtypes_of_fillings() -> None:
    assert {tg.zeros(2).dtype, tg.ones(2).dtype, tg.empty(2).dtype} == {np.dtype("float32")}
    assert tg.eye(2).dtype == tg.linspace(0, 1).dtype == np.float32
    assert tg.full(2, 1).dtype == tg.arange(3).dtype == np.int64
    assert tg.full(2, 1.0).dtype == tg.arange(3.0).dtype == np.float32
    assert tg.full(2, True).dtype == np.bool_
    assert tg.full(2, np.float64(1)).dtype == np.float64
    assert tg.arange(0, 1, 0.25).tolist() == [0, 0.25, 0.5, 0.75]
    assert tg.full_like(Tensor(np.ones(2, "int8")), 3).dtype == np.int8
    assert tg.zeros_like(np.ones(2, "int8"), "float16").dtype == np.float16


def test_defaults_are_numpys() -> None:
    for name in ("linspace", "logspace", "geomspace"):
        expected = getattr(np, name)(1, 3)
        np.testing.assert_allclose(getattr(tg, name)(1, 3).numpy(), expected, rtol=1e-6)
        half_open = getattr(np, name)(1, 3, 4, False)
        np.testing.assert_allclose(getattr(tg, name)(1, 3, 4, False).numpy(), half_open, rtol=1e-6)
    assert tg.indices((2,)).dtype == tg.one_hot([1]).dtype == np.int64
    assert tg.identity(2).dtype == np.float32
    x = np.arange(9.0).reshape(3, 3)
    for made in (
        tg.tensor(1.0), tg.zeros(1), tg.ones(1), tg.empty(1), tg.full(1, 2.0), tg.zeros_like(x),
        tg.ones_like(x), tg.empty_like(x), tg.full_like(x, 2.0), tg.arange(3.0), tg.linspace(0, 1),
        tg.eye(2), tg.asarray(x),
    ):  # fmt: skip
        assert not made.requires_grad
    for asked in (
        tg.empty(1, requires_grad=True), tg.full(1, 2.0, requires_grad=True),
        tg.empty_like(x, requires_grad=True), tg.full_like(x, 2.0, requires_grad=True),
        tg.zeros_like(x, requires_grad=True), tg.linspace(0, 1, requires_grad=True),
        tg.eye(2, requires_grad=True), tg.ones(1, requires_grad=True),
    ):  # fmt: skip
        assert asked.requires_grad
    np.testing.assert_array_equal(tg.tril(x).numpy(), np.tril(x))
    np.testing.assert_array_equal(tg.triu(x).numpy(), np.triu(x))


def test_arrays_of_other_libraries_share_their_memory() -> None:
    values = np.arange(3.0)

    class Foreign:
        def __dlpack__(self, **options: Any) -> Any:
            return values.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return values.__dlpack_device__()

    assert np.shares_memory(tg.asarray(Foreign()).data, values)
    assert not np.shares_memory(tg.asarray(Foreign(), copy=True).data, values)


def test_lists_of_tensors_are_stacked() -> None:
    x = Tensor(np.ones(2), requires_grad=True)
    y = tg.asarray([x, [3.0, 4.0]])
    y.backward(np.array([[1.0, 2.0], [5.0, 6.0]]))
    np.testing.assert_array_equal(y.numpy(), [[1, 1], [3, 4]])
    np.testing.assert_array_equal(x.grad, [1, 2])
    filled = tg.full(2, Tensor(np.array(3.0)))
    assert (filled.tolist(), str(filled.dtype)) == ([3, 3], "float64")


def test_a_given_dtype_holds() -> None:
    for dtype in ("float64", "float16", "bfloat16", "int32", "uint8", "bool"):
        for x in (
            tg.tensor([1, 0], dtype),
            tg.asarray(np.array([1, 0]), dtype),
            tg.zeros(2, dtype),
            tg.full(2, 1, dtype),
            tg.arange(2, dtype=dtype),
            tg.one_hot(Tensor(np.array([1, 0])), 2, dtype=dtype),
            tg.eye(2, dtype=dtype),
        ):
            assert x.dtype == as_dtype(dtype)


def test_tensor_copies_and_asarray_shares() -> None:
    values = np.ones(3, "float32")
    assert np.shares_memory(tg.asarray(values).data, values)
    assert np.shares_memory(tg.asarray(Tensor(values)).data, values)
    assert not np.shares_memory(tg.tensor(values).data, values)
    assert not np.shares_memory(tg.tensor(Tensor(values)).data, values)
    x = Tensor(values, requires_grad=True)
    assert tg.asarray(x) is x
    assert tg.asarray(x, "float64").requires_grad
    for copy in (tg.tensor(x), tg.array(x, "float64")):
        assert not np.shares_memory(copy.data, values)
        copy.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
    with pytest.raises(GradError, match="tensor: value requires a gradient"):
        tg.tensor(x, requires_grad=True)
    assert tg.asarray(x, copy=False) is x
    for copy in (tg.asarray(x, copy=True), tg.asarray(values, copy=True)):
        assert not np.shares_memory(copy.data, values)
    with pytest.raises(ArgumentError, match="copy is False, expected a value that needs no copy"):
        tg.asarray(x, "float64", copy=False)
    values.flags.writeable = False
    assert np.shares_memory(tg.asarray(values).data, values)


def test_gradients_can_be_asked_for_at_creation() -> None:
    for x in (
        tg.tensor([1.0], requires_grad=True),
        tg.zeros(1, requires_grad=True),
        tg.ones_like(np.zeros(1), requires_grad=True),
        tg.arange(1.0, requires_grad=True),
    ):
        (x * 3).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [3]
    with pytest.raises(DtypeError, match="tensor: got dtype int64 with requires_grad"):
        tg.tensor([1], requires_grad=True)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "float16", "bfloat16"])
def test_triangles_keep_the_dtype(dtype: str) -> None:
    x = np.ones((3, 3), as_dtype(dtype))
    for ours, numpys in ((tg.tril, np.tril), (tg.triu, np.triu)):
        assert ours(x).dtype == x.dtype
        np.testing.assert_array_equal(ours(x).numpy(), numpys(x))


def test_triangles_drop_nan() -> None:
    x = Tensor(np.array([[1.0, np.nan], [2.0, 3.0]]), requires_grad=True)
    y = tg.tril(x)
    assert y.tolist() == [[1, 0], [2, 3]]
    y.backward(np.array([[1.0, np.nan], [1, 1]]))
    np.testing.assert_array_equal(x.grad, [[1, 0], [1, 1]])


@pytest.mark.gpu
def test_devices() -> None:
    for x in (tg.tensor([1.0], device="cuda"), tg.zeros(1, device="cuda")):
        assert x.device == "cuda:0"
        assert tg.zeros_like(x).device == "cuda:0"
    assert tg.tensor(x).device == "cuda:0"
    assert tg.tensor(x, device="cpu").device == "cpu"
    assert tg.asarray(x.data).data is x.data


LEARNED = Tensor(np.ones(1), requires_grad=True)
HALVES: Any = (2, 1.5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tg.tensor([[1], [2, 3]]), ShapeError, "tensor: value is .*expected equal length"),
        (lambda: tg.tensor([LEARNED]), DtypeError, "tensor: value holds a Tensor, expected numb"),
        (lambda: tg.tensor("text"), DtypeError, "tensor: value has dtype <U4, expected numbers"),
        (lambda: tg.tensor([None]), DtypeError, "tensor: value has dtype object, expected numbers"),
        (lambda: tg.tensor(1j, "float32"), ArgumentError, "tensor: value does not fit the dtype"),
        (lambda: tg.asarray(np.ones(2, ">f4")), DtypeError, "asarray: value has dtype >f4, exp"),
        (lambda: tg.tensor([300], "uint8"), ArgumentError, "tensor: value does not fit"),
        (lambda: tg.zeros(2, "int5"), DtypeError, "dtype: got 'int5', expected one of"),
        (lambda: tg.zeros(-1), ShapeError, r"zeros: shape is \(-1,\), expected 0 or more"),
        (lambda: tg.ones(HALVES), ShapeError, r"ones: shape is \(2, 1.5\), expected integers"),
        (lambda: tg.zeros(1, device="gpu"), DeviceError, "device: got 'gpu', expected 'cpu', 'cu"),
        (lambda: tg.full(2, [1, 2]), ShapeError, r"full: fill_value has shape \(2,\), expected"),
        (lambda: tg.arange(1, 2, 0), ArgumentError, "arange: step is 0, expected another number"),
        (lambda: tg.arange(INF, 2), ArgumentError, "arange: start is inf, expected a finite numb"),
        (lambda: tg.arange(INF), ArgumentError, "arange: stop is inf, expected a finite number"),
        (lambda: tg.arange(0, NAN, 2), ArgumentError, "arange: stop is nan, expected a finite"),
        (lambda: tg.arange(0, 1, 1e-300), ArgumentError, "arange: stop is 1.0, expected fewer th"),
        (lambda: tg.arange(-1e308, 1e308, 1e-9), ArgumentError, "than 2.60 numbers up to"),
        (lambda: tg.arange(10**18 * 2), ArgumentError, "arange: stop is 2000000000000000000, exp"),
        (lambda: tg.arange(10**400, 10**400 + 3), ArgumentError, "arange: got 1000000"),
        (lambda: tg.arange(10**400, 1.5), ArgumentError, "arange: start is 1000.*expected a floa"),
        (lambda: tg.arange(2**63, 2**63 + 2), ArgumentError, "arange: got 9223372036854775808, e"),
        (lambda: tg.arange(300, dtype="int8"), ArgumentError, "arange: got 299, expected numbers"),
        (lambda: tg.arange(-1, 5, 2, dtype="uint8"), ArgumentError, "arange: got -1, expec"),
        (lambda: tg.arange(3e9, 3e9 + 2, dtype="int32"), ArgumentError, "arange: got 3000000000."),
        (lambda: tg.arange(3, dtype=bool), DtypeError, "arange: dtype is bool for 3 numbers, exp"),
        (lambda: tg.linspace(0, 300, 4, dtype="int8"), ArgumentError, "linspace: got 300.0, expe"),
        (lambda: tg.linspace(0, INF, 4, dtype="int8"), ArgumentError, "linspace: got inf, expect"),
        (lambda: tg.linspace(0, 10**400), ArgumentError, "linspace: stop is 1000.*expected a flo"),
        (lambda: tg.linspace(0, 1, -1), ArgumentError, "linspace: num is -1, expected 0 or more"),
        (lambda: tg.tril(np.ones(3)), ShapeError,
         r"tril: x has shape \(3,\), expected \(\.\.\., M, N\)$"),
        (lambda: tg.triu(np.ones(3)), ShapeError,
         r"triu: x has shape \(3,\), expected \(\.\.\., M, N\)$"),
        (lambda: tg.one_hot([0, 4], 4), OutOfRangeError, r"indices\[1\] is 4, expected 0 to"),
        (lambda: tg.one_hot([-1], 4), OutOfRangeError, r"indices\[0\] is -1, expected 0 to"),
        (lambda: tg.geomspace(1, -2), ArgumentError, "geomspace: stop is -2, expected the sign of"),
        (lambda: tg.geomspace(0, 2), ArgumentError, "stop is 2, expected the sign of start, 0"),
        (lambda: tg.one_hot(np.zeros(0, int)), ArgumentError, "one_hot: num_classes is -1 without"),
        (lambda: tg.one_hot([0], -2), ArgumentError, "one_hot: num_classes is -2, expected -1 or"),
        (lambda: tg.full(2, LEARNED), GradError, "full: fill_value requires a gradient"),
        (lambda: tg.full(2, 1.5, int), TensorgradError, "full: "),
        (lambda: tg.one_hot([0.5], 4), DtypeError, "one_hot: indices has dtype float64, expected"),
    ],
)  # fmt: skip
def test_errors_name_argument_and_expectation(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_no_gpu_is_an_error_that_says_so() -> None:
    if tensorgrad.backend.gpu_count():
        pytest.skip("there is a GPU")
    for make in (
        partial(tg.tensor, 1.0), partial(tg.asarray, 1.0), partial(tg.zeros, 1),
        partial(tg.ones, 1), partial(tg.full, 1, 2.0), partial(tg.eye, 1), partial(tg.arange, 1),
        partial(tg.linspace, 0, 1), partial(tg.logspace, 0, 1), partial(tg.geomspace, 1, 2),
        partial(tg.identity, 1), partial(tg.indices, (1,)), partial(tg.tri, 1),
    ):  # fmt: skip
        with pytest.raises(DeviceError, match=r"device: got 'cuda', but .*; expected 'cpu'"):
            make(device="cuda")


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "int64", "float32", "float64"])
def test_ranges_have_numpys_values(dtype: str, device: str) -> None:
    for first, end, step in [(0, 2, 1), (1, 3, 1), (5, 3, 1), (0.5, 1.5, 1), (3, 1, -1)]:
        got = tg.arange(first, end, step, dtype=dtype, device=device)
        np.testing.assert_array_equal(got.numpy(), np.arange(first, end, step, dtype=dtype))
    for start, stop, num, endpoint in [
        (0, 1, 5, True), (0, 1, 1, True), (0, 1, 0, True), (1, 0, 3, True), (0, 100, 7, False),
        (-2, 2, 5, False), (-2, 2, 6, True), (0, 2**70, 3, True),
    ]:  # fmt: skip
        if (dtype.startswith("uint") and start < 0) or ("int" in dtype and stop > 100):
            continue
        got = tg.linspace(start, stop, num, endpoint, dtype=dtype, device=device)
        expected = np.linspace(float(start), float(stop), num, endpoint, dtype=dtype)
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)
    assert tg.arange(2**63, 2**63 + 3, dtype="uint64", device=device).tolist() == [
        2**63, 2**63 + 1, 2**63 + 2,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_minus_zero_keeps_its_sign(device: str, dtype: str) -> None:
    for x in (
        tg.asarray(-0.0, dtype, device=device),
        tg.tensor(-0.0, dtype, device=device),
        tg.tensor([-0.0], dtype, device=device),
        tg.full((2, 3), -0.0, dtype, device=device),
        Tensor(np.array(-0.0)).to(device, dtype),
    ):
        assert np.signbit(x.numpy().astype("float64")).all()
    assert not np.signbit(tg.full((2,), 0.0, dtype, device=device).numpy().astype("float64")).any()


def test_a_single_integer_indexes_a_list(device: str) -> None:
    assert [3, 5, 7][tg.asarray(2, device=device)] == 7
    with pytest.raises(TypeError, match="integer"):
        [3, 5, 7][tg.asarray(2.0, device=device)]
