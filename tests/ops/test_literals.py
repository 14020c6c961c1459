"""The dtype of literals beside other operands, the warning of widening, and what a dtype holds.

tests/fuzz/test_literals.py tries every public function.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn
from tensorgrad.core import checks
from tensorgrad.dtypes import bfloat16
from tensorgrad.errors import ArgumentError, DtypeError, TensorgradError, WideningWarning

FAR = 2**53 + 1  # no float64


def beside(dtype: Any) -> Tensor:
    return Tensor(np.array([1, 2]).astype(dtype))


@pytest.mark.parametrize(
    ("dtype", "floats", "integers"),
    [
        ("float64", "float64", "float64"),
        ("float32", "float32", "float32"),
        ("float16", "float16", "float16"),
        (bfloat16, bfloat16, bfloat16),
        ("complex64", "complex64", "complex64"),
        ("int64", "float64", "int64"),
        ("int8", "float64", "int64"),
        ("uint64", "float64", "uint64"),
        ("bool", "float32", "int64"),
    ],
)
def test_lists_take_their_dtype_with_the_other_operands(
    dtype: Any, floats: Any, integers: Any
) -> None:
    x = beside(dtype)
    for join in (tg.add, lambda a, b: tg.concatenate([a, b]), lambda a, b: tg.stack((b, a))):
        assert join(x, [0.1, 0.2]).dtype == floats
        assert join(x, (1, 2)).dtype == integers
    assert tg.dot(x, [[0.1], [0.2]]).dtype == floats
    narrow = floats != "float64"
    assert tg.append(x, [1j]).dtype == ("complex64" if narrow else "complex128")


def test_numbers_take_the_dtype_of_the_other_operands() -> None:
    for dtype in ("int8", "uint64", "float16", "float32"):
        assert tg.append(beside(dtype), 3).dtype == dtype
    assert tg.append(beside("int8"), 0.1).numpy()[2] == 0.1
    assert tg.append(beside("float64"), 1 / 3).numpy()[2] == 1 / 3
    with pytest.raises(ArgumentError, match="append: values is 300, expected int8"):
        tg.append(beside("int8"), 300)
    with pytest.raises(ArgumentError, match="append: values is -1, expected uint64"):
        tg.append(beside("uint64"), -1)
    with pytest.raises(ArgumentError, match=r"concatenate: tensors\[1\] is \[1, -1844674407"):
        tg.concatenate([beside("int64"), [1, -(2**64)]])
    assert tg.isin(beside("int8"), 300).tolist() == [False, False]  # compared, not computed with
    assert tg.searchsorted(beside("uint8"), [-1, 300]).tolist() == [0, 2]


def test_literals_alone_are_float32() -> None:
    for y in (tg.add([0.1], [1]), tg.concatenate([[1], [0.1]]), tg.dot([1, 2], [0.1, 0.2])):
        assert y.dtype == "float32"
    assert tg.add([1], [2]).dtype == "int64"
    assert tg.tensor([[0.1, 1]]).dtype == "float32"
    assert tg.concatenate([[1j], [0.1]]).dtype == "complex64"
    assert tg.concatenate([np.full(1, 0.1), [np.float64(0.1)], [0.1]]).tolist() == [0.1] * 3


def test_integers_beyond_float64_stay_exact() -> None:
    x = Tensor(np.array([FAR, 2**63 + 1], np.uint64))
    assert (x == [FAR, 2**63 + 1]).tolist() == [True, True]
    assert (x - [FAR - 1, 2**63]).tolist() == [1, 1]
    assert tg.searchsorted(x, [FAR, FAR + 1]).tolist() == [0, 1]
    assert tg.isin(x, [FAR]).tolist() == [True, False]
    assert tg.tensor([2**63 + 1, 1]).tolist() == [2**63 + 1, 1]
    assert tg.concatenate([x, [1]]).tolist() == [FAR, 2**63 + 1, 1]
    assert tg.array_equal(Tensor(np.array([FAR])), [FAR - 1]) is False


def test_losses_take_the_weights_of_lists_in_the_dtype_of_the_logits() -> None:
    logits = np.array([[0.1, 0.7], [1 / 3, -0.2]])
    for dtype in ("float64", "float32"):
        x = Tensor(logits.astype(dtype))
        weight = [0.1, 1 / 3]
        expected = tg.nn.functional.cross_entropy(x, [1, 0], weight=np.array(weight, dtype))
        assert nn.CrossEntropyLoss(weight)(x, [1, 0]).item() == expected.item()
        loss = nn.BCEWithLogitsLoss(weight)(x, [[0.1, 0.9], [1, 0]])
        assert loss.dtype == dtype


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("add", lambda a, b: a + b),
        ("multiply", lambda a, b: b * a),
        ("matmul", tg.matmul),
        ("concatenate", lambda a, b: tg.concatenate([a, b])),
        ("where", lambda a, b: tg.where(b > 1, a, b)),
    ],
)
def test_integers_that_widen_floats_are_named_once(
    name: str, call: Callable[[Any, Any], Tensor], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    a = tg.tensor([1, 2], device=device)
    b = tg.tensor([0.5, 1.5], device=device)
    with pytest.warns(WideningWarning, match=f"^{name}: int64 beside float32 gives float64") as got:
        assert call(a, b).dtype == "float64"
    assert len(got) == 1
    assert got[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(a, b)


def test_what_does_not_widen_does_not_warn(device: str) -> None:
    a, b = tg.tensor([1, 2], device=device), tg.tensor([0.5, 1.5], device=device)
    a * 0.5, a + 1, b * 2, b + 1  # numbers of Python
    a / a, a * a.astype("float64"), a > b, tg.equal(a, b)
    a.astype("int16") * b, (b > 1) * b, a.sum() * b.sum()  # the last has no axes


HOW: list[tuple[str, Callable[[Tensor, Any], Any]]] = [
    ("setitem", lambda x, v: x.__setitem__(0, v)),
    ("setitem of a list", lambda x, v: x.__setitem__(slice(None), [v, v])),
    ("setitem of an array", lambda x, v: x.__setitem__(0, np.asarray(v))),
    ("setitem of a tensor", lambda x, v: x.__setitem__(0, Tensor(np.asarray(v)))),
    ("fill", lambda x, v: x.fill(v)),
    ("put_along_axis", lambda x, v: tg.put_along_axis(x, [0], v)),
    ("masked_fill", lambda x, v: x.masked_fill(x == 1, v)),
    ("pad", lambda x, v: tg.pad(x, 1, constant_values=v)),
    ("full_like of a tensor", lambda x, v: tg.full_like(x, Tensor(np.asarray(v)))),
    ("index_fill", lambda x, v: tg.index_fill(x, 0, [0], v)),
    ("index_put", lambda x, v: tg.index_put(x, ([0],), v)),
    ("index_add", lambda x, v: tg.index_add(x, 0, [0], v)),
    ("index_copy", lambda x, v: tg.index_copy(x, 0, [0], [v])),
    ("scatter", lambda x, v: tg.scatter(x, 0, [0], v)),
    ("scatter_add", lambda x, v: tg.scatter_add(x, 0, [0], [v])),
    ("select_scatter", lambda x, v: tg.select_scatter(x, v, 0, 1)),
    ("slice_scatter", lambda x, v: tg.slice_scatter(x, [v], 0, 1)),
    ("diagonal_scatter", lambda x, v: tg.diagonal_scatter(x[None], v)),
]


@pytest.mark.parametrize(
    ("dtype", "value", "error"),
    [
        ("int64", 1.5, DtypeError),
        ("int64", 2.0, DtypeError),
        ("int64", float("nan"), DtypeError),
        ("uint8", 1j, DtypeError),
        ("bool", 0.5, DtypeError),
        ("float32", 1j, DtypeError),
        ("uint8", -1, ArgumentError),
        ("int8", 300, ArgumentError),
        ("bool", 2, ArgumentError),
        ("int64", 2**63, ArgumentError),
        ("float64", 10**400, ArgumentError),
    ],
)
def test_values_that_a_dtype_does_not_hold_are_errors(
    dtype: str, value: Any, error: type[TensorgradError]
) -> None:
    for how, change in HOW:
        if value == 10**400 and ("array" in how or "tensor" in how):
            continue
        x = beside(dtype)
        before = x.numpy().copy()
        with pytest.raises(error):  # noqa: PT012
            change(x, value)
            pytest.fail(how)
        np.testing.assert_array_equal(x.numpy(), before, how)


def test_values_that_a_dtype_holds_are_taken() -> None:
    for dtype, value in (
        ("int64", True), ("int64", 2**62), ("uint8", 255), ("bool", 1), ("float16", 0.1),
        ("float32", 3), ("complex64", 0.1), (bfloat16, 0.1),
    ):  # fmt: skip
        for how, change in HOW:
            if "scatter_add" in how or "index_add" in how:
                continue
            x = beside(dtype)
            y = change(x, value)
            y = x if y is None else y
            assert y.dtype == dtype, how
            assert np.asarray(value).astype(dtype) in y.numpy(), (how, dtype)
    x = beside("uint8")
    x[:] = tg.tensor([3, 4])  # int64 whose numbers fit
    assert x.tolist() == [3, 4]
    for number in (1.5, np.float32(2)):
        with pytest.raises(DtypeError, match="full: fill_value has dtype float"):
            tg.full_like(x, number)
    with pytest.raises(ArgumentError, match="full: fill_value is -1, expected 0 to 255"):
        tg.full(2, np.int8(-1), "uint8")
    with pytest.raises(ArgumentError, match="max: initial is 300, expected uint8"):
        tg.max(x, initial=300)
    with pytest.raises(DtypeError, match="max: initial has dtype float64, expected integers"):
        tg.max(x, initial=2.5)
    y = beside("int8")
    with pytest.raises(ArgumentError, match=r"\+=: the result is 302, expected -128 to 127"):
        y += [301, 300]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_number_is_compared_in_the_dtype_of_16_bits(dtype: str) -> None:
    x = tg.tensor([0.1, 1 / 3], dtype)
    for number, index in ((0.1, 0), (1 / 3, 1)):
        same = [i == index for i in range(2)]
        assert (x == number).tolist() == tg.equal(number, x).tolist() == same
        assert (x != number).tolist() == [not equal for equal in same]
        assert tg.fuse(lambda x, number=number: x == number)(x).tolist() == same
        compared = [bool(values[index]) for values in (x <= number, x >= number, x < number)]
        assert compared == [True, True, False]
    assert (tg.tensor([2048.0], "float16") == 2049).all()  # float16 has no 2049
    assert (x < 1e30).all()
    assert not (x == float("nan")).any()


@pytest.mark.parametrize("op", [tg.floor_divide, tg.remainder, tg.fmod], ids=lambda op: op.__name__)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_number_divides_in_the_dtype_of_16_bits(op: Any, dtype: str) -> None:
    x = tg.tensor([1.0, 0.3, -7.0], dtype)
    for number in (0.1, 1 / 3):
        beside = op(x, tg.tensor(number, dtype)).tolist()
        assert op(x, number).tolist() == tg.fuse(lambda x, c=number: op(x, c))(x).tolist() == beside
