"""Quantiles, averages that skip NaN, histograms and differences, against NumPy."""

from __future__ import annotations

import warnings
from typing import Any, get_args

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.gradcheck import gradcheck
from tensorgrad.errors import ArgumentError, DtypeError, GradError, ShapeError
from tensorgrad.ops import statistics
from tensorgrad.testing import Case, Ulps, check


def apart(*shape: int) -> Any:
    """Return different numbers in any order: numeric differences must not change the order."""
    size = int(np.prod(shape))
    return (np.random.default_rng(size).permutation(size) / 8 - 2).reshape(shape)


def case(name: str, x: Any, *arguments: Any, gradient: bool = True, **options: Any) -> Case:
    return Case(
        lambda x: getattr(tg, name)(x, *arguments, **options),
        [x],
        lambda x: getattr(np, name)(x, *arguments, **options),
        values=Ulps(2, "row"),
        terms=16,
        gradient=gradient,
        name=name,
    )


CASES = [
    *(case("median", apart(*shape), axis) for shape, axis in [((5,), None), ((4, 3), 0),
                                                           ((2, 3, 4), (0, 2)), ((), None)]),
    case("median", apart(4, 3), 1, keepdims=True),
    *(case("quantile", apart(3, 7), 0.3, 1, method=method)
      for method in ("linear", "lower", "higher", "nearest", "midpoint")),
    case("quantile", apart(3, 7), [0.0, 0.25, 1.0], 0, keepdims=True),
    case("percentile", apart(9), 80),
    *(case(name, apart(3, 5), 1) for name in ("nanmedian", "nanmean", "nansum", "nanprod",
                                            "nanvar", "nanstd", "nanmax", "nanmin")),
    *(case(name, apart(3, 5), 1, gradient=False) for name in ("nanargmax", "nanargmin")),
    *(case(name, apart(3, 5), 1) for name in ("nancumsum", "nancumprod")),
    case("nanquantile", apart(3, 5), 0.4, 0),
    case("nanpercentile", apart(3, 5), [40, 60]),
    case("ptp", apart(3, 5), 1),
    case("average", apart(3, 5), 0),
    Case(tg.average, [(3, 5)], np.average, terms=15, values=Ulps(4, "row")),
    Case(lambda x, w: tg.average(x, 1, w), [apart(3, 4), np.array([0.5, 1.0, 2.0, 3.5])],
         lambda x, w: np.average(x, 1, w), terms=16, values=Ulps(4, "row"),
         gradients=Ulps(16, "row", why="of a quotient of sums"), name="average",
         dtypes=("float64", "float32")),
    Case(tg.cov, [(3, 5)], np.cov, terms=16, values=Ulps(4, "row")),
    Case(lambda x, y: tg.cov(x, y, rowvar=False, bias=True), [(6, 2), (6, 1)],
         lambda x, y: np.cov(x, y, rowvar=False, bias=True), terms=16, values=Ulps(4, "row"),
         name="cov"),
    Case(tg.corrcoef, [(3, 5)], np.corrcoef, terms=64, dtypes=("float64", "float32"),
         values=Ulps(4, "row"), gradients=Ulps(16, "row", why="cancels beside the diagonal")),
    case("diff", (3, 5)),
    case("diff", (5, 3), 2, 0),
    case("diff", np.arange(12).reshape(3, 4) ** 2, prepend=0, append=[[1], [2], [3]]),
    case("diff", np.array([True, True, False])),
    case("trapezoid", (3, 5)),
    Case(lambda y, x: tg.trapezoid(y, x, axis=0), [(4, 2), np.array([0.0, 1.0, 3.0, 3.5])],
         lambda y, x: np.trapezoid(y.T, x).T, terms=16, values=Ulps(4, "row"),
         gradients=Ulps(2, "row"), name="trapezoid"),
    Case(tg.bincount, [np.array([0, 3, 1, 3])], np.bincount, gradient=False, captured=False),
    Case(lambda x, w: tg.bincount(x, w, 6), [np.array([0, 3, 1, 3]), (4,)],
         lambda x, w: np.bincount(x, w, 6), captured=False, values=Ulps(4, "row"),
         dtypes=("float64",), name="bincount"),
    case("digitize", np.array([0.5, 1.0, -3.0, 9.0]), [0.0, 1.0, 2.0], gradient=False),
    case("digitize", np.array([0.5, 1.0, -3.0, 9.0]), [2.0, 1.0], True, gradient=False),
]  # fmt: skip
CASES += [Case(lambda x: tg.histogram(x, [-2.0, 0.0, 0.5, 9.0])[0], [(3, 5)],
               lambda x: np.histogram(x, [-2.0, 0.0, 0.5, 9.0])[0], gradient=False,
               captured=False, name="histogram")]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


def test_nan_is_skipped_or_wins(device: str) -> None:
    x = np.array([[1.0, np.nan, 3.0, 2.0], [np.nan] * 4])
    t = Tensor(x).to(device)
    names = ["nanmean", "nansum", "nanprod", "nanvar", "nanstd", "nanmax", "nanmin", "nanmedian",
             "median", "nancumsum", "nancumprod"]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's of rows without numbers
        for name in names:
            found = getattr(tg, name)(t, 1).numpy()
            np.testing.assert_allclose(found, getattr(np, name)(x, 1), err_msg=name)
        np.testing.assert_allclose(tg.nanquantile(t, 0.7, 1), np.nanquantile(x, 0.7, 1))
    leaf = Tensor(x[0], requires_grad=True)
    tg.nanmean(leaf).backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad * 3, np.array([1.0, 0.0, 1.0, 1.0]))


INF, NAN = np.inf, np.nan
DEGENERATE: list[Any] = [
    np.zeros(0), np.zeros((0, 3)), np.zeros((3, 0)), np.array(2.5), np.array(NAN), np.array(INF),
    np.array([1.5]), np.array([NAN]), np.array([INF, INF]), np.array([INF, -INF]),
    np.array([-INF, -INF, 1.0, 3.0]), np.array([1.0, INF]), np.array([NAN, -INF, INF, NAN]),
    np.array([[INF, INF, INF], [-INF, -INF, -INF]]), np.array([[1, NAN, 3], [NAN, NAN, NAN]]),
    np.array([1e308, 1e308]), np.zeros(0, bool), np.array(True), np.array([True, False, True]),
    np.array([[-50, 1, 70], [0, 3, 7]], "int8"), np.array([250, 255, 3, 4], "uint8"),
    np.array([2**62, 2**62 + 1]), np.array([], "int32"), np.ones((1, 2, 1), "float32"),
]  # fmt: skip
METHODS = [*get_args(statistics.QuantileMethod)]
REDUCTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("mean", "max", "min", "ptp", "sum", "prod", "median", "nanmedian",
                              "nanmean", "nansum", "nanprod", "nanmax", "nanmin", "cumsum",
                              "nancumsum", "nancumprod", "argmax", "nanargmax", "nanargmin",
                              "count_nonzero", "average", "any", "all")),
    *((name, {"ddof": ddof}) for name in ("var", "std", "nanvar", "nanstd") for ddof in (0, 2, -1)),
    *((name, {"q": 0.3, "method": method}) for name in ("quantile", "nanquantile")
      for method in METHODS),
    ("quantile", {"q": 1}),
    ("quantile", {"q": np.array([0.0, 0.5, 1.0])}), ("percentile", {"q": 30.0}),
    ("cumulative_sum", {"include_initial": True}), ("average", {"weights": 0}),
    ("average", {"weights": 1}),
]  # fmt: skip
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("cov", {}), ("cov", {"ddof": 5}), ("cov", {"rowvar": False}), ("corrcoef", {}),
    ("cov", {"fweights": [1, 0, 2], "aweights": [0.5, 1.0, 2.0]}), ("vander", {}),
    ("cov", {"fweights": [1, 0, 2]}), ("cov", {"aweights": [0.5, 1.0, 2.0], "ddof": 0}),
    ("vander", {"N": 3}), ("diff", {}), ("trapezoid", {}), ("bincount", {"minlength": 2}),
    ("histogram", {"bins": 3}), ("histogram", {"bins": "auto", "range": (0, 3)}),
    ("digitize", {"bins": [0.0, 2.0]}),
]  # fmt: skip


def numpys(name: str, x: Any, options: dict[str, Any]) -> Any:
    """Return NumPy's results as a list, None where it raises an error."""
    try:
        found = getattr(np, name)(x, **options)
    except (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError):
        return None
    return [np.asarray(part) for part in (found if isinstance(found, tuple) else [found])]


with np.errstate(all="ignore"):  # NumPy before 2.4 interpolates between inf and inf: NaN
    NO_INFINITE_QUANTILES = bool(np.isnan(np.quantile(np.array(INF), 1)))


def compare(name: str, x: Any, options: dict[str, Any]) -> int:
    """Compare with NumPy; return whether it gives numbers."""
    if NO_INFINITE_QUANTILES and "q" in options and not np.isfinite(x).all():
        return 0
    expected = numpys(name, x, options)
    own = {{"N": "columns"}.get(key, key): value for key, value in options.items()}
    if expected is None:
        return 0
    result = getattr(tg, name)(Tensor(x), **own)
    for y, want in zip(result if isinstance(result, tuple) else [result], expected, strict=True):
        assert (y.shape, y.dtype) == (want.shape, want.dtype), (name, x, options)
        assert np.allclose(y.numpy(), want, 1e-6, 0, equal_nan=True), (name, x, options)
    return 1


@pytest.mark.filterwarnings("ignore")
def test_degenerate_inputs_are_numpys() -> None:
    compared = 0
    for x in DEGENERATE:
        for name, options in OTHERS:
            compared += compare(name, x, options)
        for name, options in REDUCTIONS:
            for axis in (None, -1) if x.ndim else (None,):
                given = {**options, "axis": axis}
                if "weights" in options:
                    given["weights"] = np.full(x.shape, options["weights"])
                compared += compare(name, x, given)
    assert compared > 2000


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["nansum", "nanprod", "nanmean", "nanmax", "nanmin", "nanargmax",
                                  "nancumsum", "nancumprod"])  # fmt: skip
def test_complex_nan_is_skipped(name: str) -> None:
    for values in ([1 + 1j, np.nan, 2], [complex(1, NAN), 3], [NAN, NAN]):
        compare(name, np.array(values, "complex64"), {})


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_quantiles(method: Any) -> None:
    x = Tensor(apart(3, 4))
    assert gradcheck(lambda x: tg.quantile(x, [0.1, 0.5, 1.0], 1, method=method), [x])
    assert gradcheck(lambda x: tg.nanquantile(x, 0.7, method=method), [x])


REDUCED = ["median", "nanmedian", "nanmean", "nansum", "nanprod", "nanvar", "nanstd", "nanmax",
           "nanmin", "nanargmax", "nanargmin", "ptp", "average"]  # fmt: skip


@pytest.mark.parametrize("name", [*REDUCED, "quantile", "nanquantile", "percentile",
                                  "nanpercentile"])  # fmt: skip
def test_defaults_and_keepdims_are_numpys(name: str) -> None:
    x = apart(3, 4)
    if name.startswith("nan"):
        x[1, 2] = np.nan
    ours, numpys = getattr(tg, name), getattr(np, name)
    q: Any = () if name in REDUCED else (0.3,)
    for values in (x, np.arange(12).reshape(3, 4)):
        np.testing.assert_allclose(ours(values, *q), numpys(values, *q))
        for axis in (None, 0, 1):
            found = ours(values, *q, axis, keepdims=True)
            expected = numpys(values, *q, axis, keepdims=True)
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected)


def test_other_defaults_are_numpys() -> None:
    x = apart(3, 5)
    for name in ("cov", "corrcoef", "diff", "trapezoid", "nancumsum", "nancumprod"):
        np.testing.assert_allclose(getattr(tg, name)(x), getattr(np, name)(x), 1e-12)
    changed: list[dict[str, Any]] = [
        {"bias": True}, {"ddof": 0}, {"rowvar": False}, {"ddof": 2, "bias": True},
    ]  # fmt: skip
    for options in changed:
        np.testing.assert_allclose(tg.cov(x, **options), np.cov(x, **options), 1e-12)
    np.testing.assert_allclose(tg.trapezoid(x, dx=0.5, axis=0), np.trapezoid(x, dx=0.5, axis=0))
    widths = np.abs(x).cumsum(1)
    np.testing.assert_allclose(tg.trapezoid(x, widths), np.trapezoid(x, widths))
    for one, two in zip(tg.histogram(x), np.histogram(x), strict=True):
        assert str(one.dtype) == str(two.dtype)
        np.testing.assert_allclose(one, two)
    np.testing.assert_array_equal(tg.digitize([1.0], [0.0, 1.0]), np.digitize([1.0], [0.0, 1.0]))
    assert tg.bincount([2]).tolist() == [0, 0, 1]
    assert tg.bincount([2], minlength=5).tolist() == [0, 0, 1, 0, 0]
    weights = Tensor(np.array([1.0, 2.0, 4.0]), requires_grad=True)
    y = tg.bincount([1, 0, 1], weights)
    y.backward(np.array([10.0, 20.0]))
    assert y.tolist() == [2, 5]
    np.testing.assert_array_equal(weights.grad, [20, 10, 20])
    np.testing.assert_allclose(tg.average(x, 1, np.arange(1.0, 6), keepdims=True),
                               np.average(x, 1, np.arange(1.0, 6), keepdims=True))  # fmt: skip
    assert tg.average(np.arange(3), weights=[1, 2, 1]).dtype == np.float64
    assert tg.average(x.astype("float16"), weights=np.ones((3, 5), "float16")).dtype == np.float16


def test_what_is_empty_gives_what_is_empty() -> None:
    x = Tensor(np.ones((2, 3)))
    assert tg.quantile(x, [], 1, keepdims=True).shape == (0, 2, 1)
    assert tg.quantile(x, np.zeros((2, 0)), 1).shape == (2, 0, 2)
    assert tg.cov(x[:0]).shape == (0, 0)
    assert tg.diff(x, 0) is x
    rows = np.array([[1, 2, 4], [0, 3, 1]], "float32")
    for op in (tg.cov, tg.corrcoef):
        assert op(rows).dtype == np.float64
        assert op(rows, dtype="float32").dtype == np.float32


def test_tensors_are_fractions_and_edges() -> None:
    x = Tensor(np.array([1.0, 2.0, 4.0]))
    np.testing.assert_array_equal(tg.quantile(x, Tensor(np.array([0.25, 1.0]))).numpy(), [1.5, 4])
    counts, edges = tg.histogram(x, Tensor(np.array([0.0, 2.0, 4.0])))  # type: ignore[arg-type]
    assert (counts.tolist(), edges.tolist()) == ([1, 2], [0, 2, 4])


@pytest.mark.parametrize("method", METHODS)
def test_quantiles_on_and_between_elements_are_numpys(method: Any) -> None:
    for count in (4, 5):
        x, q = np.arange(1.0, count + 1) ** 2, np.arange(4 * count + 1) / (4 * count)
        expected = np.quantile(x, q, method=method)
        np.testing.assert_allclose(tg.quantile(x, q, method=method), expected, 1e-12)
        np.testing.assert_allclose(tg.nanquantile(x, q, method=method), expected, 1e-12)


def test_lists_stay_integers_beside_weights() -> None:
    assert tg.bincount([0, 2], np.array([0.1, 0.3])).tolist() == [0.1, 0.0, 0.3]
    assert tg.bincount([]).tolist() == []


def test_quantiles_of_narrow_integers_do_not_wrap() -> None:
    assert tg.quantile(np.array([-128, 127], "int8"), 0.5).item() == -0.5


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_fractions_of_float64_are_not_rounded_to_the_elements(dtype: str) -> None:
    x = np.array([1, 2, 4], dtype)
    y = tg.quantile(x, np.array([0.3, 0.7]))
    assert y.dtype == np.float64
    np.testing.assert_allclose(y.numpy(), [1.6, 2.8], 1e-15)


def test_weights_of_several_axes(device: str) -> None:
    x, weights = apart(2, 3, 4), np.arange(1.0, 9).reshape(4, 2)
    y = tg.average(Tensor(x).to(device), (2, 0), weights=Tensor(weights).to(device))
    np.testing.assert_allclose(y.numpy(), np.average(x, (2, 0), weights))


@pytest.mark.parametrize("options", [{}, {"bins": 4, "range": (0.0, 2.0)}, {"density": True}])
def test_histogram_is_numpys(options: dict[str, Any], device: str) -> None:
    x = np.random.default_rng(3).standard_normal((7, 9))
    for one, two in zip(tg.histogram(Tensor(x).to(device), **options), np.histogram(x, **options),
                        strict=True):  # fmt: skip
        np.testing.assert_allclose(one.numpy(), two)


def test_errors_name_argument_and_expectation() -> None:
    x = Tensor(np.ones((2, 3)))
    calls: list[tuple[Any, Any, str]] = [
        (lambda: tg.quantile(x, 1.5), ArgumentError, "quantile: q is 1.5, expected 0 to 1"),
        (lambda: tg.quantile(x, 0.5, method="mid"),  # type: ignore[arg-type]
         ArgumentError, "quantile: method is 'mid'"),
        (lambda: tg.nanquantile(x, 0.5, method="median"),  # type: ignore[arg-type]
         ArgumentError, "nanquantile: method is 'median', expected one of 'linear', 'lower'"),
        (lambda: tg.quantile(x[:0], 0.5), ShapeError, r"quantile: x has shape \(0, 3\), expect"),
        (lambda: tg.average(x, 1, np.ones(2)), ShapeError, r"average: weights has shape \(2,\)"),
        (lambda: tg.average(x, None, np.ones(3)), ShapeError, r"expected \(2, 3\)$"),
        (lambda: tg.average(x, 1, np.ones(2)), ShapeError,
         r"expected \(2, 3\), or the lengths along \(1,\)"),
        (lambda: tg.nanvar(x, ddof="a"), ArgumentError,  # type: ignore[arg-type]
         "nanvar: ddof is 'a', expected a number"),
        (lambda: tg.nanargmin(x * np.nan), ArgumentError, "nanargmin: x holds nothing but NaN alo"),
        (lambda: tg.average(x, 1, [-1, 0, 1]), ArgumentError, "average: weights sum to 0"),
        (lambda: tg.nanargmax(x * np.nan, 1), ArgumentError, "nanargmax: x holds nothing but NaN"),
        (lambda: tg.std(x, ddof=1, correction=0), ArgumentError, "got ddof=1 and correction=0"),
        (lambda: tg.cov(x, ddof=0.5), ArgumentError,  # type: ignore[arg-type]
         "cov: ddof is 0.5, expected an integer"),
        (lambda: tg.cov(x, aweights=[1, -1, 1]), ArgumentError, "cov: aweights holds negative"),
        (lambda: tg.vander([1.0], -1), ArgumentError, "vander: columns is -1, expected 0 or more"),
        (lambda: tg.bincount(np.array([2**64 - 1], "uint64")), ArgumentError, "x holds 18446744"),
        (lambda: tg.bincount(x[0]), DtypeError, "bincount: x has dtype float64, expected integers"),
        (lambda: tg.bincount(np.array([-1])), ArgumentError, "bincount: x holds -1, expected 0"),
        (lambda: tg.histogram(x, [2.0, 1.0]), ArgumentError, "histogram: bins is"),
        (lambda: tg.diff(x, -1), ArgumentError, "diff: n is -1, expected 0 or more"),
        (lambda: tg.diff(x, dim=1), ArgumentError,  # type: ignore[arg-type]
         "^diff: got dim=1, expected axis=1$"),
        (lambda: tg.median(x, dim=1), ArgumentError,  # type: ignore[arg-type]
         "^median: got dim=1, expected axis=1$"),
        (lambda: tg.quantile(x, 0.5, dim=1), ArgumentError,  # type: ignore[arg-type]
         "^quantile: got dim=1, expected axis=1$"),
        (lambda: tg.quantile(x, "a"), DtypeError, "quantile: q "),
        (lambda: tg.quantile(x, 1j), DtypeError, "quantile: q has dtype complex128, expected rea"),
        (lambda: tg.quantile(x, np.ones((1, 1, 1))), ShapeError, r"\(1, 1, 1\), expected 2 axes"),
        (lambda: tg.nanquantile(x, np.ones((1, 1))), ShapeError, r"\(1, 1\), expected 1 axes at"),
        (lambda: tg.percentile(x, 100.5), ArgumentError, "q is 100.5, expected 0 to 100$"),
        (lambda: tg.quantile(x * 1j, 0.5), DtypeError, "quantile: x has dtype complex128, expecte"),
        (lambda: tg.quantile(x, Tensor(np.ones(1), requires_grad=True)), GradError,
         "quantile: q requires a gradient"),
        (lambda: tg.cov(x, fweights=[1, 2]), ShapeError, r"weights has shape \(2,\), expected \(3"),
        (lambda: tg.cov(x, fweights=[1, 0.5, 1]), DtypeError, "cov: fweights holds fractions, exp"),
        (lambda: tg.cov(x[None]), ShapeError, r"cov: x has shape \(1, 2, 3\), expected two axes"),
        (lambda: tg.cov(x, x * 1j), DtypeError, "cov: y has dtype complex128, expected real num"),
        (lambda: tg.bincount(np.ones((2, 2), int)), ShapeError, r"x has shape \(2, 2\), expected "),
        (lambda: tg.bincount([0, 1], [1.0]), ShapeError, r"weights has shape \(1,\), expected \(2"),
        (lambda: tg.bincount([0], [1j]), DtypeError, "bincount: weights has dtype complex128, exp"),
        (lambda: tg.bincount([0], minlength=-1), ArgumentError, "minlength is -1, expected 0 or"),
        (lambda: tg.histogram(x, range=(0,)), ArgumentError,  # type: ignore[arg-type]
         r"histogram: range is \(0,\), expected two numbers"),
        (lambda: tg.histogram(x, range=3), ArgumentError,  # type: ignore[arg-type]
         "histogram: range is 3, expected two numbers"),
        (lambda: tg.digitize(x, [1.0, 3.0, 2.0]), ArgumentError, r"digitize: bins is \[1.0, 3.0"),
    ]  # fmt: skip
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
