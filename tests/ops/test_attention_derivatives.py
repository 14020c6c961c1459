"""Tangents and second derivatives of attention against differences."""

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
Shapes = list[tuple[int, ...]]


def values(*shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(4)
    return [rng.standard_normal(shape) for shape in shapes]


def seeded(f: Callable[..., Any], *xs: Tensor, **options: Any) -> Any:
    """Return the result of f with the same random numbers each time."""
    tg.random.seed(3)
    return f(*xs, **options)


def squared_gradients(f: Callable[..., Tensor], *xs: Tensor) -> Tensor:
    """Return what has the third and fourth derivatives of f for its second ones."""

    def loss(*xs: Tensor) -> Tensor:
        y = f(*xs)
        return (y * Tensor(np.arange(1.0, y.size + 1).reshape(y.shape) / y.size)).sum()

    each = [(g**2).sum() for g in tg.grad(loss, tuple(range(len(xs))))(*xs)]
    return sum(each[1:], each[0])


causal = partial(tg.attention, causal=True)
packed = partial(tg.attention_packed, heads=4, kv_heads=2, causal=True)
varlen = partial(
    seeded, tg.attention_varlen, starts=[0, 1, 4, 4, 6], causal=True, window=2, dropout=0.4
)
CASES: list[tuple[Callable[..., Any], Shapes]] = [
    (tg.attention, GROUPED),
    (causal, GROUPED),
    (partial(causal, window=2), GROUPED),
    (partial(tg.attention, window=2, scale=0.3), GROUPED),
    (partial(causal, mask=PADDING), GROUPED),
    (partial(tg.attention, mask=np.zeros((4, 1), bool)), GROUPED),
    (partial(tg.attention, mask=values((4, 4))[0]), GROUPED),
    (partial(seeded, tg.attention, causal=True, dropout=0.4), GROUPED),
    (causal, LONGER),
    (causal, [(1, 2, 70, 2), (1, 1, 70, 2), (1, 1, 70, 2)]),
    (lambda q: causal(q, Tensor(K), Tensor(K)), LONGER[:1]),
    (lambda k: causal(Tensor(K), k, Tensor(K)), LONGER[1:2]),
    (lambda v: causal(Tensor(K), Tensor(K), v), LONGER[1:2]),
    (lambda q, mask: tg.attention(q, Tensor(K), Tensor(K), mask), [(1, 2, 3, 3), (3, 5)]),
    (tg.attention, [(2, 2, 3, 3), (2, 5, 3), (2, 5, 2)]),
    (tg.attention, [(1, 2, 0, 3), (1, 2, 5, 3), (1, 2, 5, 3)]),
    (varlen, VARLEN),
    (
        partial(tg.attention_varlen, starts=[0, 1, 4], k_starts=[0, 3, 5], causal=True),
        [(4, 2, 3), (5, 2, 3), (5, 2, 3)],
    ),
    (packed, [(2, 3, 32)]),
    (partial(packed, angles=ANGLES), [(2, 3, 32)]),
    (lambda x: packed(x * 1, angles=ANGLES, overwrite=True), [(1, 3, 32)]),
]
THIRD: list[tuple[Callable[..., Any], Shapes]] = [
    (causal, [(1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2)]),
    (lambda v: causal(Tensor(K), Tensor(K), v), LONGER[1:2]),
    (partial(packed, heads=1, kv_heads=1, angles=ANGLES), [(1, 3, 12)]),
    (varlen, VARLEN),
]


@pytest.fixture(autouse=True)
def _generator() -> Any:
    """Leave the generator as other tests expect it."""
    state = tg.random.get_state()
    yield
    tg.random.set_state(state)


@pytest.mark.parametrize(("f", "shapes"), CASES)
def test_derivatives(f: Callable[..., Any], shapes: Shapes) -> None:
    check_derivatives(f, *values(*shapes))


@pytest.mark.parametrize(("f", "shapes"), THIRD)
def test_third_derivatives(f: Callable[..., Any], shapes: Shapes) -> None:
    check_derivatives(partial(squared_gradients, f), *values(*shapes))


@pytest.mark.parametrize(("f", "shapes"), [CASES[2], CASES[7], (packed, [(2, 3, 32)]), CASES[16]])
@pytest.mark.parametrize("way", ["one sequence at a time", "op by op"])
def test_derivatives_in_other_ways(
    f: Callable[..., Any], shapes: Shapes, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "op by op":
        monkeypatch.setattr(attention_tangent, "implementation", lambda done: None)
    else:
        monkeypatch.setattr(attention_numpy, "_SHORT", 0)
    check_derivatives(f, *values(*shapes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tangents_of_narrow_floats_are_rounded_once(dtype: str) -> None:
    arrays = values(*GROUPED, *GROUPED)
    inputs, tangents = (
        tuple(tg.tensor(a, dtype) for a in each) for each in (arrays[:3], arrays[3:])
    )
    wide = [tuple(a.astype("float64") for a in each) for each in (inputs, tangents)]
    _, found = jvp(causal, inputs, tangents)
    _, exact = jvp(causal, *wide)
    assert found.dtype == inputs[0].dtype
    step = 2.0 ** (-20 if dtype == "float32" else -8)
    error = abs(found.astype("float64") - exact).numpy().max()
    assert error <= step * abs(exact).numpy().max()
