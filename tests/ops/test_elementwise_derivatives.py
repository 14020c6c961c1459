"""Tangents and second and third derivatives of the elementwise table and of fused functions."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.functions import jvp
from tensorgrad.core.backend import BLOCK
from tensorgrad.dtypes import FLOATS, bfloat16, float16, float32, float64
from tensorgrad.errors import GradError
from tensorgrad.kernels.expression import FUNCTIONS, GRADIENTS, rule_of
from tensorgrad.ops import elementwise
from tensorgrad.ops.elementwise import activation
from tests.derivatives import check_derivatives

INF, NAN = math.inf, math.nan
ANY = np.array([-2.7, -1.6, -0.8, -0.3, 0.4, 1.1, 2.6])
OTHER = np.array([1.2, -0.7, 0.33, 2.1, -1.9, 0.8, -2.2])
POSITIVE = np.array([0.31, 0.62, 0.9, 1.3, 1.7, 2.2, 2.9])
UNIT = np.array([-0.83, -0.5, -0.21, 0.17, 0.33, 0.71, 0.9])
MASK = np.array([1, 0, 1, 1, 0, 0, 1])
MAPS = {
    "abs": ANY, "angle": ANY, "arccos": UNIT, "arccosh": POSITIVE + 1.1, "arcsin": UNIT,
    "arcsinh": ANY, "arctan": ANY, "arctanh": UNIT, "cbrt": ANY, "conj": ANY, "cos": ANY,
    "cosh": ANY, "deg2rad": ANY, "elu": ANY, "entr": POSITIVE, "erf": ANY, "erfc": ANY, "exp": ANY,
    "exp2": ANY, "expm1": ANY, "frac": ANY, "gelu": ANY, "leaky_relu": ANY, "log": POSITIVE,
    "log10": POSITIVE, "log1p": POSITIVE, "log2": POSITIVE, "logit": POSITIVE / 3,
    "nan_to_num": ANY, "ndtr": ANY, "negative": ANY, "positive": ANY, "rad2deg": ANY, "real": ANY,
    "reciprocal": ANY, "relu": ANY, "rsqrt": POSITIVE, "sigmoid": ANY, "silu": ANY, "sin": ANY,
    "sinc": ANY, "sinh": ANY, "softplus": ANY, "sqrt": POSITIVE, "square": ANY, "tan": UNIT,
    "tanh": ANY,
}  # fmt: skip
ZIPS = (
    "add", "arctan2", "bias_gelu", "copysign", "divide", "fmax", "fmin", "fmod", "heaviside",
    "hypot", "logaddexp", "logaddexp2", "maximum", "minimum", "multiply", "remainder", "subtract",
    "swiglu",
)  # fmt: skip
masked = tg.fuse(lambda x, mask, whole: tg.where(mask, x * whole, -x))
fused_sum = tg.fuse(lambda x, y: tg.tanh(x * y) + tg.where(x > y, tg.sin(x), y * y) / (2 + y * y))
DERIVATIVES: dict[str, tuple[Any, ...]] = {
    **{name: (getattr(tg, name), x) for name, x in MAPS.items()},
    **{name: (getattr(tg, name), ANY, OTHER) for name in ZIPS},
    "clip": (tg.clip, ANY, OTHER - 2, OTHER + 1),
    "clip below": (lambda x, low: tg.clip(x, low), ANY, OTHER),
    "clip above": (lambda x, high: tg.clip(x, None, high), ANY, OTHER),
    "divmod": (lambda a, b: tg.divmod(a, b)[1], ANY, OTHER),
    "elu alpha": (tg.elu, ANY, OTHER),
    "gelu tanh": (lambda x: tg.gelu(x, approximate="tanh"), ANY),
    "bias_gelu exact": (lambda x, b: tg.bias_gelu(x, b, approximate="none"), ANY, OTHER),
    "leaky_relu slope": (tg.leaky_relu, ANY, OTHER),
    "lerp": (tg.lerp, ANY, OTHER, UNIT),
    "power": (tg.power, POSITIVE, ANY),
    "power 2": (lambda x: x**2, ANY),
    "power 3": (lambda x: x**3, ANY),
    "power -1": (lambda x: x**-1.0, ANY),
    "power 0.5": (lambda x: x**0.5, POSITIVE),
    "power of 2.5": (lambda x: 2.5**x, ANY),
    "sinc near 0": (tg.sinc, ANY / 1000),
    "softplus beta": (lambda x: tg.softplus(x, 2.0), ANY),
    "where": (lambda a, b: tg.where(MASK, a, b), ANY, OTHER),
    "xlogy": (tg.xlogy, ANY, POSITIVE),
    "xlog1py": (tg.xlog1py, ANY, POSITIVE - 0.4),
    "xlogy at 0": (tg.xlogy, 0 * ANY, POSITIVE),
    "fused": (fused_sum, ANY, OTHER),
    "fused in fused": (tg.fuse(lambda x, y: fused_sum(x, x * y)), ANY, OTHER),
    "one operand twice": (lambda x: tg.multiply(x, x) / (x + x * x + 5), ANY),
}
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "0-d": ((), ()), "empty": ((0, 3), (3,)), "broadcast": ((3, 1), (1, 5)), "row": ((4, 7), (7,)),
    "scalar": ((3, 5), ()), "one element": ((1,), (1, 1, 1)),
}  # fmt: skip


def third(f: Callable[..., Any], *arrays: Any) -> tuple[float, float]:
    """Return the third derivative along a line, and a difference of the second ones."""
    rng = np.random.default_rng(1)
    directions = [rng.standard_normal(x.shape) for x in arrays]
    weights = rng.standard_normal(arrays[0].shape)

    def along(t: Tensor) -> Tensor:
        points = [Tensor(x) + t * Tensor(v) for x, v in zip(arrays, directions, strict=True)]
        y: Tensor = f(*points)
        return tg.sum(y * weights)

    first = tg.grad(along)
    second = tg.grad(lambda t: first(t))
    ends = [second(Tensor(np.array(step))).item() for step in (1e-5, -1e-5)]
    return tg.grad(lambda t: second(t))(Tensor(np.zeros(()))).item(), (ends[0] - ends[1]) / 2e-5


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_three_orders(name: str) -> None:
    f, *arrays = DERIVATIVES[name]
    check_derivatives(f, *arrays)
    found, expected = third(f, *arrays)
    assert abs(found - expected) < 1e-5 * max(abs(expected), 10), "third order"


def test_each_function_with_a_gradient_has_a_case() -> None:
    without = {"imag", "round", "nextafter"}
    wanted = {
        name
        for name in (*elementwise.__all__, *activation.__all__)
        if "Gradient: none" not in (getattr(tg, name).__doc__ or "")
    }
    assert wanted - without == {name.split()[0] for name in DERIVATIVES} - {"fused", "one"}


def test_each_function_of_expressions_has_gradients() -> None:
    symbols = {"+", "-", "*", "/", "<", "<=", ">", ">=", "==", "!=", "negative"}
    rules = [rule_of(kind)[1] for kind in FUNCTIONS.keys() - {"inf", "nan"} | symbols]
    assert GRADIENTS.keys() <= FUNCTIONS.keys() | symbols
    for text in [text for texts in rules for text in texts if text]:
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        assert {node.func.id for node in calls} <= FUNCTIONS.keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LAYOUTS)
def test_derivatives_of_broadcast_operands(name: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0.5, 2, shape) for shape in LAYOUTS[name]]
    for f in (tg.divide, tg.power, fused_sum):
        check_derivatives(f, *arrays)
        check_derivatives(lambda x, f=f: f(x, arrays[1]), arrays[0])
        check_derivatives(lambda x, f=f: f(arrays[0], x), arrays[1])


def test_derivatives_of_views_and_of_several_blocks() -> None:
    x = np.linspace(0.5, 2, 24).reshape(4, 6)
    check_derivatives(lambda a, b: tg.power(a, b) * x[::2, ::-1].T, x[:2].T, x[2:].T)
    many = np.linspace(-1, 1, 3 * BLOCK + 5)
    _, t = jvp(tg.silu, (Tensor(many),), (Tensor(many),))
    s = 1 / (1 + np.exp(-many))
    np.testing.assert_allclose(t.numpy(), many * s * (1 + many * (1 - s)), rtol=1e-12)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["tanh", "gelu", "swiglu", "power", "softplus", "fused", "lerp"])
def test_tangents_are_computed_wide_in_the_dtype_of_the_result(name: str, dtype: Any) -> None:
    f, *arrays = DERIVATIVES[name]
    rounded = [x.astype(dtype) for x in arrays]
    exact = [x.astype(float64) for x in rounded]
    found, expected = (
        [
            jvp(f, [Tensor(x) for x in xs], [Tensor(x[::-1].copy()) for x in xs])[1],
            jvp(tg.grad(lambda *xs: f(*xs).sum()), [Tensor(x) for x in xs], [*map(Tensor, xs)])[1],
        ]
        for xs in (rounded, exact)
    )
    bound = {float16: 4e-3, bfloat16: 3e-2, float32: 2e-6, float64: 1e-15}[np.dtype(dtype)]
    for t, wanted in zip(found, expected, strict=True):
        assert t.dtype == dtype
        scale = abs(wanted.numpy()).max()
        assert abs(t.numpy().astype(float64) - wanted.numpy()).max() <= bound * scale


def test_operands_of_other_dtypes_are_constants() -> None:
    x, whole, mask = Tensor(ANY), np.arange(-3, 4), ANY > 0
    for f, slope in (
        (lambda x: x * whole, whole),
        (lambda x: whole / x, -whole / ANY**2),
        (lambda x: x**3, 3 * ANY**2),
        (lambda x: 2 - x * mask, 0.0 - mask),
        (lambda x: np.float64(3) * x, 0 * ANY + 3),
        (lambda x: tg.where(whole, x, 0), whole != 0),
        (lambda x: masked(x, mask, whole), np.where(mask, whole, -1)),
    ):
        y, t = jvp(f, (x,), (tg.ones_like(x),))
        np.testing.assert_allclose(t.numpy(), slope, rtol=1e-15)
        assert t.dtype == y.dtype == float64
    narrow = Tensor(ANY.astype(float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the op itself
        y = narrow * whole
    y, t = jvp(lambda x: x * whole, (narrow,), (narrow,))  # which does not warn again
    assert t.dtype == y.dtype == float64


def test_a_tangent_of_complex_numbers_is_an_error() -> None:
    z = np.array([1j, 2.0])
    with pytest.raises(GradError, match=r"multiply: the tangent of a result of complex128.*detach"):
        jvp(lambda x: x * z, (tg.ones(2, dtype=float64),), (tg.ones(2, dtype=float64),))


def hessian(f: Callable[..., Tensor], *point: float) -> list[list[float]]:
    """Return the second derivatives of a function of numbers."""
    numbers = range(len(point))
    gradients = tg.grad(f, tuple(numbers))
    xs = [Tensor(np.array(p, float64)) for p in point]
    return [
        [h.item() for h in tg.grad(lambda *xs, i=i: gradients(*xs)[i], tuple(numbers))(*xs)]
        for i in numbers
    ]


@tg.no_grad()
def constant(x: Tensor) -> Tensor:
    return x.astype("float64") + 2 * tg.abs(x)


def squared(f: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    return tg.fuse(lambda x: f(x) ** 2)


SECOND = -(math.pi**2) / 3
EDGES: list[tuple[Callable[..., Tensor], tuple[float, ...], Any]] = [
    (lambda x: x**2, (0,), 2), (lambda x: x**2, (-3,), 2), (lambda x: x**3, (-3,), -18),
    (lambda x: x**1, (0,), 0), (lambda x: x**0, (0,), 0), (lambda x: x**-1, (-2,), -0.25),
    (lambda x: x**0.5, (0,), -INF), (lambda x: 0.0**x, (2,), 0),
    (tg.power, (2, 0), [[0, 0.5], [0.5, math.log(2) ** 2]]), (tg.power, (0, 3), [[0, 0], [0, 0]]),
    (tg.hypot, (0, 0), [[0, 0], [0, 0]]), (tg.hypot, (0, 2), [[0.5, 0], [0, 0]]),
    (tg.sqrt, (0,), -INF), (tg.maximum, (1, 1), [[0, 0], [0, 0]]), (tg.abs, (0,), 0),
    (tg.logaddexp, (-INF, 0), [[0, 0], [0, 0]]), (tg.logaddexp, (800, -800), [[0, 0], [0, 0]]),
    (tg.entr, (0,), -INF), (tg.xlogy, (0, 2), [[0, 0.5], [0.5, 0]]),
    (tg.xlogy, (0, 0), [[0, 0], [0, 0]]), (tg.xlog1py, (0, -1), [[0, 0], [0, 0]]),
    (tg.sinc, (0,), SECOND), (tg.sinc, (1e-9,), SECOND), (tg.clip, (1, 1, 2), np.zeros((3, 3))),
    (tg.erfc, (30,), 0), (tg.ndtr, (INF,), 0), (tg.gelu, (INF,), 0), (tg.gelu, (-50,), 0),
    (partial(tg.gelu, approximate="tanh"), (1e300,), 0), (tg.silu, (INF,), 0),
    (tg.silu, (-900,), 0),
    (tg.softplus, (19,), 1 / (2 + math.exp(19) + math.exp(-19))), (tg.sigmoid, (-900,), 0),
    (tg.elu, (-900,), 0), (tg.elu, (0,), 0), (tg.relu, (0,), 0), (tg.relu, (NAN,), 0),
    (lambda x: tg.where(x > 0, tg.sqrt(tg.where(x > 0, x, 1)), 0), (-1,), 0),
    (squared(lambda x: tg.nan_to_num(x)), (INF,), 0), (squared(tg.relu), (0,), 0),
    # Within a fused function as outside of it: relu passes nothing at 0, clip all at its bounds.
    (tg.fuse(lambda x, w: tg.relu(x) * w), (0, 1), [[0, 0], [0, 0]]),
    (tg.fuse(lambda x, w: tg.clip(x, 0, 1) * w), (1, 1), [[0, 1], [1, 0]]),
    (tg.fuse(lambda x: x * x.detach()), (3,), 0),
    (tg.fuse(lambda x: x * x * tg.tanh(x).detach()), (3,), 2 * math.tanh(3)),
    (tg.fuse(lambda x: x * x * constant(x)), (3,), 18),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(EDGES)))
def test_second_derivatives_at_edges(number: int) -> None:
    f, point, expected = EDGES[number]
    with np.errstate(all="ignore"):
        found = hessian(f, *point)
    np.testing.assert_allclose(found, np.reshape(expected, (len(point),) * 2), rtol=1e-9)
