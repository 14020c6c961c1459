"""Softmax and log_softmax against NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, DtypeError, GradError, ShapeError
from tensorgrad.testing import Case, Ulps, check, sized


def softmax(x: Any, axis: int = -1) -> Any:
    powers = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis, keepdims=True)


def masked(x: Any, mask: Any, scale: float = 1.0, axis: int = -1) -> Any:
    z = np.where(mask, scale * x, -np.inf) if mask.dtype == bool else scale * x + mask
    peak = z.max(axis, keepdims=True)
    powers = np.exp(z - np.where(np.isfinite(peak), peak, 0))
    total = powers.sum(axis, keepdims=True)
    return powers / np.where(total == 0, 1, total)


def causal(x: Any, scale: float = 1.0) -> Any:
    queries, keys = x.shape[-2:]
    return masked(x, np.tri(queries, keys, keys - queries, dtype=bool), scale)


def log_softmax(x: Any, axis: int = -1) -> Any:
    return np.log(softmax(x, axis))


def bits(shape: tuple[int, ...]) -> Any:
    """Return a mask that allows two thirds, and nothing in the first row."""
    mask = np.random.default_rng(3).random(shape) < 2 / 3
    mask[(0,) * (len(shape) - 1)] = False
    return mask


def added(shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(3).standard_normal(shape)


def bounded(case: Case, scale: float = 1.0) -> Case:
    """Bound gradients by what they subtract: dy and, over the row, the sum of dy weighted."""

    def magnitudes(*arrays: Any) -> list[Any]:
        y, dy = case.reference(*arrays[:-1]), abs(arrays[-1])
        if case.name.startswith("log_softmax"):  # exp(y) of a y that is kept in the dtype
            dx = dy + np.exp(y) * (1 + abs(y)) * dy.sum(case.axis, keepdims=True)
        else:
            dx = scale * y * (dy + (y * dy).sum(case.axis, keepdims=True))
        return [abs(y), dx, *[None] * (len(case.inputs) - 1)]

    return replace(case, values=Ulps(4), gradients=Ulps(2, "terms"), magnitudes=magnitudes)


CASES = [
    *(bounded(case) for case in sized(tg.softmax, lambda n: [(3, n)], softmax, terms=1025)),
    *(
        bounded(Case(tg.softmax, [s], softmax, terms=s[-1], name="softmax"))
        for s in ((7,), (1, 1), (2, 3, 1023), (0, 4))
    ),
    *(
        bounded(case)
        for case in sized(
            tg.log_softmax, lambda n: [(3, n)], log_softmax, terms=1025, name="log_softmax"
        )
    ),
    *(
        bounded(Case(lambda x, a=a: tg.softmax(x, a), [(5, 33, 4)], lambda x, a=a: softmax(x, a),
                     terms=33, axis=a, name=f"softmax-axis{a}"))
        for a in (0, 1, -3)
    ),
    bounded(Case(
        lambda x: tg.log_softmax(x, 0), [(65, 3)], lambda x: log_softmax(x, 0),
        terms=65, axis=0, name="log_softmax-axis0",
    )),
    bounded(Case(
        lambda x: tg.softmax(x, scale=0.25), [(3, 33)], lambda x: softmax(0.25 * x),
        terms=33, name="softmax-scale",
    ), 0.25),
    *(
        bounded(Case(lambda x: tg.softmax(x, scale=0.5, causal=True), [s],
                     lambda x: causal(x, 0.5), terms=s[-1], name="softmax-causal"), 0.5)
        for s in ((4, 4), (2, 3, 7, 40), (2, 9, 5), (1, 300, 264))
    ),
    *(
        bounded(Case(lambda x, m: tg.softmax(x, scale=0.5, mask=m), [(2, 3, 5, w), bits(shape)],
                     lambda x, m: masked(x, m, 0.5), terms=w, name=f"softmax-bool-{shape}"), 0.5)
        for w in (8, 33, 264, 300)
        for shape in ((2, 3, 5, w), (2, 1, 1, w), (5, 1), (3, 1, w))
    ),
    *(
        Case(lambda x, m: tg.softmax(x, mask=m.data), [(2, 3, 5, w), added(shape)],
             lambda x, m: masked(x, m), values=Ulps(4), terms=w, gradient=False,
             name=f"softmax-added-{shape}")
        for w in (8, 33, 264, 300)
        for shape in ((1, 3, 1, w), (5, w), ())
    ),
    bounded(Case(
        lambda x, m: tg.softmax(x, 1, mask=m), [(4, 9, 3), bits((9, 1))],
        lambda x, m: masked(x, m, axis=1), terms=9, axis=1, name="softmax-bool-axis1",
    )),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_large_values_do_not_overflow(dtype: str) -> None:
    x = Tensor(np.array([[6e4, 5.9e4, 0]], dtype), requires_grad=True)
    np.testing.assert_array_equal(tg.softmax(x).numpy(), [[1, 0, 0]])
    y = tg.log_softmax(x)
    np.testing.assert_array_equal(y.numpy(), x.numpy() - x.numpy()[:, :1])
    y.backward(np.array([[1, 0, 0]], dtype))
    np.testing.assert_array_equal(x.grad, [[0, 0, 0]])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", [7, 64, 1024, 5000, 70_001])  # each kernel
def test_log_softmax_keeps_its_digits(width: int, dtype: str, device: str) -> None:
    """Also where the logits are large or share an offset, and in the gradient."""
    rng = np.random.default_rng(width)
    eps = float(np.finfo(dtype).eps)
    for scale, offset in ((30, 0), (1, 4096), (100, -4096)):
        x = (rng.standard_normal((4, width)) * scale + offset).astype(dtype)
        dy = rng.uniform(0.5, 1, x.shape).astype(dtype)
        t = Tensor(backend.to_device(x, device), requires_grad=True)
        y = tg.log_softmax(t)
        y.backward(backend.to_device(dy, device))
        wide = x.astype("longdouble")
        exact = wide - wide.max(-1, keepdims=True)
        exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
        size = np.abs(exact)
        assert (np.abs(y.numpy() - exact) <= eps * (2 * size + 8)).all()
        powers, total = np.exp(exact), dy.astype("longdouble").sum(-1, keepdims=True)
        slopes = dy - powers * total
        bound = eps * (2 * np.abs(dy) + powers * total * (2 * size + 16))
        assert (np.abs(backend.to_numpy(t.grad) - slopes) <= bound).all()


def test_values_of_minus_infinity_have_no_share() -> None:
    x = Tensor(np.array([0.0, -np.inf, 0.0]), requires_grad=True)
    y = tg.softmax(x)
    y.backward(np.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(y.numpy(), [0.5, 0, 0.5])
    np.testing.assert_array_equal(x.grad, [-0.5, 0, 0.5])


def test_rows_without_anything_allowed_are_zero() -> None:
    x = Tensor(np.ones((2, 3), "float32"), requires_grad=True)
    y = tg.softmax(x, mask=np.array([[0.0], [-np.inf]]))
    y.backward(np.arange(6, dtype="float32").reshape(2, 3))
    np.testing.assert_allclose(y.numpy(), [[1 / 3] * 3, [0.0] * 3], rtol=1e-6)
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad[1], [0, 0, 0])
    np.testing.assert_array_equal(tg.softmax(x, causal=True).numpy()[0], [0.5, 0.5, 0])


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(DtypeError, match="softmax: x has dtype int64, expected a float"):
        tg.softmax(Tensor(np.arange(3)))
    with pytest.raises(ArgumentError, match="log_softmax: axis is 2, expected -2 to 1"):
        tg.log_softmax(Tensor(np.ones((2, 3))), 2)
    with pytest.raises(ArgumentError, match="softmax: axis is -1, expected none: it has no axes"):
        tg.softmax(Tensor(np.ones(())))
    x = Tensor(np.ones((2, 3)))
    with pytest.raises(ShapeError, match=r"mask has shape \(2,\), expected one that broadcasts"):
        tg.softmax(x, mask=np.ones(2, bool))
    with pytest.raises(DtypeError, match="mask has dtype int64, expected bool or a float"):
        tg.softmax(x, mask=np.ones(3, int))
    with pytest.raises(GradError, match="mask requires a gradient"):
        tg.softmax(x, mask=Tensor(np.ones(3), requires_grad=True))
    with pytest.raises(ArgumentError, match=r"axis is 0, expected 1 \(the last\) for causal"):
        tg.softmax(x, 0, causal=True)
    with pytest.raises(ShapeError, match=r"x has shape \(3,\), expected \(..., Tq, Tk\)"):
        tg.softmax(Tensor(np.ones(3)), causal=True)


def test_defaults_and_scales() -> None:
    x = np.array([[1.0, 2.0], [4.0, 0.0]])
    for op in (tg.softmax, tg.log_softmax):
        np.testing.assert_array_equal(op(x).numpy(), op(x, -1).numpy())
        np.testing.assert_allclose(op(x, 0).numpy(), op(x.T, 1).numpy().T)
    np.testing.assert_allclose(tg.softmax(x, scale=0).numpy(), np.full((2, 2), 0.5))
    np.testing.assert_allclose(tg.softmax(x, scale=2).numpy(), softmax(2 * x))
    causal = tg.softmax(x, -1, causal=True)
    np.testing.assert_array_equal(causal.numpy(), tg.softmax(x, causal=True).numpy())
    with pytest.raises(ArgumentError, match="softmax: scale is 'a', expected a number"):
        tg.softmax(x, scale="a")  # type: ignore[arg-type]


def test_a_dtype_is_computed_in_and_returned() -> None:
    x = Tensor(np.array([[1.0, 2.0, 4.0]], "float16"), requires_grad=True)
    for op in (tg.softmax, tg.log_softmax, tg.nn.functional.softmin):
        y = op(x, -1, dtype="float64")
        assert y.dtype == np.float64
        sign = -1.0 if op is tg.nn.functional.softmin else 1.0
        expected = softmax(sign * x.numpy().astype("float64"))
        expected = np.log(expected) if op is tg.log_softmax else expected
        np.testing.assert_allclose(y.numpy(), expected, 1e-12)
        y[0, 0].backward()
        assert x.grad is not None
        assert x.grad.dtype == np.float16


@pytest.mark.parametrize("op", [tg.softmax, tg.log_softmax])
def test_dim_is_named_axis(op: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"^{op.__name__}: got dim=1, expected axis=1$"):
        op(np.ones((2, 2)), dim=1)
