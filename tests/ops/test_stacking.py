"""Stacks, splits and grids, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.errors import ArgumentError, OutOfRangeError, ShapeError
from tensorgrad.testing import Case, check

PAIR = [(2, 3), (2, 3)]


def of_list(name: str, *shapes: tuple[int, ...]) -> Case:
    """Return a case for a function of a list of arrays."""
    return Case(
        lambda *x: getattr(tg, name)(list(x)),
        shapes,
        lambda *x: getattr(np, name)(list(x)),
        name=name,
    )


def of_one(name: str, shape: tuple[int, ...], *arguments: Any, **options: Any) -> Case:
    """Return a case for a function of an array and what is not one."""
    return Case(
        lambda x: getattr(tg, name)(x, *arguments, **options),
        [shape],
        lambda x: getattr(np, name)(x, *arguments, **options),
        name=name,
    )


CASES = [
    *(of_list(name, *PAIR) for name in ("hstack", "vstack", "dstack", "column_stack")),
    *(of_list(name, (3,), (3,)) for name in ("hstack", "vstack", "dstack", "column_stack")),
    of_list("hstack", (), (4,)),
    of_one("rot90", (2, 3)),
    of_one("rollaxis", (2, 3, 4), 2),
    of_one("array_split", (5, 2), np.int64(2)),
    Case(tg.append, PAIR, np.append),
    Case(lambda a, b: tg.append(a, b, 1), PAIR, lambda a, b: np.append(a, b, 1), name="append"),
    of_one("array_split", (7, 2), 3),
    of_one("array_split", (2, 7), [2, 3], axis=1),
    of_one("array_split", (2, 7), 4, axis=-1),
    of_one("hsplit", (2, 4), 2),
    of_one("hsplit", (4,), 2),
    of_one("vsplit", (4, 2), 2),
    of_one("dsplit", (1, 2, 4), [1]),
    Case(tg.unstack, [(3, 2)], lambda x: list(x)),
    *(of_one(f"atleast_{n}d", shape) for n in (1, 2, 3) for shape in [(), (3,), (2, 3)]),
    Case(tg.broadcast_arrays, [(3, 1), (4,)], np.broadcast_arrays, terms=4),
    Case(tg.meshgrid, [(3,)], np.meshgrid),
    Case(tg.meshgrid, [(3,), (4,), (2,)], np.meshgrid, terms=12),
    Case(lambda *x: tg.meshgrid(*x, indexing="ij", sparse=True), [(3,), (4,)],
         lambda *x: np.meshgrid(*x, indexing="ij", sparse=True), name="meshgrid-sparse"),
    of_one("fliplr", (2, 3)),
    of_one("flipud", (2, 3)),
    *(of_one("rot90", (2, 3), k) for k in range(-2, 8)),
    of_one("rot90", (2, 3, 2), 1, (2, 1)),
    *(of_one("rollaxis", (2, 3, 4), axis, start) for axis, start in ((2, 0), (0, 3), (-2, -3))),
    of_one("matrix_transpose", (2, 3, 4)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


def test_rollaxis_to_every_place() -> None:
    x = np.zeros((2, 3, 4, 5))
    for axis in range(-4, 4):
        for start in range(-4, 5):
            assert tg.rollaxis(x, axis, start).shape == np.rollaxis(x, axis, start).shape
        for start in (-5, 5):
            with pytest.raises(OutOfRangeError, match=rf"rollaxis: start is {start}, expected"):
                tg.rollaxis(x, axis, start)


def test_broadcast_shapes_is_numpys() -> None:
    assert tg.broadcast_shapes((3, 1), 4, (1, 1)) == (3, 4)
    with pytest.raises(ShapeError, match="broadcast_shapes: got"):
        tg.broadcast_shapes((2,), (3,))


def test_errors_name_argument_and_expectation() -> None:
    x: Any = Tensor(np.ones((2, 3)))
    with pytest.raises(ArgumentError, match="array_split: indices_or_sections is 0, expected 1"):
        tg.array_split(x, 0)
    with pytest.raises(
        ArgumentError, match="meshgrid: indexing is 'yx', expected one of 'xy', 'ij'"
    ):
        tg.meshgrid(x[0], indexing="yx")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"rot90: axes is \(0, 0\), expected two different"):
        tg.rot90(x, 1, (0, 0))
    with pytest.raises(ShapeError, match="matrix_transpose: x has shape"):
        tg.matrix_transpose(x[0])
    with pytest.raises(ArgumentError, match=r"^unstack: got dim=1, expected axis=1$"):
        tg.unstack(x, dim=1)  # type: ignore[arg-type]
    wrong: list[Any] = [(0,), (0, 1, 0), 1]
    for axes in wrong:
        with pytest.raises(ArgumentError, match=r"rot90: axes is .*, expected two of them"):
            tg.rot90(x, 1, axes)


def test_without_arrays_there_are_none() -> None:
    assert tg.broadcast_arrays() == ()
    assert tg.meshgrid() == ()
