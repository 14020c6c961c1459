"""Reductions against NumPy in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.core import backend
from tensorgrad.core.arrays import sum_array
from tensorgrad.dtypes import FLOATS, bfloat16, compute_dtype, float32, float64
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.testing import SIZES, Case, Ulps, check, sized

Array = np.ndarray[Any, Any]


def logsumexp(x: Array, axis: Any = None, keepdims: bool = False) -> Any:
    peak = x.max(axis, keepdims=True, initial=-1e300)
    y = np.log(np.exp(x - peak).sum(axis, keepdims=True)) + peak
    return y if keepdims else y.squeeze(axis)


def norm(x: Array, axis: Any = None, ord: float = 2, keepdims: bool = False) -> Any:
    if ord == 1:
        return np.abs(x).sum(axis, keepdims=keepdims)
    if ord == 2:
        return np.sqrt((x**2).sum(axis, keepdims=keepdims))
    return np.abs(x).max(axis, keepdims=keepdims)


# (op, reference, options, whether it has a gradient)
OPS: list[tuple[Any, Any, dict[str, Any], bool]] = [
    (tg.sum, np.sum, {}, True),
    (tg.mean, np.mean, {}, True),
    (tg.prod, np.prod, {}, True),
    (tg.max, np.max, {}, True),
    (tg.min, np.min, {}, True),
    (tg.var, np.var, {}, True),
    (tg.var, np.var, {"ddof": 1}, True),
    (tg.std, np.std, {}, True),
    (tg.logsumexp, logsumexp, {}, True),
    (tg.norm, norm, {}, True),
    (tg.norm, norm, {"ord": 1}, True),
    (tg.norm, norm, {"ord": math.inf}, True),
    (tg.any, np.any, {}, False),
    (tg.all, np.all, {}, False),
    (tg.argmax, np.argmax, {}, False),
    (tg.argmin, np.argmin, {}, False),
]
SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((5,), None),
    ((3, 4), 0),
    ((3, 4), -1),
    ((3, 4), None),
    ((2, 3, 4), (0, 2)),
    ((2, 3, 4), (1, -1)),
    ((3, 1), 1),
    ((33, 31), 0),
    ((33, 31), 1),
]


def case(op: Any, reference: Any, options: dict[str, Any], gradient: bool,
         shape: Any, axis: Any, keepdims: bool = False) -> Case:  # fmt: skip
    extra = {"axis": axis, "keepdims": keepdims, **options}
    return Case(
        lambda x: op(x, **extra),
        [shape],
        lambda x: reference(x, **extra),
        gradient=gradient,
        values=Ulps(4),
        terms=4 * math.prod(shape),
        domain=(0.8, 1.2) if op is tg.prod else None,
        name="-".join([op.__name__, *map(str, (*options.values(), axis))]),
    )


ZEROS = np.array([[1.5, 0.0, 2.0], [0.0, 0.0, 0.5], [0.5, 3.0, 0.0], [2.0, 0.0, 1.0]])
CASES = [
    case(op, reference, options, gradient, shape, axis)
    for op, reference, options, gradient in OPS
    for shape, axis in SHAPES
    if not (isinstance(axis, tuple) and op in (tg.argmax, tg.argmin))
    and not ("ddof" in options and shape == (3, 1))
]
CHOSEN = np.arange(12).reshape(3, 4) % 3 != 1
PARTIAL: list[tuple[str, dict[str, Any]]] = [
    ("sum", {}), ("mean", {}), ("mean", {"keepdims": True}), ("prod", {}), ("var", {"ddof": 1}),
    ("std", {}), ("any", {}), ("all", {"keepdims": True}), ("max", {"initial": 0.25}),
    ("min", {"initial": 0.25}),
]  # fmt: skip


def partial_case(name: str, options: dict[str, Any], axis: Any) -> Case:
    return Case(
        lambda x: getattr(tg, name)(x, axis, where=CHOSEN, **options),
        [(2, 3, 4)],
        lambda x: getattr(np, name)(x, axis=axis, where=CHOSEN[None] & (x == x), **options),
        values=Ulps(4, "row"), axis=None, terms=24, gradient=name not in ("any", "all"),
        captured=False, name=f"{name}-where",
    )  # fmt: skip


CASES += [partial_case(*row, axis) for row in PARTIAL for axis in (None, 1, (0, 2))]
CASES += [case(*row, (3, 4), 1, keepdims=True) for row in OPS]
CASES += [case(*row, (3, n), 1) for row in OPS for n in SIZES[2:]]
CASES += [case(*row, (0, 3), 1) for row in OPS]  # no rows; for empty rows see below
CASES += [
    Case(lambda x: tg.cumsum(x, 0), [(7, 3)], lambda x: np.cumsum(x, 0), terms=7, name="cumsum"),
    *sized(
        lambda x: tg.cumsum(x, -1),
        lambda n: [(2, n)],
        lambda x: np.cumsum(x, 1),
        terms=1025,
        name="cumsum",
    ),
    Case(tg.cumsum, [(3, 4)], np.cumsum, terms=12),
    Case(tg.cumsum, [()], np.cumsum, terms=1),
    Case(lambda x: tg.cumsum(x, 1), [(0, 4)], lambda x: np.cumsum(x, 1), name="cumsum"),
    *sized(
        lambda x: tg.cumprod(x, -1),
        lambda n: [(2, n)],
        lambda x: np.cumprod(x, 1),
        terms=4 * 1025,
        domain=(0.99, 1.01),
        values=Ulps(4),
        gradients=Ulps(4, "row"),
        dtypes=(float64, float32),
        name="cumprod",
    ),
    Case(
        lambda x: tg.cumprod(x, 0),
        [ZEROS],
        lambda x: np.cumprod(x, 0),
        terms=16,
        values=Ulps(4),
        gradients=Ulps(4, "row"),
        name="cumprod",
    ),
    Case(
        lambda x: tg.cumulative_sum(x, axis=1, include_initial=True),
        [(3, 4)],
        lambda x: np.cumulative_sum(x, axis=1, include_initial=True),
        terms=8,
        name="cumulative_sum",
    ),
    Case(
        tg.cumulative_prod,
        [np.array([0.5, 2.0, 1.5])],
        np.cumulative_prod,
        terms=8,
        values=Ulps(4),
        gradients=Ulps(4, "row"),
    ),
    Case(tg.sum, [()], np.sum),
    Case(lambda x: tg.sum(x, ()), [(2, 3)], lambda x: x, name="sum-no-axis"),
    Case(lambda x: tg.max(x, ()), [(2, 3)], lambda x: x, name="max-no-axis"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


def test_a_given_dtype_is_that_of_the_sum() -> None:
    x = Tensor(np.full((2, 300), -1, "int8"))
    for name in ("sum", "prod", "mean", "cumsum", "cumprod"):
        for dtype in ("int8", "float32", "float64"):
            if (name, dtype) != ("mean", "int8"):  # which NumPy sums in int8
                found = getattr(tg, name)(x, 1, dtype=dtype)
                with np.errstate(over="ignore"):
                    expected = getattr(np, name)(x.numpy(), 1, dtype=dtype)
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)
    leaf = tg.tensor([1.0, 2.0], requires_grad=True)
    y = leaf.sum(dtype="float64") + tg.var(leaf, correction=1)
    y.backward()
    assert y.dtype == np.dtype("float64")
    np.testing.assert_array_equal(leaf.grad, [0.0, 2.0])
    with pytest.raises(ArgumentError, match="cumulative_sum: axis is None for x of 2 axes"):
        tg.cumulative_sum(np.ones((2, 2)))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32",
                                   "int64", "uint64"])  # fmt: skip
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "mean", "var", "any", "all",
                                "argmax", "argmin", "cumsum"])  # fmt: skip
def test_integers_follow_numpy(op: str, dtype: str, device: str) -> None:
    x = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 100, (6, 5)).astype(dtype)
    if dtype == "uint64":
        x[2, 3] = 2**64 - 1
    for axis in (None, 0, 1):
        got = getattr(tg, op)(Tensor(backend.to_device(x, device)), axis)
        expected = getattr(np, op)(x, axis)
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-14)


def test_signed_extremes(device: str) -> None:
    for dtype in ("int8", "int32", "int64"):
        limits = np.iinfo(dtype)
        x = Tensor(backend.to_device(np.array([limits.min, limits.max], dtype), device))
        assert (tg.max(x).item(), tg.min(x).item()) == (limits.max, limits.min)
        low = Tensor(backend.to_device(np.full(3, limits.min, dtype), device))
        assert (tg.max(low).item(), tg.argmax(low).item()) == (limits.min, 0)


@pytest.mark.parametrize(
    ("op", "value"),
    [(tg.sum, 0), (tg.prod, 1), (tg.mean, math.nan), (tg.var, math.nan), (tg.std, math.nan),
     (tg.logsumexp, -math.inf), (tg.norm, 0), (tg.any, False), (tg.all, True)],
)  # fmt: skip
def test_reductions_of_nothing(op: Any, value: float, device: str) -> None:
    x = Tensor(backend.to_device(np.ones((0, 3), "float32"), device))
    np.testing.assert_array_equal(op(x, 0).numpy(), np.full(3, value))
    np.testing.assert_array_equal(op(x).numpy(), value)
    assert op(x, 0, keepdims=True).shape == (1, 3)
    assert op(x, 1).shape == (0,)


@pytest.mark.parametrize("op", [tg.max, tg.min, tg.argmax, tg.argmin])
def test_extremes_of_nothing(op: Any, device: str) -> None:
    x = Tensor(backend.to_device(np.ones((0, 3)), device))
    with pytest.raises(
        ShapeError, match=rf"{op.__name__}: x has shape \(0, 3\), expected elements"
    ):
        op(x, 0)
    with pytest.raises(ShapeError, match="expected elements along"):
        op(x)
    assert op(x, 1).shape == (0,)


def test_nan_wins_and_the_first_index(device: str) -> None:
    for dtype in FLOATS:
        rows = [[1, math.nan, 3, math.nan], [math.inf, 2, math.inf, -1], [-math.inf] * 4]
        x = Tensor(backend.to_device(np.array(rows).astype(dtype), device))
        top, low = tg.max(x, 1).numpy().astype("float64"), tg.min(x, 1).numpy().astype("float64")
        np.testing.assert_array_equal(top, [math.nan, math.inf, -math.inf])
        np.testing.assert_array_equal(low, [math.nan, -1, -math.inf])
        assert tg.argmax(x, 1).tolist() == [1, 0, 0]
        assert tg.argmin(x, 1).tolist() == [1, 3, 0]
        assert tg.argmax(x, 0).tolist() == [1, 0, 1, 0]
        assert tg.logsumexp(x, 1).tolist()[1:] == [math.inf, -math.inf]
        assert math.isnan(tg.logsumexp(x, 1).tolist()[0])
        assert tg.any(x, 1).tolist() == [True, True, True]


@pytest.mark.parametrize("length", [16, 33, 1024, 40_000])
def test_ties_have_the_first_index(length: int, device: str) -> None:
    rows = np.full((6, length), -2.0)
    last = length - 1
    rows[0] = -math.inf
    rows[1, [3, last]] = -0.0, 0.0
    rows[2, [7, last]] = 5.0
    rows[3, [9, last]] = math.nan
    rows[3, 1] = math.inf
    rows[4] = math.inf
    rows[4, 11:] = -math.inf
    for dtype in FLOATS:
        for sign, op in ((1, tg.argmax), (-1, tg.argmin)):
            x = backend.to_device((sign * rows).astype(dtype), device)
            expected = [0, 3, 7, 9, 0, 0]
            assert op(Tensor(x), 1).tolist() == expected
            assert op(Tensor(backend.contiguous(x.T)), 0).tolist() == expected
            assert op(Tensor(x[1])).tolist() == 3


def gradient(function: Callable[[Tensor], Tensor], values: Any, device: str) -> list[Any]:
    x = Tensor(backend.to_device(np.array(values, "float64"), device), requires_grad=True)
    function(x).sum().backward()
    return backend.to_numpy(x.grad).tolist()  # type: ignore[no-any-return]


def test_gradients_at_corners(device: str) -> None:
    third = 1 / 3
    assert gradient(tg.max, [2, 5, 5, 5], device) == [0, third, third, third]
    assert gradient(lambda x: tg.min(x, 1), [[2, 2], [1, 3]], device) == [[0.5, 0.5], [1, 0]]
    assert gradient(tg.prod, [2, 3, 4], device) == [12, 8, 6]
    assert gradient(tg.prod, [2, 0, 4], device) == [0, 8, 0]
    assert gradient(tg.prod, [0, 0, 4], device) == [0, 0, 0]
    assert gradient(lambda x: tg.prod(x[0]), [5], device) == [1]
    assert gradient(tg.std, [3, 3, 3], device) == [0, 0, 0]
    assert gradient(tg.norm, [0, 0], device) == [0, 0]
    assert gradient(lambda x: tg.norm(x, ord=1), [-2, 0, 3], device) == [-1, 0, 1]
    assert gradient(lambda x: tg.norm(x, ord=math.inf), [-2, 1, 2], device) == [-0.5, 0, 0.5]
    assert gradient(tg.logsumexp, [-math.inf, 1], device) == [0, 1]
    assert gradient(tg.mean, [[1, 2]], device) == [[0.5, 0.5]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_of_an_infinite_logsumexp_is_nan(dtype: Any, device: str) -> None:
    inf = math.inf
    rows = np.array([[-inf] * 3, [inf, 300, -inf], [inf, inf, 1], [-inf, 300, -inf], [3e4] * 3])
    x = Tensor(backend.to_device(rows.astype(dtype), device), requires_grad=True)
    tg.logsumexp(x, 1).backward(backend.to_device(np.ones(5, dtype), device))
    nan, third = math.nan, 1 / 3
    expected: Any = [[nan] * 3, [nan, 0, 0], [nan, nan, 0], [0, 1, 0], [third] * 3]
    got = backend.to_numpy(x.grad).astype("float64")
    np.testing.assert_allclose(got, expected, rtol=0.01)


def test_variance_of_large_numbers_does_not_cancel(device: str) -> None:
    x = (np.random.default_rng(2).standard_normal(100_001) + 1e4).astype("float32")
    expected = x.astype("float64").var()
    got = tg.var(Tensor(backend.to_device(x, device))).item()
    assert abs(got / expected - 1) < 1e-4


def test_deviations_are_computed_in_a_given_dtype() -> None:
    x = np.arange(6).reshape(2, 3)
    for name in ("var", "std"):
        for dtype in ("float32", "float64"):
            found = getattr(tg, name)(x, 0, dtype=dtype)
            assert found.dtype == dtype
            np.testing.assert_allclose(found, getattr(np, name)(x, 0), 1e-6)
        for ddof in (0, 1):
            found = getattr(tg, name)(x, correction=ddof)
            np.testing.assert_allclose(found, getattr(np, name)(x, ddof=ddof))


def test_degrees_of_freedom(device: str) -> None:
    x = Tensor(backend.to_device(np.array([1.0, 2.0]), device))
    assert math.isinf(tg.var(x, ddof=2).item())
    assert math.isnan(tg.var(x[:1], ddof=1).item())


def test_logsumexp_of_large_numbers(device: str) -> None:
    x = Tensor(backend.to_device(np.array([1000.0, 1000.0, -1000.0], "float32"), device))
    assert abs(tg.logsumexp(x).item() - 1000 - math.log(2)) < 1e-4


@pytest.mark.parametrize("dtype", ["float16", bfloat16])
def test_sixteen_bits_accumulate_wide_and_round_once(dtype: Any, device: str) -> None:
    x = np.full(5000, 1.003, "float32").astype(dtype)
    array = backend.to_device(x, device)
    exact = x.astype("float64").sum()
    assert tg.sum(Tensor(array)).item() == np.array(exact).astype(dtype)
    wide = sum_array(array, (0,), dtype=np.dtype("float32"))
    assert wide.dtype == np.float32
    assert abs(float(wide) / exact - 1) < 1e-5


def test_bad_arguments() -> None:
    x = Tensor(np.ones((2, 3)))
    with pytest.raises(ArgumentError, match="sum: axis is 2, expected -2 to 1"):
        tg.sum(x, 2)
    with pytest.raises(ArgumentError, match=r"mean: axis is \(0, -2\), expected each axis once"):
        tg.mean(x, (0, -2))
    with pytest.raises(ArgumentError, match="max: axis is 0, expected none: it has no axes"):
        tg.max(Tensor(np.array(1.0)), 0)
    with pytest.raises(ArgumentError, match=r"sum: axis is 0\.5, expected an integer"):
        tg.sum(x, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"argmax: axis is \(0, 1\), expected an integer"):
        tg.argmax(x, (0, 1))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"cumsum: axis is \(0,\), expected an integer"):
        tg.cumsum(x, (0,))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="norm: ord is 3, expected 1, 2 or inf"):
        tg.norm(x, ord=3)
    with pytest.raises(DtypeError, match="sum: x is a str, expected a tensor, array, number or"):
        tg.sum("12")


# Shapes that reach every kernel: (shape, axis).
GPU_SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((70001,), 0),  # a single row, split
    ((3_000_017,), 0),
    ((5, 70001), 1),  # rows that begin at any alignment, split
    ((2000, 1023), 1),  # a warp a row
    ((4100, 9000), 1),  # a block a row, not split
    ((9, 3000), 1),  # few rows of middling length
    ((100_000, 3), 1),  # rows shorter than one access
    ((1000, 8), 1),
    ((3001, 33), 1),  # a thread a row
    ((257, 61), 1),
    ((70001, 3), 0),  # few columns, split
    ((5000, 768), 0),  # wide columns, split
    ((5000, 769), 0),
    ((3, 100_000), 0),
    ((2, 9, 5), 1),
    ((3000, 4, 4), 1),  # many slabs
    ((40, 300, 65), 1),
    ((41, 512, 33), 1),  # rows joined until vectors fit
    ((3, 136, 5), 1),
    ((6, 50, 7, 40), (1, 3)),  # not side by side
]


@pytest.mark.gpu
@pytest.mark.parametrize("row", OPS, ids=lambda r: f"{r[0].__name__}{list(r[2].values())}")
@pytest.mark.parametrize(("shape", "axis"), GPU_SHAPES)
def test_every_kernel(row: Any, shape: tuple[int, ...], axis: Any) -> None:
    op, reference, options, _ = row
    if isinstance(axis, tuple) and op in (tg.argmax, tg.argmin):
        pytest.skip("takes one axis")
    rng = np.random.default_rng(3)
    low, high = (0.999, 1.001) if op is tg.prod else (-2, 2)
    for dtype in FLOATS if math.prod(shape) < 1_000_000 else (np.dtype("float32"), bfloat16):
        wide = rng.uniform(low, high, shape).astype(dtype)
        x = backend.to_device(wide, "cuda")
        got = op(Tensor(x), axis, **options).numpy()
        again = op(Tensor(x), axis, **options).numpy()
        assert got.tobytes() == again.tobytes()
        expected = reference(wide.astype("float64"), axis, **options)
        if got.dtype.kind in "bi":
            np.testing.assert_array_equal(got, expected)
            continue
        length = math.prod(np.array(shape)[list(axis) if isinstance(axis, tuple) else [axis]])
        eps = np.finfo(compute_dtype(dtype)).eps
        tolerance = eps * (4 + (length if op is tg.prod else length**0.5))
        tolerance += 0 if dtype.itemsize > 2 else 2.0**-7
        scale = np.abs(wide.astype("float64")).sum(axis).max()  # sums may cancel
        scale = {tg.sum: scale, tg.mean: scale / length}.get(op, 1)
        with np.errstate(over="ignore"):
            expected = expected.astype(dtype).astype("float64")  # float16 overflows
        np.testing.assert_allclose(
            got.astype("float64"), expected, rtol=tolerance, atol=tolerance * scale
        )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(70001,), (3, 5000), (2000, 100), (1, 1_000_003)])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", bfloat16, "int32", "bool"])
def test_cumsum_kernels(shape: tuple[int, ...], dtype: Any) -> None:
    x = (np.random.default_rng(4).uniform(0, 2, shape)).astype(dtype)
    got = tg.cumsum(Tensor(backend.to_device(x, "cuda")), -1)
    wide = x.astype("float64") if got.dtype.kind != "i" else x
    expected = np.cumsum(wide, -1)
    tolerance = {8: 1e-12, 4: 2e-5, 2: 1e-2}[got.dtype.itemsize]
    finite = expected < 6e4 if got.dtype == np.float16 else np.ones(shape, bool)
    np.testing.assert_allclose(
        got.numpy().astype(expected.dtype)[finite], expected[finite], rtol=tolerance
    )


@pytest.mark.gpu
def test_views_that_are_not_aligned() -> None:
    base = np.random.default_rng(5).standard_normal(10_007).astype("float32")
    x = backend.to_device(base, "cuda")
    for start in range(1, 5):
        part = base[start:]
        got = tg.sum(Tensor(x[start:])).item()
        assert abs(got - part.astype("float64").sum()) < 1e-2
        assert tg.argmax(Tensor(x[start:])).item() == part.argmax()
        table = tg.max(Tensor(x[start : start + 10_000].reshape(100, 100)), 0).numpy()
        np.testing.assert_array_equal(table, base[start : start + 10_000].reshape(100, 100).max(0))


def test_running_results_may_begin_with_their_neutral_number() -> None:
    x = np.array([[2.0, 3], [4, 5]])
    for name in ("cumulative_sum", "cumulative_prod"):
        ours, numpys = getattr(tg, name), getattr(np, name)
        for values, axis in ((x, 0), (x, -1), (x[0], None)):
            for initial in (False, True):
                np.testing.assert_array_equal(
                    ours(values, axis=axis, include_initial=initial),
                    numpys(values, axis=axis, include_initial=initial),
                )
            np.testing.assert_array_equal(ours(values, axis=axis), numpys(values, axis=axis))
        assert ours(3.0).tolist() == [3]
        assert ours(x, axis=1, dtype="float32").dtype == np.float32
        with pytest.raises(ArgumentError, match=f"{name}: axis is 2, expected -2 to 1"):
            ours(x, axis=2)


def test_where_and_initial() -> None:
    x, none = np.array([[1.0, 2], [3, 4]]), np.zeros((2, 2), bool)
    wrong: Any = "a"
    with np.errstate(invalid="ignore", divide="ignore"):
        assert np.isnan(tg.mean(x, where=none).numpy())
        assert np.isnan(tg.var(x, where=none).numpy())
    assert float(tg.sum(x, where=none)) == 0
    assert float(tg.max(x, initial=9.0)) == 9
    assert float(tg.max(5, initial=9.0)) == 9
    np.testing.assert_array_equal(tg.min(x, (), initial=2.0).numpy(), np.minimum(x, 2))
    np.testing.assert_array_equal(tg.max(x[:0], 0, initial=-1.0).numpy(), [-1, -1])
    assert tg.mean(x.astype("float16"), where=~none).dtype == np.float16
    assert tg.mean(x.astype(int), where=~none).dtype == np.float64
    assert float(tg.sum(x.astype("int8"), where=[True, False])) == 4
    np.testing.assert_array_equal(tg.mean(x * 1j, where=x > 2).numpy(), 3.5j)
    one_row, one_column = np.array([[True, False]]), np.array([[False], [True]])
    for part in (one_row, one_column, one_row[0]):
        for name in ("sum", "prod", "mean", "var", "std", "any", "all"):
            for axis in (None, 0, 1, (0, 1)):
                for keepdims in (False, True):
                    with np.errstate(invalid="ignore", divide="ignore"), catch_warnings():
                        simplefilter("ignore")  # NumPy's of rows without numbers
                        found = getattr(tg, name)(x, axis, keepdims=keepdims, where=part)
                        wanted = getattr(np, name)(x, axis, keepdims=keepdims, where=part)
                    np.testing.assert_array_equal(found, wanted, f"{name} {axis}")
    calls: list[tuple[Any, Any, str]] = [
        (lambda: tg.max(x, where=none), ArgumentError, "max: initial is None, expected a number"),
        (lambda: tg.sum(x, where=x), DtypeError, "sum: where has dtype float64, expected bool"),
        (lambda: tg.mean(x, where=x), DtypeError, "mean: where has dtype float64, expected bool"),
        (lambda: tg.var(x * 1j, where=none), DtypeError, "var: x has dtype complex128, expected"),
        (lambda: tg.std(x, where=none[None]), ShapeError,
         r"where has shape \(1, 2, 2\), expected one that broadcasts to \(2, 2\)"),
        (lambda: tg.prod(x, where=[True] * 3), ShapeError, "prod: where has shape"),
        (lambda: tg.var(x, ddof=1, correction=1), ArgumentError, "ddof=1 and correction=1, expec"),
        (lambda: tg.std(x, ddof=wrong, where=none), ArgumentError, "std: ddof is 'a', expected"),
        (lambda: tg.var(x, ddof=wrong), ArgumentError, "var: ddof is 'a', expected a number"),
        (lambda: tg.mean(x, keepdims=wrong, where=~none), ArgumentError, "mean: keepdims is"),
        (lambda: tg.sum(x, keepdims=wrong), ArgumentError, "sum: keepdims is 'a', expec"),
        (lambda: tg.cumulative_sum(x), ArgumentError, "cumulative_sum: axis is None for x of 2"),
        (lambda: tg.cumulative_prod(x), ArgumentError, "cumulative_prod: axis is None for x of 2"),
    ]  # fmt: skip
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    "op",
    [
        tg.sum,
        tg.mean,
        tg.var,
        tg.std,
        tg.max,
        tg.min,
        tg.prod,
        tg.argmax,
        tg.argmin,
        tg.any,
        tg.all,
        tg.logsumexp,
        tg.norm,
        tg.cumsum,
        tg.cumprod,
    ],
)
def test_dim_is_named_axis(op: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"^{op.__name__}: got dim=1, expected axis=1$"):
        op(np.ones((2, 2)), dim=1)
