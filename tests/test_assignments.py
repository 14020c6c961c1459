"""Augmented assignment: NumPy's, in place, and known to the graphs that need the old values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor, nn, no_grad
from tensorgrad.core import backend
from tensorgrad.dtypes import ALL, FLOATS, bfloat16, float16, float32, float64, is_float
from tensorgrad.errors import ArgumentError, DeviceError, DtypeError, GradError, ShapeError

ARITHMETIC: list[Callable[[Any, Any], Any]] = [
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ipow,
]
BITWISE: list[Callable[[Any, Any], Any]] = [operator.iand, operator.ior, operator.ixor]


def values(dtype: Any, *shape: int) -> Any:
    return np.random.default_rng(0).integers(1, 4, shape).astype(dtype)


@pytest.mark.filterwarnings("ignore::tensorgrad.errors.WideningWarning")
@pytest.mark.parametrize("f", ARITHMETIC)
@pytest.mark.parametrize("dtype", [float64, float32, np.dtype("int32"), np.dtype("uint8")], ids=str)
def test_arithmetic_is_numpys(f: Callable[[Any, Any], Any], dtype: Any) -> None:
    others = (2, 1.5, values(dtype, 3), values(float64, 2, 3), values("int64", 2, 3), np.float32(2))
    for other in others:
        for given in (other, Tensor(other) if isinstance(other, np.ndarray) else other):
            expected, base = values(dtype, 2, 3), values(dtype, 2, 3)
            x = y = Tensor(base)
            try:
                f(expected, other)
            except TypeError:  # NumPy's rule is same_kind
                with pytest.raises(DtypeError, match=r"=: the result has dtype \w+, which"):
                    f(x, given)
                np.testing.assert_array_equal(base, values(dtype, 2, 3))
                continue
            y = f(y, given)
            assert y is x
            assert x.data is base
            np.testing.assert_allclose(base, expected, rtol=1e-6)


@pytest.mark.parametrize("f", [*BITWISE, operator.ilshift, operator.irshift])
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64"])
def test_operators_of_bits(f: Callable[[Any, Any], Any], dtype: str) -> None:
    base, other = np.array([6, 3, 0, 127], dtype), np.array([1, 2, 3, 0], dtype)
    expected = f(base.copy(), other)
    x = Tensor(base)
    assert f(x, Tensor(other)) is x
    np.testing.assert_array_equal(base, expected)


@pytest.mark.parametrize("f", BITWISE)
def test_operators_of_bools(f: Callable[[Any, Any], Any]) -> None:
    a, b = np.array([True, True, False, False]), np.array([True, False, True, False])
    expected = f(a.copy(), b)
    for other in (b, Tensor(b)):
        x = Tensor(a.copy())
        assert f(x, other) is x
        np.testing.assert_array_equal(x, expected)


@pytest.mark.filterwarnings("ignore::tensorgrad.errors.WideningWarning")
def test_casts_follow_numpys_rule_for_every_pair_of_dtypes() -> None:
    dtypes = [dtype for dtype in ALL if dtype != bfloat16]
    for target in dtypes:
        for source in dtypes:
            expected, x = values(target, 3), Tensor(values(target, 3))
            try:
                expected += values(source, 3)
            except TypeError:
                with pytest.raises(DtypeError, match=r"\+=: the result has dtype"):
                    x += Tensor(values(source, 3))
            else:
                x += Tensor(values(source, 3))
            np.testing.assert_array_equal(x.numpy(), expected)
    for source in (float64, float32, np.dtype("int8"), np.dtype("bool")):
        x = Tensor(values(bfloat16, 3))
        x += Tensor(values(source, 3))
        assert x.dtype == bfloat16
        if source != np.bool_ and not is_float(source):
            with pytest.raises(DtypeError, match=r"\+=: the result has dtype bfloat16, which int8"):
                ARITHMETIC[0](Tensor(values(source, 3)), x)


def test_views_see_it() -> None:
    base = np.arange(12.0).reshape(3, 4)
    whole, row, column = Tensor(base), Tensor(base[1]), Tensor(base)[:, 2]
    whole *= 2
    assert row.tolist() == [8, 10, 12, 14]
    column -= 1
    assert whole[:, 2].tolist() == [3, 11, 19]
    whole[0] += 100
    whole[[0, 2], 3] += 1000
    assert base[:, 3].tolist() == [1106, 14, 1022]
    whole.T[1] += 1
    assert base[:, 1].tolist() == [103, 11, 19]
    empty, single = Tensor(np.ones((0, 3))), Tensor(np.array(1.0))
    empty += 1
    single += 1
    assert single.item() == 2


def test_a_matrix_product_in_place() -> None:
    x, square = Tensor(values(float32, 2, 3)), values(float32, 3, 3)
    expected = x.numpy() @ square
    x @= square
    np.testing.assert_array_equal(x, expected)
    with pytest.raises(ShapeError, match=r"@=: the result has shape \(2, 2\), expected \(2, 3\)"):
        x @= np.ones((3, 2), "float32")


def test_the_right_operand_may_overlap() -> None:
    base = np.arange(6.0)
    x = Tensor(base[1:])
    x += Tensor(base[:-1])
    np.testing.assert_array_equal(base, [0, 1, 3, 5, 7, 9])
    x -= x
    assert x.tolist() == [0] * 5
    square = Tensor(np.arange(4.0).reshape(2, 2))
    square += square.T
    assert square.tolist() == [[0, 3], [3, 6]]


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
def test_sixteen_bits_are_rounded_once(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal(1000).astype(dtype), rng.standard_normal(1000).astype(float32)
    x = Tensor(a.copy())
    x += b  # rounding b to 16 bits before would change about half of the sums
    np.testing.assert_array_equal(x.numpy(), (a.astype(float32) + b).astype(dtype))
    y = Tensor(a.copy())
    y *= 1.1
    np.testing.assert_array_equal(y.numpy(), (a.astype(float32) * float32.type(1.1)).astype(dtype))


def test_what_does_not_fit_changes_nothing() -> None:
    x = Tensor(np.ones((1, 3)))
    with pytest.raises(ShapeError, match=r"\+=: the result has shape \(2, 3\), expected \(1, 3\)"):
        x += np.ones((2, 3))
    with pytest.raises(ShapeError, match=r"add: a has shape \(1, 3\), b has shape \(2,\)"):
        x += np.ones(2)
    with pytest.raises(
        DtypeError, match="add: b is a str, expected a tensor, array, number or list"
    ):
        x += "no"
    fixed = np.ones(3)
    fixed.flags.writeable = False
    y = Tensor(fixed)
    with pytest.raises(ArgumentError, match=r"\*=: the tensor's memory is read-only"):
        y *= 2
    small = Tensor(np.ones(3, "uint8"))
    with pytest.raises(ArgumentError, match=r"add: .* is 300"):
        small += 300
    assert x.tolist() == [[1, 1, 1]]


def test_what_a_gradient_flows_through_is_refused() -> None:
    w = Tensor(np.ones(3), requires_grad=True)
    y, plain = w * 2, Tensor(np.ones(3))
    with pytest.raises(GradError, match=r"-=: the tensor of shape \(3,\) requires a gradient; .*"
                       r"under no_grad\(\)"):  # fmt: skip
        w -= 1
    with pytest.raises(GradError, match=r"\+=: the tensor of shape \(3,\) is the result of an op"):
        y += 1
    with pytest.raises(GradError, match=r"/=: the value requires a gradient, .* write a = a / b"):
        plain /= w
    with pytest.raises(GradError, match=r"\+=: the value requires a gradient"):
        plain += y
    assert w.tolist() == plain.tolist() == [1, 1, 1]
    with no_grad():
        plain += w
        y *= w
    assert plain.tolist() == [2, 2, 2]


def test_a_graph_that_needs_the_old_values_notices() -> None:
    x, w = Tensor(np.ones(3)), Tensor(np.ones(3), requires_grad=True)
    y = x * w
    x += 1
    with pytest.raises(GradError, match=r"multiply needs an array of shape \(3,\) that was assign"):
        y.sum().backward()
    y = (x * w).sum()
    with no_grad():
        w *= 2  # saved for the gradient of nothing that wants one: but by the op all the same
    with pytest.raises(GradError, match="was assigned to after the op ran"):
        y.backward()
    y = (x + w).sum()
    x += 1  # a sum keeps nothing
    y.backward()


def test_gradient_descent_by_hand_keeps_the_parameter() -> None:
    model = nn.Linear(3, 1, bias=False)
    weight, memory = model.weight, model.weight.data
    x = np.random.default_rng(0).standard_normal((8, 3)).astype(float32)
    losses = []
    for _ in range(3):
        loss = tg.square(model(x) - 1).mean()
        model.zero_grad()
        loss.backward()
        with no_grad():
            model.weight -= 0.1 * weight.grad  # type: ignore[operator]  # there is one
        losses.append(loss.item())
    assert model.weight is weight
    assert weight.data is memory
    assert weight.requires_grad
    assert losses == sorted(losses, reverse=True)


def test_autocast_casts_anew() -> None:
    w, x = Tensor(np.ones((2, 2), float32), requires_grad=True), np.ones((2, 2), float32)
    with tensorgrad.autocast("bfloat16"):
        assert (w @ x).tolist() == [[2, 2], [2, 2]]
        with no_grad():
            w += 1
        assert (w @ x).tolist() == [[4, 4], [4, 4]]


def test_fused_functions_refuse_it() -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        y += x
        return y

    with pytest.raises(ArgumentError, match="fuse: f uses __iadd__, expected elementwise ops"):
        tensorgrad.fuse(f)(np.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_devices_agree(dtype: Any) -> None:
    for f in ARITHMETIC[:4]:
        host, memory = values(dtype, 4, 5), backend.to_device(values(dtype, 4, 5), "cuda")
        one, two = Tensor(host), Tensor(memory)
        other = values(float32, 5)
        f(one, other), f(two, backend.to_device(other, "cuda"))
        f(one[1:, ::2], 3), f(two[1:, ::2], 3)
        assert two.data is memory
        np.testing.assert_allclose(
            two.numpy().astype(float64), one.numpy().astype(float64), rtol=1e-6
        )


@pytest.mark.gpu
def test_cupys_gradients_update_a_leaf_in_place() -> None:
    cupy: Any = backend.cupy
    w = Tensor(cupy.ones((2, 3), float32), requires_grad=True)
    (w * 3).sum().backward()
    memory = w.data
    with no_grad():
        w -= 0.5 * w.grad  # type: ignore[operator]  # there is one
    assert w.data is memory
    assert w.tolist() == [[-0.5] * 3] * 2
    with no_grad(), pytest.raises(DeviceError, match="subtract: b is on cpu, expected cuda:0"):
        w -= np.ones(3)
    base = cupy.arange(6.0)
    x = Tensor(base[1:])
    x += Tensor(base[:-1])
    assert base.tolist() == [0, 1, 3, 5, 7, 9]
