"""The array API standard's namespace: dtypes, inspection, conversion, devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.errors import ArgumentError, DtypeError


def test_an_array_knows_its_namespace() -> None:
    x = tg.asarray([1.0, 2.0])
    assert x.__array_namespace__() is tg
    assert x.__array_namespace__(api_version="2024.12") is tg
    assert tg.__array_api_version__ == "2024.12"
    with pytest.raises(ArgumentError, match=r"api_version is '1999\.01'"):
        x.__array_namespace__(api_version="1999.01")


def test_inspection() -> None:
    info = tg.__array_namespace_info__()
    assert info.default_device() == "cpu"
    assert "cpu" in info.devices()
    assert info.default_dtypes()["real floating"] == tg.zeros(1).dtype
    assert info.default_dtypes()["integral"] == tg.asarray(1).dtype == tg.arange(3).dtype
    assert info.dtypes(kind="signed integer") == {
        name: getattr(tg, name) for name in ("int8", "int16", "int32", "int64")
    }
    assert set(info.dtypes()) >= {"bool", "uint8", "float32", "float64"}
    assert info.capabilities() == {
        "boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64,
    }  # fmt: skip
    assert info.default_dtypes()["complex floating"] == tg.complex64
    assert info.default_dtypes()["indexing"] == tg.zeros(1).argmax().dtype
    assert set(info.dtypes(kind=("bool", "complex floating"))) == {
        "bool",
        "complex64",
        "complex128",
    }


def test_limits_of_dtypes_are_python_numbers() -> None:
    for name in ("float64", "float32", "float16"):
        found, expected = tg.finfo(name), np.finfo(name)
        for field in ("bits", "eps", "max", "min", "smallest_normal", "tiny"):
            assert getattr(found, field) == getattr(expected, field), (name, field)
        assert type(found.eps) is float
    assert tg.finfo(tg.bfloat16).eps == 2**-7
    assert tg.finfo(tg.zeros(2)).bits == tg.finfo("complex64").bits == 32
    assert tg.finfo("complex64").dtype == tg.float32
    assert tg.iinfo("int8").dtype == tg.int8
    for name in ("int8", "uint64"):
        assert tg.iinfo(name)[:3] == (np.iinfo(name).bits, np.iinfo(name).max, np.iinfo(name).min)
    with pytest.raises(DtypeError, match="finfo: got dtype int8, expected a float"):
        tg.finfo("int8")
    with pytest.raises(DtypeError, match="iinfo: got dtype float32, expected an integer"):
        tg.iinfo(tg.float32)


def test_kinds_and_promotion() -> None:
    assert tg.isdtype(tg.int8, "signed integer")
    assert tg.isdtype(tg.bfloat16, ("bool", "real floating"))
    assert not tg.isdtype(tg.bool, "numeric")
    assert tg.isdtype(tg.float32, tg.float32)
    assert not tg.isdtype(tg.float32, tg.float64)
    assert tg.isdtype(tg.bfloat16, "numeric")
    assert not tg.isdtype(tg.bfloat16, "integral")
    assert not tg.isdtype(tg.int8, ("bool", "real floating"))
    with pytest.raises(ArgumentError, match="result_type: got no operands, expected at least one"):
        tg.result_type()
    with pytest.raises(ArgumentError, match="isdtype: kind is 'float', expected one of bool"):
        tg.isdtype(tg.float32, "float")
    assert tg.result_type(tg.zeros(1, "int8"), tg.float32, 1.5) == tg.float32
    assert tg.result_type(tg.float16, np.ones(1, "int32")) == tg.float64
    assert tg.result_type(tg.bfloat16, 1.5) == tg.result_type(2, tg.bfloat16) == tg.bfloat16
    assert tg.result_type(tg.bfloat16, 1j) == (tg.ones(1, "bfloat16") * 1j).dtype == tg.complex64
    assert tg.promote_types("uint8", "int8") == tg.int16
    assert tg.can_cast(tg.int8, tg.int16)
    assert not tg.can_cast(tg.zeros(1), tg.int8)
    with pytest.raises(DtypeError, match="result_type: got float16, bfloat16, expected dtypes"):
        tg.result_type(tg.float16, tg.bfloat16)


def test_asarray_copies_where_told() -> None:
    array = np.ones(3, "float32")
    assert tg.asarray(array).data is array
    assert not np.shares_memory(tg.asarray(array, copy=True).data, array)
    for value, dtype in (([1.0], None), (array, "float64")):
        with pytest.raises(ArgumentError, match="asarray: copy is False"):
            tg.asarray(value, dtype, copy=False)
    x = tg.tensor([1.0, 2.0], requires_grad=True)
    y = tg.asarray([[x[0], 3.0], [x[1] * 2, 4.0]])
    y.sum().backward()
    np.testing.assert_array_equal(y, [[1.0, 3.0], [4.0, 4.0]])
    np.testing.assert_array_equal(x.grad, [1.0, 2.0])
    assert tg.reshape(x, (2, 1), copy=True).shape == (2, 1)
    with pytest.raises(ArgumentError, match="reshape: copy is False"):
        tg.reshape(Tensor(np.ones((2, 3)).T), 6, copy=False)
    assert not np.shares_memory(tg.from_dlpack(array, copy=True).data, array)
    assert np.shares_memory(tg.from_dlpack(array, copy=False, device="cpu").data, array)


def test_methods_of_numpy() -> None:
    x = tg.tensor([[3.0, 1.0], [2.0, 5.0]], requires_grad=True)
    array = x.numpy()
    calls: list[Any] = [
        lambda x: x.copy(), lambda x: x.flatten(), lambda x: x.round(), lambda x: x.dot(x),
        lambda x: x.cumsum(1), lambda x: x.cumprod(0), lambda x: x.nonzero()[1],
        lambda x: x.diagonal(1), lambda x: x.trace(), lambda x: x.mT, lambda x: x.itemsize,
        lambda x: x.nbytes, lambda x: x[1].searchsorted([3.0]), lambda x: x.T,
    ]  # fmt: skip
    for call in calls:
        np.testing.assert_array_equal(call(x), call(array))
    y = x.detach().copy()
    y.sort()
    assert y.tolist() == [[1.0, 3.0], [2.0, 5.0]]
    y.fill(2)
    assert y.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert complex(y[0, 0]) == 2 + 0j
    assert y.to_device("cpu") is y
    x.flatten().sum().backward()
    np.testing.assert_array_equal(x.grad, np.ones((2, 2)))
