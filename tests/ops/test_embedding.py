"""Embedding against NumPy's indexing."""

from __future__ import annotations

import numpy as np
import pytest

from tensorgrad import Tensor, ops
from tensorgrad.errors import DtypeError, OutOfRangeError, ShapeError
from tests.opcheck import Case, check

RNG = np.random.default_rng(3)
CASES = [
    Case(ops.embedding, [(5, 3), RNG.integers(0, 5, (4, 7))], lambda w, i: w[i], terms=28),
    Case(ops.embedding, [(5, 31), np.array([4, 4, 4, 0], "uint16")], lambda w, i: w[i], terms=4),
    Case(ops.embedding, [(1, 1), np.zeros((2, 33), "int32")], lambda w, i: w[i], terms=66),
    Case(ops.embedding, [(9, 1023), RNG.integers(0, 9, 129)], lambda w, i: w[i], terms=129),
    Case(ops.embedding, [(5, 3), np.array(2)], lambda w, i: w[i]),
    Case(ops.embedding, [(5, 3), np.zeros((0, 2), "int64")], lambda w, i: w[i]),
    Case(ops.embedding, [(0, 3), np.zeros(0, "int64")], lambda w, i: w[i]),
    Case(ops.embedding, [(5, 0), np.array([1, 2])], lambda w, i: w[i]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


def test_a_frequent_id_adds_up_in_float32() -> None:
    weight = Tensor(np.zeros((2, 1), "float16"), requires_grad=True)
    weight.grad = np.zeros((2, 1), "float32")
    dy = np.full((4096, 1), 0.75, "float16")
    ops.embedding(weight, np.ones(4096, "int64")).backward(dy)
    np.testing.assert_array_equal(weight.grad, [[0], [3072]])


@pytest.mark.parametrize(("bad", "place"), [(7, (1, 2)), (-1, (0, 0))])
def test_ids_outside_are_named(bad: int, place: tuple[int, int]) -> None:
    ids = np.zeros((2, 3), "int64")
    ids[place] = bad
    message = rf"ids\[{place[0]}, {place[1]}\] is {bad}, expected 0 to 6 \(a vocabulary of 7\)"
    with pytest.raises(OutOfRangeError, match=message):
        ops.embedding(Tensor(np.ones((7, 2))), ids)


def test_arguments_that_do_not_fit() -> None:
    weight = Tensor(np.ones((3, 2)))
    with pytest.raises(DtypeError, match="embedding: ids has dtype float64, expected integers"):
        ops.embedding(weight, Tensor(np.ones(3)))
    with pytest.raises(ShapeError, match=r"weight has shape \(3,\), expected \(V, C\)"):
        ops.embedding(Tensor(np.ones(3)), [0])
    assert ops.embedding(weight, [0, 2]).shape == (2, 2)


@pytest.mark.gpu
def test_ids_outside_give_nan_on_the_gpu() -> None:
    weight = Tensor(np.ones((3, 2), "float32"), requires_grad=True).to("cuda").detach()
    weight.requires_grad = True
    y = ops.embedding(weight, Tensor(np.array([1, 3, -1])).to("cuda"))
    np.testing.assert_array_equal(y.numpy()[1:], np.full((2, 2), np.nan))
    y.backward(y.data)
    assert weight.grad is not None
    np.testing.assert_array_equal(weight.grad.get(), [[0, 0], [1, 1], [0, 0]])
