"""Second derivatives of random programs: all modes agree to rounding.

A program applies steps to a pool of tensors: maps, operations on two of them, reductions, products,
indexing. Each step adds its result to the pool. A seed decides all of it, evenly: drawn one by one,
steps are mostly the simplest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import tensorgrad as tg
import tensorgrad.nn.functional as F
from tensorgrad import Tensor
from tests.fuzz.cases import cases

Step = Callable[[Tensor], Tensor]
LARGE = 8.0  # results above it are scaled down, lest rounding errors grow

MAPS: list[Step] = [
    tg.tanh, tg.sin, tg.square, tg.sigmoid, tg.erf, tg.arctan, tg.abs, tg.arcsinh, F.logsigmoid,
    F.gelu, F.silu, F.relu, F.softplus, F.elu, F.mish, tg.negative,
    lambda x: tg.exp(tg.tanh(x)), lambda x: tg.log1p(x * x), lambda x: tg.sqrt(x * x + 1),
    lambda x: 1 / (x * x + 1), lambda x: (x * x + 1) ** 0.7, lambda x: x**3, tg.cos,
    lambda x: tg.clip(x, -1.0, 1.0), lambda x: tg.rsqrt(x * x + 1), lambda x: x - 0.5,
]  # fmt: skip
ZIPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    tg.add, tg.subtract, tg.multiply, tg.maximum, tg.minimum, tg.logaddexp, tg.swiglu,
    lambda a, b: a / (b * b + 1), lambda a, b: (a * a + 1) ** tg.tanh(b),
    lambda a, b: tg.where(a > 0, a, b), lambda a, b: tg.hypot(a, b * b + 1),
    lambda a, b: tg.arctan2(a, b * b + 1), lambda a, b: tg.xlogy(a, b * b + 1),
]  # fmt: skip
# A reduction takes x, an axis or None, and whether the reduced axis stays.
REDUCTIONS: list[Callable[..., Tensor]] = [
    tg.sum, tg.prod, tg.mean, tg.max, tg.min, tg.var, tg.logsumexp,
    lambda x, axis, keepdims: tg.norm(x + 3, axis, keepdims=keepdims),
    lambda x, axis, keepdims: tg.norm(x, axis, ord=1, keepdims=keepdims),
    lambda x, axis, keepdims: tg.std(x * x + 3 * _counting(x), axis, ddof=0, keepdims=keepdims),
    lambda x, axis, keepdims: tg.median(x, axis, keepdims=keepdims),
]  # fmt: skip
# Functions of x and an axis.
ALONG: list[Callable[[Tensor, int], Tensor]] = [
    tg.softmax, tg.log_softmax, tg.cumsum, tg.cumprod, tg.sort, tg.flip,
    lambda x, axis: tg.diff(x, axis=axis),
    lambda x, axis: tg.pad(x, (1, 0)), lambda x, axis: tg.tile(x, 2),
    lambda x, axis: tg.roll(x, 1, axis), lambda x, axis: tg.repeat(x, 2, axis),
    lambda x, axis: tg.concatenate([x, x * x], axis), lambda x, axis: tg.stack([x, 2 * x], axis),
    lambda x, axis: tg.expand_dims(x, axis), lambda x, axis: tg.moveaxis(x, axis, 0),
    lambda x, axis: tg.take(x, np.array([0, 0]), axis),
    lambda x, axis: tg.layer_norm(tg.swapaxes(x, axis, -1), eps=0.5),
    lambda x, axis: tg.rms_norm(tg.swapaxes(x, axis, -1), eps=0.5),
]  # fmt: skip
PRODUCTS: list[Step] = [
    lambda x: x @ x.mT, lambda x: x.mT @ x, lambda x: tg.einsum("...ij,...kj->...i", x, x),
    lambda x: tg.tensordot(x, x, ([-1], [-1])), lambda x: tg.einsum("...ij->...ji", x),
    lambda x: tg.vecdot(x, x[..., :1, :]), lambda x: tg.tril(x), lambda x: tg.kron(x, x[..., :1]),
    lambda x: tg.linalg.inv(_positive(x)), lambda x: tg.linalg.slogdet(_positive(x))[1],
    lambda x: tg.linalg.solve(_positive(x), x), lambda x: tg.linalg.cholesky(_positive(x)),
    lambda x: tg.attention(x[None], x[None, :, :2], tg.sin(x)[None, :, :2], causal=True)
    if x.ndim == 3 else x,
]  # fmt: skip
# Layers take a matrix.
LAYERS: list[Step] = [
    lambda x: tg.linear(x, tg.sin(x), x[:, 0]), lambda x: tg.linear_gelu(x, tg.sin(x), x[:, 0]),
    lambda x: tg.gated_linear(x, tg.sin(x), x), lambda x: tg.add_layer_norm(x, tg.sin(x), x[0])[1],
    lambda x: tg.feed_forward(x, tg.sin(x), None, x.T, x[0], x), lambda x: tg.add_rms_norm(x, x)[1],
    lambda x: tg.cross_entropy(x, _places(x, x.shape[1]), label_smoothing=0.1, z_loss=0.1),
    lambda x: tg.linear_cross_entropy(x, tg.sin(x), _places(x, len(x)), reduction="none"),
    lambda x: tg.embedding(x, np.array([0, len(x) - 1, 0])),
    lambda x: tg.checkpoint(lambda y: tg.tanh(y) @ y.T)(x),
]  # fmt: skip


def _positive(x: Tensor) -> Tensor:
    """Return a positive definite matrix."""
    return x @ x.mT + tg.eye(x.shape[-2], dtype=x.dtype)


def _places(x: Tensor, count: int) -> Any:
    """Return a number below the count for each row."""
    return np.arange(len(x)) % count


def _counting(x: Tensor) -> Tensor:
    """Return different numbers in the shape of x."""
    return Tensor(np.arange(x.size, dtype=float).reshape(x.shape))


def _indexed(random: Random, shape: Sequence[int]) -> Step:
    """Return a step that picks elements of an array."""
    key: list[Any] = []
    has_array = False  # several may not broadcast
    for length in shape[: random.randint(0, len(shape))]:
        if random.random() < 0.2:
            key.append(None)
        kind = random.randrange(4)
        start, stop = (random.randint(-length, length) for _ in range(2))
        found: Any = slice(start, stop, random.choice([-2, -1, 1, 2]))
        if kind == 1 and length:
            found = random.randrange(-length, length)
        elif kind > 1 and length and not has_array:
            has_array = True
            repeated = [random.randrange(-length, length) for _ in range(random.randint(1, 3))]
            found = repeated if kind == 2 else np.arange(length) % 2 == 0
        key.append(found)
    return lambda x: x[tuple(key)]


def _step(random: Random, pool: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return a step that the tensors in the pool are fit for."""
    i = random.randrange(len(pool))
    x = pool[i]
    kinds = ["map", "zip", "index"] + ["reduce", "along"] * (x.ndim > 0 and x.size > 0)
    kinds += ["product"] * (1 < x.ndim < 4 and x.size > 0)
    kinds += ["layer"] * 2 * (x.ndim == 2 and x.size > 0)
    kind = random.choice(kinds)
    if kind == "zip":
        f = random.choice(ZIPS)
        j = random.choice([j for j, y in enumerate(pool) if _broadcast(x, y)])
        return lambda pool: f(pool[i], pool[j])
    axis: Any = random.randrange(-x.ndim, x.ndim) if x.ndim else None
    if kind == "reduce":
        g, keepdims = random.choice(REDUCTIONS), random.random() < 0.5
        axis = axis if random.random() < 0.7 else None
        return lambda pool: g(pool[i], axis=axis, keepdims=keepdims)
    if kind == "along":
        h = random.choice(ALONG)
        return lambda pool: h(pool[i], axis)
    if kind == "index":
        step = _indexed(random, x.shape)
    else:
        step = random.choice({"map": MAPS, "product": PRODUCTS, "layer": LAYERS}[kind])
    return lambda pool: step(pool[i])


def _broadcast(x: Tensor, y: Tensor) -> bool:
    try:
        np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        return False
    return True


def program(seed: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return a function of some tensors to a scalar, and the tensors."""
    random, rng = Random(seed), np.random.default_rng(seed)
    inputs = []
    for _ in range(random.randint(1, 2)):
        shape = [random.choice([0, 1, 2, 3, 3, 4]) for _ in range(random.randint(0, 3))]
        inputs.append(Tensor(np.asarray(rng.standard_normal(shape))))
    pool, steps, scales = list(inputs), [], []
    for _ in range(random.randint(2, 8)):
        step = _step(random, pool)
        y = step(pool)
        if y.size > 200:
            continue
        scale = min(1.0, LARGE / max(float(np.abs(y.numpy()).max(initial=0)), LARGE))
        steps.append(step)
        scales.append(scale)
        pool.append(y * scale)
    weights = [np.asarray(rng.standard_normal(y.shape)) for y in pool]

    def f(*xs: Tensor) -> Tensor:
        pool = list(xs)
        for step, scale in zip(steps, scales, strict=True):
            pool.append(step(pool) * scale)
        return sum(
            [(y * w).sum() for y, w in zip(pool, weights, strict=True)], Tensor(np.zeros(()))
        )

    return f, inputs


@cases(50)
@given(seed=st.integers(0, 1 << 32))
def test_second_derivatives_agree(seed: int) -> None:
    f, inputs = program(seed)
    rng, argnums = np.random.default_rng(0), tuple(range(len(inputs)))
    v, w = ([Tensor(np.asarray(rng.standard_normal(x.shape))) for x in inputs] for _ in range(2))
    gradient = tg.grad(f, argnums)
    grads = gradient(*inputs)

    def along(*xs: Tensor) -> Tensor:
        return tg.jvp(f, xs, v)[1]

    def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        return sum([(s * t).sum() for s, t in zip(a, b, strict=True)], Tensor(np.zeros(())))

    products = {
        "reverse over forward": tg.grad(along, argnums)(*inputs),
        "reverse over reverse": tg.grad(lambda *xs: dot(gradient(*xs), v), argnums)(*inputs),
        "forward over reverse": tg.jvp(gradient, inputs, v)[1],
        "hvp": tg.hvp(f, tuple(inputs), tuple(v)),
    }
    first = products["reverse over forward"]
    size = 1 + max(float(np.abs(h.numpy()).max(initial=0)) for h in (*first, *grads))
    for mode, each in products.items():
        for h, other in zip(each, first, strict=True):
            np.testing.assert_allclose(h.numpy(), other.numpy(), 0, 1e-9 * size, err_msg=mode)
    assert abs((along(*inputs) - dot(grads, v)).item()) < 1e-9 * size
    of_w = tg.hvp(f, tuple(inputs), tuple(w))
    assert abs((dot(of_w, v) - dot(first, w)).item()) < 1e-9 * size * max(1, size)
