"""Names that NumPy has too: signatures, defaults, and results with default arguments.

docs/start/coming-from-numpy-and-cupy.md lists what differs; it and the tests have to agree. A row
that is missing there is printed by `python -m tests.parity.test_numpy_defaults`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.core import checks
from tests.parity.calls import NOT_CALLED, X, arrays, as_tensors, call_of
from tests.parity.peers import Argument, Peer, arguments, quoted
from tests.source_tree import ROOT

# NumPy's own defaults
ABSENT = {"keepdims": False, "descending": False, "axis": -1}  # where an argument is not given
NONE = {"density": False, "descending": False}  # where it is None


def signature(name: str, f: Any) -> list[Argument] | None:
    """Return the arguments of a function of NumPy; None where it does not tell."""
    try:
        found = arguments(f)
    except ValueError:
        return None
    for place, argument in enumerate(found):
        if argument.default is np._NoValue:
            found[place] = argument._replace(default=ABSENT.get(argument.name))
        elif argument.default is None:
            found[place] = argument._replace(default=NONE.get(argument.name))
    return found


NUMPY = Peer(
    ROOT / "docs" / "start" / "coming-from-numpy-and-cupy.md",
    [
        ("", tg, np),
        ("linalg.", tg.linalg, np.linalg),
        ("fft.", tg.fft, np.fft),
        ("random.", tg.random, np.random.Generator),
        ("random.", tg.random, np.random),
        ("Tensor.", Tensor, np.ndarray),
    ],
    signature,
    frozenset({"out", "order", "subok", "like", "casting", "kind", "signature"}),
)
TWO_FOUR = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.4.0", reason="NumPy has arguments that 2.4 removed"
)
FUNCTIONS = {name: (f, peer) for name, f, peer in NUMPY.pairs() if not isinstance(f, type)}


@TWO_FOUR
def test_the_page_lists_what_differs_in_signatures() -> None:
    assert NUMPY.differences() == NUMPY.page_rows()


@TWO_FOUR
def test_the_page_lists_the_arguments_that_are_missing() -> None:
    other_meaning = {"load", "save"}
    missing = {
        (argument, name)
        for argument, names in NUMPY.lacking().items()
        for name in names - other_meaning
        if not isinstance(FUNCTIONS.get(name, [None])[-1], np.ufunc)
    }
    known = {name: {a.name for a in theirs} for name, _, theirs in NUMPY.signatures()}
    listed = {
        (argument, name)
        for words, names, _ in NUMPY.table("Arguments that are missing")
        for argument in quoted(words)
        for name in quoted(names)
        if argument in known.get(name, ())  # in this version of NumPy
    }
    assert missing == listed


def test_the_page_lists_the_methods_of_generators_that_are_missing() -> None:
    page = NUMPY.page.read_text(encoding="utf-8").split("\n## Random numbers\n")[1]
    row = next(line for line in page.splitlines() if line.startswith("| `"))
    theirs, ours = (
        {name for name in dir(kind) if not name.startswith("_")}
        for kind in (np.random.Generator, tg.random.Generator)
    )
    assert set(quoted(row)) - {"numpy.random.Generator"} == theirs - ours
    text = page.partition("```")[0]
    assert theirs & ours <= set(quoted(text))


# By dtype of the arguments: functions whose result has another dtype, or that raise in one library.
FLOAT32 = {"empty", "eye", "fft.fftfreq", "fft.rfftfreq", "geomspace", "identity", "linspace",
           "logspace", "ones", "tri", "zeros"}  # fmt: skip
ANGLES = {"deg2rad", "degrees", "logaddexp2", "rad2deg", "radians"}
OF_FLOAT16 = {"fft.hfft", "fft.irfft", "histogram", "nextafter"}
LINEAR_ALGEBRA = {"cholesky", "cond", "det", "eigh", "eigvalsh", "inv", "matrix_rank", "pinv", "qr",
                  "slogdet", "solve", "svd", "svdvals", "tensorinv", "tensorsolve"}  # fmt: skip
OF_BYTES = {*ANGLES, "heaviside", "reciprocal", "rint"}
OF_BOOL = {*ANGLES, "full_like", "heaviside", "nanpercentile", "nanquantile", "percentile",
           "quantile", "reciprocal"}  # fmt: skip
OTHERS: dict[str, set[str]] = {
    "float64": set(),
    "float16": {*OF_FLOAT16, *(f"linalg.{name}" for name in LINEAR_ALGEBRA)},
    "uint8": OF_BYTES,
    "bool": OF_BOOL,
}
TOLERANCES = {"float64": 1e-12, "float16": 1e-2, "uint8": 1e-2, "bool": 1e-2}
UNORDERED = {"empty", "empty_like", "unique_values"}  # whose elements NumPy leaves open


def converted(value: Any, dtype: str) -> Any:
    """Return the floats of an argument in another dtype; those of integers are small."""
    if isinstance(value, list):
        return [converted(part, dtype) for part in value]
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        return (value if "float" in dtype else abs(value)).astype(dtype)
    return value


def outcome(f: Callable[..., Any], call: list[Any]) -> list[np.ndarray[Any, Any]] | None:
    """Return the arrays of a result, None for an error."""
    try:
        return arrays(f(*call))
    except (ValueError, TypeError, ArithmeticError):
        return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", OTHERS)
def test_results_with_default_arguments(dtype: str) -> None:
    others, tolerance = set(), TOLERANCES[dtype]
    for name, (f, peer) in FUNCTIONS.items():
        if name.startswith(("Tensor.", "random.")) or name in NOT_CALLED:
            continue
        call = [converted(value, dtype) for value in call_of(name, f)]
        found, expected = outcome(f, as_tensors(call)), outcome(peer, call)
        assert dtype != "float64" or (found and expected), name
        if found is None or expected is None:
            if found is not expected:
                others.add(name)
            continue
        assert len(found) == len(expected), name
        if [a.dtype for a in found] != [a.dtype for a in expected]:
            others.add(name)
        elif name not in UNORDERED:
            for a, b in zip(found, expected, strict=True):
                assert a.dtype == object or np.allclose(a, b, tolerance, tolerance, True), name
    assert others == FLOAT32 | OTHERS[dtype]


def error_of(f: Callable[[], Any]) -> str:
    """Return the name of the error that a call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  its name is compared
        f()
    return type(caught.value).__name__


def _assigned(module: Any) -> Any:
    x = module.arange(3)
    x[0] = 1.5
    return x


def _added(module: Any) -> Any:
    x = module.arange(3)
    x += 1.5
    return x


def _is_float32(*results: Any) -> bool:
    return all(result.dtype == "float32" for result in results)


def _warns_once() -> bool:
    nobody: Any = mock.patch.object(checks, "_warned", set())
    with nobody, pytest.warns(tg.errors.WideningWarning):
        result = tg.arange(2).reshape(2) * tg.ones(2)
    return bool(result.dtype == np.float64)


def _signals_on_the_cpu() -> bool:
    with np.errstate(divide="raise"):
        return error_of(lambda: 1 / tg.zeros(1)) == "ArgumentError"


TWO_BY_TWO: Any = tg.ones((2, 2))
OF_TWO = np.array([2, 4], np.uint8)
RESULTS: dict[str, Callable[[], Any]] = {
    "zeros(3)": lambda: (
        _is_float32(tg.full(3, 0.5), tg.arange(3.0), *(getattr(tg, name)(3) for name in (
            "zeros", "ones", "empty", "eye", "identity", "tri")))
        and _is_float32(*(getattr(tg, f"{name}space")(1, 2) for name in ("lin", "log", "geom")))
        and np.full(3, 0.5).dtype == np.arange(3.0).dtype == np.float64
    ),
    "array([0.5])": lambda: (
        _is_float32(tg.array([0.5]), tg.asarray(0.5))
        and tg.array([np.float64(0.5)]).dtype == tg.asarray(np.ones(1)).dtype == "float64"
    ),
    'array([0.5], dtype="float32") * [0.5]': lambda: (
        _is_float32(tg.array([0.5], dtype="float32") * [0.5])
        and (np.array([0.5], dtype="float32") * [0.5]).dtype == np.float64
    ),
    "random.normal(size=3)": lambda: _is_float32(tg.random.normal(size=3), tg.random.uniform()),
    "random.default_rng(0).normal()": lambda: (
        tg.random.default_rng(0).normal().item() != np.random.default_rng(0).normal()
    ),
    "sum(x)": lambda: (
        all(type(part) is Tensor for part in (tg.sum(Tensor(X)), Tensor(X).max(), Tensor(X)[0, 0]))
        and type(np.sum(X)) is np.float64
    ),
    "float(x)": lambda: (
        float(tg.ones((1, 1))) == 1.0
        and (np.lib.NumpyVersion(np.__version__) < "2.4.0"
             or error_of(lambda: float(np.ones((1, 1)))) == "TypeError")
    ),
    "reciprocal(x)": lambda: (
        (tg.reciprocal(OF_TWO).tolist(), np.reciprocal(OF_TWO).tolist()) == ([0.5, 0.25], [0, 0])
    ),
    "rint(x)": lambda: (
        tg.rint(np.array([1, 2])).dtype == np.int64 and np.rint([1, 2]).dtype == np.float64
    ),
    "heaviside": lambda: ANGLES | {"heaviside"} <= OF_BYTES,
    "fft.irfft": lambda: {"fft.irfft", "fft.hfft", "histogram"} <= OF_FLOAT16,
    "linalg": lambda: (
        tg.linalg.inv(np.eye(2, dtype="float16")).dtype == np.float16
        and error_of(lambda: np.linalg.inv(np.eye(2, dtype="float16"))) == "TypeError"
    ),
    "unique_values(x)": lambda: tg.unique_values([3, 1, 2, 1]).tolist() == [1, 2, 3],
    "argsort(x)": lambda: (tg.argsort(np.arange(99) % 2)[:50].numpy() == np.arange(0, 99, 2)).all(),
    "array_of_integers[0] = 1.5": lambda: (
        error_of(lambda: _assigned(tg)) == error_of(lambda: _added(tg)) == "DtypeError"
        and _assigned(np)[0] == 1 and "UFunc" in error_of(lambda: _added(np))
    ),
    "full_like(bools, 3)": lambda: (
        error_of(lambda: tg.full_like(np.ones(1, bool), 3)) == "ArgumentError"
        and np.full_like(np.ones(1, bool), 3).all()
    ),
    "x == None": lambda: (
        error_of(lambda: tg.ones(1) == None) == "DtypeError"  # noqa: E711
        and error_of(lambda: tg.ones(1) == "a") == "DtypeError"
        and not (np.ones(1) == None).any()  # noqa: E711
    ),
    "1.0 in x": lambda: (
        error_of(lambda: 1.0 in TWO_BY_TWO) == "ValueError" and 1.0 in np.ones((2, 2))
    ),
    "percentile": lambda: {"percentile", "quantile"} <= OF_BOOL,
    "nextafter": lambda: "nextafter" in OF_FLOAT16,
    'a.astype("int64") * b.astype("float32")': _warns_once,
    "1 / zeros(1)": _signals_on_the_cpu,
}  # fmt: skip


def test_the_page_lists_other_results() -> None:
    assert [quoted(row[0])[0] for row in NUMPY.table("Results of equal calls")] == [*RESULTS]


@pytest.mark.parametrize("call", RESULTS)
def test_results_that_the_page_lists(call: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default", tg.errors.WideningWarning)
        assert RESULTS[call]()


def test_memory_is_shared_where_that_of_numpy_is() -> None:
    x = np.zeros((2, 3))
    views: dict[str, Callable[[Any], Any]] = {
        "slice": lambda a: a[0], "reshape": lambda a: a.reshape(3, 2), "T": lambda a: a.T,
        "ravel": lambda a: a.ravel(), "flatten": lambda a: a.flatten(),
        "squeeze": lambda a: a[None].squeeze(), "list": lambda a: a[[0]],
        "mask": lambda a: a[np.ones(2, bool)], "astype": lambda a: a.astype("float64"),
        "swapaxes": lambda a: a.swapaxes(0, 1),
    }  # fmt: skip
    for name, view in views.items():
        both = (np.shares_memory(view(a), x) for a in (Tensor(x), x))
        assert len(set(both)) == 1, name
    assert np.shares_memory(tg.split(Tensor(x), 2)[0], x)
    assert np.shares_memory(tg.asarray(x), x)
    assert not any(np.shares_memory(f(x), x) for f in (tg.array, tg.tensor, tg.diagonal))


if __name__ == "__main__":
    NUMPY.print_missing_rows()
