"""DLPack, the protocol by which array libraries share memory. Tests: tests/compat/test_interop.py.

NumPy's DLPack knows no bfloat16. There the array crosses as 16-bit integers, and the type code
in the DLPack header is changed on the way.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import as_dtype, bfloat16
from tensorgrad.core.errors import DeviceError, DtypeError

# DLDeviceType and DLDataTypeCode of the DLPack standard
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_UINT, _BFLOAT = 1, 4
# Where the type code lies: DLTensor has it after data (8 bytes), device (8) and ndim (4); a
# versioned header comes 32 bytes (version, context, deleter, flags) before its DLTensor.
_CODE_OFFSET = {b"dltensor": 20, b"dltensor_versioned": 52}


def from_dlpack(x: Any) -> Array:
    """Return an array on the memory of an array of another library, without a copy.

    Args:
        x: an object with `__dlpack__`: of PyTorch, CuPy, JAX, NumPy, ... on the CPU or a GPU.

    Raises:
        DtypeError: x does not speak DLPack, or its dtype is none of the library's.
        DeviceError: x is neither on the CPU nor on a CUDA GPU, or CuPy is missing.
    """
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise DtypeError(f"from_dlpack: x is a {type(x).__name__}, expected one with __dlpack__")
    kind, index = x.__dlpack_device__()
    if int(kind) in (_CPU, _CUDA_HOST):
        source = _AsIntegers(x)
        try:
            array = np.from_dlpack(source)
        except (RuntimeError, BufferError) as error:  # which one depends on NumPy and the source
            raise DtypeError(
                f"from_dlpack: x has a dtype that NumPy lacks, expected numbers or bool: {error}"
            ) from error
        array = array.view(bfloat16) if source.is_bfloat16 else array
    elif int(kind) in (_CUDA, _CUDA_MANAGED):
        backend.gpu_index(f"cuda:{index}")
        array = backend.cupy.from_dlpack(x)
    else:
        raise DeviceError(f"from_dlpack: x is on a device of DLPack type {int(kind)}, expected "
                          "the CPU or a CUDA GPU")  # fmt: skip
    as_dtype(array.dtype)
    return array


def to_dlpack(array: Array, **kwargs: Any) -> Any:
    """Return a DLPack capsule of the array's memory, for `Tensor.__dlpack__`.

    Memory that runs backwards is copied: PyTorch ends the process when it is given some.
    """
    if any(stride < 0 for stride in array.strides):
        if kwargs.get("copy") is False:
            raise BufferError("dlpack: the tensor has negative strides, expected copy=None or True")
        array = array.copy()
    if not backend.is_numpy(array):
        return _cuda_capsule(array, **kwargs)
    if array.dtype != bfloat16:
        return array.__dlpack__(**kwargs)
    capsule = array.view(np.uint16).__dlpack__(**kwargs)
    _type_code(capsule).value = _BFLOAT
    return capsule


def _cuda_capsule(array: Array, **kwargs: Any) -> Any:
    """Return a capsule of memory on a GPU; CuPy itself copies to the CPU only."""
    to_cpu = kwargs.get("dl_device") is not None and int(kwargs["dl_device"][0]) == _CPU
    if to_cpu and kwargs.get("copy") is False:
        raise BufferError("dlpack: the tensor is on a GPU, expected copy=None or True for the CPU")
    if kwargs.get("copy") and not to_cpu:
        array, kwargs = array.copy(), {**kwargs, "copy": None}
    return array.__dlpack__(**kwargs)


class _AsIntegers:
    """Stands for a CPU array of another library and hands its bfloat16 on as 16-bit integers."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.is_bfloat16 = False

    def __dlpack_device__(self) -> Any:
        return self.source.__dlpack_device__()

    def __dlpack__(self, **kwargs: Any) -> Any:
        capsule = self.source.__dlpack__(**kwargs)
        code = _type_code(capsule)
        if code.value == _BFLOAT:
            self.is_bfloat16 = True
            code.value = _UINT
        return capsule


def _type_code(capsule: Any) -> ctypes.c_uint8:
    """Return the type code inside a capsule's header, to read or to write."""
    name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype = ctypes.c_void_p
    pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = name_of(capsule)
    return ctypes.c_uint8.from_address(pointer_of(capsule, name) + _CODE_OFFSET[name])
