"""Map and zip against NumPy."""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import numpy as np
import pytest

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.core import backend
from tensorgrad.dtypes import ALL, bfloat16
from tensorgrad.errors import ArgumentError, DtypeError, GradError, ShapeError, TensorgradError
from tensorgrad.ops.elementwise.row import _compute_type
from tensorgrad.testing import SIZES, Case, Ulps, check, sized

ANY = (-3.0, 3.0)
POSITIVE = (0.3, 3.0)
INF, NAN = math.inf, math.nan
SHAPES: list[tuple[int, ...]] = [(), (3, 5), (33, 31), *((2, n) for n in SIZES)]
MAPS: list[tuple[Any, Any, tuple[float, float], bool]] = [
    (tg.negative, np.negative, ANY, True),
    (tg.abs, np.abs, POSITIVE, True),
    (tg.sign, np.sign, ANY, False),
    (tg.exp, np.exp, ANY, True),
    (tg.expm1, np.expm1, ANY, True),
    (tg.log, np.log, POSITIVE, True),
    (tg.log1p, np.log1p, POSITIVE, True),
    (tg.sqrt, np.sqrt, POSITIVE, True),
    (tg.rsqrt, lambda x: 1 / np.sqrt(x), POSITIVE, True),
    (tg.reciprocal, lambda x: 1 / x, POSITIVE, True),
    (tg.square, np.square, ANY, True),
    (tg.sin, np.sin, ANY, True),
    (tg.cos, np.cos, ANY, True),
    (tg.tanh, np.tanh, ANY, True),
    (tg.erf, np.vectorize(math.erf, otypes=[float]), ANY, True),
    (tg.floor, np.floor, ANY, False),
    (tg.ceil, np.ceil, ANY, False),
    (tg.rint, np.round, ANY, False),
    (tg.round, np.rint, ANY, False),
    (tg.isnan, np.isnan, ANY, False),
    (tg.isinf, np.isinf, ANY, False),
    (tg.isfinite, np.isfinite, ANY, False),
    (tg.logical_not, np.logical_not, ANY, False),
]
ZIPS: list[tuple[Any, Any, tuple[float, float], bool]] = [
    (tg.add, np.add, ANY, True),
    (tg.subtract, np.subtract, ANY, True),
    (tg.multiply, np.multiply, ANY, True),
    (tg.divide, np.divide, POSITIVE, True),
    (tg.power, np.power, POSITIVE, True),
    (tg.maximum, np.maximum, ANY, True),
    (tg.minimum, np.minimum, ANY, True),
    (tg.equal, np.equal, ANY, False),
    (tg.not_equal, np.not_equal, ANY, False),
    (tg.less, np.less, ANY, False),
    (tg.less_equal, np.less_equal, ANY, False),
    (tg.greater, np.greater, ANY, False),
    (tg.greater_equal, np.greater_equal, ANY, False),
    (tg.logical_and, np.logical_and, ANY, False),
    (tg.logical_or, np.logical_or, ANY, False),
    (tg.logical_xor, np.logical_xor, ANY, False),
]
UNIT = (-0.9, 0.9)
LENGTHS: list[tuple[int, ...]] = [(33, 31), (1, 1025), (1023,), (0,), ()]  # the lengths of SIZES
FURTHER_MAPS: list[tuple[Any, Any, tuple[float, float], bool]] = [
    (tg.tan, np.tan, UNIT, True),
    (tg.arcsin, np.arcsin, UNIT, True),
    (tg.arccos, np.arccos, UNIT, True),
    (tg.arctan, np.arctan, ANY, True),
    (tg.sinh, np.sinh, ANY, True),
    (tg.cosh, np.cosh, ANY, True),
    (tg.arcsinh, np.arcsinh, ANY, True),
    (tg.arccosh, np.arccosh, (1.5, 4.0), True),
    (tg.arctanh, np.arctanh, UNIT, True),
    (tg.log2, np.log2, POSITIVE, True),
    (tg.log10, np.log10, POSITIVE, True),
    (tg.exp2, np.exp2, ANY, True),
    (tg.cbrt, np.cbrt, POSITIVE, True),
    (tg.deg2rad, np.deg2rad, ANY, True),
    (tg.rad2deg, np.rad2deg, ANY, True),
    (tg.positive, np.positive, ANY, True),
    (tg.real, np.real, ANY, True),
    (tg.imag, np.imag, ANY, False),
    (tg.conj, np.conj, ANY, True),
    (tg.sinc, np.sinc, (0.3, 0.8), True),
    (tg.nan_to_num, np.nan_to_num, ANY, True),
    (tg.trunc, np.trunc, ANY, False),
    (tg.signbit, np.signbit, ANY, False),
    (tg.angle, np.angle, POSITIVE, True),
]
# Not NumPy's.
SPECIAL_MAPS: list[tuple[Any, Any, tuple[float, float], bool]] = [
    (tg.erfc, np.vectorize(math.erfc, otypes=[float]), ANY, True),
    (tg.ndtr, np.vectorize(lambda x: math.erfc(-x / 2**0.5) / 2, otypes=[float]), ANY, True),
    (tg.entr, lambda x: -x * np.log(x), (0.5, 0.9), True),
    (tg.frac, lambda x: x - np.trunc(x), (0.1, 0.9), True),
    (tg.logit, lambda x: np.log(x / (1 - x)), (0.6, 0.9), True),
]
FURTHER_ZIPS: list[tuple[Any, Any, tuple[float, float], bool]] = [
    (tg.fmax, np.fmax, ANY, True),
    (tg.fmin, np.fmin, ANY, True),
    (tg.floor_divide, np.floor_divide, (0.3, 0.9), False),
    (tg.divmod, np.divmod, (-0.9, -0.3), False),
    (tg.arctan2, np.arctan2, POSITIVE, True),
    (tg.hypot, np.hypot, POSITIVE, True),
    (tg.logaddexp, np.logaddexp, POSITIVE, True),
    (tg.xlogy, lambda a, b: a * np.log(b), (1.5, 3.0), True),
    (tg.logaddexp2, np.logaddexp2, POSITIVE, True),
    (tg.xlog1py, lambda a, b: a * np.log1p(b), (1.5, 3.0), True),
    (tg.copysign, np.copysign, ANY, True),
    (tg.heaviside, np.heaviside, ANY, False),
]
PAIRS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3, 5), (3, 5)),
    ((3, 5), (5,)),
    ((3, 1), (1, 5)),
    ((), (2, 3)),
    ((2, 0), (2, 1)),
    *(((2, n), (n,)) for n in SIZES),
]
# Derivatives computed from the value, which is kept in the dtype: 1 - y * y and y + 1 cancel.
CANCELS: dict[Any, Any] = {
    tg.tanh: lambda x, dy: [abs(np.tanh(x)), abs(dy) * (1 + np.tanh(x) ** 2)],
    tg.expm1: lambda x, dy: [abs(np.expm1(x)), abs(dy) * (1 + abs(np.expm1(x)))],
}


def mapped(f: Any, x: Any, reference: Any, domain: Any, gradient: bool) -> Case:
    bound = Ulps(2, "terms") if f in CANCELS else Ulps(4) if f is tg.rsqrt else None
    return Case(f, [x], reference, domain=domain, gradients=bound, gradient=gradient,
                magnitudes=CANCELS.get(f))  # fmt: skip


SUMMED = Ulps(2, "terms")  # over the axes that an operand was broadcast along
CASES = [
    *(mapped(f, s, ref, domain, g) for f, ref, domain, g in MAPS for s in SHAPES),
    *(
        Case(f, [*p], ref, domain=domain, gradient=g, gradients=SUMMED, terms=5)
        for f, ref, domain, g in ZIPS
        for p in PAIRS
    ),
    *(
        mapped(f, s, ref, domain, g)
        for f, ref, domain, g in (*FURTHER_MAPS, *SPECIAL_MAPS)
        for s in LENGTHS
    ),
    *(
        Case(f, [s, s], ref, domain=domain, gradient=g)
        for f, ref, domain, g in FURTHER_ZIPS
        for s in LENGTHS
    ),
    *(
        Case(
            f,
            [np.arange(n) % 32 / 8 + 1 / 16, np.array(divisor)],
            ref,
            gradients=SUMMED,
            terms=1025,
        )  # off the jumps
        for f, ref in ((tg.remainder, np.remainder), (tg.fmod, np.fmod))
        for n in SIZES
        for divisor in (0.75, -0.75)
    ),
    *sized(
        tg.nextafter,
        lambda n: [(n,), (n,)],
        np.nextafter,
        gradient=False,
        dtypes=("float64", "float32"),
    ),
    Case(tg.where, [np.arange(15).reshape(3, 5) % 2 == 0, (3, 5), (5,)], np.where),
    Case(tg.where, [np.array([True, False]), (1, 2), (3, 1)], np.where),
    *(
        Case(
            lambda a, b, c=c: tg.where(c, a, b),
            [*p],
            lambda a, b, c=c: np.where(c, a, b),
            gradients=SUMMED,
            terms=5,
            name=f"where-{c}",
        )
        for c in (True, False)
        for p in PAIRS
    ),
    *sized(
        tg.lerp,
        lambda n: [(2, n), (n,), ()],
        lambda a, b, w: a + w * (b - a),
        gradients=SUMMED,
        terms=2050,
        values=Ulps(2, "terms"),
        magnitudes=lambda a, b, w, dy: [
            abs(a) + abs(w) * (abs(a) + abs(b)),
            abs(dy) * (1 + abs(w)),
            (abs(dy) * abs(w)).sum(0),
            (abs(dy) * (abs(a) + abs(b))).sum(),
        ],
    ),
    *sized(tg.clip, lambda n: [(4, n), (n,), (4, 1)], np.clip, gradients=SUMMED, terms=1025),
    Case(lambda x: tg.clip(x, -0.5, 0.5), [(4, 7)], lambda x: np.clip(x, -0.5, 0.5), name="clip"),
    Case(lambda x: tg.clip(x, min=0.1), [(4, 7)], lambda x: np.maximum(x, 0.1), name="clip"),
    Case(lambda x: tg.clip(x, max=0.1), [(4, 7)], lambda x: np.minimum(x, 0.1), name="clip"),
    Case(lambda x: tg.power(x, 3), [(4, 7)], lambda x: x**3, name="power"),
    Case(lambda x: tg.power(2.0, x), [(4, 7)], lambda x: 2.0**x, name="power"),
    Case(tg.add, [(257, 129), (257, 129)], np.add, name="add-large"),
    Case(tg.exp, [(65, 1023)], np.exp, name="exp-large"),
]
BITS = np.array([0, 1, -1, 5, 127, -128, 64, 3])
for op in ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"):
    CASES += [
        Case(getattr(tg, op), [BITS.astype(a), BITS[::-1].astype(b)], getattr(np, op),
             gradient=False)
        for a, b in [("int8", "int8"), ("int64", "int16"), ("uint8", "int32"), ("uint64", "uint64")]
    ]  # fmt: skip
    CASES += sized(getattr(tg, op), lambda n: [np.arange(2 * n).reshape(2, n), np.arange(n) % 7],
                   getattr(np, op), gradient=False)  # fmt: skip
CASES += sized(tg.invert, lambda n: [np.arange(n)], np.invert, gradient=False)
CASES += [
    Case(tg.invert, [(BITS > 0) if dtype == "bool" else BITS.astype(dtype)], np.invert,
         gradient=False)
    for dtype in ("bool", "int8", "uint16", "int64", "uint64")
]  # fmt: skip
BINARY_OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.floordiv,
    operator.mod,
    operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("op", BINARY_OPERATORS)
@pytest.mark.parametrize("other", [2, 1.5, np.float32(3), np.arange(1.0, 7).reshape(2, 3)])
def test_operators_follow_numpy_on_both_sides(op: Any, other: Any) -> None:
    x = np.linspace(0.5, 2, 6, dtype="float32").reshape(2, 3)
    for got, expected in (
        (op(Tensor(x), other), op(x, other)),
        (op(other, Tensor(x)), op(other, x)),
    ):
        assert isinstance(got, Tensor)
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got.numpy(), expected, rtol=2e-7)


def test_lists_are_operands() -> None:
    x = tg.tensor([1.0, 2.0], requires_grad=True)
    y = x * [3.0, 4.0] + (1, 2)
    y.sum().backward()
    assert (y.tolist(), y.dtype) == ([4.0, 10.0], np.dtype("float32"))
    np.testing.assert_array_equal(x.grad, [3.0, 4.0])
    assert tg.sum([[1.0, 2.0], [3.0, 4.0]], 0).tolist() == [4.0, 6.0]
    with pytest.raises(DtypeError, match="add: b holds a Tensor, expected numbers; use stack"):
        tg.add(x, [x.sum(), 1.0])


def test_whole_quotients_at_the_edges_are_numpys() -> None:
    numbers = np.array([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, INF, -INF, NAN, 1e300, 0.1])
    a, b = np.meshgrid(numbers, numbers)
    with np.errstate(all="ignore"):
        for ours, numpys in ((tg.floor_divide, np.floor_divide), (tg.remainder, np.remainder)):
            np.testing.assert_array_equal(ours(Tensor(a), Tensor(b)), numpys(a, b))
        x = Tensor(np.array([7, -7, 0], "int8"))
        assert ((x // 2).tolist(), (x % -2).tolist()) == ([3, -4, 0], [-1, -1, 0])
        assert ((x // 0).tolist(), (5 % x).tolist()) == ([0, 0, 0], [5, -2, 0])
    x //= 2
    x %= 3
    assert x.tolist() == [0, 2, 0]
    assert [part.tolist() for part in divmod(5, Tensor(np.array([2, -2])))] == [[2, -3], [1, -1]]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "float32", "float64"])
def test_whole_quotients_on_a_gpu_are_those_of_numpy(dtype: str) -> None:
    rng = np.random.default_rng()
    a, b = (rng.integers(-128 if dtype[0] != "u" else 0, 127, 4096).astype(dtype) for _ in "ab")
    for function in ("floor_divide", "remainder", "fmod"):
        expected = getattr(np, function)(a, b)
        found = getattr(tg, function)(Tensor(a).to("cuda"), Tensor(b).to("cuda"))
        np.testing.assert_array_equal(found.numpy(), expected, function)
        assert found.dtype == expected.dtype


def test_xlogy_is_0_where_its_first_operand_is() -> None:
    a = Tensor(np.array([0.0, 0.0, 2.0]), requires_grad=True)
    b = Tensor(np.array([0.0, NAN, 1.0]), requires_grad=True)
    y = tg.xlogy(a, b)
    np.testing.assert_array_equal(y, [0.0, NAN, 0.0])
    y[::2].sum().backward()
    np.testing.assert_array_equal(a.grad, [0.0, NAN, 0.0])
    np.testing.assert_array_equal(b.grad, [0.0, 0.0, 2.0])


def test_nan_to_num_replaces_what_is_not_finite() -> None:
    x = Tensor(np.array([NAN, INF, -INF, 1.5], "float32"), requires_grad=True)
    np.testing.assert_array_equal(tg.nan_to_num(x), np.nan_to_num(x.numpy()))
    y = tg.nan_to_num(x, nan=1.0, posinf=2.0, neginf=-2.0)
    assert (y.tolist(), y.dtype) == ([1.0, 2.0, -2.0, 1.5], np.dtype("float32"))
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, [0.0, 0.0, 0.0, 1.0])


@pytest.mark.filterwarnings("ignore::tensorgrad.errors.WideningWarning")
@pytest.mark.parametrize("a", ["float64", "float32", "float16", "int64", "int8", "uint8", "bool"])
@pytest.mark.parametrize("b", ["float64", "float32", "float16", "int64", "int8", "uint8", "bool"])
def test_promotion_is_numpys(a: str, b: str) -> None:
    x, y = np.ones(3, a), np.ones(3, b)
    for ours, numpys in ((tg.add, np.add), (tg.multiply, np.multiply), (tg.divide, np.divide)):
        assert ours(Tensor(x), Tensor(y)).dtype == numpys(x, y).dtype
    assert tg.add(Tensor(x), 1).dtype == np.add(x, 1).dtype
    assert tg.multiply(Tensor(x), 0.5).dtype == np.multiply(x, 0.5).dtype


MAPPED = {f: reference for f, reference, *_ in [*MAPS, *FURTHER_MAPS]} | {
    tg.round: np.round,
    tg.invert: np.invert,
}
ZIPPED = (
    {f: reference for f, reference, *_ in ZIPS}
    | {tg.floor_divide: np.floor_divide, tg.remainder: np.remainder}
    | {
        getattr(tg, name): getattr(np, name)
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift")
    }
)
WITHOUT_NUMPY = (
    tg.erf,
    tg.rsqrt,
    tg.reciprocal,
    tg.sinc,
    tg.arccosh,
    tg.arctanh,
    tg.deg2rad,
    tg.rad2deg,
)  # or with another meaning for integers
NUMBERS: list[Any] = [
    -1, 0, 2, 255, -129, 300, 2**31, 2**63, 2**64, -(2**63) - 1, 2**1100, True, 1.5, -0.5, 1e40,
]  # fmt: skip


def sample(dtype: Any, size: int) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.resize(np.array([0, 1, limits.max, limits.min, 3], dtype), size)
    return np.resize(np.array([0, 1, 2.5, -3, 7]).astype(dtype), size)


def same_as_numpy(ours: Any, numpys: Any, operands: list[Any], device: str = "cpu") -> None:
    """Compare value and dtype, or that both refuse."""
    moved = [
        Tensor(backend.to_device(o, device)) if isinstance(o, np.ndarray) else o for o in operands
    ]
    what = f"{ours.__name__} of {[getattr(o, 'dtype', o) for o in operands]!s:.99}"
    try:
        expected = np.asarray(numpys(*operands))
    except (TypeError, ValueError, OverflowError):
        with pytest.raises(TensorgradError):
            ours(*moved)
        return
    got = ours(*moved)
    assert got.dtype == expected.dtype, what
    if got.dtype.kind in "iub":
        np.testing.assert_array_equal(got.numpy(), expected, what)
    else:
        tolerance = {2: 0.02, 4: 1e-5, 8: 1e-12}[got.dtype.itemsize]
        np.testing.assert_allclose(
            got.numpy().astype("float64"), expected.astype("float64"), tolerance, err_msg=what
        )


# The large arrays are computed block by block, for which the dtype is worked out beforehand.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's too, of divisions by 0 and others
@pytest.mark.filterwarnings("ignore::tensorgrad.errors.WideningWarning")
@pytest.mark.parametrize("size", [5, 40_000])
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_all_dtypes_follow_numpy(dtype: Any, size: int) -> None:
    x = sample(dtype, size)
    for ours, numpys in MAPPED.items():
        if ours not in WITHOUT_NUMPY:
            same_as_numpy(ours, numpys, [x])
    for other in ALL:
        y = sample(other, size)[::-1]
        for ours, numpys in ZIPPED.items():
            same_as_numpy(ours, numpys, [x, y])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("size", [5, 40_000])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", "uint64", "float32"])
def test_python_numbers_follow_numpy(dtype: Any, size: int) -> None:
    x = sample(dtype, size)
    for number in NUMBERS:
        for ours, numpys in ZIPPED.items():
            same_as_numpy(ours, numpys, [x, number])
            same_as_numpy(ours, numpys, [number, x])
        same_as_numpy(tg.where, np.where, [x > 1, x, number])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64"])
def test_integers_on_a_gpu_follow_numpy(dtype: Any) -> None:
    x = sample(dtype, 5)
    for ours, numpys in ((tg.square, np.square), (tg.round, np.round), (tg.invert, np.invert)):
        same_as_numpy(ours, numpys, [x], "cuda")
    for number in (-1, 2, 300, 2**63, 2**70, -(2**63) - 1, True):
        for zipped in (tg.add, tg.maximum, tg.less, tg.equal, tg.bitwise_and):
            if dtype == "bool" and abs(number) > 2**62:
                continue  # some NumPys refuse to compare, where the answer is known
            same_as_numpy(zipped, ZIPPED[zipped], [x, number], "cuda")


@pytest.mark.filterwarnings("ignore::tensorgrad.errors.WideningWarning")
@pytest.mark.parametrize("condition", ALL, ids=str)
def test_the_condition_has_no_part_in_promotion(condition: Any, device: str) -> None:
    pairs: Any = itertools.product(ALL, ALL)
    if device != "cpu":  # where each takes a kernel of its own
        pairs = [("float16", "float16"), (bfloat16, bfloat16), (bfloat16, "float32")]
    pairs = [tuple(map(np.dtype, pair)) for pair in pairs]
    for size in (4, 40_000):
        c = np.resize(np.array([1, 0, 0, 1]).astype(condition), size)
        for a, b in pairs:
            x, y = np.ones(size, a), np.zeros(size, b)
            try:
                expected = np.result_type(a, b)
            except TypeError:  # bfloat16 has no common dtype with these; NumPy's ufuncs find one
                expected = np.add(x, y).dtype
            moved = [Tensor(backend.to_device(array, device)) for array in (c, x, y)]
            got = tg.where(moved[0], moved[1], moved[2])
            assert got.dtype == expected, (condition, a, b)
            np.testing.assert_array_equal(got.numpy(), c.astype(bool))


def test_where_of_sixteen_bits_passes_gradients(device: str) -> None:
    for dtype in ("float16", "bfloat16"):
        c, x, y = tg.tensor([1.0, 0.0]), *(tg.ones(2, dtype, requires_grad=True) for _ in "ab")
        c, x, y = (Tensor(backend.to_device(t.data, device), t.requires_grad) for t in (c, x, y))
        tg.where(c, x, y).sum().backward()
        assert (x.grad.dtype, y.grad.dtype) == (x.dtype, y.dtype)  # type: ignore[union-attr]
        assert (x.grad.tolist(), y.grad.tolist()) == ([1, 0], [0, 1])  # type: ignore[union-attr]


@pytest.mark.parametrize("op", [operator.and_, operator.or_, operator.xor])
def test_bits_by_operators(op: Any, device: str) -> None:
    x = np.array([6, -3, 0, 127])
    t = Tensor(backend.to_device(x, device))
    for got, expected in ((op(t, 5), op(x, 5)), (op(5, t), op(5, x)), (op(t, t > 0), op(x, x > 0)),
                          (~t, ~x), (t << 2, x << 2), (2 << (t & 3), 2 << (x & 3)),
                          (t >> 1, x >> 1), (64 >> (t & 3), 64 >> (x & 3)),
                          (op(t > 0, t < 9), op(x > 0, x < 9)), (~(t > 0), ~(x > 0))):  # fmt: skip
        if not (device != "cpu" and isinstance(got, np.ndarray)):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got.numpy(), expected)
    with pytest.raises(DtypeError, match=r"bitwise_\w+: a has dtype float32, b has dtype int64"):
        op(Tensor(np.ones(4, "float32")), Tensor(x))
    with pytest.raises(DtypeError, match="invert: x has dtype bfloat16"):
        ~tg.ones(2, "bfloat16")


def test_bfloat16_promotion() -> None:
    x = Tensor(np.ones(3, tensorgrad.dtypes.bfloat16))
    assert (x + x).dtype == tensorgrad.dtypes.bfloat16
    assert (x * 2.5).dtype == tensorgrad.dtypes.bfloat16
    assert (x + Tensor(np.ones(3, "float32"))).dtype == np.float32
    assert tg.exp(x).dtype == tensorgrad.dtypes.bfloat16
    assert (x > 0).dtype == np.bool_


def test_sixteen_bits_round_once() -> None:
    x = np.array([0.1, 1.3, -2.7], "float16")
    wide = tg.gelu(Tensor(x.astype("float32"))).numpy()
    np.testing.assert_array_equal(tg.gelu(Tensor(x)).numpy(), wide.astype("float16"))


def test_round_leaves_integers_that_have_no_decimals() -> None:
    ends = [0, 2**63 - 1]
    assert tg.round(np.array(ends), 2).tolist() == ends
    assert tg.round(np.array([1.26, 25]), 1).tolist() == [1.3, 25]
    assert tg.round(np.array([25, 36]), -1).tolist() == [20, 40]
    parts = np.array([complex(np.inf, 1.26), complex(np.nan, -0.04)])
    np.testing.assert_array_equal(tg.round(parts, 1).numpy(), np.round(parts, 1))
    for decimals in (1.5, 400, None, Tensor(np.ones(2))):
        with pytest.raises(ArgumentError, match="round: decimals is"):
            tg.round(1.26, decimals)  # type: ignore[arg-type]


def test_rounding_and_its_limits() -> None:
    assert tg.round([1.26, -2.5]).tolist() == [1, -2]
    assert tg.round(np.array([1.25, 1.35]), 1).tolist() == [1.2, 1.4]
    for decimals in (308, -308):
        assert tg.round(np.array([0.0]), decimals).tolist() == [0]
    for decimals in (309, -309):
        with pytest.raises(ArgumentError, match=f"round: decimals is {decimals}, expected -308"):
            tg.round(1.0, decimals)
    assert tg.round(np.array([24, 26], "int8"), -1).dtype == np.int8
    assert tg.round(np.array([25, 26], "int8"), 1).tolist() == [25, 26]


def test_parts_of_real_numbers() -> None:
    x = Tensor(np.array([1.0, -2.0]), requires_grad=True)
    for op, expected in ((tg.real, [1, -2]), (tg.conj, [1, -2]), (tg.imag, [0, 0])):
        y = op(x)
        assert (y.tolist(), str(y.dtype)) == (expected, "float64")
        assert y.requires_grad == (op is not tg.imag)
        assert y.data is not x.data
    flags = np.array([True, False])
    for op, dtype in ((tg.real, "bool"), (tg.conj, "int8"), (tg.imag, "bool")):
        y = op(flags)
        assert y.dtype == dtype
        assert y.tolist() == [op is not tg.imag, False]
        assert not np.shares_memory(y.data, flags)
    z = np.array([1 + 2j, 3 - 4j])
    for op, numpys in ((tg.real, np.real), (tg.imag, np.imag)):
        assert np.shares_memory(op(z).data, z)
        np.testing.assert_array_equal(op(z), numpys(z))


def test_numbers_in_the_place_of_what_is_not_finite() -> None:
    x = np.array([NAN, INF, -INF], "float32")
    largest = np.finfo("float32").max
    assert tg.nan_to_num(x).tolist() == [0, largest, -largest]
    assert tg.nan_to_num(x, nan=1.0, neginf=3.0).tolist() == [1, largest, 3]
    assert tg.nan_to_num(x, posinf=2.0).tolist() == [0, 2, -largest]
    whole = np.array([1, 2])
    assert tg.nan_to_num(whole).tolist() == [1, 2]
    assert not np.shares_memory(tg.nan_to_num(whole).data, whole)
    for name in ("nan", "posinf", "neginf"):
        wrong: Any = {name: Tensor(np.ones(()), requires_grad=True)}
        with pytest.raises(GradError, match=f"nan_to_num: {name} requires a gradient"):
            tg.nan_to_num(x, **wrong)
    assert tg.nan_to_num(x, nan=Tensor(np.array(5.0, "float32"))).tolist()[0] == 5  # type: ignore[arg-type]


def test_bounds_that_are_none_do_not_limit() -> None:
    x = Tensor(np.array([-1.0, 2.0]), requires_grad=True)
    assert tg.clip(x).tolist() == [-1, 2]
    assert tg.clip(x).data is not x.data
    assert tg.clip(x, 0).tolist() == [0, 2]
    assert tg.clip(x, None, 0).tolist() == [-1, 0]
    assert tg.angle(np.array(-1.0)).item() == math.pi
    assert tg.angle(np.array(-1.0), deg=True).item() == 180
    for given in ((x, 1.0), (1.0, x)):
        with pytest.raises(GradError, match=r"nextafter: [ab] requires a gradient"):
            tg.nextafter(*given)


def test_special_values() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])
    assert tg.isnan(Tensor(x)).tolist() == [True, False, False, False, False]
    assert tg.isinf(Tensor(x)).tolist() == [False, True, True, False, False]
    assert tg.isfinite(Tensor(x)).tolist() == [False, False, False, True, True]
    np.testing.assert_array_equal(tg.maximum(Tensor(x), 1.0).numpy(), np.maximum(x, 1.0))
    np.testing.assert_array_equal(tg.erf(Tensor(x)).numpy(), [np.nan, 1, -1, 0, 0])


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, of a negative number's root
@pytest.mark.parametrize(
    ("op", "a", "b", "expected"),
    [
        (tg.maximum, 2.0, 2.0, (0.5, 0.5)),
        (tg.minimum, 2.0, 2.0, (0.5, 0.5)),
        (tg.power, 0.0, 2.0, (0.0, 0.0)),
        (tg.power, 0.0, 0.0, (0.0, 0.0)),
        (tg.power, -2.0, 3.0, (12.0, 0.0)),
        (tg.power, INF, 0.0, (0.0, INF)),
        (tg.power, -INF, 0.0, (0.0, 0.0)),
        (tg.power, INF, 2.0, (INF, INF)),
        (tg.power, 0.0, NAN, (NAN, NAN)),
        (tg.power, -1.0, NAN, (NAN, NAN)),
        (tg.power, -2.0, 0.5, (NAN, NAN)),
        (tg.power, NAN, 0.0, (0.0, NAN)),
        (tg.maximum, NAN, 1.0, (1.0, 1.0)),
        (tg.minimum, 1.0, NAN, (1.0, 1.0)),
        (tg.maximum, 1.0, INF, (0.0, 1.0)),
        (tg.divide, 1.0, INF, (0.0, 0.0)),
    ],
)
def test_gradients_at_corners(
    op: Any, a: float, b: float, expected: tuple[float, float], device: str
) -> None:
    x, y = (Tensor(backend.to_device(np.array([value]), device), True) for value in (a, b))
    op(x, y).backward(backend.to_device(np.ones(1), device))
    for tensor, number in zip((x, y), expected, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(tensor.grad), [number])


@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
def test_gradients_of_a_power_are_as_exact_as_the_wide_operand(narrow: str) -> None:
    few = tg.tensor([0.011, 0.3, 1.7, 3.3], narrow).data
    for base, exponent in ((few, few.astype("float32")), (few.astype("float32"), few)):
        a, b = Tensor(base, requires_grad=True), Tensor(exponent, requires_grad=True)
        (a**b).backward(np.ones(4, "float32"))
        x = few.astype("float64")
        for tensor, exact in ((a, x * x ** (x - 1)), (b, x**x * np.log(x))):
            if tensor.dtype == "float32":
                np.testing.assert_allclose(tensor.grad, exact, rtol=1e-6)  # type: ignore[arg-type]


def test_gradient_at_kinks() -> None:
    x = Tensor(np.array([-1.0, 0.0, 1.0, 2.0]), True)
    (tg.abs(x) + tg.clip(x, -1, 1)).sum().backward()
    np.testing.assert_array_equal(x.grad, [-1 + 1, 0 + 1, 1 + 1, 1 + 0])


def test_inputs_that_do_not_fit() -> None:
    x, y = Tensor(np.ones((2, 3))), Tensor(np.ones((4,)))
    with pytest.raises(ShapeError, match=r"add: a has shape \(2, 3\), b has shape \(4,\)"):
        x + y
    with pytest.raises(DtypeError, match="add: b is a str, expected a tensor, array, number or"):
        x + "one"
    with pytest.raises(DtypeError, match="negative: x has dtype bool"):
        tg.negative(Tensor(np.array([True])))
    with pytest.raises(ArgumentError, match="add: a has dtype int8, b is 300, expected numbers"):
        Tensor(np.ones(3, np.int8)) + 300
    with pytest.raises(ArgumentError, match="power: a has dtype int64, b is -1, expected numbers"):
        Tensor(np.ones(3, np.int64)) ** -1
    with pytest.raises(ArgumentError, match="divide: a is 2, b is 0, expected numbers"):
        tg.divide(2, 0)
    with pytest.raises(DtypeError, match="add: got an array of object, expected numbers"):
        y + np.zeros(4, object)
    with pytest.raises(DtypeError, match="floor: x has dtype complex64, expected dtypes it is"):
        tg.floor(np.zeros(4, "complex64"))


def test_numbers_that_a_dtype_lacks_can_be_compared_with(device: str) -> None:
    for dtype in ("uint8", "int8", "uint16", "int32"):
        x = Tensor(backend.to_device(np.arange(3, dtype=dtype), device))
        for number in (-1, 2, 1 << 20, 1 << 40):
            assert (x < number).tolist() == [i < number for i in range(3)]
            assert (x == number).tolist() == [i == number for i in range(3)]


def test_where_of_numbers_has_the_type_that_holds_both() -> None:
    numbers = (False, True, -3, 2.5)
    for c, a, b in itertools.product((True, False), numbers, numbers):
        y, expected = tg.where(c, a, b), np.where(c, a, b)
        assert (y.item(), y.dtype) == (expected, expected.dtype)


def test_kernels_compare_numbers_that_a_dtype_lacks() -> None:
    for number in (-1, 300, True):
        compute = _compute_type(np.dtype("bool"), [np.zeros(3, np.uint8), number])
        assert compute.type(number) == number


@np.errstate(all="ignore")
def test_special_functions_at_the_ends() -> None:
    ends = np.array([0.0, 1.0, -1.0, np.nan, np.inf])
    np.testing.assert_array_equal(tg.entr(ends).numpy(), [0, 0, -np.inf, np.nan, -np.inf])
    np.testing.assert_array_equal(tg.logit(ends[:4]).numpy(), [-np.inf, np.inf, np.nan, np.nan])
    np.testing.assert_allclose(tg.logit(ends[:2], eps=0.25).numpy(), [-np.log(3), np.log(3)])
    np.testing.assert_array_equal(tg.xlog1py([0.0, 0.0, 2.0], [-1.0, np.nan, -1.0]).numpy(),
                                  [0, np.nan, -np.inf])  # fmt: skip
    np.testing.assert_array_equal(tg.erfc([-np.inf, 0.0, np.inf]).numpy(), [2, 1, 0])
    assert 0 < float(tg.erfc(np.float64(26.0))) < 1e-290  # 1 - erf(26) is 0
    big = np.array([1e4, -np.inf, np.inf])
    np.testing.assert_array_equal(tg.logaddexp2(big, big).numpy(), [10001, -np.inf, np.inf])
    np.testing.assert_array_equal(tg.angle(np.array([-1.0, 0, 2, np.nan])).numpy(),
                                  [np.pi, 0, 0, np.nan])  # fmt: skip
    np.testing.assert_allclose(tg.angle([1j, -1 - 1j], deg=True).numpy(), [90, -135])


def test_where_of_a_condition_alone_is_nonzero() -> None:
    condition = np.array([[0, 3, 0], [1, 0, 2]])
    for found, expected in zip(tg.where(condition), np.where(condition), strict=True):
        np.testing.assert_array_equal(found.numpy(), expected)


def test_nextafter_takes_what_it_computes_with() -> None:
    for x, name in ((Tensor(np.ones(2, "float16")), "a"), (Tensor(np.ones(2, bfloat16)), "a")):
        with pytest.raises(DtypeError, match=f"nextafter: {name} has dtype {x.dtype}, expected"):
            tg.nextafter(x, 1.0)
    with pytest.raises(DtypeError, match="nextafter: b has dtype float16"):
        tg.nextafter(1.0, Tensor(np.ones(2, "float16")))


def test_the_docstring_of_a_row_has_its_formula_and_gradients() -> None:
    expected = {
        "exp": "Formula: y = exp(x)\nGradient: dx = dy * y\n",
        "subtract": "Formula: y = a - b\nGradient: da = dy, db = -dy\n",
        "copysign": "db = 0 * dy\n",
        "floor": "Gradient: none\n",
        "less": "Returns:\n    The shape that a and b broadcast to, in bool.\n",
        "invert": "Raises:\n    DtypeError: an operand holds floats.\n",
        "add": "Example:\n    >>> tg.add([1, 2], 3).tolist()\n    [4, 5]\n",
    }
    for name, text in expected.items():
        assert text in getattr(tg, name).__doc__, name
