"""Embedding against NumPy's indexing."""

from __future__ import annotations

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.errors import DtypeError, OutOfRangeError, ShapeError
from tensorgrad.testing import Case, check, sized

RNG = np.random.default_rng(3)
CASES = [
    Case(tg.embedding, [(5, 3), RNG.integers(0, 5, (4, 7))], lambda w, i: w[i], terms=28),
    Case(tg.embedding, [(5, 31), np.array([4, 4, 4, 0], "uint16")], lambda w, i: w[i], terms=4),
    Case(tg.embedding, [(1, 1), np.zeros((2, 33), "int32")], lambda w, i: w[i], terms=66),
    Case(tg.embedding, [(9, 1023), RNG.integers(0, 9, 129)], lambda w, i: w[i], terms=129),
    *sized(tg.embedding, lambda n: [(9, n), RNG.integers(0, 9, 12)], lambda w, i: w[i], terms=12),
    *sized(tg.embedding, lambda n: [(9, 3), RNG.integers(0, 9, n)], lambda w, i: w[i], terms=1025),
    Case(tg.embedding, [(5, 3), np.array(2)], lambda w, i: w[i]),
    Case(tg.embedding, [(5, 3), np.zeros((0, 2), "int64")], lambda w, i: w[i]),
    Case(tg.embedding, [(0, 3), np.zeros(0, "int64")], lambda w, i: w[i]),
    Case(tg.embedding, [(5, 0), np.array([1, 2])], lambda w, i: w[i]),
]


def with_positions(shape: tuple[int, ...], width: int, count: int, start: int) -> Case:
    ids = RNG.integers(0, 11, shape)
    return Case(
        lambda w, p, i: tg.embedding(w, i, p, start=start), [(11, width), (count, width), ids],
        lambda w, p, i: w[i] + p[start : start + shape[-1]],
        terms=ids.size + 1, name="embedding-positions",
    )  # fmt: skip


def with_starts(shape: tuple[int, ...], width: int, count: int) -> Case:
    ids = RNG.integers(0, 11, shape)
    starts = RNG.integers(0, count - shape[-1] + 1, shape[:-1], dtype="int32")
    return Case(
        lambda w, p, i, s: tg.embedding(w, i, p, start=s),
        [(11, width), (count, width), ids, starts],
        lambda w, p, i, s: w[i] + p[s[..., None] + np.arange(shape[-1])],
        terms=ids.size + 1, name="embedding-starts",
    )  # fmt: skip


CASES += [
    with_starts((4, 1), 8, 9),
    with_starts((3, 5), 31, 7),
    with_starts((2, 3, 4), 1032, 20),
    with_positions((2, 5), 8, 7, 1),
    with_positions((3, 4), 31, 4, 0),
    with_positions((7,), 1, 9, 2),
    with_positions((4, 33), 1032, 40, 3),
    with_positions((0, 4), 8, 4, 0),
    Case(tg.embedding, [(300, 40), RNG.integers(0, 300, 5000)], lambda w, i: w[i], terms=40),
    Case(
        tg.embedding, [(70000, 8), RNG.integers(0, 70000, 3000, dtype="int32")],
        lambda w, i: w[i], terms=9,
    ),
    Case(  # the same id in nearly all places: a run over many windows
        tg.embedding, [(9, 24), np.where(RNG.random(4001) < 0.9, 4, RNG.integers(0, 9, 4001))],
        lambda w, i: w[i], terms=4001,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


def test_a_frequent_id_adds_up_in_float32() -> None:
    weight = Tensor(np.zeros((2, 1), "float16"), requires_grad=True)
    weight.grad = np.zeros((2, 1), "float32")
    dy = np.full((4096, 1), 0.75, "float16")
    tg.embedding(weight, np.ones(4096, "int64")).backward(dy)
    np.testing.assert_array_equal(weight.grad, [[0], [3072]])


@pytest.mark.parametrize(("bad", "place"), [(7, (1, 2)), (-1, (0, 0))])
def test_ids_outside_are_named(bad: int, place: tuple[int, int]) -> None:
    ids = np.zeros((2, 3), "int64")
    ids[place] = bad
    message = rf"ids\[{place[0]}, {place[1]}\] is {bad}, expected 0 to 6 \(a vocabulary of 7\)"
    with pytest.raises(OutOfRangeError, match=message):
        tg.embedding(Tensor(np.ones((7, 2))), ids)


def test_arguments_that_do_not_fit() -> None:
    weight = Tensor(np.ones((3, 2)))
    with pytest.raises(DtypeError, match="embedding: ids has dtype float64, expected integers"):
        tg.embedding(weight, Tensor(np.ones(3)))
    with pytest.raises(ShapeError, match=r"weight has shape \(3,\), expected \(V, C\)"):
        tg.embedding(Tensor(np.ones(3)), [0])
    assert tg.embedding(weight, [0, 2]).shape == (2, 2)


def test_rows_are_added_to_a_gradient_that_is_there() -> None:
    weight, positions = (Tensor(np.zeros((4, 3), "float16"), True) for _ in range(2))
    buffer = np.ones((2, 4, 3), "float32")
    weight.grad, positions.grad = buffer
    y = tg.embedding(weight, np.array([[1, 1], [3, 1]]), positions, start=2)
    (y.sum() + weight.sum() * 2).backward()
    np.testing.assert_array_equal(buffer[0], np.repeat([[3.0], [6], [3], [4]], 3, axis=1))
    np.testing.assert_array_equal(buffer[1], np.repeat([[1.0], [1], [3], [3]], 3, axis=1))
    assert weight.grad.base is buffer


def test_positions_that_do_not_fit() -> None:
    weight, ids = Tensor(np.ones((7, 2))), np.zeros((2, 3), "int64")
    with pytest.raises(ShapeError, match=r"positions has shape \(3, 4\), expected \(P, 2\)"):
        tg.embedding(weight, ids, Tensor(np.ones((3, 4))))
    with pytest.raises(ShapeError, match=r"positions has shape \(2,\), expected \(P, 2\)"):
        tg.embedding(weight, ids, Tensor(np.ones(2)))
    with pytest.raises(ShapeError, match=r"expected \(P, 2\) for ids of shape \(\)"):
        tg.embedding(weight, np.array(1), Tensor(np.ones((4, 2))))
    with pytest.raises(OutOfRangeError, match="start is -1 and 3 ids follow, expected at most 4"):
        tg.embedding(weight, ids, Tensor(np.ones((4, 2))), start=-1)
    with pytest.raises(OutOfRangeError, match=r"start\[0\] is -1, expected 0 to 1"):
        tg.embedding(weight, ids, Tensor(np.ones((4, 2))), start=np.array([-1, 1]))
    assert tg.embedding(weight, ids, Tensor(np.ones((3, 2)))).tolist() == [[[2, 2]] * 3] * 2
    with pytest.raises(DtypeError, match="positions has dtype float32, expected float64"):
        tg.embedding(weight, ids, Tensor(np.ones((3, 2), "float32")))
    with pytest.raises(OutOfRangeError, match="start is 2 and 3 ids follow, expected at most 4"):
        tg.embedding(weight, ids, Tensor(np.ones((4, 2))), start=2)
    with pytest.raises(OutOfRangeError, match=r"start\[1\] is 2, expected 0 to 1 \(4 positions\)"):
        tg.embedding(weight, ids, Tensor(np.ones((4, 2))), start=np.array([1, 2]))
    with pytest.raises(ShapeError, match=r"start has shape \(3,\), expected \(2,\) like ids with"):
        tg.embedding(weight, ids, Tensor(np.ones((4, 2))), start=np.zeros(3, "int32"))


@pytest.mark.gpu
def test_ids_outside_give_nan_on_the_gpu() -> None:
    weight = Tensor(np.ones((3, 2), "float32"), requires_grad=True).to("cuda").detach()
    weight.requires_grad = True
    y = tg.embedding(weight, Tensor(np.array([1, 3, -1])).to("cuda"))
    np.testing.assert_array_equal(y.numpy()[1:], np.full((2, 2), np.nan))
    y.backward(y.data)
    assert weight.grad is not None
    np.testing.assert_array_equal(tg.backend.to_numpy(weight.grad), [[0, 0], [1, 1], [0, 0]])
    ids, starts = (Tensor(np.array(a)).to("cuda") for a in ([[0, 1]] * 3, [1, 3, -2]))
    y = tg.embedding(weight, ids, Tensor(np.ones((4, 2), "float32")).to("cuda"), start=starts)
    assert np.isnan(y.numpy()).all(-1).tolist() == [[False, False], [False, True], [True, True]]
