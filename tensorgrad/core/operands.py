"""The operands that ops accept, with errors that name the argument."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from tensorgrad.core import backend, instrument
from tensorgrad.core.arrays import array_of, not_an_operand
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import (
    SCALARS,
    Dtype,
    DtypeLike,
    as_dtype,
    bool_,
    complex64,
    complex128,
    float32,
    float64,
    int64,
    is_complex,
    is_float,
    is_known,
    uint64,
)
from tensorgrad.core.errors import ArgumentError, DtypeError, GradError, ShapeError, TensorgradError
from tensorgrad.core.modes import mode
from tensorgrad.core.tensor import Tensor

Names = Sequence[str]
Values = Sequence[Any]
# The kind of a number of Python, or of a list of them: the last of these types that it holds.
_KINDS: tuple[type, ...] = (bool, int, float, complex)
_ALONE: dict[Any, Dtype] = {bool: bool_, float: float32, complex: complex64}
_OF_NUMPY = {float64: float32, complex128: complex64}
_LITERALS = (*_KINDS, list, tuple)
_BESIDE_INTEGERS: dict[Any, Dtype] = {bool: bool_, float: float64, complex: complex128}


def operands(op: str, names: Names, values: Values, compared: bool = False) -> Sequence[Tensor]:
    """Return the operands of an op as tensors.

    A literal (a number of Python, or nested lists of them) has no dtype of its own. It is decided
    here, with the other operands: floats and integers beside floats take the dtype of these, floats
    beside integers are float64. Beside integers, an integer takes their dtype, as in NumPy, and a
    list of integers is int64, or uint64 beside uint64. Floats beside literals or bools alone are
    float32.

    Args:
        op: for errors.
        names: of the operands, for errors.
        values: tensors, arrays or literals.
        compared: the op compares the operands, so an integer outside their dtype is wider.

    Raises:
        ArgumentError: a dtype does not hold an integer.
        ShapeError: nested lists of unequal length.
        DtypeError: an operand does not hold numbers.
    """
    if instrument.observer is not None:
        instrument.observer.enter(op)
    kinds = [_kind_of(op, name, value) for name, value in zip(names, values, strict=True)]
    known = frozenset(kinds)
    return [
        value
        if isinstance(value, Tensor)
        else Tensor(_array_of(op, name, value, kind, known, compared))
        for name, value, kind in zip(names, values, kinds, strict=True)
    ]


def tensor_of(op: str, name: str, value: Any, *others: Any) -> Tensor:
    """Return an operand as a tensor; a literal takes its dtype with the others, see `operands`."""
    if instrument.observer is not None:
        instrument.observer.enter(op)
    if isinstance(value, Tensor):
        return value
    return Tensor(array_beside(op, name, value, *others))


def array_beside(op: str, name: str, value: Any, *others: Any) -> Array:
    """Return one operand as an array; a literal beside others, see `operands`.

    Args:
        others: the other operands of the op, None for one that is not given.
    """
    kind = _kind_of(op, name, value)
    known = {kind}
    for other in others:
        with suppress(TensorgradError):  # the op names it when it takes it as an operand
            known.add(_kind_of(op, name, other))
    return _array_of(op, name, value, kind, frozenset(known))


def values_of(op: str, name: str, value: Any, dtype: DtypeLike | None = None) -> Array:
    """Return the value as an array; values without a dtype get the library's default."""
    target = None if dtype is None else as_dtype(dtype)
    if not isinstance(value, _LITERALS):  # an array, a range, a data frame
        array = value if backend.is_array(value) else _converted(op, name, value, target)
        own = array.dtype
        if not is_known(own):
            raise DtypeError(f"{op}: {name} has dtype {own}, expected numbers")
        if array is value:
            return np.asarray(value) if isinstance(value, np.ndarray) else value
        return array.astype(target or _OF_NUMPY.get(own, own), copy=False)
    kind = _kind_of(op, name, value)
    if target is not None:
        return _converted(op, name, value, target)
    return _array_of(op, name, value, kind, frozenset((kind,)))


def _kind_of(op: str, name: str, value: Any) -> Dtype | type:
    """Return the dtype of an operand, of a literal one of the types of Python's numbers."""
    if isinstance(value, Tensor):
        return value.data.dtype  # type: ignore[no-any-return]
    if backend.is_array(value) or isinstance(value, np.generic):
        if not is_known(value.dtype):
            raise DtypeError(f"{op}: {name} has dtype {value.dtype}, expected numbers")
        return value.dtype  # type: ignore[no-any-return]
    if not isinstance(value, _LITERALS):
        raise not_an_operand(op, name, value)
    leaves = {type(leaf): leaf for leaf in leaves_of(value)}
    for kind, leaf in leaves.items():
        if isinstance(leaf, Tensor) or backend.is_array(leaf):
            raise DtypeError(
                f"{op}: {name} holds a {kind.__name__}, expected numbers; "
                "use stack() or concatenate()"
            )
    if leaves.keys() <= SCALARS:
        return max(leaves, key=_KINDS.index, default=float)
    dtype: Dtype = _converted(op, name, value, None).dtype  # that of NumPy's numbers among them
    if not is_known(dtype):
        raise DtypeError(f"{op}: {name} has dtype {dtype}, expected numbers")
    return dtype


def _array_of(
    op: str,
    name: str,
    value: Any,
    kind: Dtype | type,
    known: frozenset[Dtype | type],
    compared: bool = False,
) -> Array:
    """Return an operand as an array; a literal beside others of the dtypes and kinds `known`."""
    if backend.is_array(value):
        # without a subclass of NumPy's, which would pass for CuPy's
        return np.asarray(value) if isinstance(value, np.ndarray) else value
    if isinstance(kind, np.dtype):
        return _converted(op, name, value, kind)
    dtype = _literal_dtype(kind, known)
    if kind is not int or (dtype is not None and dtype.kind not in "iu"):
        return _converted(op, name, value, dtype)
    if isinstance(value, int):
        choices = [dtype or int64, *([int64, uint64] if compared or dtype is None else [])]
    else:
        choices = [*([uint64] if dtype == uint64 else []), int64, uint64]
    for choice in choices:
        try:
            return np.asarray(value, choice)
        except OverflowError:
            continue
        except ValueError:  # lists differ in length
            return _converted(op, name, value, choice)
    raise ArgumentError(f"{op}: {name} is {value!r:.80}, expected {choices[0]}")


@lru_cache
def _literal_dtype(kind: type, known: frozenset[Dtype | type]) -> Dtype | None:
    """Return the dtype of a literal beside others; None: that of the integers it holds."""
    dtypes = [one for one in known if isinstance(one, np.dtype) and one != bool_]
    if not dtypes:
        kinds = [one for one in known if isinstance(one, type)]
        return _ALONE.get(kind if kind is bool else max(kinds, key=_KINDS.index))
    try:
        common = np.result_type(*dtypes)
    except TypeError:  # the op says so
        return _ALONE.get(kind)
    if kind is bool or not (is_float(common) or is_complex(common)):
        return _BESIDE_INTEGERS.get(kind, common if common.kind in "iu" else None)
    if kind is complex and not is_complex(common):
        return complex128 if common == float64 else complex64
    return common


def _converted(op: str, name: str, value: Any, dtype: Dtype | None) -> Array:
    """Return a number or nested lists as an array of a dtype, by default that of NumPy."""
    try:
        return np.asarray(value, dtype)
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(value, (list, tuple)) and "inhomogeneous" in str(error):
            raise ShapeError(f"{op}: {name} is {value!r:.80}, expected equal lengths") from error
        what = f"dtype {dtype}" if dtype is not None else "numbers"
        raise ArgumentError(
            f"{op}: {name} does not fit the dtype, expected {what}: {error}"
        ) from error


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield what nested lists hold."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


def constant_of(
    op: str, name: str, tensor: Tensor, why: str = "complex numbers carry none"
) -> Array:
    """Return the array of an operand that an op has no gradient of.

    Raises:
        GradError: the operand requires a gradient, which would be lost; `why` says the reason.
    """
    if tensor.requires_grad and mode.grad_enabled:
        raise GradError(
            f"{op}: {name} requires a gradient, expected one that does not: {why}; use detach()"
        )
    return tensor.data


def data_of(tensor: Tensor | None) -> Any:
    """Return the array of an optional operand."""
    return None if tensor is None else tensor.data


def float_operand(op: str, name: str, tensor: Tensor) -> None:
    """Raise DtypeError unless the tensor holds floats."""
    if not is_float(tensor.data.dtype):
        raise DtypeError(f"{op}: {name} has dtype {tensor.data.dtype}, expected a float")


def float_tensor(op: str, name: str, value: Any, *others: Any) -> Tensor:
    """Return an operand as a tensor of floats; a literal takes its dtype with the others."""
    plain = isinstance(value, Tensor) and instrument.observer is None
    tensor: Tensor = value if plain else tensor_of(op, name, value, *others)
    if tensor.data.dtype.kind != "f":  # bfloat16 has another kind
        float_operand(op, name, tensor)
    return tensor


def integer_array(op: str, name: str, value: Any) -> Array:
    """Return the integers of a tensor, an array or (nested lists of) Python numbers."""
    value = value.data if isinstance(value, Tensor) else value
    array = array_of(op, name, value)
    if array is not value and not array.size:
        array = array.astype(np.int64)  # NumPy makes an empty list float64
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{op}: {name} has dtype {array.dtype}, expected integers")
    return array
