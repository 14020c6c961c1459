"""Dropout: what is spared, how it is scaled, and that the seed decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, ops, random
from tensorgrad.errors import ArgumentError, DtypeError
from tensorgrad.ops.dropout import keep_mask
from tests.opcheck import Case, check

SHAPES: list[tuple[int, ...]] = [(), (7,), (33, 31), (3, 5, 1025), (600, 257), (0, 4)]


def seeded(x: Tensor) -> Tensor:
    random.seed(5)
    return ops.dropout(x, 0.3)


def reference(x: Any) -> Any:
    random.seed(5)
    return x * keep_mask(x.shape, 0.3, like=x) / (1 - 0.3)


CASES = [
    *(Case(seeded, [s], reference, name="dropout") for s in SHAPES),
    Case(lambda x: ops.dropout(x, 0.0), [(3, 4)], lambda x: x, name="dropout-none"),
    Case(lambda x: ops.dropout(x, 0.9, training=False), [(3, 4)], lambda x: x, name="dropout-off"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_and_the_mean(p: float) -> None:
    random.seed(1)
    y = ops.dropout(Tensor(np.ones((500, 400), "float32")), p).numpy()
    assert (y == 0).mean() == pytest.approx(p, abs=5 * np.sqrt(p * (1 - p) / y.size))
    np.testing.assert_allclose(y[y > 0], 1 / (1 - p), rtol=1e-6)


def test_the_gradient_flows_where_the_value_did() -> None:
    x = Tensor(np.ones((64, 64), "float32"), requires_grad=True)
    y = ops.dropout(x, 0.4)
    y.backward(np.full((64, 64), 3, "float32"))
    np.testing.assert_allclose(np.asarray(x.grad), 3 * y.numpy(), rtol=1e-6)


def test_each_call_drops_others_and_the_seed_decides() -> None:
    x = Tensor(np.ones(1000, "float32"))
    random.seed(2)
    first, second = ops.dropout(x).numpy(), ops.dropout(x).numpy()
    random.seed(2)
    np.testing.assert_array_equal(ops.dropout(x).numpy(), first)
    assert 0.4 < (first != second).mean() < 0.6


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match=r"dropout: p is -0\.1, expected 0 <= p < 1"):
        ops.dropout(Tensor(np.ones(3)), -0.1)
    with pytest.raises(DtypeError, match="dropout: x has dtype int64, expected a float"):
        ops.dropout(Tensor(np.arange(3)), 0.1)
