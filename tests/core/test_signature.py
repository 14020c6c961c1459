"""Declared signatures: what they accept, their errors, and that compiled checks say the same."""

from __future__ import annotations

import itertools
from typing import Any, Literal, Never

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad.core import instrument
from tensorgrad.core.errors import TensorgradError
from tensorgrad.core.signature import (
    Bool,
    Check,
    Count,
    Float,
    Inexact,
    Int,
    NotNegative,
    Probability,
    Real,
    Signatures,
    Size,
    compiled,
    declared,
)
from tensorgrad.core.tensor import ArrayLike, Tensor
from tests.signatures import calls, checked, raises, written


def normed(
    x: Float[ArrayLike, "... C"],
    weight: Float[ArrayLike, "C"] | None = None,
    *,
    eps: NotNegative | None = 1e-5,
) -> Any: ...


def grouped(
    x: Float[ArrayLike, "B C ..."], groups: Count, weight: Float[ArrayLike, "C"]
) -> Any: ...


def joined(
    x: Real[ArrayLike, "*B M K"], y: Inexact[ArrayLike, "K N"], bias: ArrayLike | None
) -> Any: ...


def looked_up(
    weight: Float[ArrayLike, "V 2"], index: Int[ArrayLike, "..."], where: Bool[ArrayLike, ""]
) -> Any: ...


def dropped(
    x: ArrayLike,
    p: Probability,
    mode: Literal["up", "down"],
    length: Size,
    k: int,
    scale: float,
    keepdims: bool,
    axis: int | tuple[int, ...] | None,
    **unknown: Never,
) -> Any: ...


takes = Signatures(globals())
MODULES = list(dict.fromkeys(module for module, _ in checked()))


def _right() -> dict[str, tuple[Any, ...]]:
    x = tg.ones((2, 3, 4))
    return {
        "normed": (x, tg.ones(4), 1e-5),
        "grouped": (x, 3, tg.ones(3)),
        "joined": (x, tg.ones((4, 5)), tg.ones(7, dtype="int32")),
        "looked_up": (tg.ones((6, 2)), tg.tensor([1, 2]), tg.tensor(True)),
        "dropped": (x, 0.5, "up", 0, -1, 2.0, True, {}),
    }


_VALUES = [
    None, True, -1, 0, 3, 0.0, -0.5, 1.0, np.inf, np.nan, 1 << 70, "up", "left", [], [1.0, 2.0],
    [1, 2], (1, 2), {"dim": 1}, {"other": 1}, np.float32(0.5), np.int64(2), np.bool_(True), 1j,
    object(), np.ones((2, 3, 4), np.float32), np.ones(4, np.int32), "x",
]  # fmt: skip


def _values() -> list[Any]:
    shapes = [(), (0,), (1,), (4,), (3,), (2, 3), (4, 5), (2, 4), (2, 3, 4), (0, 3, 4)]
    dtypes = ["float32", "float64", "bfloat16", "int32", "bool", "complex64"]
    tensors = [tg.ones(s, dtype=d) for s, d in itertools.product(shapes, dtypes)]
    return [*_VALUES, *tensors]


def _outcome(check: Any, values: tuple[Any, ...]) -> Any:
    try:
        tensors = check(*values)
    except (TensorgradError, TypeError) as error:
        return type(error), str(error)
    return [t if t is None else (t.dtype, t.shape, str(t.tolist())) for t in tensors]


@pytest.mark.parametrize("name", _right())
def test_a_compiled_check_says_what_the_check_says(name: str) -> None:
    check = Check(name, declared(globals()[name]))
    fast = compiled(check)
    right = _right()[name]
    for place, value in itertools.product(range(len(right)), _values()):
        if isinstance(right[place], dict) and not isinstance(value, dict):
            continue  # `**unknown` is one
        values = (*right[:place], value, *right[place + 1 :])
        assert _outcome(fast, values) == _outcome(check, values), values


@pytest.mark.parametrize("name", _right())
def test_a_compiled_check_accepts_tensors_without_the_check(name: str) -> None:
    check = Check(name, declared(globals()[name]))
    fast = compiled(check)
    right = _right()[name]
    check.op = ""
    check.__dict__["arguments"] = ()  # a call of the check would fail
    results = fast(*right)
    assert [id(t) for t in results] == [id(v) for v in right if isinstance(v, Tensor)]
    optional = {"normed": (right[0], None, None), "joined": (*right[:2], None)}.get(name, right)
    assert fast(*optional)[0] is right[0]


def test_checks_are_compiled_once_they_are_called_often() -> None:
    signatures = Signatures(globals())
    x = tg.ones((2, 4))
    assert isinstance(signatures.normed, Check)
    for _ in range(20):
        assert signatures.normed(x, None, 0.0)[0] is x
    assert not isinstance(signatures.normed, Check)
    assert signatures.normed(x, None, 0.0)[0] is x


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("normed", 0, tg.ones(()), "x has shape (), expected (..., C)"),
        ("normed", 0, tg.ones(4, dtype="int32"), "x has dtype int32, expected a float"),
        ("normed", 0, "a", "x is a str, expected a tensor, array, number or list"),
        ("normed", 0, None, "x is a NoneType, expected a tensor, array, number or list"),
        ("normed", 1, tg.ones(3), "weight has shape (3,), expected (4,) (last axis of x)"),
        ("normed", 2, -1.0, "eps is -1.0, expected a finite number from 0"),
        ("normed", 2, np.nan, "eps is nan, expected a finite number from 0"),
        ("normed", 2, "a", "eps is 'a', expected a number"),
        ("grouped", 0, tg.ones(4), "x has shape (4,), expected (B, C, ...)"),
        ("grouped", 1, 0, "groups is 0, expected 1 or more"),
        ("grouped", 1, 1.5, "groups is 1.5, expected an integer"),
        ("grouped", 2, tg.ones(4), "weight has shape (4,), expected (3,) (axis 1 of x)"),
        ("joined", 0, tg.ones(4), "x has shape (4,), expected (*B, M, K)"),
        ("joined", 0, tg.ones((2, 2), dtype="complex64"),
         "x has dtype complex64, expected real numbers"),
        ("joined", 1, tg.ones((3, 5)), "y has shape (3, 5), expected (4, N) (last axis of x)"),
        ("joined", 1, tg.ones((4, 5), dtype="int64"),
         "y has dtype int64, expected floats or complex numbers"),
        ("looked_up", 0, tg.ones((6, 3)), "weight has shape (6, 3), expected (V, 2)"),
        ("looked_up", 1, 0.5, "index has dtype float32, expected integers"),
        ("looked_up", 2, tg.tensor(1), "where has dtype int64, expected bool"),
        ("looked_up", 2, tg.tensor([True]), "where has shape (1,), expected ()"),
        ("dropped", 1, 1.0, "p is 1.0, expected 0 <= p < 1"),
        ("dropped", 2, "left", "mode is 'left', expected one of 'up', 'down'"),
        ("dropped", 3, -1, "length is -1, expected 0 or more"),
        ("dropped", 4, 1 << 63, f"k is {1 << 63}, expected an integer of 64 bits"),
        ("dropped", 5, "2", "scale is '2', expected a number"),
        ("dropped", 6, 1, "keepdims is 1, expected True or False"),
        ("dropped", 7, {"dim": 1}, "got dim=1, expected axis=1"),
    ],
)  # fmt: skip
def test_an_error_says_argument_got_and_expected(
    name: str, place: int, value: Any, message: str
) -> None:
    right = _right()[name]
    with pytest.raises(TensorgradError) as error:
        getattr(takes, name)(*right[:place], value, *right[place + 1 :])
    assert str(error.value) == f"{name}: {message}"


def test_axes_that_are_named_twice_come_from_the_first_operand() -> None:
    def added(x: Float[ArrayLike, "*B C"], y: Float[ArrayLike, "*B C"]) -> Any: ...

    check = Check("added", declared(added))
    with pytest.raises(TensorgradError, match=r"y has shape \(2, 3\), expected \(3, 2\) like x"):
        check(tg.ones((3, 2)), tg.ones((2, 3)))


def test_literals_take_their_dtype_with_operands_of_their_kind() -> None:
    x, weight = takes.normed([1, 2], [1.0, 2.0], None)
    assert x.dtype == weight.dtype == "float32"
    x, weight = takes.normed(tg.ones(2, dtype="float64"), [1, 2], None)
    assert weight.dtype == "float64"
    _, index, _ = takes.looked_up(tg.ones((1, 2)), [], True)
    assert index.dtype == "int64"
    assert index.shape == (0,)


def test_a_name_in_an_annotation_is_that_of_the_functions_module() -> None:
    source = "from __future__ import annotations\ndef f(how: How): ..."
    for words in (("a", "b"), ("c",)):
        module: dict[str, Any] = {"How": Literal[words]}
        exec(source, module)
        assert [argument.takes for argument in declared(module["f"])] == [words]


def test_an_operand_that_may_be_missing_decides_no_length() -> None:
    def wrong(x: Float[ArrayLike, "C"] | None, y: Float[ArrayLike, "C"]) -> Any: ...

    with pytest.raises(TypeError, match="C is first named by an optional operand, x"):
        compiled(Check("wrong", declared(wrong)))


def test_a_profiler_hears_of_an_op_whose_check_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    class Ear(instrument.Observer):
        def enter(self, op: str) -> None:
            heard.append(op)

    fast = compiled(Check("normed", declared(normed)))
    monkeypatch.setattr(instrument, "observer", Ear())
    fast(tg.ones((2, 4)), None, None)
    assert heard == ["normed"]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_checks_are_called_with_the_arguments_that_they_declare(module: Any) -> None:
    for call in calls(module):
        name = call.func.attr  # type: ignore[attr-defined]
        given = [getattr(argument, "id", None) for argument in call.args]
        assert given == [argument.name for argument in declared(getattr(module, name))], name


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_docstrings_begin_raises_with_what_is_declared(module: Any) -> None:
    for call in calls(module):
        function = getattr(module, call.func.attr)  # type: ignore[attr-defined]
        expected = raises(function)
        assert written(function)[: len(expected)] == expected, "run python -m tests.signatures"
