"""Whether values are close or equal, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.errors import ShapeError
from tensorgrad.testing import Case, check

A = np.array([1.0, 2.0, np.inf, np.nan])
B = np.array([1.0 + 1e-9, 2.1, np.inf, np.nan])


def answer(function: Any, **options: Any) -> Any:
    """Return the function with its bool as an array, as cases compare them."""
    return lambda a, b: Tensor(np.array(function(a, b, **options)))


def numpys(function: Any, **options: Any) -> Any:
    return lambda a, b: np.array(function(a, b, **options))


CASES = [
    Case(tg.isclose, [A, B], np.isclose, gradient=False, dtypes=("float64",)),
    Case(lambda a, b: tg.isclose(a, b, equal_nan=True), [A, B],
         lambda a, b: np.isclose(a, b, equal_nan=True), gradient=False, name="isclose"),
    *(Case(answer(getattr(tg, name)), [(3,), (3,)], numpys(getattr(np, name)), gradient=False,
           captured=False, name=name) for name in ("allclose", "array_equal", "array_equiv")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("name", ["allclose", "array_equal", "array_equiv"])
def test_answers_are_numpys(name: str, device: str) -> None:
    pairs: list[tuple[Any, Any]] = [(A, B), (A[:3], B[:3]), (A[:1], B[:1]), (A, A), (A[:3], A[:3])]
    pairs += [(A[:1], np.ones((3, 1))), (np.ones((2, 3)), np.ones(3))]
    for a, b in pairs:
        found = getattr(tg, name)(Tensor(a).to(device), Tensor(b).to(device))
        assert type(found) is bool
        assert found == getattr(np, name)(a, b), (name, a, b)
    assert tg.allclose([1.0, 2.0], [1.0, 2.0])
    assert tg.array_equal(Tensor(A).to(device), Tensor(A).to(device), equal_nan=True)
    assert not tg.array_equiv(np.ones(2), np.ones(3))
    with pytest.raises(ShapeError, match="broadcast"):
        tg.allclose(np.ones(2), np.ones(3))
