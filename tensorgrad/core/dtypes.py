"""Element types. A dtype is NumPy's own object; bfloat16 comes from ml_dtypes.

Promotion follows NumPy: `result_type` decides, a Python scalar takes the dtype of the array
beside it. Lists do so too (operands.py), and creation differs: values without a dtype (`zeros(3)`,
`tensor([1.0])`) become float32, not float64. Complex numbers have no gradients and no kernels of
ours: NumPy and CuPy compute with them.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tensorgrad.core.errors import DtypeError

__all__ = [
    "ALL", "COMPLEX", "FLOATS", "INTEGERS", "SCALARS", "Dtype", "DtypeLike", "as_dtype", "bfloat16",
    "bool_", "c_name", "complex64", "complex128", "compute_dtype", "float16", "float32", "float64",
    "int8", "int16", "int32", "int64", "is_complex", "is_float", "uint8", "uint16", "uint32",
    "uint64",
]  # fmt: skip

Dtype = np.dtype
DtypeLike = str | type | np.dtype

float64 = np.dtype("float64")
float32 = np.dtype("float32")
float16 = np.dtype("float16")
bfloat16 = np.dtype(ml_dtypes.bfloat16)
int64 = np.dtype("int64")
int32 = np.dtype("int32")
int16 = np.dtype("int16")
int8 = np.dtype("int8")
uint64 = np.dtype("uint64")
uint32 = np.dtype("uint32")
uint16 = np.dtype("uint16")
uint8 = np.dtype("uint8")
bool_ = np.dtype("bool")
complex128 = np.dtype("complex128")
complex64 = np.dtype("complex64")

SCALARS = frozenset((bool, int, float, complex))  # the types of Python's numbers
FLOATS = (float64, float32, float16, bfloat16)
INTEGERS = (int64, int32, int16, int8, uint64, uint32, uint16, uint8)
ALL = (*FLOATS, *INTEGERS, bool_)  # dtypes of real numbers; kernels take these
COMPLEX = (complex128, complex64)
_BY_NAME = {str(dtype): dtype for dtype in (*ALL, *COMPLEX)}
_C_NAMES = {
    float64: "double",
    float32: "float",
    float16: "__half",
    bfloat16: "__nv_bfloat16",
    int64: "long long",
    int32: "int",
    int16: "short",
    int8: "signed char",
    uint64: "unsigned long long",
    uint32: "unsigned int",
    uint16: "unsigned short",
    uint8: "unsigned char",
    bool_: "bool",
}


def as_dtype(dtype: DtypeLike, name: str = "dtype") -> Dtype:
    """Return the dtype that a name ("bfloat16"), a Python type or a NumPy dtype stands for.

    Args:
        dtype: a name, such as "bfloat16"; a Python or NumPy scalar type, such as float (float64) or
            numpy.int8; or a NumPy dtype.
        name: the start of errors, such as the name of the argument.

    Returns:
        A NumPy dtype.

    Raises:
        DtypeError: the library has no such dtype.

    Example:
        >>> tg.dtypes.as_dtype("bfloat16"), tg.dtypes.as_dtype(float)
        (dtype(bfloat16), dtype('float64'))
    """
    if isinstance(dtype, str) and dtype in _BY_NAME:
        return _BY_NAME[dtype]
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise DtypeError(
            f"{name}: got {dtype!r:.80}, expected one of {', '.join(_BY_NAME)}"
        ) from error
    if not is_known(found):
        raise DtypeError(f"{name}: got {found}, expected one of {', '.join(_BY_NAME)}")
    return found


def is_known(dtype: Dtype) -> bool:
    """Whether the library computes with this dtype: numbers and bool, nothing else."""
    return dtype in _C_NAMES or dtype in COMPLEX


def is_float(dtype: Dtype) -> bool:
    """Whether values of this dtype can carry a gradient.

    Args:
        dtype: a NumPy dtype.

    Returns:
        True for floats of 16, 32 and 64 bits, bfloat16 too; False for integers, bool and complex.

    Example:
        >>> tg.dtypes.is_float(tg.bfloat16), tg.dtypes.is_float(tg.int32)
        (True, False)
    """
    return dtype.kind == "f" or dtype is bfloat16 or dtype == bfloat16


def is_complex(dtype: Dtype) -> bool:
    """Whether values of this dtype are complex numbers, which carry no gradient.

    Args:
        dtype: a NumPy dtype.

    Returns:
        True or False.

    Example:
        >>> tg.dtypes.is_complex(tg.complex64), tg.dtypes.is_complex(tg.float32)
        (True, False)
    """
    return dtype.kind == "c"


def compute_dtype(dtype: Dtype) -> Dtype:
    """Return the dtype that arithmetic is done in: float32 for 16-bit floats, else `dtype`.

    Args:
        dtype: a NumPy dtype.

    Returns:
        A NumPy dtype.

    Example:
        >>> tg.dtypes.compute_dtype(tg.bfloat16), tg.dtypes.compute_dtype(tg.float64)
        (dtype('float32'), dtype('float64'))
    """
    return float32 if dtype.itemsize == 2 and is_float(dtype) else dtype


def c_name(dtype: Dtype) -> str:
    """Return the CUDA C++ type of one element.

    Args:
        dtype: a NumPy dtype of the library, of real numbers or bool.

    Returns:
        The name of the type in the source of a kernel.

    Raises:
        DtypeError: kernels do not compute with complex numbers.

    Example:
        >>> tg.dtypes.c_name(tg.float16), tg.dtypes.c_name(tg.int64)
        ('__half', 'long long')
    """
    if is_complex(dtype):
        raise DtypeError(f"kernel: got dtype {dtype}, expected real numbers")
    return _C_NAMES[dtype]
