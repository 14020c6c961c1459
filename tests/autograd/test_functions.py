"""Derivatives of functions: values, structures, nesting in any mix, and errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, autograd, nn
from tensorgrad.errors import ArgumentError, DeviceError, DtypeError, GradError, ShapeError
from tests.gpu_array import on_gpu

Function = Callable[[Any], Any]


def scalar(value: float) -> Tensor:
    return Tensor(np.array(value))


def vector(*values: float) -> Tensor:
    return Tensor(np.array(values))


def cubic(x: Tensor) -> Tensor:
    return tg.sin(x) * x * x


ONE = scalar(1.0)
WAYS: dict[str, Callable[[Function], Function]] = {
    "grad": tg.grad,
    "jvp": lambda f: lambda x: tg.jvp(f, (x,), (ONE,))[1],
    "vjp": lambda f: lambda x: tg.vjp(f, x)[1](ONE)[0],
    "linearize": lambda f: lambda x: tg.linearize(f, x)[1](ONE),
    "jacobian": tg.jacobian,
}
S, C = math.sin(0.7), math.cos(0.7)
DERIVATIVES = {  # by order: the derivatives of sin(x) x^2 at 0.7
    1: 0.49 * C + 1.4 * S,
    2: -0.49 * S + 2.8 * C + 2 * S,
    3: -0.49 * C - 4.2 * S + 6 * C,
    4: 0.49 * S - 5.6 * C - 12 * S,
}


def assert_plain(*results: Tensor) -> None:
    """Check that tensors have no graph and no tangents."""
    for x in results:
        assert not x.requires_grad
        assert x.node is None
        assert not hasattr(x, "tangents")


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_derivatives_nest_in_any_mix(order: int) -> None:
    names = {3: ["grad", "jvp", "linearize"], 4: ["grad", "jvp"]}.get(order, list(WAYS))
    for mix in itertools.product(names, repeat=order):
        f: Function = cubic
        for name in mix:
            f = WAYS[name](f)
        found = f(scalar(0.7))
        assert abs(found.item() - DERIVATIVES[order]) < 1e-10, mix
        assert_plain(found)
        with tg.no_grad():
            again = f(scalar(0.7))
        assert again.item() == found.item(), mix
        assert_plain(again)


@pytest.mark.parametrize("outer", WAYS)
@pytest.mark.parametrize("inner", WAYS)
def test_derivatives_are_not_confused(outer: str, inner: str) -> None:
    """d/dx x d/dy (x + y) is 1, and d/dx x d/dy (x y) is 2 x."""
    for f, expected in ((lambda x, y: x + y, 1.0), (lambda x, y: x * y, 4.0)):

        def product(x: Tensor, f: Any = f) -> Any:
            return x * WAYS[inner](lambda y: f(x, y))(ONE)

        found = WAYS[outer](product)(scalar(2.0))
        assert found.item() == expected
        assert_plain(found)


@pytest.mark.parametrize("name", WAYS)
def test_what_does_not_depend_on_the_argument_has_a_derivative_of_zero(name: str) -> None:
    w = Tensor(np.array(5.0), requires_grad=True)
    for f in (lambda x: ONE, lambda x: ONE * 2, lambda x: w, lambda x: w * x.detach()):
        assert WAYS[name](f)(scalar(3.0)).item() == 0.0
        assert WAYS[name](WAYS[name](f))(scalar(3.0)).item() == 0.0
    assert w.grad is None


@pytest.mark.parametrize("name", ["grad", "vjp", "linearize", "jacobian"])
def test_results_leave_tensors_outside_alone(name: str) -> None:
    w = Tensor(np.array(5.0), requires_grad=True)
    found = WAYS[name](lambda x: x * x * w)(scalar(3.0))
    assert found.item() == 30.0
    assert_plain(found)
    assert w.grad is None


def test_gradients_flow_through_jvp_to_tensors_outside() -> None:
    w = Tensor(np.array(5.0), requires_grad=True)
    x = Tensor(np.array(3.0), requires_grad=True)
    y, dy = tg.jvp(lambda x: x * x * w * w, (x,), (ONE,))  # 2 x w^2
    assert (y.item(), dy.item()) == (225.0, 150.0)
    dy.backward()
    assert w.grad == 4 * 3.0 * 5.0
    assert x.grad == 2 * 25.0
    w.grad = None
    inner = tg.jvp(tg.grad(lambda x: x * x * x * w), (scalar(2.0),), (ONE,))[1]  # 6 x w
    inner.backward()
    assert w.grad == 12.0
    with tg.no_grad():
        y, dy = tg.jvp(lambda x: x * w, (x,), (ONE,))
    assert_plain(y, dy)


def test_aux_comes_back_without_a_graph() -> None:
    def f(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return (x * x).sum(), {"doubled": x * 2, "name": "f", "none": None}

    x = vector(1.0, 2.0)
    (y, aux), g = tg.value_and_grad(f, has_aux=True)(x)
    assert (y.item(), g.tolist(), aux["doubled"].tolist()) == (5.0, [2, 4], [2, 4])
    assert (aux["name"], aux["none"]) == ("f", None)
    g, aux2 = tg.grad(f, has_aux=True)(x)
    y3, dy, aux3 = tg.jvp(f, (x,), (vector(1.0, 0.0),), has_aux=True)
    y4, pullback, aux4 = tg.vjp(f, x, has_aux=True)
    y5, f_jvp, aux5 = tg.linearize(f, x, has_aux=True)
    assert (y3.item(), dy.item(), y4.item(), y5.item()) == (5.0, 2.0, 5.0, 5.0)
    assert pullback(1.0 * ONE)[0].tolist() == [2, 4]
    assert f_jvp(vector(0.0, 1.0)).item() == 4.0
    assert_plain(y, g, y3, dy, *[a["doubled"] for a in (aux, aux2, aux3, aux4, aux5)])
    outer = tg.grad(lambda x: tg.grad(f, has_aux=True)(x)[1]["doubled"].sum())(x)
    assert outer.tolist() == [2, 2]


class Pair(NamedTuple):
    u: Any
    v: Any


def tree_loss(p: Any, q: Any) -> Tensor:
    y: Tensor = (p["w"][0] ** 3 * q.u).sum() + (q.v * q.v * p["w"][1]).sum()
    return y


def test_arguments_and_results_are_trees() -> None:
    a, b, u, v = (vector(*values) for values in ([1.0, 2.0], [3.0], [4.0, 5.0], [6.0]))
    p: Any = {"w": (a, b), "none": None}
    q = Pair(u, v)
    gp, gq = tg.grad(tree_loss, (0, 1))(p, q)
    assert gp["w"][0].tolist() == [12, 60]
    assert gp["w"][1].tolist() == [36]
    assert gp["none"] is None
    assert type(gq) is Pair
    assert gq.u.tolist() == [1, 8]
    assert gq.v.tolist() == [36]
    tangents = {"w": (vector(1.0, 0.0), vector(0.0)), "none": None}, Pair(vector(0.0, 1.0), b)
    hp, hq = tg.hvp(tree_loss, (p, q), tangents)
    assert hp["w"][0].tolist() == [6 * 4, 3 * 4]
    assert hp["w"][1].tolist() == [2 * 6 * 3]
    assert hq.u.tolist() == [3, 0]
    assert hq.v.tolist() == [2 * 3 * 3]
    _, dy = tg.jvp(lambda p: {"sum": [p["w"][0] + 1, p["w"][1]]}, (p,), tangents[:1])
    assert [t.tolist() for t in dy["sum"]] == [[1, 0], [0]]
    pair, pullback = tg.vjp(lambda p: Pair(p["w"][0] * 2, p["w"][1]), p)
    assert type(pair) is Pair
    (found,) = pullback(pair)
    assert [t.tolist() for t in found["w"]] == [[4, 8], [3]]


class Net(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        self.a = nn.Parameter(np.array([1.0, 2.0]))
        self.tied = self.a
        self.b = nn.Parameter(np.array([0.5, 0.25]))
        self.fixed = nn.Parameter(np.array([3.0, 3.0]), requires_grad=False)
        self.register_buffer("count", Tensor(np.zeros(())))

    def forward(self, x: Tensor) -> Tensor:
        with tg.no_grad():
            self.count += 1
        return tg.exp(self.a * x) * self.b * self.tied * self.fixed


def test_a_module_is_an_argument_by_its_parameters() -> None:
    net, x = Net(), vector(0.5, 0.25)
    before = dict(vars(net))

    def loss(net: Net) -> Tensor:
        assert isinstance(net.a, nn.Parameter)
        assert net.tied is net.a
        assert net is not given
        return net(x).sum()

    given = net
    g = tg.grad(loss)(net)
    a, b = net.a.data, net.b.data
    e = np.exp(a * x.data)
    np.testing.assert_allclose(g.a.data, e * 3 * b * (1 + a * x.data))
    np.testing.assert_allclose(g.b.data, e * 3 * a)
    assert type(g) is Net
    assert g.tied is g.a
    assert g.fixed.tolist() == [0, 0]
    assert net.count.item() == 1.0
    assert vars(net) == before
    assert net.a.grad is None
    direction = Net()
    (h,) = tg.hvp(loss, (net,), (direction,))
    by_name = {"tied": direction.a, "b": direction.b}
    (same,) = tg.hvp(loss, (net,), (by_name,))
    (from_results,) = tg.hvp(loss, (net,), (g,))
    assert h.a.tolist() == same.a.tolist() != from_results.a.tolist()
    expected = e * 3 * b * (2 * x.data + a * x.data**2) * a + e * 3 * (1 + a * x.data) * b
    np.testing.assert_allclose(h.a.data, expected)
    found = tg.hessian(loss)(net)
    assert list(found) == ["a", "b"]
    product = found["a"]["a"].data @ a + found["a"]["b"].data @ b
    np.testing.assert_allclose(product, expected)
    # A model among the results, and one in a tree.
    y, dy = tg.jvp(lambda p: p["net"], ({"net": net},), ({"net": direction},))
    assert type(y) is type(dy) is Net
    assert dy.a.tolist() == direction.a.tolist()


def test_a_module_without_trainable_parameters_is_an_error() -> None:
    layer = nn.Linear(2, 1)
    for parameter in layer.parameters():
        parameter.requires_grad = False
    with pytest.raises(GradError, match="grad: argument 0 holds no tensors, expected some"):
        WAYS["grad"](lambda m: m(tg.ones((1, 2))).sum())(layer)


def test_jacobians_have_the_shapes_of_outputs_and_inputs() -> None:
    x, y = Tensor(np.arange(1.0, 7.0).reshape(2, 3)), scalar(2.0)
    found = tg.jacobian(lambda x, y: {"p": x * y, "s": [(x * x).sum() * y]}, (0, 1))(x, y)
    np.testing.assert_array_equal(found["p"][0].data.reshape(6, 6), 2 * np.eye(6))
    np.testing.assert_array_equal(found["p"][1].data, x.data)
    np.testing.assert_array_equal(found["s"][0][0].data, 4 * x.data)
    assert found["s"][0][1].item() == 91.0
    assert_plain(found["p"][0], found["s"][0][1])
    twice = tg.jacobian(lambda x, y: x * y, (1, -1))(x, y)
    assert twice[0].tolist() == twice[1].tolist() == x.tolist()


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_rows_and_columns_give_the_same_jacobian(rows: int) -> None:
    weights = Tensor(np.linspace(-1, 1, 3 * rows).reshape(rows, 3))
    x = vector(0.2, 0.3, 0.5)

    def f(x: Tensor) -> Tensor:
        return tg.sin((weights * x).sum(1))

    expected = np.cos(weights.data @ x.data)[:, None] * weights.data
    np.testing.assert_allclose(tg.jacobian(f)(x).data, expected)

    def second(x: Tensor) -> Tensor:
        return (tg.jacobian(f)(x) ** 2).sum()

    eps, unit = 1e-6, np.eye(3)
    ends = [[second(Tensor(x.data + s * eps * u)).item() for s in (1, -1)] for u in unit]
    numeric = [(high - low) / (2 * eps) for high, low in ends]
    np.testing.assert_allclose(tg.grad(second)(x).data, numeric, atol=1e-7)
    slopes = [tg.jvp(second, (x,), (Tensor(u),))[1].item() for u in unit]
    np.testing.assert_allclose(slopes, numeric, atol=1e-7)


def weighted_slope(f: Function, t: Tensor, x: Tensor) -> Tensor:
    return (tg.grad(f)(x) * t).sum()


def test_hessian_agrees_with_its_products_in_all_modes() -> None:
    x = vector(0.3, 0.7, -0.2)

    def f(x: Tensor) -> Tensor:
        return (tg.exp(x) * x).sum() * tg.sin(x).sum()

    h = tg.hessian(f)(x).data
    np.testing.assert_allclose(h, h.T, atol=1e-14)
    for k, unit in enumerate(np.eye(3)):
        t = Tensor(unit)
        columns = [
            tg.hvp(f, (x,), (t,))[0],
            tg.jvp(tg.grad(f), (x,), (t,))[1],
            tg.grad(partial(weighted_slope, f, t))(x),
            tg.vjp(tg.grad(f), x)[1](t)[0],
            tg.linearize(tg.grad(f), x)[1](t),
        ]
        for column in columns:
            np.testing.assert_allclose(column.data, h[:, k], atol=1e-14)
    assert tg.hessian(tg.sin)(x).shape == (3, 3, 3)


def test_gauss_newton_product() -> None:
    rng = np.random.default_rng(0)
    weights, x, t = (rng.standard_normal(shape) for shape in ((4, 3), 3, 3))

    def f(x: Tensor) -> dict[str, Tensor]:
        return {"y": tg.tanh((Tensor(weights) * x).sum(1))}

    def loss(y: dict[str, Tensor]) -> Tensor:
        return (tg.exp(y["y"]) * y["y"]).sum()

    z = np.tanh(weights @ x)
    j = (1 - z * z)[:, None] * weights
    expected = j.T @ ((2 + z) * np.exp(z) * (j @ t))
    (found,) = tg.ggnvp(f, loss, (Tensor(x),), (Tensor(t),))
    np.testing.assert_allclose(found.data, expected)
    assert_plain(found)
    (slope,) = tg.grad(lambda x: tg.ggnvp(f, loss, (x,), (Tensor(t),))[0].sum(), (0,))(Tensor(x))
    ends = [
        tg.ggnvp(f, loss, (Tensor(x + s * 1e-6 * t),), (Tensor(t),))[0].data.sum() for s in (1, -1)
    ]
    np.testing.assert_allclose((slope.data * t).sum(), (ends[0] - ends[1]) / 2e-6, rtol=1e-6)


def test_pullbacks_and_linearized_functions_are_called_again_and_differentiated() -> None:
    x, dy = vector(1.0, 2.0), vector(1.0, 1.0)
    _, pullback = tg.vjp(lambda x: x * x * x, x)
    assert pullback(dy)[0].tolist() == pullback(dy)[0].tolist() == [3, 12]
    assert tg.jvp(pullback, (dy,), (vector(2.0, 0.0),))[1][0].tolist() == [6, 0]
    assert tg.grad(lambda dy: (pullback(dy)[0] ** 2).sum())(dy).tolist() == [18, 288]
    _, f_jvp = tg.linearize(lambda x: x * x * x, x)
    assert f_jvp(dy).tolist() == f_jvp(dy).tolist() == [3, 12]
    assert tg.grad(lambda t: (f_jvp(t) ** 2).sum())(dy).tolist() == [18, 288]
    assert tg.jvp(f_jvp, (dy,), (vector(2.0, 0.0),))[1].tolist() == [6, 0]
    assert_plain(pullback(dy)[0], f_jvp(dy))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_results_have_the_dtypes_of_arguments_and_results(dtype: str) -> None:
    x, t = tg.ones((3,), dtype), tg.ones((3,), dtype)

    def f(x: Tensor) -> Tensor:
        return (x.astype("float32") * 2 * x).sum()

    y, dy = tg.jvp(f, (x,), (t,))
    assert (str(y.dtype), str(dy.dtype)) == (str(f(x).dtype), str(f(x).dtype))
    assert dy.item() == 12.0
    assert str(tg.hvp(f, (x,), (t,))[0].dtype) == dtype
    assert str(tg.vjp(f, x)[1](Tensor(np.ones_like(y.data)))[0].dtype) == dtype
    assert str(tg.jacobian(lambda x: x * 3)(x).dtype) == dtype


def test_derivatives_see_autocast() -> None:
    x = tg.ones((2,))
    with tg.autocast("bfloat16"):
        assert tg.hvp(lambda x: (x * x * x).sum(), (x,), (x,))[0].tolist() == [6, 6]


X = vector(1.0, 2.0)
TG: Any = tg


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: TG.jvp(3, (X,), (X,)), ArgumentError, "jvp: f is a int, expected a function"),
        (lambda: TG.jvp(cubic, X, (X,)), ArgumentError, "jvp: primals is a Tensor, expected a tu"),
        (lambda: TG.hvp(cubic, (X,), X), ArgumentError, "hvp: tangents is a Tensor, expected a"),
        (lambda: TG.jvp(cubic, (X,), ()), ArgumentError, "jvp: tangents holds 0, expected 1, one"),
        (lambda: TG.jvp(cubic, (X,), (ONE,)), ShapeError,
         r"jvp: tangents\[0\] has shape \(\), expected \(2,\), that of primals\[0\]"),
        (lambda: TG.jvp(cubic, (X,), (X.astype("float32"),)), DtypeError,
         r"jvp: tangents\[0\] has dtype float32, expected float64, that of primals\[0\]"),
        (lambda: TG.jvp(cubic, (X,), (Tensor(on_gpu(X.data)),)), DeviceError,
         r"jvp: tangents\[0\] is on cuda:0, expected cpu like primals\[0\]"),
        (lambda: TG.jvp(cubic, ({"w": X},), ({"w": [X]},)), ArgumentError,
         r"jvp: tangents\[0\]\['w'\] is a list, expected a tensor"),
        (lambda: TG.hvp(cubic, ([X, 3],), ([X, 3],)), DtypeError,
         r"hvp: primals\[0\]\[1\] has dtype int64, expected floats"),
        (lambda: TG.grad(cubic)({"w": [1]}), DtypeError,
         r"grad: argument 0\['w'\]\[0\] has dtype int64, expected floats"),
        (lambda: TG.vjp(cubic, "x"), DtypeError, r"vjp: primals\[0\] is a str, expected a tensor"),
        (lambda: TG.vjp(lambda: ONE), GradError, "vjp: the function holds no tensors, expected"),
        (lambda: TG.jvp(lambda x: 3.0, (X,), (X,)), GradError,
         "jvp: the function returned float, expected tensors"),
        (lambda: TG.jvp(lambda x: None, (X,), (X,)), GradError, "jvp: the function returned None"),
        (lambda: TG.vjp(lambda x: [x, {"n": 3}], X), GradError,
         r"vjp: the function returned int at \[1\]\['n'\], expected tensors"),
        (lambda: TG.linearize(lambda x: x > 1, X), DtypeError,
         "linearize: the function returned bool, expected floats; .* has_aux=True"),
        (lambda: TG.hvp(cubic, (X,), (X,)), GradError,
         r"hvp: the function returned shape \(2,\), expected a scalar tensor"),
        (lambda: TG.ggnvp(cubic, cubic, (X,), (X,)), GradError,
         r"ggnvp: the function returned shape \(2,\), expected a scalar tensor"),
        (lambda: TG.ggnvp(cubic, X, (X,), (X,)), ArgumentError, "ggnvp: loss is a Tensor"),
        (lambda: TG.vjp(cubic, X)[1](ONE), ShapeError, r"vjp: dy has shape \(\), expected \(2,\)"),
        (lambda: TG.vjp(cubic, X)[1]([X]), ArgumentError, "vjp: dy is a list, expected a tensor"),
        (lambda: TG.linearize(cubic, X)[1](), ArgumentError, "linearize: tangents holds 0, expec"),
        (lambda: TG.linearize(cubic, X)[1](ONE), ShapeError, r"linearize: tangents\[0\] has shape"),
        (lambda: TG.jacobian(cubic, 1)(X), ArgumentError, "jacobian: argnums has 1, expected"),
        (lambda: TG.grad(cubic, has_aux=True)(ONE), GradError,
         r"grad: the function returned Tensor, expected a pair \(result, aux\) with has_aux=True"),
        (lambda: TG.grad(cubic, has_aux=1), ArgumentError, "grad: has_aux is 1, expected True or"),
        (lambda: TG.jvp(lambda x: x.backward(X), (X,), (X,)), GradError,
         "backward: got a call inside of a function that jvp differentiates, expected .*grad"),
        (lambda: TG.functional_call(cubic, {}, X), ArgumentError,
         "functional_call: model is a function, expected a Module"),
    ],
)  # fmt: skip
def test_wrong_calls_are_errors_that_name_function_and_argument(
    call: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()
    assert not tg.grad(cubic)(ONE).requires_grad  # the modes were put back


def test_an_op_without_a_tangent_is_named() -> None:
    def odd(x: Tensor) -> Tensor:
        return autograd.record("odd", x.data * 2, [x], lambda dy, saved, needs: [dy * 2], ())

    x = scalar(3.0)
    assert tg.grad(odd)(x).item() == 2.0
    assert tg.vjp(odd, x)[1](ONE)[0].item() == 2.0
    derivatives: list[Callable[[], Any]] = [
        lambda: tg.jvp(odd, (x,), (ONE,)),
        lambda: tg.linearize(odd, x)[1](ONE),
        lambda: tg.hvp(odd, (x,), (ONE,)),
        lambda: tg.grad(tg.grad(odd))(x),
    ]
    for derivative in derivatives:
        with pytest.raises(GradError, match="odd: the op has a gradient and no tangent, expected"):
            derivative()


def test_arrays_that_are_assigned_to_are_named() -> None:
    x = vector(1.0, 2.0)
    w = vector(1.0, 2.0)
    _, pullback = tg.vjp(lambda x: x * w, x)
    _, f_jvp = tg.linearize(lambda x: x * w, x)
    w[0] = 3.0
    for call in (pullback, f_jvp):
        with pytest.raises(GradError, match=r"multiply needs an array of shape \(2,\) that was"):
            call(x)

    def assigns(x: Tensor) -> Tensor:
        x[0] = 1.0
        return x

    for name in ("grad", "jvp"):
        with pytest.raises(GradError, match="assign to a copy"):
            WAYS[name](assigns)(scalar(1.0))


def test_a_matrix_that_does_not_fit_says_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd.functions, "free_bytes", lambda device: 10**9)
    x = tg.zeros(1_000_000)
    calls: list[Any] = []

    def f(x: Tensor) -> Tensor:
        calls.append(x)
        return (x * x).sum()

    error = r"1,000,000 x 1,000,000 elements, 4,000.0 GB, expected at most the 1.0 GB that are free"
    with pytest.raises(MemoryError, match=f"hessian: the result has {error}"):
        tg.hessian(f)(x)
    assert calls == []
    with pytest.raises(MemoryError, match=r"jacobian: the result has .* jvp or vjp gives products"):
        tg.jacobian(lambda x: x * 2)(x)


def test_functional_call_replaces_parameters_and_buffers() -> None:
    net, x = Net(), vector(1.0, 1.0)
    given = Tensor(np.array([0.0, 1.0]), requires_grad=True)
    y = tg.functional_call(net, ({"tied": given}, {"count": scalar(7.0)}), x)
    np.testing.assert_allclose(y.data, np.exp(given.data) * net.b.data * given.data * 3)
    y.sum().backward()
    assert given.grad is not None
    np.testing.assert_allclose(given.grad, np.exp(given.data) * net.b.data * (1 + given.data) * 3)
    assert net.a.grad is None
    assert net.b.grad is not None
    assert net.count.item() == 0.0
    assert tg.functional_call(net, {}, x=x).tolist() == net(x).tolist()
    for wrong, kind, message in (
        ({"c": x}, ArgumentError, "parameters has 'c', expected names of the parameters and b"),
        ({"a": scalar(1.0)}, ShapeError, r"parameters\['a'\] has shape \(\), expected \(2,\)"),
        ({"a": given, "tied": x}, ArgumentError, "parameters has two tensors for 'tied'"),
        ({"a": Tensor(on_gpu(x.data))}, DeviceError, r"parameters\['a'\] is on cuda:0, expected"),
        (3, ArgumentError, "parameters is a int, expected tensors by name"),
    ):
        with pytest.raises(kind, match=f"functional_call: {message}"):
            tg.functional_call(net, wrong, x)
