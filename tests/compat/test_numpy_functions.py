"""NumPy's functions on tensors: differentiated as our own operations, or refused by name."""

from __future__ import annotations

import io
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad
from tensorgrad import Tensor, gradcheck
from tensorgrad.compat import numpy_functions
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, DtypeError, GradError

Values = np.ndarray[Any, Any]
X = np.array([[0.3, 1.7, -0.6], [2.2, -1.4, 0.9]])
Y = np.array([[1.2, 0.4, 0.8], [0.5, 2.5, -0.7]])
VECTOR = np.array([0.2, 1.1, 2.3])

# Each name of the table once, with the arguments after the first array.
UFUNCS: dict[str, tuple[Any, ...]] = {
    "add": (Y,), "subtract": (Y,), "multiply": (Y,), "divide": (Y,), "power": (2.0,),
    "matmul": (Y.T,), "maximum": (Y,), "minimum": (Y,), "negative": (), "exp": (), "expm1": (),
    "square": (), "sin": (), "cos": (), "tanh": (), "sign": (), "floor": (), "ceil": (),
    "isnan": (), "isinf": (), "isfinite": (), "equal": (Y,), "not_equal": (Y,), "less": (Y,),
    "less_equal": (Y,), "greater": (Y,), "greater_equal": (Y,), "logical_and": (Y,),
    "logical_or": (Y,), "logical_xor": (Y,), "logical_not": (), "absolute": (), "rint": (),
    "positive": (), "floor_divide": (Y,), "tan": (),
    "arctan": (), "arctan2": (Y,), "sinh": (), "cosh": (), "arcsinh": (), "exp2": (),
    "logaddexp": (Y,), "hypot": (Y,), "fmax": (Y,), "fmin": (Y,), "copysign": (Y,),
    "nextafter": (Y,), "signbit": (), "trunc": (), "heaviside": (Y,), "deg2rad": (),
    "rad2deg": (), "degrees": (), "radians": (),
}  # fmt: skip
POSITIVE = ("log", "log1p", "log2", "log10", "sqrt", "cbrt", "arcsin", "arccos", "arctanh")
INDICES = np.array([[0, 2], [1, 1]])
FUNCTIONS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("all", (0,), {"keepdims": True}), ("any", (1,), {}), ("argmax", (1,), {}),
    ("argmin", (), {"axis": 0}), ("argsort", (0,), {}), ("astype", (np.float32,), {}),
    ("broadcast_to", ((4, 2, 3),), {}), ("clip", (-0.5, 1.0), {}), ("clip", (), {"max": 1.0}),
    ("clip", (), {"a_min": 0.0, "a_max": 1.0}), ("cumsum", (1,), {}), ("dot", (Y.T,), {}),
    ("empty_like", (), {}), ("expand_dims", (1,), {}), ("flip", (), {"axis": 1}),
    ("full_like", (2.5,), {}), ("full_like", (), {"fill_value": 1}), ("max", (1,), {}),
    ("amax", (), {"axis": 0, "out": None}), ("mean", (), {"axis": (0, 1), "keepdims": True}),
    ("min", (0,), {}), ("amin", (), {}), ("moveaxis", (0, 1), {}), ("ones_like", (), {}),
    ("outer", (VECTOR,), {}), ("pad", (((1, 0), (2, 1)),), {"constant_values": 2}),
    ("prod", (), {}), ("prod", (0,), {"keepdims": np._NoValue}), ("ravel", (), {}),
    ("repeat", (2, 1), {}), ("reshape", ((3, 2),), {}), ("roll", (1, 1), {}), ("round", (), {}),
    ("around", (), {}), ("searchsorted", (Y[0], "right"), {}), ("sort", (0,), {}),
    ("squeeze", (), {}), ("std", (1,), {"ddof": 1}), ("sum", (), {}), ("sum", (1,), {}),
    ("swapaxes", (0, 1), {}), ("take", (INDICES, 1), {}), ("take_along_axis", (INDICES, 1), {}),
    ("tensordot", (Y, 2), {}), ("tile", ((2, 1),), {}), ("transpose", ((1, 0),), {}),
    ("tril", (1,), {}), ("triu", (), {"k": 1}), ("var", (), {"axis": 0, "ddof": 1}),
    ("zeros_like", (), {}), ("append", (Y, 0), {}), ("argwhere", (), {}), ("average", (0,), {}),
    ("copy", (), {}), ("count_nonzero", (1,), {}), ("cov", (), {}), ("cross", (Y,), {}),
    ("cumprod", (1,), {}), ("diag", (1,), {}), ("diagonal", (1,), {}), ("diff", (1, 0), {}),
    ("flatnonzero", (), {}), ("fliplr", (), {}), ("flipud", (), {}), ("inner", (Y,), {}),
    ("kron", (Y,), {}), ("median", (1,), {}), ("nan_to_num", (), {}), ("nanmax", (1,), {}),
    ("nanmean", (1,), {}), ("nanmedian", (), {"axis": 1}), ("nanmin", (), {}),
    ("nanprod", (1,), {}), ("sum", (), {"dtype": "float64"}), ("nanstd", (1,), {}),
    ("nansum", (1,), {}), ("nanvar", (1,), {"ddof": 1}),
    ("percentile", (30, 1), {}), ("ptp", (1,), {}), ("quantile", (0.3,), {"axis": 0}),
    ("rot90", (1,), {}), ("sinc", (), {}), ("trace", (), {}), ("trapezoid", (), {}),
    ("unique", (), {}), ("vdot", (Y,), {}), ("sum", (1, "float64"), {}), ("round", (1,), {}),
    ("angle", (True,), {}), ("atleast_1d", (), {}), ("atleast_2d", (), {}), ("atleast_3d", (), {}),
    ("corrcoef", (), {}), ("cumulative_prod", (), {"axis": 1}), ("cumulative_sum", (), {"axis": 0}),
    ("diagflat", (1,), {}), ("digitize", (VECTOR, True), {}), ("imag", (), {}), ("real", (), {}),
    ("intersect1d", (Y,), {}), ("isin", (Y,), {"invert": True}), ("matrix_transpose", (), {}),
    ("nanargmax", (1,), {}), ("nanargmin", (), {}), ("nancumprod", (1,), {}),
    ("nancumsum", (), {}), ("nanpercentile", (30, 1), {"method": "lower"}),
    ("nanquantile", (0.3, 0), {}), ("rollaxis", (1,), {}), ("setdiff1d", (Y,), {}),
    ("setxor1d", (Y,), {}), ("union1d", (Y,), {}), ("unique_values", (), {}),
]  # fmt: skip
WITH_TENSORS_INSIDE: dict[str, Callable[[Any], Any]] = {
    "concatenate": lambda x: np.concatenate([x, x * 2, Y], 1),
    "stack": lambda x: np.stack((Y, x), axis=1),
    "split": lambda x: np.split(x, [1, 2], 1)[2],
    "array_split": lambda x: np.array_split(x, 2, 1)[0],
    "column_stack": lambda x: np.column_stack([x, Y]),
    "dstack": lambda x: np.dstack([x, Y]),
    "hstack": lambda x: np.hstack([x, Y]),
    "vstack": lambda x: np.vstack([x, Y]),
    "where": lambda x: np.where(Y > 0.6, x, 1.0),
    "einsum": lambda x: np.einsum("ij,kj->ik", Y, x),
    "bincount": lambda x: np.bincount([0, 2, 2], x[0], 4),
    "broadcast_arrays": lambda x: np.broadcast_arrays(x[:, None], Y)[0],
    "dsplit": lambda x: np.dsplit(x[None], [1])[1],
    "histogram": lambda x: np.histogram(x, 3, (-1, 1))[0],
    "hsplit": lambda x: np.hsplit(x, 3)[1],
    "meshgrid": lambda x: np.meshgrid(x[0], VECTOR, indexing="ij")[0],
    "nonzero": lambda x: np.nonzero(x)[1],
    "put_along_axis": lambda x: _put(x * 2),
    "unique_all": lambda x: np.unique_all(x)[1],
    "unique_counts": lambda x: np.unique_counts(x)[1],
    "unique_inverse": lambda x: np.unique_inverse(x)[1],
    "unstack": lambda x: np.unstack(x, axis=1)[2],
    "vander": lambda x: np.vander(x[0], 4),
    "vsplit": lambda x: np.vsplit(x, [1])[0],
}
WITHOUT_OPERANDS = {
    "arange", "asarray", "broadcast_shapes", "empty", "eye", "full", "geomspace", "identity",
    "indices", "linspace", "logspace", "ones", "tri", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def _put(x: Any) -> Any:
    y = x.detach() if isinstance(x, Tensor) else x
    np.put_along_axis(y, INDICES[:, :1], 5.0, 1)  # type: ignore[arg-type]
    return y


def agree(f: Callable[[Any], Any], x: Values) -> None:
    """Compare f of a tensor with f of its array, and its gradient with differences."""
    expected = f(x)
    leaf = Tensor(x.copy(), requires_grad=True)
    try:
        y = f(leaf)
    except GradError:  # it has none
        y = f(leaf.detach())
    assert isinstance(y, Tensor)
    assert isinstance(f(Tensor(x)), Tensor), "the same without a gradient"
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-12)
    if y.requires_grad and y.dtype == x.dtype:
        assert gradcheck(f, [leaf])


@pytest.mark.parametrize("name", [*UFUNCS, *POSITIVE])
def test_universal_functions(name: str) -> None:
    function, others = getattr(np, name), UFUNCS.get(name, ())
    positive = np.abs(X) / 4 if name.startswith("arc") else np.abs(X)
    agree(lambda x: function(x, *others), positive if name in POSITIVE else X)
    if others and isinstance(others[0], np.ndarray):  # an array before the tensor
        agree(lambda x: function(Y, x.T if name == "matmul" else x), X)


@pytest.mark.parametrize(("name", "arguments", "options"), FUNCTIONS)
def test_functions(name: str, arguments: Any, options: Any) -> None:
    def f(x: Any) -> Any:
        y = getattr(np, name)(x, *arguments, **options)
        return y * 0 + 1 if name == "empty_like" else y

    agree(f, np.sort(VECTOR) if name == "searchsorted" else X)


@pytest.mark.parametrize("name", list(WITH_TENSORS_INSIDE))
def test_functions_of_several_tensors(name: str) -> None:
    agree(WITH_TENSORS_INSIDE[name], X)


def test_every_name_of_the_tables_was_compared() -> None:
    bitwise = {f.__name__ for f in BITWISE} | {"invert"}
    universal = set(UFUNCS) | set(POSITIVE) | bitwise | {"arccosh", "divmod", "fmod", "remainder"}
    assert universal >= numpy_functions._UFUNCS
    compared = {name for name, _, _ in FUNCTIONS} | set(WITH_TENSORS_INSIDE)
    functions = {name for name in numpy_functions._OPS if hasattr(np, name)}
    functions = {name for name in functions if not isinstance(getattr(np, name), np.ufunc)}
    assert functions - numpy_functions._ABOUT_VALUES - WITHOUT_OPERANDS <= compared
    assert set(numpy_functions._SYNONYMS) <= compared


BITWISE: list[Callable[[Any, Any], Any]] = [
    np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift,
]  # fmt: skip


@pytest.mark.parametrize("f", [*BITWISE, operator.and_, operator.or_, operator.xor])
@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_bitwise_operators_with_an_array_in_front(f: Callable[[Any, Any], Any], dtype: str) -> None:
    a, b = np.array([1, 1, 0, 6]).astype(dtype), np.array([1, 0, 1, 3]).astype(dtype)
    for found in (f(a, Tensor(b)), f(Tensor(a), b), f(a[0], Tensor(b))):
        assert isinstance(found, Tensor)
    np.testing.assert_array_equal(f(a, Tensor(b)), f(a, b))
    np.testing.assert_array_equal(np.invert(Tensor(a)), ~a)


def test_universal_functions_of_other_domains() -> None:
    agree(np.arccosh, np.abs(X) + 1)
    agree(lambda x: np.remainder(x, Y), X)
    agree(lambda x: np.fmod(Y + 0.01, x), X)
    for one, two in zip(np.divmod(Tensor(X), Y), np.divmod(X, Y), strict=True):
        np.testing.assert_array_equal(one, two)


def test_operators_with_arrays_and_numpys_scalars_in_front() -> None:
    x = Tensor(X.astype("float32"), requires_grad=True)
    for f in (operator.add, operator.sub, operator.mul, operator.truediv):
        for other in (Y, np.float64(2), np.float32(3), np.array(1.5), Y.astype("float32")):
            y = f(other, x)
            assert y.requires_grad
            assert y.dtype == np.result_type(other, np.float32)
            np.testing.assert_array_equal(y, f(other, X.astype("float32")))
    for compare in (operator.lt, operator.ge, operator.eq, operator.ne):
        for number in (np.float32(0.5), Y):
            np.testing.assert_array_equal(compare(number, x), compare(number, x.numpy()))
    np.testing.assert_array_equal(Y.T @ x, Y.T @ x.numpy())
    np.testing.assert_allclose(np.float64(2) ** x, 2**X, rtol=1e-6)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: np.linalg.norm(t), r"numpy\.linalg\.norm is not defined for tensors.*t\.numpy"),
        (lambda t: np.block([t, t]), r"numpy\.block is not defined for tensors"),
        (lambda t: np.interp(t, t, t), r"numpy\.interp is not defined for tensors"),
        (lambda t: np.copyto(np.ones(3), t), r"numpy\.copyto is not defined for tensors"),
        (lambda t: np.spacing(t), r"numpy\.spacing is not defined for tensors"),
        (lambda t: np.reciprocal(t), r"numpy\.reciprocal is not defined"),  # not integers
        (lambda t: np.add.reduce(t), r"numpy\.add\.reduce is not defined for tensors"),
        (lambda t: np.add.outer(t, t), r"numpy\.add\.outer is not defined for tensors"),
        (lambda t: np.add.at(np.ones(3), [0], t), r"numpy\.add\.at is not defined for tensors"),
        (lambda t: np.add(1, t, out=np.ones(3)), r"numpy\.add: out is not supported for tensors"),
        (lambda t: np.add(np.ones(3), 1, out=t), r"numpy\.add: out is not supported"),
        (lambda t: np.ones(3).__iadd__(t), r"numpy\.add: out .* write a = a \+ t"),
        (lambda t: np.exp(t, where=np.ones(3) > 0), r"numpy\.exp: where is not supported"),
        (lambda t: np.exp(t, dtype="float64"), r"numpy\.exp: dtype is not supported"),
        (
            lambda t: np.sum(t, 0, np.float64, np.ones(())),
            r"numpy\.sum: for tensors .* too many positional",
        ),
        (lambda t: np.concatenate([t, t], out=np.ones(6)), r"numpy\.concatenate: out is not"),
        (lambda t: np.take(t, [0], mode="clip"), r"numpy\.take: mode is not supported"),
        (lambda t: np.where(t, t), r"where: b is a NoneType, expected a tensor"),
    ],
)
def test_what_is_refused(call: Any, message: str, requires_grad: bool) -> None:
    t = Tensor(np.ones(3), requires_grad)
    with pytest.raises(DtypeError, match=message):
        call(t)
    np.testing.assert_array_equal(t, np.ones(3))


def test_reductions_take_where_and_initial() -> None:
    t = Tensor(np.arange(4.0), requires_grad=True)
    chosen = np.array([True, False, True, True])
    assert float(np.max(t, where=chosen, initial=0.5)) == 3
    mean: Any = np.mean(t, where=chosen)
    mean.backward()
    assert t.grad is not None
    np.testing.assert_allclose(t.grad, chosen / 3)


def test_universal_functions_of_others_are_refused_by_their_name() -> None:
    exp = np.frompyfunc(np.exp, 1, 1)  # not numpy.exp
    with pytest.raises(DtypeError, match=r"^exp \(vectorized\) is not defined for tensors"):
        exp(Tensor(np.ones(3)))


def test_an_array_that_a_tensor_is_added_to_in_place_stays() -> None:
    array, t = np.ones(3), Tensor(np.ones(3))
    with pytest.raises(DtypeError, match="out is not supported"):
        array += t
    assert array.tolist() == [1, 1, 1]
    array += t.numpy()
    assert array.tolist() == [2, 2, 2]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_looking_at_values_is_free(requires_grad: bool) -> None:
    t = Tensor(X.copy(), requires_grad)
    assert np.asarray(t) is t.data or np.shares_memory(np.asarray(t), t.data)
    assert np.asarray(t, "float32").dtype == np.float32
    assert (np.shape(t), np.ndim(t), np.size(t)) == ((2, 3), 2, 6)
    assert np.result_type(t, np.float32) == np.float64
    assert np.shares_memory(t, t.data)
    assert not np.iscomplexobj(t)
    assert np.allclose(t, X)
    assert np.array_equal([t, t], [X, X])
    assert np.isclose(t, X).all()
    assert np.array2string(t) == np.array2string(X)  # type: ignore[arg-type]
    file = io.BytesIO()
    np.save(file, t)
    file.seek(0)
    np.testing.assert_array_equal(np.load(file), X)
    assert "tensor(" in f"{t}"


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "name", ["assert_allclose", "assert_array_equal", "assert_array_almost_equal", "assert_equal"]
)
def test_numpys_assertions_compare_values(name: str, requires_grad: bool) -> None:
    t, check = Tensor(X.copy(), requires_grad), getattr(np.testing, name)
    for pair in ((t, X), (X, t)):
        check(*pair)
    for pair in ((t, X + 1e-3), (X + 1e-3, t)):
        with pytest.raises(AssertionError):
            check(*pair)
    if name != "assert_equal":  # which takes other objects apart with `==`
        check(t, t)
        check(t, X.tolist())


def test_matplotlib_draws_tensors() -> None:
    plot = pytest.importorskip("matplotlib.figure")
    axes = plot.Figure().add_subplot()
    x, y = Tensor(VECTOR, requires_grad=True), Tensor(VECTOR**2)
    (line,) = axes.plot(x, y)
    axes.scatter(x, y)
    axes.imshow(Tensor(X))
    axes.hist(y)
    np.testing.assert_array_equal(line.get_ydata(), VECTOR**2)


@pytest.mark.gpu
def test_cupys_arrays_and_functions() -> None:
    cupy: Any = backend.cupy
    x = Tensor(cupy.asarray(X), requires_grad=True)
    array: Any = cupy.asarray(Y)
    y = array + x * np.exp(x) + np.float64(2) * x
    y = np.concatenate([y, array @ x.T @ x])
    assert y.device.startswith("cuda")
    y.sum().backward()
    assert type(x.grad) is cupy.ndarray
    np.testing.assert_array_equal(array > x, Y > X)
    calls: list[Callable[[], Any]] = [
        lambda: cupy.exp(x),
        lambda: cupy.add(array, x),
        lambda: cupy.concatenate([x, x]),
        lambda: array.__iadd__(x),
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call()
    np.testing.assert_array_equal(array.get(), Y)
    assert np.shape(x) == (2, 3)
    assert np.allclose(x, X)


def test_the_operations_are_the_librarys() -> None:
    for name in numpy_functions._UFUNCS:
        assert name in tensorgrad.__all__


def test_keywords_that_a_reduction_lacks_are_refused_by_name() -> None:
    x = tensorgrad.zeros((2, 3))
    reductions: list[Callable[..., Any]] = [tensorgrad.sum, x.sum, x.mean, tensorgrad.max]
    for function in reductions:
        operands = () if hasattr(function, "__self__") else (x,)
        with pytest.raises(ArgumentError, match=r"^\w+: got keepdim=True, expected keepdims=True$"):
            function(*operands, **{"keepdim": True})
        with pytest.raises(TypeError, match=rf"{function.__name__}\(\) .* argument 'other'"):
            function(*operands, **{"other": 1})
