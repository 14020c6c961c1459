"""Structs that kernels take by value: one layout in Python and in CUDA."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad.core import backend
from tensorgrad.kernels import compile as check
from tensorgrad.kernels import loader, structs
from tensorgrad.kernels.structs import Struct, static_asserts
from tests.gpu_array import on_gpu
from tests.kernels.test_loader import needs_nvrtc

ALL = Struct.__subclasses__()
NUMPY = {
    ctypes.c_int: "i4", ctypes.c_uint32: "u4", ctypes.c_int64: "i8", ctypes.c_uint64: "u8",
    ctypes.c_float: "f4", ctypes.c_double: "f8", ctypes.c_void_p: "u8",
}  # fmt: skip


def numpy_dtype(c_type: Any) -> Any:
    """Return the type of a field as an aligned NumPy one."""
    if c_type in NUMPY:
        return np.dtype(NUMPY[c_type])
    if issubclass(c_type, ctypes.Array):
        return np.dtype((NUMPY[c_type._type_], c_type._length_))
    fields = [(name, numpy_dtype(own)) for name, own, *_ in c_type._fields_]
    return np.dtype(fields, align=True)


def draw(dtype: Any, rng: np.random.Generator) -> Any:
    """Return a random value of a type as nested tuples."""
    if dtype.names:
        return tuple(draw(dtype[name], rng) for name in dtype.names)
    if dtype.subdtype:
        return tuple(draw(dtype.base, rng) for _ in range(dtype.shape[0]))
    if dtype.kind == "f":
        return float(rng.standard_normal())
    return int(rng.integers(0, 2**31) * (-1 if dtype.kind == "i" and rng.random() < 0.5 else 1))


@pytest.mark.parametrize("struct", ALL, ids=lambda struct: struct.__name__)
def test_a_struct_has_the_bytes_of_an_aligned_numpy_record(struct: type[Struct]) -> None:
    rng, dtype = np.random.default_rng(0), numpy_dtype(struct)
    for _ in range(20):
        values = draw(dtype, rng)
        record = np.zeros(1, dtype)
        record[0] = values
        assert bytes(struct(*values)) == record.tobytes()


@pytest.mark.parametrize("struct", ALL, ids=lambda struct: struct.__name__)
def test_the_sources_have_the_fields_in_this_order(struct: type[Struct]) -> None:
    for source in struct.sources:
        text = (loader.FOLDER / source).read_text()
        body = re.search(rf"struct {struct.__name__} {{(.*?)\n}};", text, re.DOTALL)
        assert body, f"{source} has no struct {struct.__name__}"
        places = [
            found.start() if (found := re.search(rf"\b{name}\b[^;(]*;", code)) else -1
            for code in [re.sub(r"//.*", "", body[1])]
            for name, *_ in struct._fields_
        ]
        assert -1 not in places
        assert places == sorted(places)


def test_sources_end_with_the_assertions() -> None:
    text = loader.read(loader.FOLDER / "cross_entropy.cu").text
    assert 'static_assert(sizeof(GradientScale<float>) == 24, "structs.py' in text
    assert 'static_assert(sizeof(Targets) == 48, "structs.py' in text
    assert not static_asserts("norm.cuh")


def test_arguments_that_are_missing_are_null() -> None:
    array = on_gpu(np.zeros(3))
    assert structs.pointer(array) is array
    assert structs.pointer(None) == 0
    assert structs.pointer(None).dtype == np.uintp
    assert structs.address(None) == 0
    assert structs.address(array) == array.ctypes.data


def test_arguments_by_value_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pointer:
        def __init__(self, memory: int) -> None:
            self.ptr = memory

    function = SimpleNamespace(CPointer=Pointer)
    cuda = SimpleNamespace(function=function)
    monkeypatch.setattr(backend, "cupy", SimpleNamespace(cuda=cuda))
    structs._by_value.cache_clear()
    structs.number.cache_clear()
    try:
        strides = structs.CacheStrides(1, 2, 3)
        found = structs.by_value(strides)
        assert (found.ptr, found.value) == (ctypes.addressof(strides), strides)
        found = structs.by_value(np.float32(2.5))
        assert found.value.dtype == np.float32
        assert ctypes.c_float.from_address(found.ptr).value == 2.5
        array = np.arange(3)
        assert structs.by_value(array).ptr == array.ctypes.data
        one = structs.number("float64", 0.5)
        assert ctypes.c_double.from_address(one.ptr).value == 0.5
        assert structs.number("float64", 0.5) is one
    finally:
        structs._by_value.cache_clear()
        structs.number.cache_clear()


def compilers() -> list[Any]:
    nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
    return [
        pytest.param(check._nvrtc, marks=needs_nvrtc, id="nvrtc"),
        pytest.param(check._nvcc, marks=nvcc, id="nvcc"),
    ]


@pytest.mark.parametrize("fields", ["int first; long long second;", "int second; int first;"])
@pytest.mark.parametrize("compiler", compilers())
def test_a_declaration_that_differs_does_not_compile(
    compiler: Any, fields: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Example(ctypes.Structure):
        sources = ("folder/example.cu",)
        cuda_name = ""
        _fields_ = (("first", ctypes.c_int), ("second", ctypes.c_int64))

    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/example.cu").write_text(
        f"// instantiate: copy<1>\nstruct Example {{ {fields} }};\n"
        "template <int N> __global__ void copy(Example* to, Example from) { *to = from; }\n"
    )
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    monkeypatch.setattr(structs.Struct, "__subclasses__", lambda: [Example])
    source = loader.read(tmp_path / "folder/example.cu")
    errors = check._report(compiler, source, source.kernels, "sm_80").errors
    assert bool(errors) == fields.startswith("int second")
    if errors:
        assert "structs.py declares another Example" in errors[0]
