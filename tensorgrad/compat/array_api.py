"""The array API standard's demands on a namespace beside its functions: dtypes and devices.

Source: https://data-apis.org/array-api/2024.12. Tests: tests/compat/test_array_api.py.
"""

from __future__ import annotations

import builtins
import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tensorgrad.core import backend, dtypes
from tensorgrad.core.dtypes import Dtype, DtypeLike, as_dtype, float32, int64, is_complex, is_float
from tensorgrad.core.errors import ArgumentError, DtypeError
from tensorgrad.core.tensor import Tensor

__all__ = [
    "bfloat16",
    "bool",
    "can_cast",
    "complex64",
    "complex128",
    "e",
    "finfo",
    "float16",
    "float32",
    "float64",
    "iinfo",
    "inf",
    "int8",
    "int16",
    "int32",
    "int64",
    "isdtype",
    "long",
    "nan",
    "newaxis",
    "pi",
    "promote_types",
    "result_type",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]  # fmt: skip

__array_api_version__ = "2024.12"

bool = dtypes.bool_
complex64, complex128 = dtypes.complex64, dtypes.complex128
bfloat16, float16, float64 = dtypes.bfloat16, dtypes.float16, dtypes.float64
int8, int16, int32 = dtypes.int8, dtypes.int16, dtypes.int32
long = int64  # PyTorch's name
uint8, uint16, uint32, uint64 = dtypes.uint8, dtypes.uint16, dtypes.uint32, dtypes.uint64
e, inf, nan, pi, newaxis = math.e, math.inf, math.nan, math.pi, None

_KINDS: dict[str, tuple[Dtype, ...]] = {
    "bool": (bool,),
    "signed integer": (int8, int16, int32, int64),
    "unsigned integer": (uint8, uint16, uint32, uint64),
    "real floating": (float32, float64),
    "complex floating": (complex64, complex128),
}
_KINDS["integral"] = _KINDS["signed integer"] + _KINDS["unsigned integer"]
_KINDS["numeric"] = _KINDS["integral"] + _KINDS["real floating"]
_KINDS["numeric"] += _KINDS["complex floating"]


class FloatLimits(NamedTuple):
    """Limits of a float dtype, Python numbers; see `tensorgrad.finfo`."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: Dtype

    @property
    def tiny(self) -> float:
        """The smallest normal number, NumPy's other name for it."""
        return self.smallest_normal


class IntegerLimits(NamedTuple):
    """Limits of an integer dtype, Python numbers; see `tensorgrad.iinfo`."""

    bits: int
    max: int
    min: int
    dtype: Dtype


def finfo(dtype: DtypeLike | Tensor) -> FloatLimits:
    """Return the limits of a float dtype; for a complex one those of its real part.

    Args:
        dtype: a dtype, its name, or a tensor or array, whose dtype counts.

    Returns:
        Python numbers: `bits`; `eps`, the distance from 1 to the next number; `max`, `min`,
        `smallest_normal`; and `dtype`.

    Raises:
        DtypeError: it is not a float.

    Example:
        >>> tg.finfo("bfloat16").eps
        0.0078125
    """
    kind = _dtype_of("finfo: dtype", dtype)
    kind = np.empty(0, kind).real.dtype if is_complex(kind) else kind
    if not is_float(kind):
        raise DtypeError(f"finfo: got dtype {kind}, expected a float")
    limits: Any = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
    eps, high, low = float(limits.eps), float(limits.max), float(limits.min)
    return FloatLimits(int(limits.bits), eps, high, low, float(limits.smallest_normal), kind)


def iinfo(dtype: DtypeLike | Tensor) -> IntegerLimits:
    """Return the limits of an integer dtype.

    Args:
        dtype: a dtype, its name, or a tensor or array, whose dtype counts.

    Returns:
        Python numbers: `bits`, `max`, `min`; and `dtype`.

    Raises:
        DtypeError: it is not an integer.

    Example:
        >>> tg.iinfo("int8").max
        127
    """
    kind = _dtype_of("iinfo: dtype", dtype)
    if kind.kind not in "iu":
        raise DtypeError(f"iinfo: got dtype {kind}, expected an integer")
    limits = np.iinfo(kind)
    return IntegerLimits(limits.bits, int(limits.max), int(limits.min), kind)


def isdtype(dtype: DtypeLike, kind: Any) -> builtins.bool:
    """Return whether a dtype is of a kind.

    Args:
        dtype: the dtype.
        kind: a dtype; "bool", "signed integer", "unsigned integer", "integral", "real floating",
            "complex floating" or "numeric"; or a tuple of these, of which one must fit.

    Returns:
        True or False.

    Raises:
        ArgumentError: there is no such kind.

    Example:
        >>> tg.isdtype(tg.bfloat16, "real floating"), tg.isdtype(tg.bool, ("integral", tg.uint8))
        (True, False)
    """
    found = as_dtype(dtype, "isdtype: dtype")
    if isinstance(kind, tuple):
        return any([isdtype(found, one) for one in kind])
    if not isinstance(kind, str):
        return found == as_dtype(kind, "isdtype: kind")
    if kind not in _KINDS:
        raise ArgumentError(f"isdtype: kind is {kind!r}, expected one of {', '.join(_KINDS)}")
    return found in _KINDS[kind] or (is_float(found) and kind in ("real floating", "numeric"))


def result_type(*operands: Any) -> Dtype:
    """Return the dtype that tensors, arrays, dtypes and Python numbers promote to, as in NumPy.

    Args:
        operands: tensors, arrays, dtypes, their names, or Python numbers, which take the dtype of
            the others.

    Returns:
        A NumPy dtype.

    Raises:
        ArgumentError: there are none.
        DtypeError: they have no common dtype.

    Example:
        >>> tg.result_type(tg.float32, 2.0), tg.result_type("float32", "int32")
        (dtype('float32'), dtype('float64'))
    """
    if not operands:
        raise ArgumentError("result_type: got no operands, expected at least one")
    kinds = [
        x if type(x) in dtypes.SCALARS else _dtype_of(f"result_type: operands[{i}]", x)
        for i, x in enumerate(operands)
    ]
    arrays = [kind for kind in kinds if type(kind) not in dtypes.SCALARS]
    try:
        if bfloat16 in arrays and complex not in map(type, kinds):
            return as_dtype(np.result_type(*arrays))  # NumPy takes a Python float for a float64
        return as_dtype(np.result_type(*kinds))
    except TypeError as error:
        got = ", ".join(map(str, kinds))
        raise DtypeError(f"result_type: got {got}, expected dtypes with a common one") from error


def promote_types(a: DtypeLike, b: DtypeLike) -> Dtype:
    """Return the dtype that two dtypes promote to; see `result_type`.

    Args:
        a, b: dtypes or their names.

    Returns:
        A NumPy dtype.

    Example:
        >>> tg.promote_types("int8", "uint8")
        dtype('int16')
    """
    return result_type(as_dtype(a, "promote_types: a"), as_dtype(b, "promote_types: b"))


def can_cast(source: Any, to: DtypeLike) -> builtins.bool:
    """Return whether all values of a dtype (or of that of a tensor) keep their meaning in another.

    Args:
        source: a dtype, its name, or a tensor or array, whose dtype counts.
        to: a dtype or its name.

    Returns:
        True or False.

    Raises:
        DtypeError: the library has no such dtype.

    Example:
        >>> tg.can_cast("int32", "int64"), tg.can_cast("float64", "float32")
        (True, False)
    """
    return np.can_cast(_dtype_of("can_cast: source", source), as_dtype(to, "can_cast: to"))


def _dtype_of(name: str, value: Any) -> Dtype:
    array = isinstance(value, Tensor) or backend.is_array(value)
    return as_dtype(value.dtype if array else value, name)


class NamespaceInfo:
    """Devices, dtypes and capabilities, as the standard's inspection functions return them."""

    def capabilities(self) -> dict[str, Any]:
        """Return what depends on values, and the most axes."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """Return the device of new tensors."""
        return "cpu"

    def devices(self) -> list[str]:
        """Return the CPU and the GPUs."""
        return ["cpu", *[f"cuda:{i}" for i in range(backend.gpu_count())]]

    def default_dtypes(self, *, device: str | None = None) -> dict[str, Dtype]:
        """Return the dtypes of values without one."""
        floats = {"real floating": float32, "complex floating": complex64}
        return {**floats, "integral": int64, "indexing": int64}

    def dtypes(self, *, device: str | None = None, kind: Any = None) -> dict[str, Dtype]:
        """Return the standard's dtypes of a kind (see `isdtype`) by name."""
        every = [dtype for kinds in (_KINDS["bool"], _KINDS["numeric"]) for dtype in kinds]
        return {str(d): d for d in every if kind is None or isdtype(d, kind)}


def __array_namespace_info__() -> NamespaceInfo:
    """Return the standard's inspection functions."""
    return NamespaceInfo()
