"""Second derivatives of attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.functions import jvp
from tensorgrad.ops import attention_numpy, attention_tangent
from tests.derivatives import check_derivatives

PADDING = np.array([True, True, False, True])
K = np.random.default_rng(1).standard_normal((1, 2, 5, 3))
ANGLES = tuple(f(np.arange(6.0)).reshape(3, 1, 2) for f in (np.cos, np.sin))
GROUPED = [(2, 4, 4, 3), (2, 2, 4, 3), (2, 2, 4, 3)]
LONGER = [(1, 2, 3, 3), (1, 2, 5, 3), (1, 2, 5, 3)]
VARLEN = [(6, 4, 3), (6, 2, 3), (6, 2, 3)]


def values(*shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(4)
    return [rng.standard_normal(shape) for shape in shapes]


def seeded(f: Callable[..., Any], *xs: Tensor, **options: Any) -> Any:
    """Return the result of f with the same random numbers each time."""
    tg.random.seed(3)
    return f(*xs, **options)


def squared_gradients(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function whose second derivatives are the third and fourth of f."""

    def loss(*xs: Tensor) -> Tensor:
        y = f(*xs)
        weights = tg.sin(tg.cumsum(tg.ones_like(y)))  # no sum of them times y is constant
        return (y.reshape(-1) * weights).sum()

    def squares(*xs: Tensor) -> Tensor:
        each = [(g * g).sum() for g in tg.grad(loss, tuple(range(len(xs))))(*xs)]
        return sum(each[1:], each[0])

    return squares


causal = partial(tg.attention, causal=True)
packed = partial(tg.attention_packed, heads=4, kv_heads=2, causal=True)
varlen = partial(
    seeded, tg.attention_varlen, starts=[0, 1, 4, 4, 6], causal=True, window=2, dropout=0.4
)
CASES: dict[str, tuple[Any, ...]] = {
    "attention": (tg.attention, *values(*GROUPED)),
    "causal": (causal, *values(*GROUPED)),
    "causal, window": (partial(causal, window=2), *values(*GROUPED)),
    "window, scale": (partial(tg.attention, window=2, scale=0.3), *values(*GROUPED)),
    "padding": (partial(causal, mask=PADDING), *values(*GROUPED)),
    "no key": (partial(tg.attention, mask=np.zeros((4, 1), bool)), *values(*GROUPED)),
    "float mask": (partial(tg.attention, mask=values((4, 4))[0]), *values(*GROUPED)),
    "dropout": (partial(seeded, tg.attention, causal=True, dropout=0.4), *values(*GROUPED)),
    "more keys": (causal, *values(*LONGER)),
    "several blocks": (causal, *values((1, 2, 70, 2), (1, 1, 70, 2), (1, 1, 70, 2))),
    "by the queries": (lambda q: causal(q, Tensor(K), Tensor(K)), *values(LONGER[0])),
    "by the keys": (lambda k: causal(Tensor(K), k, Tensor(K)), K),
    "by the values": (lambda v: causal(Tensor(K), Tensor(K), v), K),
    "learned mask": (
        lambda q, mask: tg.attention(q, Tensor(K), Tensor(K), mask),
        *values((1, 2, 3, 3), (3, 5)),
    ),
    "batch that broadcasts": (tg.attention, *values((2, 2, 3, 3), (2, 5, 3), (2, 5, 2))),
    "no queries": (tg.attention, *values((1, 2, 0, 3), (1, 2, 5, 3), (1, 2, 5, 3))),
    "varlen, dropout": (varlen, *values(*VARLEN)),
    "varlen of two lengths": (
        partial(tg.attention_varlen, starts=[0, 1, 4], k_starts=[0, 3, 5], causal=True),
        *values((4, 2, 3), (5, 2, 3), (5, 2, 3)),
    ),
    "packed": (packed, *values((2, 3, 32))),
    "packed, rotated": (partial(packed, angles=ANGLES), *values((2, 3, 32))),
    "packed, overwritten": (
        lambda x: packed(x * 1, angles=ANGLES, overwrite=True),
        *values((1, 3, 32)),
    ),
    "third order": (squared_gradients(causal), *values((2, 2, 3, 2), (2, 1, 3, 2), (2, 1, 3, 2))),
    "third order by the values": (squared_gradients(lambda v: causal(Tensor(K), v, v)), K),
    "third order, packed": (
        squared_gradients(partial(packed, heads=2, kv_heads=1)),
        *values((2, 2, 8)),
    ),
    "third order, rotated": (
        squared_gradients(partial(packed, heads=1, kv_heads=1, angles=ANGLES)),
        *values((1, 3, 12)),
    ),
    "third order, varlen": (squared_gradients(varlen), *values(*VARLEN)),
}
OTHER_WAYS = ["causal, window", "dropout", "varlen, dropout", "packed, rotated"]


@pytest.fixture(autouse=True)
def _generator() -> Any:
    """Leave the generator as other tests expect it."""
    state = tg.random.get_state()
    yield
    tg.random.set_state(state)


@pytest.mark.parametrize("name", CASES)
def test_derivatives_match_differences(name: str) -> None:
    function, *inputs = CASES[name]
    check_derivatives(function, *inputs)


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_derivatives_one_sequence_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_numpy, "_SHORT", 0)
    test_derivatives_match_differences(name)


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_derivatives_op_by_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tangent, "_runs_unfused", lambda done: True)
    test_derivatives_match_differences(name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tangents_of_narrow_floats_are_rounded_once(dtype: str) -> None:
    arrays = values(*GROUPED, *GROUPED)
    inputs, tangents = (
        tuple(tg.tensor(a, dtype) for a in each) for each in (arrays[:3], arrays[3:])
    )
    wide = [tuple(a.astype("float64") for a in each) for each in (inputs, tangents)]
    _, found = jvp(causal, inputs, tangents)
    _, exact = jvp(causal, wide[0], wide[1])
    assert found.dtype == inputs[0].dtype
    step = 2.0 ** (-20 if dtype == "float32" else -8)
    error = abs(found.astype("float64") - exact).numpy().max()
    assert error <= step * abs(exact).numpy().max()
