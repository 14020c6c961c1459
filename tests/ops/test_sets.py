"""Unique elements and sets, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.testing import Case, check

X = np.array([[3, 1, 2], [1, 1, 5]])
OTHERS = np.array([1, 5, 9])
OPTIONS: dict[str, Any] = {"gradient": False, "captured": False}
CASES = [
    Case(tg.unique, [X], np.unique, **OPTIONS),
    Case(tg.unique, [(5,)], np.unique, **OPTIONS),
    Case(lambda x: tg.unique(x, True, True, True), [X],
         lambda x: np.unique(x, True, True, True), name="unique-all", **OPTIONS),
    Case(lambda x: tg.unique(x, axis=1), [X], lambda x: np.unique(x, axis=1), name="unique",
         **OPTIONS),
    Case(tg.unique_all, [X], np.unique_all, **OPTIONS),
    Case(tg.unique_counts, [X], np.unique_counts, **OPTIONS),
    Case(tg.unique_inverse, [X], np.unique_inverse, **OPTIONS),
    Case(tg.unique_values, [X], lambda x: np.unique(x), **OPTIONS),
    *(Case(getattr(tg, name), [X, OTHERS], getattr(np, name), **OPTIONS)
      for name in ("isin", "union1d", "intersect1d", "setdiff1d", "setxor1d")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


def test_nan_counts_once_for_numpy_and_for_itself_in_the_standard() -> None:
    x = Tensor(np.array([np.nan, 1.0, np.nan], "float32"))
    assert len(tg.unique(x)) == 2
    assert len(tg.unique_values(x)) == 3
    assert tg.unique_values(x.astype("bfloat16")).dtype == tg.bfloat16
