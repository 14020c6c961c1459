"""Linear algebra against NumPy, and its gradients against numeric differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, gradcheck, linalg
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, GradError, ShapeError

Values = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)
SQUARE, TALL, WIDE = (RNG.standard_normal(shape) for shape in [(2, 3, 3), (4, 3), (3, 4)])
FLAT = RNG.standard_normal((2, 3, 4))
SIX = RNG.standard_normal((6, 6)) + 3 * np.eye(6)
POSITIVE = SQUARE @ SQUARE.swapaxes(-1, -2) + np.eye(3)

# (name, our function, NumPy's, input); signs of vectors are free, so absolute values are compared
CALLS: list[tuple[str, Callable[..., Any], Callable[..., Any], Values]] = [
    ("inv", linalg.inv, np.linalg.inv, SQUARE),
    ("det", linalg.det, np.linalg.det, SQUARE),
    ("slogdet", linalg.slogdet, np.linalg.slogdet, SQUARE),
    ("cholesky", linalg.cholesky, np.linalg.cholesky, POSITIVE),
    ("cholesky-upper", lambda x: linalg.cholesky(x, upper=True),
     lambda x: np.linalg.cholesky(x).swapaxes(-1, -2), POSITIVE),
    ("eigh", lambda x: list(map(abs, linalg.eigh(x))),
     lambda x: list(map(abs, np.linalg.eigh(x))), POSITIVE),
    ("eigh-upper", lambda x: list(map(abs, linalg.eigh(x, "U"))),
     lambda x: list(map(abs, np.linalg.eigh(x, "U"))), POSITIVE),
    ("tensorinv", lambda x: linalg.tensorinv(x.reshape(3, 2, 6)),
     lambda x: np.linalg.tensorinv(x.reshape(3, 2, 6)), SIX),
    ("tensorinv-1", lambda x: linalg.tensorinv(x.reshape(6, 2, 3), 1),
     lambda x: np.linalg.tensorinv(x.reshape(6, 2, 3), 1), SIX),
    ("tensorsolve", lambda x: linalg.tensorsolve(x.reshape(3, 2, 6), x[:3, :2]),
     lambda x: np.linalg.tensorsolve(x.reshape(3, 2, 6), x[:3, :2]), SIX),
    ("tensorsolve-axes", lambda x: linalg.tensorsolve(x.reshape(3, 6, 2), x[:3, :2], (1,)),
     lambda x: np.linalg.tensorsolve(x.reshape(3, 6, 2), x[:3, :2], (1,)), SIX),
    ("eigvalsh", linalg.eigvalsh, np.linalg.eigvalsh, POSITIVE),
    *((f"qr-{x.shape}", linalg.qr, np.linalg.qr, x) for x in (SQUARE, TALL)),
    *((f"svd-{x.shape}", lambda x: list(map(abs, linalg.svd(x, False))),
       lambda x: list(map(abs, np.linalg.svd(x, False))), x) for x in (SQUARE, TALL, WIDE)),
    ("svdvals", linalg.svdvals, np.linalg.svdvals, FLAT),
    *((f"pinv-{x.shape}", linalg.pinv, np.linalg.pinv, x) for x in (SQUARE, TALL, FLAT)),
    ("diagonal", linalg.diagonal, np.linalg.diagonal, FLAT),
    *((f"matrix_power-{n}", lambda x, n=n: linalg.matrix_power(x, n),
       lambda x, n=n: np.linalg.matrix_power(x, n), SQUARE) for n in (-2, 1, 3)),
    *((f"cond-{p}", lambda x, p=p: linalg.cond(x, p), lambda x, p=p: np.linalg.cond(x, p), SQUARE)
      for p in (None, -2, "fro", 1)),
    *((f"matrix_norm-{p}", lambda x, p=p: linalg.matrix_norm(x, keepdims=True, ord=p),
       lambda x, p=p: np.linalg.matrix_norm(x, keepdims=True, ord=p), FLAT)
      for p in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)),
    *((f"vector_norm-{p}", lambda x, p=p: linalg.vector_norm(x, axis=(0, 2), keepdims=False, ord=p),
       lambda x, p=p: np.linalg.vector_norm(x, axis=(0, 2), ord=p), FLAT)
      for p in (1, 2, 3, 0.5, np.inf, -np.inf)),
    *((f"norm-{p}-{axis}", lambda x, p=p, axis=axis: linalg.norm(x, p, axis, True),
       lambda x, p=p, axis=axis: np.linalg.norm(x, p, axis, True), FLAT)
      for p, axis in ((None, None), (None, 1), (3, 2), ("nuc", (0, 2)), (1, (2, 1)))),
    ("multi_dot", lambda x: linalg.multi_dot([x.T, x, x[0]]),
     lambda x: np.linalg.multi_dot([x.T, x, x[0]]), TALL),
]  # fmt: skip


def outputs(y: Any) -> list[Any]:
    return list(y) if isinstance(y, (list, tuple)) else [y]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("row", CALLS, ids=lambda row: row[0])
def test_values_are_numpys(row: Any, dtype: str, device: str) -> None:
    _, ours, numpys, x = row
    found = outputs(ours(Tensor(x.astype(dtype)).to(device)))
    expected = outputs(numpys(x.astype(dtype).astype("float64")))
    tolerance = {"float64": 1e-9, "float32": 2e-3, "float16": 2e-2}[dtype]
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == np.dtype(dtype)
        assert one.device.startswith(device)
        np.testing.assert_allclose(one.numpy().astype("float64"), two, tolerance, tolerance)


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row[0])
def test_gradients(row: Any, device: str) -> None:
    name, ours, _, x = row

    def f(x: Tensor) -> Any:
        if x.shape == POSITIVE.shape and name.startswith(("cholesky", "eig")):
            x = (x + x.mT) / 2  # a single triangle is read
        return outputs(ours(x))[name == "slogdet" :]  # without the sign

    assert gradcheck(f, [backend.to_device(x, device)])


@pytest.mark.parametrize(("a", "b"), [(SQUARE, SQUARE[:, :, :2]), (SQUARE, TALL[:3]),
                                      (SQUARE[0], TALL[0]), (SQUARE[0], FLAT)])  # fmt: skip
def test_solve(a: Values, b: Values, device: str) -> None:
    arrays = [backend.to_device(array, device) for array in (a, b)]
    y = linalg.solve(*map(Tensor, arrays))
    np.testing.assert_allclose(y.numpy(), np.linalg.solve(a, b), 1e-9, 1e-12)
    assert gradcheck(linalg.solve, arrays)
    half = linalg.solve(Tensor(arrays[0].astype("float32")), Tensor(arrays[1]))
    assert half.dtype == np.dtype("float64")


@pytest.mark.parametrize("p", [None, 2, -2, 1, -1, np.inf, -np.inf, "fro"])
def test_condition_of_singular_matrices(p: Any, device: str) -> None:
    x = np.stack([np.zeros((2, 2)), np.eye(2), np.diag([1.0, 0]), np.diag([2.0, 1])])
    y = linalg.cond(Tensor(x).to(device), p).numpy()
    np.testing.assert_allclose(y, np.linalg.cond(x, p))
    if p not in (None, 2, -2):  # there NumPy finds no singular values
        x[1, 0, 0] = np.nan
        y = linalg.cond(Tensor(x).to(device), p).numpy()
        np.testing.assert_allclose(y, np.linalg.cond(x, p))


def test_full_matrices_and_ranks() -> None:
    for x in (TALL, WIDE):
        for one, two in zip(linalg.svd(x), np.linalg.svd(x), strict=True):
            np.testing.assert_allclose(abs(one), abs(two), 1e-9)
        assert linalg.matrix_rank(x).item() == 3
    assert linalg.matrix_rank(np.outer(TALL[0], TALL[1])).item() == 1
    np.testing.assert_allclose(linalg.qr(TALL, "complete").Q, np.linalg.qr(TALL, "complete").Q)
    np.testing.assert_array_equal(linalg.matrix_power(SQUARE, 0), np.stack([np.eye(3)] * 2))
    assert linalg.inv(np.array([[2, 0], [0, 4]])).dtype == np.dtype("float64")


def test_defaults_are_numpys() -> None:
    for name in ("diagonal", "trace"):
        for offset in (0, 1, -2):
            found = getattr(linalg, name)(FLAT, offset=offset)
            np.testing.assert_allclose(found, getattr(np.linalg, name)(FLAT, offset=offset))
        np.testing.assert_allclose(getattr(linalg, name)(FLAT), getattr(np.linalg, name)(FLAT))
    assert linalg.trace(FLAT, dtype="float32").dtype == np.float32
    assert linalg.matrix_norm(FLAT).shape == (2,)
    np.testing.assert_allclose(linalg.matrix_norm(FLAT), np.linalg.matrix_norm(FLAT))
    assert linalg.vector_norm(FLAT, keepdims=True).shape == (1, 1, 1)
    np.testing.assert_allclose(linalg.vector_norm(FLAT), np.linalg.vector_norm(FLAT))
    np.testing.assert_allclose(linalg.norm(TALL, 1), np.linalg.norm(TALL, 1))
    np.testing.assert_allclose(linalg.norm(TALL[0], 3), np.linalg.norm(TALL[0], 3))
    np.testing.assert_allclose(linalg.norm(FLAT, axis=[0, 2]), np.linalg.norm(FLAT, axis=(0, 2)))  # type: ignore[arg-type]
    for order in ("fro", "nuc", 2, -2, 1, -1, math.inf, -math.inf):
        for keepdims in (False, True):
            found = linalg.norm(FLAT, order, (2, 0), keepdims)
            expected = np.linalg.norm(FLAT, order, (2, 0), keepdims)
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(linalg.pinv(TALL, rtol=0.5), np.linalg.pinv(TALL, rtol=0.5))
    each = np.array([0.5, 0.01])
    np.testing.assert_allclose(
        linalg.pinv(FLAT, rtol=Tensor(each)), np.linalg.pinv(FLAT, rtol=each)
    )
    found = linalg.matrix_power(SQUARE.astype("float32"), 0)
    assert (found.shape, str(found.dtype)) == (SQUARE.shape, "float32")
    full = linalg.svd(WIDE)
    assert [part.shape for part in full] == [(3, 3), (3,), (4, 4)]
    assert [part.shape for part in linalg.qr(TALL)] == [(4, 3), (3, 3)]
    np.testing.assert_array_equal(linalg.cond(SQUARE), linalg.cond(SQUARE, 2))
    lower = linalg.cholesky(POSITIVE).numpy()
    np.testing.assert_array_equal(lower, np.tril(lower))
    np.testing.assert_array_equal(linalg.eigvalsh(SQUARE), linalg.eigvalsh(SQUARE, "L"))
    product = TALL.T @ TALL @ TALL[0]
    np.testing.assert_allclose(linalg.multi_dot([TALL.T, TALL, TALL[0]]), product)


def test_each_factor_alone_has_its_gradient() -> None:
    for part in range(3):
        assert gradcheck(lambda x, i=part: abs(linalg.svd(x, False)[i]), [TALL])
        assert gradcheck(lambda x, i=part: abs(linalg.svd(x)[i]), [SQUARE])
    for part in range(2):
        assert gradcheck(lambda x, i=part: linalg.qr(x)[i], [TALL])
        assert gradcheck(lambda x, i=part: linalg.qr(x, "complete")[i], [SQUARE])
        assert gradcheck(lambda x, i=part: abs(linalg.eigh((x + x.mT) / 2)[i]), [POSITIVE])
    a, b = (Tensor(x, requires_grad=True) for x in (SQUARE[0], TALL[0]))
    linalg.solve(a.detach(), b).sum().backward()
    assert b.grad is not None
    assert a.grad is None
    for name in ("U", "Vh"):
        leaf = Tensor((TALL if name == "U" else WIDE).copy(), requires_grad=True)
        with pytest.raises(GradError, match="svd: full matrices that are not square have no grad"):
            getattr(linalg.svd(leaf), name).sum().backward()
        linalg.svd(leaf).S.sum().backward()
        assert leaf.grad is not None


def test_errors_name_argument_and_expectation() -> None:
    singular, leaf = np.ones((2, 2)), Tensor(WIDE.copy(), requires_grad=True)
    wrong: Any = "max"
    missing: Any = linalg
    calls: list[tuple[Callable[[], Any], Any, str]] = [
        (lambda: linalg.inv(TALL), ShapeError, r"inv: x has shape \(4, 3\), expected \(..., N, "),
        (lambda: linalg.inv(singular), ArgumentError, "inv: the matrix is unfit: Singular"),
        (lambda: linalg.cholesky(-singular), ArgumentError, "cholesky: the matrix is unfit"),
        (lambda: linalg.solve(SQUARE, TALL), ShapeError, r"solve: b has shape \(4, 3\), expected"),
        (lambda: linalg.svd(TALL[0]), ShapeError, r"svd: x has shape \(3,\), expected \(..., M"),
        (lambda: linalg.qr(leaf).Q.sum().backward(), GradError, "qr: R has shape"),
        (lambda: linalg.svd(leaf).Vh.sum().backward(), GradError, "svd: full matrices"),
        (lambda: linalg.norm(TALL, "max"), ArgumentError,  # type: ignore[arg-type]
         "norm: ord is 'max', expected 'fro'"),
        (lambda: linalg.norm(FLAT, 1), ArgumentError, "norm: axis is None for x of 3 axes"),
        (lambda: linalg.vector_norm(TALL, ord=wrong), ArgumentError,
         "vector_norm: ord is 'max', expected a number"),
        (lambda: linalg.norm(TALL, wrong, axis=0), ArgumentError,
         "^norm: ord is 'max', expected a number for vectors"),
        (lambda: linalg.qr(TALL, wrong), ArgumentError, "qr: mode is 'max', expected one"),
        (lambda: linalg.matrix_norm(TALL[0]), ShapeError, r"norm: x has shape .*, exp"),
        (lambda: linalg.solve(SQUARE, 1.0), ShapeError, r"solve: b has shape \(\), expected 3 ro"),
        (lambda: linalg.solve(TALL, TALL), ShapeError, r"solve: a has shape .*, expected \(..., N"),
        (lambda: linalg.det(TALL[0]), ShapeError, r"det: x has shape \(3,\), expected \(..., N"),
        (lambda: linalg.matrix_power(TALL, 0), ShapeError, "matrix_power: x has shape .*, expecte"),
        (lambda: linalg.cond(TALL, 1), ShapeError, r"cond: x has shape .*\) for p 1"),
        (lambda: linalg.cond(np.zeros((3, 0))), ShapeError, r"cond: x has shape \(3, 0\), expect"),
        (lambda: linalg.pinv(TALL, rtol=Tensor(np.ones(()), requires_grad=True)), GradError,
         "pinv: rtol requires a gradient"),
        (lambda: linalg.tensorinv(SIX.reshape(3, 2, 6), 4), ArgumentError,
         "tensorinv: ind is 4, expected 1 to 3"),
        (lambda: linalg.tensorsolve(np.ones((2, 2)), np.ones(3)), ShapeError,
         r"tensorsolve: a has shape \(2, 2\), expected that of b, \(3,\)"),
        (lambda: missing.nothing, AttributeError, r"tensorgrad\.linalg"),
    ]  # fmt: skip
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()


def test_what_has_no_singular_values_is_named() -> None:
    x = np.array([[np.nan, 1], [1, 1]])
    for name in ("svd", "svdvals", "pinv"):
        with pytest.raises(ArgumentError, match=r"^(svd|pinv): the matrix is unfit"):
            getattr(linalg, name)(x)
    with pytest.raises(ArgumentError, match=r"matrix_power: n is 1.5, expected an integer"):
        linalg.matrix_power(np.eye(2), 1.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"multi_dot: got 1 matrix, expected two or more"):
        linalg.multi_dot([np.eye(2)])
    with pytest.raises(ShapeError, match=r"cond: x has shape \(0, 0\), expected elements"):
        linalg.cond(np.zeros((0, 0)))


def test_all_names_are_there() -> None:
    assert [name for name in linalg.__all__ if not callable(getattr(linalg, name))] == []


def test_tensor_equations_and_triangles_are_refused() -> None:
    x = Tensor(np.ones((2, 3, 4)))
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: linalg.tensorinv(x), ShapeError, r"tensorinv: x has shape \(2, 3, 4\), expected"),
        (lambda: linalg.tensorinv(x, 0), ArgumentError, "tensorinv: ind is 0, expected 1 to 3"),
        (lambda: linalg.tensorsolve(x, x[0]), ShapeError, "tensorsolve: a has shape"),
        (lambda: linalg.eigh(x[:, :2, :2], "X"), ArgumentError,  # type: ignore[arg-type]
         "eigh: UPLO is 'X', expected one of 'L', 'U'"),
    ]  # fmt: skip
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()


def test_eigh_reads_one_triangle() -> None:
    x = np.array([[2.0, 7.0], [1.0, 3.0]])
    for triangle, other in (("L", 1.0), ("U", 7.0)):
        symmetric = np.array([[2.0, other], [other, 3.0]])
        found = linalg.eigvalsh(x, triangle)  # type: ignore[arg-type]
        np.testing.assert_allclose(found.numpy(), np.linalg.eigvalsh(symmetric))


def test_ranks(device: str) -> None:
    x = Tensor(backend.to_device(np.stack([np.eye(3), np.diag([1, 1e-3, 0])]), device))
    assert linalg.matrix_rank(x).numpy().tolist() == [3, 2]
    assert linalg.matrix_rank(x, rtol=0.1).numpy().tolist() == [3, 1]
    each = Tensor(backend.to_device(np.array([2.0, 1e-4]), device))
    assert linalg.matrix_rank(x, rtol=each).numpy().tolist() == [0, 2]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3)])
def test_norms_of_matrices_without_elements(shape: tuple[int, ...]) -> None:
    for order in ("fro", "nuc", 2, 1, math.inf):
        y = linalg.matrix_norm(Tensor(np.zeros(shape)), ord=order)
        np.testing.assert_array_equal(y.numpy(), np.zeros(shape[:-2]))


@pytest.mark.parametrize("order", [-np.inf, -3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, np.inf])
def test_norms_of_vectors_with_zeros_and_infinities(order: float) -> None:
    vectors = np.array([[0, 0, 0], [0, 2, -1], [3, -np.inf, 1], [0, np.inf, 0], [1, 2, -3.0]])
    with np.errstate(divide="ignore"):
        expected = np.linalg.norm(vectors, order, axis=1)
    x = Tensor(vectors, requires_grad=True)
    y = linalg.vector_norm(x, axis=1, ord=order)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-14)
    if order not in (0, -np.inf, np.inf):
        y[:2].sum().backward()
        assert x.grad is not None
        assert np.isfinite(x.grad[:2]).all()
        assert (x.grad[0] == 0).all()
