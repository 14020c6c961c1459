"""Complex numbers, which have no gradients, and Fourier transforms, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, DtypeError, GradError

rng = np.random.default_rng()
REAL_OPS = [
    "abs", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh", "conj", "cos", "cosh",
    "exp", "imag", "isfinite", "isinf", "isnan", "log", "logical_not", "negative", "positive",
    "real", "reciprocal", "round", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh",
]  # fmt: skip
PAIR_OPS = ["add", "divide", "equal", "matmul", "multiply", "not_equal", "power", "subtract"]
REDUCTIONS = ["all", "any", "cumsum", "mean", "prod", "sum"]
DTYPES = ["complex64", "complex128"]


def numbers(shape: Any, dtype: str) -> Any:
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


def assert_close(found: Tensor, expected: Any) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    bound = 2e-5 if expected.dtype.name in ("complex64", "float32") else 1e-12
    np.testing.assert_allclose(found.numpy(), expected, bound, bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [*REAL_OPS, *REDUCTIONS])
def test_one_operand(op: str, dtype: str, device: str) -> None:
    x = numbers((4, 5), dtype)
    given = Tensor(backend.to_device(x, device))
    options = {"axis": 1} if op in REDUCTIONS else {}
    assert_close(getattr(tg, op)(given, **options), getattr(np, op)(x, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", PAIR_OPS)
def test_two_operands(op: str, dtype: str, device: str) -> None:
    a, b = numbers((3, 4, 4), dtype), numbers((4, 4), dtype)
    given = [Tensor(backend.to_device(x, device)) for x in (a, b, a.real.copy())]
    assert_close(getattr(tg, op)(*given[:2]), getattr(np, op)(a, b))
    assert_close(getattr(tg, op)(given[2], given[1]), getattr(np, op)(a.real, b))
    if op not in ("matmul", "power"):
        assert_close(getattr(tg, op)(given[2], 2 - 1j), getattr(np, op)(a.real, 2 - 1j))


def test_products_conjugate_their_first_operand(device: str) -> None:
    a, b = numbers((3, 4), "complex128"), numbers((3, 4), "complex128")
    x, y = (Tensor(backend.to_device(each, device)) for each in (a, b))
    assert_close(tg.vecdot(x, y), np.vecdot(a, b))
    assert_close(tg.vdot(x, y), np.vdot(a, b))
    assert_close(tg.tensordot(x, y.T, 1), a @ b.T)
    assert_close(tg.einsum("ij,ij->i", x, y), np.einsum("ij,ij->i", a, b))
    assert_close(tg.where(tg.real(x) > 0, x, y), np.where(a.real > 0, a, b))


def test_decompositions_of_complex_matrices(device: str) -> None:
    a, b = numbers((2, 4, 4), "complex128"), numbers((2, 4, 3), "complex128")
    square = a @ a.conj().swapaxes(-1, -2) + np.eye(4)
    x, y, z = (Tensor(backend.to_device(each, device)) for each in (a, b, square))
    assert_close(tg.linalg.inv(x) @ x, np.broadcast_to(np.eye(4) + 0j, a.shape))
    assert_close(x @ tg.linalg.solve(x, y), b)
    assert_close(tg.linalg.det(x), np.linalg.det(a))
    sign, value = tg.linalg.slogdet(x)
    assert_close(sign * tg.exp(value), np.linalg.det(a))
    assert value.dtype == tg.float64
    upper = tg.linalg.cholesky(z, upper=True)
    assert_close(tg.conj(upper.mT) @ upper, square)
    values, vectors = tg.linalg.eigh(z)
    assert_close(z @ vectors, (vectors * values[..., None, :]).numpy())
    assert values.dtype == tg.float64
    u, s, vh = tg.linalg.svd(y, full_matrices=False)
    assert_close((u * s[..., None, :]) @ vh, b)
    q, r = tg.linalg.qr(y)
    assert_close(q @ r, b)
    for order in ("fro", "nuc", 1, 2, np.inf):
        assert_close(tg.linalg.matrix_norm(y, ord=order), np.linalg.norm(b, order, (-2, -1)))
    assert_close(tg.linalg.vector_norm(y, axis=-1), np.linalg.norm(b, axis=-1))


def test_transforms(device: str) -> None:
    for dtype, complex_dtype in (("float32", "complex64"), ("float64", "complex128")):
        real, z = rng.standard_normal((4, 6)).astype(dtype), numbers((4, 6), complex_dtype)
        x, y = Tensor(backend.to_device(real, device)), Tensor(backend.to_device(z, device))
        for op in ("fft", "ifft", "rfft", "ihfft"):
            for options in ({}, {"n": 5, "axis": 0, "norm": "ortho"}, {"n": 9, "norm": "forward"}):
                expected = getattr(np.fft, op)(real, **options)
                assert_close(getattr(tg.fft, op)(x, **options), expected)
        for op in ("fft", "ifft", "irfft", "hfft"):
            assert_close(getattr(tg.fft, op)(y, n=7), getattr(np.fft, op)(z, n=7))
        for op in ("fftn", "ifftn", "irfftn"):
            assert_close(getattr(tg.fft, op)(y), getattr(np.fft, op)(z))
            expected = getattr(np.fft, op)(z, (3, 8), (0, 1))
            assert_close(getattr(tg.fft, op)(y, (3, 8)), expected)
        assert_close(tg.fft.rfftn(x, axes=(1, 0)), np.fft.rfftn(real, axes=(1, 0)))
        assert_close(tg.fft.irfftn(tg.fft.rfftn(x)), real)
    assert_close(
        tg.fft.rfft(tg.ones(4, "bfloat16", device=device)), np.array([4, 0, 0], "complex64")
    )


def test_frequencies() -> None:
    for n in (1, 6, 7):
        assert_close(tg.fft.fftfreq(n, 0.5, dtype="float64"), np.fft.fftfreq(n, 0.5))
        assert_close(tg.fft.rfftfreq(n), np.fft.rfftfreq(n).astype("float32"))
        x = tg.arange(2.0 * n, requires_grad=True).reshape(2, n)
        assert_close(tg.fft.fftshift(x), np.fft.fftshift(x.numpy()))
        assert_close(tg.fft.ifftshift(tg.fft.fftshift(x, 1), 1), x.numpy())
    assert tg.fft.fftshift(x).requires_grad
    x = tg.arange(6.0).reshape(2, 3)
    for axes in (None, 0, (0, 1), -1):
        assert_close(tg.fft.fftshift(x, axes), np.fft.fftshift(x.numpy(), axes))
        assert_close(tg.fft.ifftshift(x, axes), np.fft.ifftshift(x.numpy(), axes))
    for name in ("fftfreq", "rfftfreq"):
        assert_close(getattr(tg.fft, name)(5), getattr(np.fft, name)(5).astype("float32"))
        wrong: list[tuple[Any, str]] = [
            (0, "n is 0, expected 1 or more"),
            (1.5, "n is 1.5, expected an int"),
        ]
        for count, message in wrong:
            with pytest.raises(ArgumentError, match=f"{name}: {message}"):
                getattr(tg.fft, name)(count)
        with pytest.raises(ArgumentError, match=f"{name}: d is 'a', expected a number"):
            getattr(tg.fft, name)(3, "a")


@pytest.mark.parametrize("op", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
def test_defaults_of_lines_are_numpys(op: str) -> None:
    x = rng.standard_normal((3, 4))
    ours, numpys = getattr(tg.fft, op), getattr(np.fft, op)
    assert_close(ours(x), numpys(x))
    assert_close(ours(x, axis=0), numpys(x, axis=0))
    for norm in ("backward", "ortho", "forward"):
        assert_close(ours(x, 5, norm=norm), numpys(x, 5, norm=norm))
    for wrong, message in (({"n": 0}, "n is 0, expected 1 or more"), ({"n": 1.5}, "n is 1.5, exp"),
                           ({"axis": 2}, "axis is 2, expected -2 to 1"),
                           ({"norm": None}, "norm is None, expected one of 'b")):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"{op}: {message}"):
            ours(x, **wrong)


@pytest.mark.parametrize("op", ["fftn", "ifftn", "rfftn", "irfftn"])
def test_defaults_of_several_axes_are_numpys(op: str) -> None:
    x = rng.standard_normal((3, 4, 5))
    ours, numpys = getattr(tg.fft, op), getattr(np.fft, op)
    assert_close(ours(x), numpys(x))
    assert_close(ours(x, axes=(2, 0)), numpys(x, axes=(2, 0)))
    assert_close(ours(x, (3, 4)), numpys(x, (3, 4), (1, 2)))
    for norm in ("backward", "ortho", "forward"):
        assert_close(ours(x, (2, 6), (0, 1), norm), numpys(x, (2, 6), (0, 1), norm))
    with pytest.raises(ArgumentError, match=f"{op}: axes is 3, expected -3 to 2"):
        ours(x, axes=(0, 3))
    with pytest.raises(ArgumentError, match=rf"{op}: s is \(2, 2\), expected 1 lengths"):
        ours(x, (2, 2), (0,))


def test_what_is_not_there_is_named() -> None:
    missing: Any = tg.fft
    with pytest.raises(AttributeError, match=r"tensorgrad\.fft"):
        missing.nothing()


def test_complex_numbers_carry_no_gradient(device: str) -> None:
    x = Tensor(backend.to_device(np.ones(3), device), requires_grad=True)
    with pytest.raises(DtypeError, match="got dtype complex64 with requires_grad, expected a flo"):
        tg.zeros(3, "complex64", device=device, requires_grad=True)
    calls: list[Any] = [
        lambda: tg.abs(x * 1j).sum(), lambda: (x * 2j).sum(), lambda: (x + 1j).sum()
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(GradError, match="input of float64 has dtype complex128, expected real"):
            call().backward()
        assert x.grad is None
    ops: list[Any] = [tg.real, tg.imag, tg.conj]
    for op in ops:
        with pytest.raises(GradError, match="x requires a gradient, expected one that does not"):
            op(x * 1j)
    with pytest.raises(GradError, match="rfft: x requires a gradient, expected one that does not"):
        tg.fft.rfft(x)
    assert_close(tg.real(tg.fft.rfft(x.detach())), np.array([3.0, 0.0]))


def test_what_complex_numbers_are_refused_for(device: str) -> None:
    z = Tensor(backend.to_device(numbers((2, 3), "complex64"), device))
    with pytest.raises(DtypeError, match="astype: x has dtype complex64, expected real numbers fo"):
        z.astype("float32")
    x = tg.ones((2, 3), device=device)
    with pytest.raises(DtypeError, match="the result has dtype complex64, which float32 of"):
        x += z
    with pytest.raises(DtypeError, match="complex64"):
        tg.var(z)
    with pytest.raises(DtypeError, match="x is complex, expected real numbers"):
        tg.fuse(lambda x: x * 2)(z)
    with pytest.raises(DtypeError, match="rfft: x has dtype complex64, expected real numbers"):
        tg.fft.rfft(z)
    for name in ("ihfft", "rfftn"):
        with pytest.raises(DtypeError, match=f"{name}: x has dtype complex64, expected real num"):
            getattr(tg.fft, name)(z)
    with pytest.raises(ArgumentError, match="fft: norm is 'both', expected one of 'back"):
        tg.fft.fft(z, norm="both")  # type: ignore[arg-type]  # a user may do it
    with pytest.raises(ArgumentError, match=r"fftn: s is \(2,\), expected 2 lengths"):
        tg.fft.fftn(z, (2,), (0, 1))
    with pytest.raises(DtypeError, match="fftfreq: dtype is int64, expected a float"):
        tg.fft.fftfreq(3, dtype="int64")


def test_dtypes() -> None:
    assert tg.tensor(1j).dtype == tg.asarray([1j, 2.0]).dtype == tg.complex64
    assert tg.full(2, 1j).dtype == (tg.ones(2) + 1j).dtype == tg.complex64
    assert (tg.ones(2, "float64") * 1j).dtype == tg.complex128
    assert tg.isdtype(tg.complex64, ("complex floating", "bool"))
    assert tg.isdtype(tg.complex64, "numeric")
    assert tg.finfo(tg.complex128).bits == 64
    assert tg.result_type(tg.float32, 1j) == tg.complex64
    assert complex(tg.tensor(1 + 2j)) == 1 + 2j
