"""NumPy's functions on tensors: they call the op of the same name, or raise an error.

`np.exp(t)`, `np.concatenate([t, u])` and `array + t` call our ops, so gradients flow through them.
Any other function of NumPy would convert the tensor to an array and drop its gradient: it raises an
error, whether or not the tensor requires a gradient, and so does an argument that our op lacks
(`out`). Functions that only read values (`np.shape`, `np.allclose`, printing,
saving, `np.testing`) get them. `np.asarray(t)` and `t.numpy()` leave the graph explicitly.
Tests: tests/compat/test_numpy_functions.py.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from tensorgrad.core.backend import Array
from tensorgrad.core.errors import DtypeError
from tensorgrad.core.tensor import Tensor
from tensorgrad.ops import (
    creation,
    diagonals,
    einsum,
    elementwise,
    indexing,
    matmul,
    reduce,
    shape,
    sorting,
    stacking,
    statistics,
)

# Universal functions that mean the same here, besides those that `_ufuncs` adds.
_UFUNCS = {
    "add", "subtract", "multiply", "divide", "negative", "power", "matmul", "maximum", "minimum",
    "exp", "expm1", "log", "log1p", "sqrt", "square", "sin", "cos", "tanh", "sign", "floor", "ceil",
    "isnan", "isinf", "isfinite", "equal", "not_equal", "less", "less_equal", "greater",
    "greater_equal", "logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and",
    "bitwise_or", "bitwise_xor", "invert", "left_shift", "right_shift", "floor_divide",
    "remainder", "fmod", "divmod", "tan", "arcsin", "arccos", "arctan", "arctan2", "sinh", "cosh",
    "arcsinh", "arccosh", "arctanh", "log2", "log10", "exp2", "cbrt", "logaddexp", "hypot", "fmax",
    "fmin", "copysign", "nextafter", "signbit", "trunc", "heaviside", "deg2rad", "rad2deg",
    "positive", "rint",
}  # fmt: skip

# Names of other functions and arguments where ours differ.
_SYNONYMS = {"amax": "max", "amin": "min", "around": "round"}
_KEYWORDS = {"clip": {"a_min": "min", "a_max": "max"}}

# Functions without a differentiable result: they get the array, or its values on the CPU.
_ABOUT_ARRAYS = {
    "shape", "ndim", "size", "result_type", "can_cast", "common_type", "iscomplexobj", "isrealobj",
    "shares_memory", "may_share_memory",
}  # fmt: skip
_ABOUT_VALUES = {
    "allclose", "isclose", "array_equal", "array_equiv", "array2string", "array_repr", "array_str",
    "save", "savez", "savez_compressed", "savetxt",
}  # fmt: skip

_FAMILIES = (
    creation, diagonals, einsum, elementwise, indexing, matmul, reduce, shape, sorting, stacking,
    statistics,
)  # fmt: skip
_OPS: dict[str, Any] = {
    name: getattr(family, name) for family in _FAMILIES for name in family.__all__
}


def call_ufunc(
    ufunc: np.ufunc, method: str, operands: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Compute `ufunc.method(*operands, **options)`; see `Tensor.__array_ufunc__`."""
    of_numpy = getattr(np, ufunc.__name__, None) is ufunc  # SciPy has others
    name = f"numpy.{ufunc.__name__}" if of_numpy else ufunc.__name__
    ours = _ufuncs().get(ufunc.__name__) if of_numpy and method == "__call__" else None
    if ours is None:
        raise _refused(name if method == "__call__" else f"{name}.{method}")
    given = [key for key, value in options.items() if value is not None]
    if given:
        raise _refused_argument(name, given[0])
    return ours(*operands)


def call_function(
    function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Compute `function(*arguments, **options)`; see `Tensor.__array_function__`."""
    name = function.__name__
    full_name = f"{function.__module__}.{name}"
    if getattr(np, name, None) is not function:  # numpy.linalg.norm is not numpy.norm
        raise _refused(full_name)
    if name in _ABOUT_ARRAYS or name in _ABOUT_VALUES:
        to_array = operator.attrgetter("data") if name in _ABOUT_ARRAYS else Tensor.numpy
        plain = {key: _plain(value, to_array) for key, value in options.items()}
        return function(*[_plain(value, to_array) for value in arguments], **plain)
    name = _SYNONYMS.get(name, name)
    if name not in _OPS:
        raise _refused(full_name)
    signature = inspect.signature(_OPS[name])
    keywords = {}
    for key, value in options.items():
        own = _KEYWORDS.get(name, {}).get(key, key)
        if value is np._NoValue:  # NumPy's own functions hand it on for an argument not given
            continue
        if own in signature.parameters:
            keywords[own] = value
        elif value is not None:
            raise _refused_argument(full_name, key)
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        raise DtypeError(f"{full_name}: for tensors it is tensorgrad.{name}: {error}") from error
    return _OPS[name](*arguments, **keywords)


@cache
def _ufuncs() -> dict[str, Callable[..., Any]]:
    """Return the operation for the name of each universal function."""
    found: dict[str, Callable[..., Any]] = {name: _OPS[name] for name in _UFUNCS}
    return found | {
        "absolute": _OPS["abs"], "degrees": _OPS["rad2deg"], "radians": _OPS["deg2rad"],
    }  # fmt: skip


def _plain(value: Any, to_array: Callable[[Tensor], Array]) -> Any:
    """Return a value with arrays in place of tensors."""
    if isinstance(value, Tensor):
        return to_array(value)
    if type(value) in (list, tuple):
        return type(value)([_plain(one, to_array) for one in value])
    return value


_INSTEAD = "use tensorgrad's own operations, or give it t.numpy() to leave the graph"


def _refused(name: str) -> DtypeError:
    return DtypeError(
        f"{name} is not defined for tensors: it would drop their gradient; {_INSTEAD}"
    )


def _refused_argument(name: str, argument: str) -> DtypeError:
    instead = _INSTEAD
    if argument == "out":
        instead = "write a = a + t for a += t, or a += t.numpy() to leave the graph"
    return DtypeError(f"{name}: {argument} is not supported for tensors; {instead}")
