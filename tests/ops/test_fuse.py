"""Fused functions against NumPy, against the unfused ops, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor, autograd
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16, float16, float32, float64
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.kernels import elementwise as row_cuda
from tensorgrad.kernels.expression import Formula
from tensorgrad.ops.elementwise.fuse import row_of
from tensorgrad.ops.elementwise.trace import Trace
from tensorgrad.testing import SIZES, Case, Ulps, check

fuse = tg.fuse


@fuse
def gated(gate: Tensor, up: Tensor) -> Tensor:
    return tg.silu(gate) * up


@fuse
def mixed(x: Tensor, bias: Tensor, *, double: bool = False) -> Tensor:
    z = x + bias
    if double:
        z = z * 2
    return tg.where(z > 0.1, tg.tanh(z) * 3, tg.exp(-z)) - tg.clip(gated(x, bias), -0.5, 0.5)


@fuse
def powers(x: Tensor, scale: Tensor) -> Tensor:
    return (x**2 + 1.5) ** 0.5 * scale / tg.maximum(x, scale)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def mixed_numpy(x: Any, bias: Any, double: bool = False) -> Any:
    z = (x + bias) * (2 if double else 1)
    return np.where(z > 0.1, np.tanh(z) * 3, np.exp(-z)) - np.clip(x * sigmoid(x) * bias, -0.5, 0.5)


SHAPES: list[tuple[int, ...]] = [(), (33, 31), (2, 200, 400), (0, 4), *((3, n) for n in SIZES)]
ROW = Ulps(2, "row")  # derivatives and differences that cross zero
CASES = [
    *(Case(gated, [s, s], lambda g, u: g * sigmoid(g) * u, gradients=ROW,
             name="fuse-gated") for s in SHAPES),
    Case(gated, [(4, 5, 6), (5, 1)], lambda g, u: g * sigmoid(g) * u,
         gradients=Ulps(3, "terms"), terms=24, name="fuse-columns"),
    Case(gated, [(3, 1, 1024), (5, 1)], lambda g, u: g * sigmoid(g) * u,
         gradients=Ulps(3, "terms"), terms=3072, name="fuse-outer"),
    Case(mixed, [(7, 33, 64), (64,)], mixed_numpy, values=ROW, terms=231, name="fuse-bias"),
    Case(mixed, [(300, 1000), (1000,)], mixed_numpy, values=ROW, terms=300, name="fuse-blocks"),
    Case(
        lambda x, b: mixed(x, b, double=True), [(9, 17), (9, 1)],
        lambda x, b: mixed_numpy(x, b, True), values=ROW,
        terms=17, axis=None, name="fuse-constant",
    ),
    Case(
        lambda x: powers(x, 3), [(65, 129)],
        lambda x: (x**2 + 1.5) ** 0.5 * 3 / np.maximum(x, 3), gradients=ROW, name="fuse-number",
    ),
    Case(
        fuse(lambda x, mask: tg.where(mask, x, 0.0) * mask),
        [(4, 6), np.arange(24).reshape(4, 6) % 3 == 0],
        lambda x, mask: np.where(mask, x, 0), name="fuse-mask",
    ),
    Case(
        fuse(lambda x, ids: tg.where(ids == 2, x * ids, -x)), [(4, 6), np.arange(6)],
        lambda x, ids: np.where(ids == 2, x * 2, -x), name="fuse-integers",
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::tensorgrad.errors.WideningWarning")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


def test_an_argument_that_is_ignored_takes_no_part() -> None:
    x, other = (Tensor(np.ones(shape, float32), requires_grad=True) for shape in ((3,), (2, 3)))
    fused = fuse(lambda other, x: x * 3)
    y = fused(other, x)
    assert y.shape == (3,)
    assert not fused(other, x.detach()).requires_grad
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, [3, 3, 3])
    assert other.grad is None


def unfused(x: Tensor) -> Tensor:
    return tg.log(tg.sigmoid(x * 3) + 0.5) * tg.gelu(x)


def test_sixteen_bits_are_rounded_once() -> None:
    x = np.random.default_rng(0).standard_normal(2000).astype(bfloat16)
    exact = unfused(Tensor(x.astype(float64))).numpy()
    once = fuse(unfused)(Tensor(x)).numpy()
    np.testing.assert_array_equal(once, exact.astype(float32).astype(bfloat16))
    assert (once != unfused(Tensor(x)).numpy()).any()  # which rounds five times


@pytest.mark.parametrize("size", [1000, 300_000])
def test_float64_agrees_with_the_unfused_ops(size: int) -> None:
    data = np.random.default_rng(1).standard_normal(size)
    one, two = Tensor(data, True), Tensor(data, True)
    y, z = fuse(unfused)(one), unfused(two)
    np.testing.assert_allclose(y.numpy(), z.numpy(), rtol=1e-14)
    (y * y).sum().backward()
    (z * z).sum().backward()
    assert one.grad is not None
    assert two.grad is not None
    np.testing.assert_allclose(one.grad, two.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((float16, float16), float16),
        ((bfloat16, float32), float32),
        ((float32, float64), float64),
        ((bfloat16, bfloat16), bfloat16),
    ],
)
def test_dtypes_promote_as_unfused_and_gradients_have_the_operands(
    dtypes: tuple[Any, Any], expected: Any
) -> None:
    a, b = (Tensor(np.ones((3, 4), d), requires_grad=True) for d in dtypes)
    y = gated(a, b)
    assert y.dtype == expected
    y.backward(np.ones((3, 4), expected))
    assert (a.grad.dtype, b.grad.dtype) == dtypes  # type: ignore[union-attr]


def test_casts_decide_the_dtype_of_the_result() -> None:
    x = Tensor(np.array([1.0, 2.0], float16), requires_grad=True)
    y = fuse(lambda x: x.astype("float32") * 2.0 + (x > 1).astype("float32"))(x)
    assert y.dtype == float32
    assert y.tolist() == [2.0, 5.0]
    y.backward(np.ones(2, float32))
    np.testing.assert_array_equal(x.grad, np.array([2, 2], float16))
    assert fuse(lambda x: x.astype("float64") / 3)(x).dtype == float64
    half = fuse(lambda x: (x * 3).astype("float16") * 2)(Tensor(np.ones(2, float32)))
    assert half.dtype == float16


def test_numbers_keep_the_dtype_of_the_arrays() -> None:
    calls = 0

    @fuse
    def scaled(x: Tensor, n: float) -> Tensor:
        nonlocal calls
        calls += 1
        return x * (1 / n) + n

    for n in (2.0, 4.0, 8.0):
        y = scaled(Tensor(np.ones(3, float16)), n)
        assert y.dtype == float16
        assert y.tolist() == [1 / n + n] * 3
    assert calls == 1  # a number is an argument of the kernel
    scaled(Tensor(np.ones(3, float32)), 2.0)
    assert calls == 2


def test_a_common_subexpression_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    row, _ = row_of(lambda x: tg.exp(tg.tanh(x)) * tg.tanh(x), [float32], {})
    gradients = row._gradients_of((True,))
    for formula in (row._formula, gradients.formula):
        statements, texts = formula.cuda()
        assert "".join([*statements, *texts]).count("tanh(x0)") == 1


def test_equal_gradients_are_computed_once() -> None:
    row, _ = row_of(lambda x, b: tg.gelu(x + b), [float32, float32], {})
    assert row._gradients_of((True, True)).indices == (0, 0)
    assert row._gradients_of((False, True)).indices == (None, 0)


def test_nothing_but_the_arguments_is_saved() -> None:
    a, b = Tensor(np.ones(5), True), Tensor(np.ones(5), True)
    y = gated(a, b)
    assert y.node is not None
    assert [s is t.data for s, t in zip(y.node.saved or (), (a, b), strict=True)] == [True, True]


def test_no_grad_checkpoint_and_reuse() -> None:
    x = Tensor(np.linspace(-1, 1, 6), requires_grad=True)
    with tensorgrad.no_grad():
        assert gated(x, x).node is None
    (gated(x, x) + gated(x, 2.0)).sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    tensorgrad.checkpoint(lambda x: gated(x, x) + gated(x, 2.0))(x).sum().backward()
    np.testing.assert_array_equal(x.grad, expected)
    found = autograd.grad(lambda x: gated(x, x).sum() + gated(x, 2.0).sum())(x)
    np.testing.assert_allclose(found.numpy(), expected)


def stopped(x: Tensor) -> Tensor:
    with tensorgrad.no_grad():
        weight = tg.exp(x).astype("float64")
    return weight * x * x.detach()


@pytest.mark.parametrize("traced", [True, False])
def test_gradients_stop_where_those_of_unfused_ops_do(traced: bool) -> None:
    fused = fuse(stopped)
    one, two = (Tensor(np.linspace(-1, 1, 6), requires_grad=True) for _ in range(2))
    if traced:
        with tensorgrad.no_grad():
            fused(one)
    fused(one).sum().backward()
    stopped(two).sum().backward()
    assert one.grad is not None
    assert two.grad is not None
    np.testing.assert_allclose(one.grad, two.grad, rtol=1e-14)
    np.testing.assert_allclose(one.grad, np.exp(one.data) * one.data, rtol=1e-14)
    assert not fuse(lambda x: x.detach())(one).requires_grad


class Named(NamedTuple):
    factor: float


def test_equal_constants_of_other_types_are_others() -> None:
    calls = []

    @fuse
    def scaled(x: Tensor, *, by: Any) -> Tensor:
        calls.append(by)
        return x * by if isinstance(by, int | float) else x * next(iter(by))

    ones = Tensor(np.ones(2, np.int32))
    for _ in range(2):
        for by, dtype in ((2, "int32"), (2.0, "float64"), (True, "int32")):
            assert scaled(ones, by=by).dtype == dtype
            for kind in (lambda value: (value,), Named, lambda value: frozenset((value,))):
                assert scaled(ones, by=kind(by)).dtype == dtype
    assert len(calls) == 12
    x = Tensor(np.ones(2))
    assert [np.signbit(scaled(x, by=by).numpy()[0]) for by in (0.0, -0.0)] == [False, True]


def branches(x: Any) -> Any:
    return x if x > 0 else -x


OUTSIDE = np.ones(3)
LEARNED = Tensor(np.ones(()), requires_grad=True)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: x / x.sum(), "<lambda> uses sum, expected elementwise ops"),
        (lambda x: tg.softmax(x), "uses softmax"),
        (lambda x: x @ x, "uses __matmul__"),
        (lambda x: x.reshape(-1), "uses reshape"),
        (lambda x: x[0], "uses __getitem__"),
        (lambda x: x * x.shape[0], "uses shape"),
        (lambda x: x * float(x), "uses __float__"),
        (branches, r"branches asks whether an element is true, expected where\("),
        (lambda x: x + OUTSIDE, r"uses add with b of shape \(3,\) that is not one of its"),
        (lambda x: Tensor(OUTSIDE) * x, r"uses multiply with a of shape \(3,\)"),
        (lambda x: x * LEARNED, "uses multiply with b, a tensor that requires a gradient"),
    ],
)
def test_what_is_not_elementwise_is_named(f: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        fuse(f)(Tensor(np.ones(3)))


@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((3, 4), (4,))], ids=["alike", "bias"])
@pytest.mark.parametrize("narrow", [float16, bfloat16], ids=str)
def test_a_gradient_of_two_operands_is_not_rounded_to_the_narrow_one(
    narrow: Any, shapes: Any, device: str
) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape) for shape in shapes)
    x, y = (
        Tensor(backend.to_device(array.astype(dtype), device), requires_grad=True)
        for array, dtype in ((a, narrow), (b, float32))
    )
    fuse(lambda x, y: tg.tanh(x + y))(x, y).backward(np.full((3, 4), 1e5, float32))
    exact = 1e5 * (1 - np.tanh(a.astype(narrow).astype(float64) + b) ** 2)
    exact = exact if b.ndim == 2 else exact.sum(0)
    np.testing.assert_allclose(backend.to_numpy(y.grad), exact, rtol=1e-4)


def test_all_is_computed_in_float64_where_an_argument_is(device: str) -> None:
    x, y = (
        Tensor(backend.to_device(np.full(3, 0.3, dtype), device), requires_grad=True)
        for dtype in (float32, float64)
    )
    z = fuse(lambda x, y: tg.sin(x) * y)(x, y)
    z.backward(z.data)
    np.testing.assert_allclose(z.numpy(), np.sin(float(float32.type(0.3))) * 0.3, rtol=1e-14)
    exact = np.sin(float(float32.type(0.3))) ** 2 * 0.3
    np.testing.assert_allclose(backend.to_numpy(y.grad), exact, rtol=1e-14)


def test_integers_beside_floats_do_not_wrap_around(device: str) -> None:
    f = fuse(lambda i, x: (i * 2 - 3) * x)
    for dtype in ("uint8", "int8"):
        i = Tensor(backend.to_device(np.array([0, 1, 100], dtype), device))
        x = Tensor(backend.to_device(np.array([1, 2, 0.5]), device), requires_grad=True)
        y = f(i, x)
        assert y.tolist() == [-3, -2, 98.5]
        y.backward(y.data)
        assert backend.to_numpy(x.grad).tolist() == [9, 2, 98.5 * 197]


def test_sums_of_conditions_are_conditions(device: str) -> None:
    f = fuse(lambda x: ((x > 1) + (x > 2)) * x)
    x = Tensor(backend.to_device(np.array([1.0, 2.0, 3.0]), device))
    assert f(x).tolist() == [0, 2, 3]
    trace = Trace(lambda: None)
    c = Tensor(trace.symbol("x0", np.dtype("bool")))
    formula = Formula("sum", ["x0"], trace.expressions, [(c + c).data.expression])
    assert formula.cuda() == (["const auto t0 = number(x0);"], ["((t0 + t0) != C(0))"])


def test_arguments_and_results_that_do_not_fit() -> None:
    x = Tensor(np.ones((2, 3)))

    def _(x: Any) -> Any:
        return x.sum()

    with pytest.raises(ArgumentError, match="fuse: function uses sum"):
        fuse(_)(x)
    with pytest.raises(DtypeError, match="returned a tuple, expected one tensor"):
        fuse(lambda x: (x, x))(x)  # type: ignore[arg-type, return-value]
    with pytest.raises(DtypeError, match="casts to int64, expected a float type"):
        fuse(lambda x: x.astype("int64"))(x)
    with pytest.raises(DtypeError, match="returned a number, expected one tensor"):
        gated(2.0, 3.0)
    with pytest.raises(DtypeError, match="min: argument 1 is not a tensor, array or number"):
        fuse(min)(x, "one")  # whose arguments have no names
    with pytest.raises(DtypeError, match="returned a tensor that does not depend on its arguments"):
        fuse(lambda x: Tensor(OUTSIDE))(x)
    with pytest.raises(DtypeError, match="subtract: a has dtype bool, b has dtype bool"):
        fuse(lambda x: x - x)(np.ones(3, bool))
    with pytest.raises(ArgumentError, match="by is a tuple given by keyword, expected tensors by"):
        fuse(lambda x, *, by: x * by[0][0])(x, by=([2.0],))
    with pytest.raises(DtypeError, match="multiply: a has dtype float64, b has dtype <U1"):
        gated(x, np.array(["x"]))
    with pytest.raises(DtypeError, match="up is not a tensor, array or number"):
        gated(x, "up")
    with pytest.raises(ArgumentError, match="double is a Tensor given by keyword"):
        mixed(x, x, double=x)
    assert fuse(lambda x: x * LEARNED.detach())(x).shape == (2, 3)
    with pytest.raises(ShapeError, match=r"^swiglu: gate has shape \(2, 3\), up has shape \(4,\)"):
        tg.swiglu(x, np.ones(4))
    with pytest.raises(ShapeError, match=r"gated: gate has shape \(2, 3\), up has shape \(4,\)"):
        gated(x, np.ones(4))


@pytest.mark.parametrize(
    ("shape", "operands", "vector", "strides"),
    [
        ((4, 6, 8), [((4, 6, 8), (384, 64, 8)), ((8,), (8,))], 2, [("1",), ("0", "1")]),
        ((4, 6, 8), [((4, 6, 8), (384, 64, 8)), ((6, 8), (64, 8))], 2, [("1",), ("0", "1")]),
        ((4, 6, 8), [((4, 6, 8), (384, 64, 8)), ((), ())], 2, [("1",), ("0",)]),
        ((4, 6, 8), [((4, 6, 8), (384, 64, 8)), ((6, 1), (8, 8))], 2, [("1",), ("0", "s", "0")]),
        ((4, 7), [((4, 7), (56, 8)), ((7,), (8,))], 1, [("1",), ("0", "1")]),
        ((4, 6), [((4, 6), (96, 16))], 1, [("s",)]),
        ((4, 6), [((4, 6), (8, 32))], 1, [("s", "s")]),
        ((4, 6), [((4, 6), (64, 8))], 2, [("s", "1")]),
        ((1, 1), [((1, 1), (8, 8))], 1, [("0",)]),
    ],
)
def test_layouts_that_kernels_are_made_for(
    shape: Any, operands: Any, vector: int, strides: Any
) -> None:
    layout, _ = row_cuda._plan(shape, tuple((s, t, 8) for s, t in operands), 2)
    assert layout.vector == vector
    assert list(layout.strides) == strides


def test_lists_are_arrays() -> None:
    x = Tensor(np.array([1.0, 2.0], "float32"), requires_grad=True)
    for operands in ((x, [3.0, 4.0]), (x, (3, 4))):
        x.grad = None
        y = fuse(lambda a, b: a * b + 1)(*operands)
        assert (y.tolist(), str(y.dtype)) == ([4, 9], "float32")
        y.sum().backward()
        np.testing.assert_array_equal(x.grad, [3, 4])


def test_bits_and_masks_inside(device: str) -> None:
    def masked(x: Tensor, ids: Tensor) -> Tensor:
        odd = ~((ids & 1) == 0) & (x > 0)
        return tg.where(odd | (ids >> 2 == 1), x, 0) + (ids << 1 ^ 3) * tg.round(ids) + ~ids

    rng = np.random.default_rng(0)
    for shape in ((5,), (300, 200)):
        x = Tensor(backend.to_device(rng.standard_normal(shape).astype("float32"), device), True)
        ids = Tensor(backend.to_device(rng.integers(-9, 9, shape).astype("int16"), device))
        got, expected = tensorgrad.fuse(masked)(x, ids), masked(x, ids)
        np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-6, atol=1e-5)
        got.sum().backward()
        wide, whole = x.numpy(), ids.numpy()
        kept = (~((whole & 1) == 0) & (wide > 0)) | (whole >> 2 == 1)
        np.testing.assert_array_equal(backend.to_numpy(x.grad), kept)
