"""Checks of axes, shapes and options, with errors that name the argument."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.dtypes import Dtype, float64, is_float
from tensorgrad.core.errors import (
    ArgumentError,
    DtypeError,
    OutOfRangeError,
    ShapeError,
    WideningWarning,
)
from tensorgrad.startup.callers import user_level

_MOST = 1 << 63
_NUMBERS = (float, int, np.floating, np.integer)


def axis_index(op: str, axis: Any, ndim: int, name: str = "axis") -> int:
    """Return the axis counted from the front."""
    try:
        index = operator.index(axis)
    except TypeError as error:
        raise ArgumentError(f"{op}: {name} is {axis!r:.80}, expected an integer") from error
    if not -ndim <= index < ndim:
        expected = f"{-ndim} to {ndim - 1}" if ndim else "none: it has no axes"
        raise OutOfRangeError(f"{op}: {name} is {index}, expected {expected}")
    return index % ndim


def axis_tuple(op: str, axis: Any, ndim: int, name: str = "axis") -> tuple[int, ...]:
    """Return one axis, several axes or all of them (None), counted from the front."""
    if axis is None:
        return tuple(range(ndim))
    if not isinstance(axis, (tuple, list)):
        return (axis_index(op, axis, ndim, name),)
    axes = tuple([axis_index(op, one, ndim, name) for one in axis])
    if len(set(axes)) != len(axes):
        raise ArgumentError(f"{op}: {name} is {tuple(axis)}, expected each axis once")
    return axes


def shape_of(op: str, shape: Any, name: str = "shape") -> Shape:
    """Return a shape given as one length or as a sequence of lengths."""
    lengths = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    try:
        checked = tuple([operator.index(length) for length in lengths])
    except TypeError as error:
        raise ShapeError(f"{op}: {name} is {shape!r:.80}, expected integers") from error
    if checked and min(checked) < 0:
        raise ShapeError(f"{op}: {name} is {checked}, expected 0 or more")
    if checked and (math.prod(checked) >= _MOST or max(checked) >= _MOST):
        raise ShapeError(f"{op}: {name} is {checked}, expected fewer than 2^63 elements")
    return checked


def check_shape(op: str, name: str, array: Any, shape: Shape, why: str = "") -> None:
    """Raise ShapeError unless an array has this shape; `why` says where that comes from."""
    if array.shape != shape:
        raise ShapeError(f"{op}: {name} has shape {array.shape}, expected {shape}{why}")


def promoted(op: str, names: Sequence[str], arrays: Sequence[Array]) -> Dtype:
    """Return the dtype that NumPy promotes the arrays to."""
    first: Dtype = arrays[0].dtype
    for array in arrays:
        if array.dtype is not first:
            break
    else:
        return first
    dtypes = [array.dtype for array in arrays]
    try:
        common = np.result_type(*dtypes)
    except TypeError as error:
        got = ", ".join(f"{n} has dtype {a.dtype}" for n, a in zip(names, arrays, strict=True))
        raise DtypeError(f"{op}: {got}, expected dtypes with a common one") from error
    if common == float64 and any([array.ndim for array in arrays]):
        note_widening(op, dtypes)
    return common


_warned: set[str] = set()  # the ops that have warned


def note_widening(op: str, dtypes: Sequence[Dtype]) -> None:
    """Warn, once for an op, where integers beside narrower floats make its result float64."""
    floats = [dtype for dtype in dtypes if is_float(dtype)]
    integers = [dtype for dtype in dtypes if dtype.kind in "iu"]
    if op in _warned or not floats or not integers or float64 in floats:
        return
    warnings.warn(
        f"{op}: {integers[0]} beside {floats[0]} gives float64, as in NumPy; on a GPU that is far "
        f"slower. Convert the integers, astype({str(floats[0])!r}), if it is not meant",
        WideningWarning,
        stacklevel=user_level(),
    )
    _warned.add(op)


def check_flag(op: str, name: str, value: Any) -> None:
    """Raise ArgumentError unless an option is a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{op}: {name} is {value!r:.80}, expected True or False")


def check_choice(op: str, name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ArgumentError unless an option is one of some words."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{op}: {name} is {value!r:.80}, expected one of {repr(choices)[1:-1]}")


def check_no_number(op: str, dtype: Any, instead: str) -> None:
    """Raise ArgumentError where a number or bool stands in the place of the dtype."""
    if isinstance(dtype, _NUMBERS):
        raise ArgumentError(f"{op}: dtype is {dtype!r}, expected a dtype; {instead}")


def check_no_length(op: str, name: str, dtype: Any) -> None:
    """Raise ArgumentError where a second length stands in the place of the dtype."""
    check_no_number(op, dtype, f"several lengths are one tuple, such as {name}=(2, 3)")


def check_function(op: str, f: Any, instead: str = "", name: str = "f") -> None:
    """Raise ArgumentError unless f can be called; for a tensor, say what to do `instead`."""
    if not callable(f):
        hint = f"; {instead}" if instead and hasattr(f, "requires_grad") else ""
        raise ArgumentError(f"{op}: {name} is a {type(f).__name__}, expected a function{hint}")


def check_number(op: str, name: str, value: Any) -> None:
    """Raise ArgumentError unless an option is a number, of Python or NumPy."""
    if not isinstance(value, _NUMBERS):
        raise ArgumentError(f"{op}: {name} is {value!r:.80}, expected a number")


def check_whole(op: str, name: str, value: Any) -> None:
    """Raise ArgumentError unless an option is an integer, of Python or NumPy."""
    if not isinstance(value, (int, np.integer)):
        raise ArgumentError(f"{op}: {name} is {value!r:.80}, expected an integer")


def check_integer(op: str, name: str, value: Any, low: int | None = None) -> None:
    """Raise ArgumentError unless an option is an integer of 64 bits, from `low` if there is one."""
    check_whole(op, name, value)
    if low is not None and value < low:
        raise ArgumentError(f"{op}: {name} is {value}, expected {low} or more")
    if not -_MOST <= value < _MOST:
        raise ArgumentError(f"{op}: {name} is {value}, expected an integer of 64 bits")


def check_seed(op: str, value: Any) -> None:
    """Raise ArgumentError unless a seed is an integer from 0 to 2^64 - 1."""
    check_whole(op, "seed", value)
    if not 0 <= value < 1 << 64:
        raise ArgumentError(f"{op}: seed is {value}, expected 0 to 2^64 - 1")


def check_range(op: str, name: str, value: Any, end: float = math.inf) -> None:
    """Raise ArgumentError unless 0 <= value < end."""
    if not isinstance(value, _NUMBERS) or not 0 <= value < end:
        check_number(op, name, value)
        limits = "a finite number from 0" if end == math.inf else f"0 <= {name} < {end:g}"
        raise ArgumentError(f"{op}: {name} is {value}, expected {limits}")


def check_between(op: str, name: str, value: Any, low: float, high: float) -> None:
    """Raise ArgumentError unless low <= value <= high."""
    check_number(op, name, value)
    if not low <= value <= high:
        raise ArgumentError(f"{op}: {name} is {value}, expected {low} to {high}")


def unexpected(op: str, keywords: Mapping[str, Any]) -> Exception:
    """Return the error for keyword arguments that an op lacks; PyTorch's names get NumPy's.

    An op takes them as `**unknown: Never`, so that type checkers refuse them.
    """
    name, value = next(iter(keywords.items()))
    if name not in _PYTORCH_NAMES:
        return TypeError(f"{op}() got an unexpected keyword argument {name!r}")
    return ArgumentError(
        f"{op}: got {name}={value!r:.80}, expected {_PYTORCH_NAMES[name]}={value!r:.80}"
    )


_PYTORCH_NAMES = {"dim": "axis", "dims": "axis", "keepdim": "keepdims"}
