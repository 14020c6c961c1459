"""Ops of one's own: values, gradients, what is kept, and errors that name the op."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, graph
from tensorgrad.autograd.function import Context
from tensorgrad.autograd.functions import jvp
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, DtypeError, GradError, ShapeError
from tests.derivatives import check_derivatives


class ScaledProduct(tg.Function):
    """Return scale * a * b, and which elements of a are positive."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ctx.scale = scale
        ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b)
        return scale * a * b, a > 0

    @staticmethod
    def backward(ctx: Context, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        return ctx.scale * b * dy, None if a is None else ctx.scale * a * dy, None


def product(a: Tensor, b: Tensor) -> Tensor:
    y: Tensor = ScaledProduct.apply(a, b, 3.0)[0]
    return y


def normal(*shape: int, seed: int = 0, device: str = "cpu", dtype: Any = "float32") -> Tensor:
    values = np.random.default_rng(seed).standard_normal(shape)
    return tg.tensor(values, dtype, device=device, requires_grad=True)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_values_and_gradients(device: str, dtype: str) -> None:
    a, b = normal(5, device=device, dtype=dtype), normal(5, seed=1, device=device, dtype=dtype)
    y, positive = ScaledProduct.apply(a, b, 3.0)
    assert y.requires_grad
    assert not positive.requires_grad
    assert positive.tolist() == (a.numpy() > 0).tolist()
    y.sum().backward()
    expected = 3 * a * b
    assert y.tolist() == expected.tolist()
    assert a.grad is not None
    assert a.grad.dtype == a.dtype
    assert a.grad.tolist() == (3 * b).tolist()
    assert product(a, b.detach()).requires_grad
    with tg.no_grad():
        assert not product(a, b).requires_grad
    tg.gradcheck(product, [a, b])


def test_a_gradient_that_the_op_holds_is_not_added_to() -> None:
    class Shift(tg.Function):
        one = tg.ones(3)

        @staticmethod
        def forward(ctx: Context, x: Tensor) -> Tensor:
            return x + 1

        @staticmethod
        def backward(ctx: Context, dy: Tensor) -> Tensor:
            with pytest.raises(ValueError, match="read-only"):
                dy *= 2
            return Shift.one

    x = normal(3)
    for _ in range(2):
        Shift.apply(x).sum().backward()
    assert Shift.one.tolist() == [1, 1, 1]
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


def test_results_that_nothing_depends_on_get_zeros() -> None:
    class Both(tg.Function):
        @staticmethod
        def forward(ctx: Context, x: Tensor) -> list[Tensor]:
            return [x * 2, x[:2] * 3]

        @staticmethod
        def backward(ctx: Context, dy: Tensor, dz: Tensor) -> Tensor:
            assert dz.shape == (2,)
            return 2 * dy + tg.concatenate([3 * dz, tg.zeros(1, dz.dtype)])

    x = normal(3)
    first, second = Both.apply(x)
    (5 * first).sum().backward(retain_graph=True)
    assert x.grad is not None
    assert x.grad.tolist() == [10, 10, 10]
    (first.sum() + second.sum()).backward()
    assert x.grad.tolist() == [15, 15, 12]
    tg.gradcheck(Both.apply, [x])


def test_backward_has_the_autocast_of_forward_and_records_nothing() -> None:
    class Product(tg.Function):
        @staticmethod
        def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            assert not (dy @ normal(3, 3)).requires_grad
            return dy @ b.T, a.T @ dy

    a, b = normal(3, 3), normal(3, 3, seed=1)
    dy = normal(3, 3, seed=2).data
    grads: list[Any] = []
    for f in (Product.apply, tg.matmul, tg.checkpoint(Product.apply)):
        a.grad = None
        with tg.autocast("bfloat16"):
            y = f(a, b)
        assert y.dtype == "bfloat16"
        y.backward(dy)
        grads.append(a.grad)
    np.testing.assert_allclose(grads[0], grads[1], rtol=2**-7)
    np.testing.assert_array_equal(grads[0], grads[2])
    exact = dy @ b.numpy().T
    assert np.abs(grads[0] - exact).max() > 1e-4 * np.abs(exact).max()  # it was in 16 bits


def test_what_is_kept_is_freed_and_must_not_change() -> None:
    a, b = normal(3), normal(3, seed=1)
    middle = b * 1
    kept = weakref.ref(middle.data)
    y = product(a, middle)
    del middle
    assert kept() is not None
    y.sum().backward()
    assert kept() is None
    with pytest.raises(GradError, match="the graph of ScaledProduct was freed"):
        y.sum().backward()
    y = product(a, b)
    with tg.no_grad():
        b += 1
    with pytest.raises(GradError, match="ScaledProduct needs an array of shape"):
        y.sum().backward()


def returning(gradient: Any) -> Any:
    """Return the backward of an op whose backward returns this."""

    class Wrong(tg.Function):
        @staticmethod
        def forward(ctx: Context, x: Tensor, *rest: Any) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Context, dy: Tensor) -> Any:
            return gradient

    return Wrong.apply(normal(2, 3), 7).sum().backward


ERRORS: list[tuple[Any, type[Exception], str]] = [
    (tg.ones(3), GradError, "Wrong.backward returned 1 gradients, expected 2: one for each"),
    ((tg.ones(3), None), ShapeError, r"the gradient of x has shape \(3,\), expected \(2, 3\)"),
    ((np.ones((2, 3)), None), DtypeError, "the gradient of x is a ndarray, expected a tensor"),
    ((tg.ones((2, 3), "int32"), None), DtypeError, "of x has dtype int32, expected a float"),
    ((None, tg.ones(1)), GradError, "of argument 1 is a Tensor, expected None: it is not a ten"),
]


@pytest.mark.parametrize(("gradient", "error", "message"), ERRORS)
def test_wrong_gradients(gradient: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        returning(gradient)()


def test_wrong_uses() -> None:
    class Nothing(tg.Function):
        @staticmethod
        def forward(ctx: Context, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x.data

    with pytest.raises(ArgumentError, match=r"Nothing: got a call of the class, expected Nothing"):
        Nothing()
    with pytest.raises(DtypeError, match=r"Nothing\.forward returned ndarray, expected tensors"):
        Nothing.apply(normal(2))
    with pytest.raises(DtypeError, match="Nothing: save_for_backward got a int, expected tensors"):
        Nothing.apply(3)


@pytest.mark.gpu
def test_it_is_captured_with_the_bits_of_eager_calls() -> None:
    def step(a: Any, b: Any) -> tuple[Any, Any]:
        a, b = Tensor(a, requires_grad=True), Tensor(b)
        y = product(a, b)
        y.backward(y.data)
        return y.data, a.grad

    captured = graph.capture(step, "cuda")
    for seed in range(4):  # eager, captured, replayed
        a, b = (normal(1025, seed=2 * seed + i, device="cuda").data for i in range(2))
        for got, expected in zip(captured(a, b), step(a, b), strict=True):
            np.testing.assert_array_equal(backend.to_numpy(got), backend.to_numpy(expected))


class ExpAndProduct(tg.Function):
    """Return exp(a b) and scale sin(a) exp(b), with derivatives of every kind."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        y, z = tg.exp(a * b), scale * tg.sin(a) * tg.exp(b)
        ctx.scale = scale
        ctx.save_for_backward(a, None, b, y, z)
        return y, z

    @staticmethod
    def backward(ctx: Context, dy: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:
        a, _, b, y, z = ctx.saved_tensors
        return b * y * dy + ctx.scale * tg.cos(a) * tg.exp(b) * dz, a * y * dy + z * dz, None

    @staticmethod
    def jvp(ctx: Context, ta: Tensor | None, tb: Tensor | None, _: None) -> Any:
        a, _, b, y, z = ctx.saved_tensors
        ta = Tensor(np.zeros(a.shape)) if ta is None else ta
        tb = Tensor(np.zeros(b.shape)) if tb is None else tb
        return y * (b * ta + a * tb), ctx.scale * tg.cos(a) * tg.exp(b) * ta + z * tb


def chained(a: Tensor, b: Tensor) -> Any:
    return ExpAndProduct.apply(*ExpAndProduct.apply(a * 0.3, b * 0.3, 2.0), 0.5)


@pytest.mark.parametrize(
    "f",
    [
        lambda a, b: ExpAndProduct.apply(a, b, 2.0),
        lambda a, b: ExpAndProduct.apply(a, b, 2.0)[1] * a,
        lambda a, b: ExpAndProduct.apply(a, Tensor(np.arange(3.0)), 2.0)[0] * b,
        chained,
    ],
)
def test_derivatives_of_every_kind(f: Any) -> None:
    check_derivatives(f, np.array([0.5, -0.3, 0.2]), np.array([0.1, 0.4, -0.2]))


def test_an_op_without_a_jvp_is_named() -> None:
    a, b = Tensor(np.ones(2)), Tensor(np.ones(2))
    expected = r"ScaledProduct: the op has no tangent, expected a staticmethod ScaledProduct\.jvp"
    with pytest.raises(GradError, match=expected):
        jvp(lambda a: product(a, b), (a,), (b,))
    with pytest.raises(GradError, match=expected):
        tg.grad(lambda a: tg.grad(lambda a: (product(a, b) ** 2).sum())(a).sum())(a)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda t: (t, t), GradError, "jvp returned 2 tangents, expected 1"),
        (lambda t: t.numpy(), DtypeError, "the tangent is a ndarray, expected a tensor"),
        (lambda t: t > 0, DtypeError, "the tangent has dtype bool, expected a float"),
        (lambda t: t.sum(), ShapeError, r"the tangent has shape \(\), expected \(2,\)"),
    ],
)
def test_wrong_tangents_are_named(wrong: Any, error: type[Exception], message: str) -> None:
    class Wrong(tg.Function):
        @staticmethod
        def forward(ctx: Context, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def jvp(ctx: Context, t: Tensor) -> Any:
            return wrong(t)

    with pytest.raises(error, match=message):
        jvp(Wrong.apply, (Tensor(np.ones(2)),), (Tensor(np.ones(2)),))
