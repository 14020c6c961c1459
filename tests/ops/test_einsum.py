"""Products summed over named axes, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.testing import SIZES, Case, Ulps, check


def einsum(subscripts: str, *shapes: tuple[int, ...]) -> Case:
    return Case(
        lambda *x: tg.einsum(subscripts, *x),
        shapes,
        lambda *x: np.einsum(subscripts, *x),
        values=Ulps(2, "row"),  # the product of two of three factors is kept in the dtype
        terms=64,
        name=f"einsum({subscripts})",
    )


def tensordot(axes: Any, *shapes: tuple[int, ...]) -> Case:
    return Case(
        lambda a, b: tg.tensordot(a, b, axes),
        shapes,
        lambda a, b: np.tensordot(a, b, axes),
        terms=64,
        name=f"tensordot({axes})",
    )


CASES = [
    einsum("ij,jk->ik", (3, 31), (31, 5)),
    einsum("ij,jk", (3, 4), (4, 5)),
    einsum("ba", (2, 3)),
    einsum("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    einsum("bqhd,bkhd->bhqk", (2, 5, 3, 4), (2, 6, 3, 4)),
    einsum("btc,oc->bto", (2, 5, 7), (3, 7)),
    einsum("ij,ij->ij", (3, 4), (3, 4)),
    einsum("ij,ij->i", (3, 4), (3, 4)),
    einsum("ij,ij->", (3, 4), (3, 4)),
    einsum("ij,kl->ljki", (2, 3), (4, 5)),
    einsum("i,j->ji", (3,), (4,)),
    einsum("i,->i", (3,), ()),
    einsum(",", (), ()),
    einsum("ijk->j", (2, 3, 4)),
    einsum("ijk->kij", (2, 3, 4)),
    einsum("ij->", (3, 4)),
    einsum("ii", (4, 4)),
    einsum("ii->i", (4, 4)),
    einsum("iji->j", (3, 4, 3)),
    einsum("iji,jk->ik", (3, 4, 3), (4, 5)),
    einsum("ii,ii->i", (3, 3), (3, 3)),
    einsum("ijk,j->j", (2, 3, 4), (3,)),
    einsum("ij,kj->j", (2, 3), (4, 3)),
    einsum("ij,jk->ik", (3, 1), (4, 5)),
    einsum("ij,ij->ij", (1, 4), (3, 1)),
    einsum("...ij,...jk->...ik", (2, 3, 4), (4, 5)),
    einsum("...ij,...jk->...ik", (5, 1, 3, 4), (2, 4, 5)),
    einsum("...i,...i", (2, 3, 4), (3, 4)),
    einsum("i...->...i", (2, 3, 4)),
    einsum("...ii->...i", (2, 3, 3)),
    einsum("b...,...->...b", (2, 3), (3,)),
    einsum("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)),
    einsum("ij,jk,ki->", (2, 3), (3, 4), (4, 2)),
    einsum("i,i,i->i", (3,), (3,), (3,)),
    einsum("ij,jk->ik", (3, 0), (0, 5)),
    einsum("ij,jk->ik", (0, 3), (3, 5)),
    tensordot(2, (2, 3, 4), (3, 4, 5)),
    tensordot(1, (2, 33), (33, 4)),
    tensordot(0, (2, 3), (4,)),
    tensordot(([0, 2], [1, 0]), (2, 3, 4), (4, 2)),
    tensordot((-1, 0), (2, 3), (3,)),
    tensordot(2, (2, 3), (2, 3)),
    *(einsum("ij,jk->ik", (3, n), (n, 2)) for n in SIZES),
    *(einsum("bi,bj->bij", (2, n), (2, 3)) for n in SIZES),
    *(tensordot(1, (3, n), (n, 2)) for n in SIZES),
    *(Case(tg.outer, [(3,), (n,)], np.outer, terms=n) for n in SIZES),
    *(Case(tg.dot, [(n,), (n,)], np.dot, terms=n) for n in SIZES),
    Case(tg.outer, [(3,), (5,)], np.outer),
    Case(tg.outer, [(2, 3), (2,)], np.outer, terms=2),
    Case(tg.outer, [(), (2,)], np.outer),
    Case(tg.dot, [(33,), (33,)], np.dot, terms=33),
    Case(tg.dot, [(3, 4), (4, 5)], np.dot, terms=5),
    Case(tg.dot, [(2, 3, 4), (4,)], np.dot, terms=6),
    Case(tg.dot, [(2, 3, 4), (5, 4, 2)], np.dot, terms=10),
    Case(tg.dot, [(), (2, 3)], np.dot, terms=6),
    Case(tg.dot, [(2, 3), ()], np.dot, terms=6),
    Case(tg.tensordot, [(2, 3, 4), (3, 4, 5)], np.tensordot, terms=64),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


@given(data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_two_operands_follow_numpy(data: Any) -> None:
    letters = st.lists(st.sampled_from("abcd"), max_size=4)
    terms = [data.draw(letters), data.draw(letters)]
    lengths = {c: data.draw(st.integers(0, 3)) for c in "abcd"}
    seen = sorted({*terms[0], *terms[1]})
    out = data.draw(st.lists(st.sampled_from(seen), unique=True)) if seen else []
    text = ",".join("".join(term) for term in terms) + "->" + "".join(out)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([lengths[c] for c in term]) for term in terms]
    expected = np.einsum(text, *arrays)
    tensors = [Tensor(a, requires_grad=True) for a in arrays]
    y = tg.einsum(text, *tensors)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-12, atol=1e-12, err_msg=text)
    y.backward(np.ones(y.shape))
    for i, tensor in enumerate(tensors):  # einsum is linear in each operand
        assert tensor.grad is not None
        total = float((tensor.grad * arrays[i]).sum())
        np.testing.assert_allclose(total, expected.sum(), rtol=1e-10, atol=1e-10, err_msg=text)


def test_dtypes_follow_numpy() -> None:
    for dtype in ("int32", "float32", "bool"):
        a = np.array([[1, 0], [1, 1]]).astype(dtype)
        for text in ("ij,jk->ik", "ij->i", "ij,ij->ij"):
            operands = [a] * (text.count(",") + 1)
            got, expected = tg.einsum(text, *operands), np.einsum(text, *operands)
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got.numpy(), expected)


def test_sixteen_bits_are_summed_in_float32() -> None:
    a = Tensor(np.full((1, 4096), 0.5, "float16"))
    b = Tensor(np.ones((4096, 1), "float16"))
    assert tg.einsum("ij,jk->ik", a, b).item() == 2048
    assert tg.einsum("ij->", a).item() == 2048
    assert tg.tensordot(a, b, 1).dtype == np.float16


def test_only_what_needs_a_gradient_gets_one() -> None:
    a, b = Tensor(np.ones((2, 3)), requires_grad=True), Tensor(np.ones((3, 4)))
    for factors, text in (((a, b), "ij,jk->ik"), ((b, a), "jk,ij->ik")):
        a.grad = None
        tg.einsum(text, *factors).backward(np.ones((2, 4)))
        np.testing.assert_array_equal(a.grad, np.full((2, 3), 4.0))
        assert b.grad is None


def test_autocast_reaches_einsum_and_tensordot() -> None:
    a = Tensor(np.array([[1.0, 2.0]], "float32"), requires_grad=True)
    with tensorgrad.autocast("bfloat16"):
        for y in (tg.einsum("ij,kj->ik", a, a), tg.tensordot(a, a, ([1], [1]))):
            assert y.dtype == tensorgrad.dtypes.bfloat16
            y.backward(np.ones((1, 1), y.dtype))
    assert a.grad is not None
    assert a.grad.dtype == np.float32
    np.testing.assert_array_equal(a.grad, [[4, 8]])


X = Tensor(np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tg.einsum("ij,jk->ik", X), ArgumentError, "einsum: got 1 operands, expected 2"),
        (lambda: tg.einsum("ijk->i", X), ShapeError,
         r"einsum: operands\[0\] has shape \(2, 3\), expected 3 axes for 'ijk'"),
        (lambda: tg.einsum("i...k->ik", Tensor(np.zeros(1))), ShapeError, "expected 2 axes"),
        (lambda: tg.einsum("i", X), ShapeError, "expected 1 axes for 'i'"),
        (lambda: tg.einsum("ij,jk->ik", X, X), ShapeError, "einsum: label 'j' has lengths 3 and"),
        (lambda: tg.einsum("ii", X), ShapeError, "einsum: label 'i' has lengths 2 and 3"),
        (lambda: tg.einsum("...,...", X, X.T), ShapeError, "einsum: an axis under ... has leng"),
        (lambda: tg.einsum("i1->i", X), ArgumentError, "einsum: subscripts is 'i1->i', expected"),
        (lambda: tg.einsum("ij->ik", X), ArgumentError, "einsum: subscripts is 'ij->ik', expect"),
        (lambda: tg.einsum("ij->ii", X), ArgumentError, "expected each label of the result once"),
        (lambda: tg.einsum("i...->i", X), ArgumentError, "expected ... in the result"),
        (lambda: tg.einsum("ij,", X, "no"), DtypeError, r"einsum: operands\[1\] is a str"),
        (lambda: tg.tensordot(X, X, 1), ShapeError, "tensordot: axis 0 of b has length 2, expec"),
        (lambda: tg.tensordot(X, X, 3), ArgumentError, r"tensordot: axes\[0\] is .*expected"),
        (lambda: tg.tensordot(X, X, ([0, 1], [0])), ArgumentError, r"axes\[1\] has 1 axes, exp"),
        (lambda: tg.einsum(["ij"], X), ArgumentError,  # type: ignore[arg-type]
         r"einsum: subscripts is \['ij'\], expected a string"),
        (lambda: tg.tensordot(X, X, (0, 0, 0)), ArgumentError,  # type: ignore[arg-type]
         r"tensordot: axes is \(0, 0, 0\), expected an integer or two sequences"),
        (lambda: tg.tensordot(X, X.T, 0.5), ArgumentError,  # type: ignore[arg-type]
         "tensordot: axes is 0.5, expected an integer"),
        (lambda: tg.dot(X, X[None]), ShapeError, "dot: axis 1 of b has length 2, expected 3 as th"),
        (lambda: tg.dot(X, X), ShapeError, "dot: axis 0 of b has length 2, expected 3 as the la"),
    ],
)  # fmt: skip
def test_errors_name_argument_and_expectation(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
