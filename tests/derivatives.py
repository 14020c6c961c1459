"""Checks of first, second and mixed derivatives of a function against differences in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tensorgrad as tg
from tensorgrad import Tensor, backend
from tensorgrad.autograd.functions import jvp

_FIRST, _SECOND = 1e-6, 1e-5  # steps of the differences
device = "cpu"  # where the tensors are; tests/autograd/test_derivatives_cuda.py sets it


def check_derivatives(f: Callable[..., Any], *values: Any, seed: int = 0) -> None:
    """Compare the derivatives of f with differences of its values and its gradients.

    The tangent of f; then the Hessian-vector product of a weighted sum of its results in three
    ways: reverse over forward, reverse over reverse, and forward over reverse.

    Args:
        f: takes tensors of float64, returns a tensor or several. Smooth near the values.
        values: arrays, or what makes one.
        seed: of the weights and the directions.
    """
    rng = np.random.default_rng(seed)
    arrays = [np.array(value, np.float64) for value in values]
    directions = [np.asarray(rng.standard_normal(x.shape)) for x in arrays]
    weights: list[Any] = []

    def loss(*xs: Tensor) -> Tensor:
        y = f(*xs)
        outputs = y if isinstance(y, list | tuple) else [y]
        if not weights:
            weights.extend(_here(rng.standard_normal(each.shape)) for each in outputs)
        parts = [(each * w).sum() for each, w in zip(outputs, weights, strict=True)]
        total: Tensor = sum(parts[1:], parts[0])
        return total

    def moved(step: float) -> list[np.ndarray[Any, Any]]:
        return [x + step * v for x, v in zip(arrays, directions, strict=True)]

    ends = [float(loss(*map(_here, moved(step))).item()) for step in (_FIRST, -_FIRST)]
    tangents, inputs = list(map(_here, directions)), list(map(_here, arrays))
    _, slope = jvp(loss, inputs, tangents)
    size = max(sum(float((v * v).sum()) for v in directions), 1.0) ** 0.5
    scale = max(abs(ends[0]), 1.0) * size
    assert abs(slope.item() - (ends[0] - ends[1]) / (2 * _FIRST)) < 1e-6 * scale, "tangent"

    argnums = tuple(range(len(arrays)))
    gradient = tg.grad(loss, argnums)
    above, below = (gradient(*map(_here, moved(step))) for step in (_SECOND, -_SECOND))
    expected = [(a.numpy() - b.numpy()) / (2 * _SECOND) for a, b in zip(above, below, strict=True)]

    def product(*xs: Tensor) -> Tensor:
        parts = [(g * v).sum() for g, v in zip(gradient(*xs), tangents, strict=True)]
        return sum(parts[1:], parts[0])

    found = {
        "reverse over forward": _gradients_of_jvp(loss, inputs, tangents),
        "reverse over reverse": [g.numpy() for g in tg.grad(product, argnums)(*inputs)],
        "forward over reverse": _each_jvp(gradient, inputs, tangents),
    }
    for mode, products in found.items():
        for i, (got, wanted) in enumerate(zip(products, expected, strict=True)):
            worst = max(float(np.abs(e).max(initial=1.0)) for e in expected)
            np.testing.assert_allclose(
                got, wanted, rtol=0, atol=2e-5 * worst * size, err_msg=f"{mode}, input {i}"
            )


def _here(value: Any) -> Tensor:
    """Return an array as a tensor on the device of the check."""
    return Tensor(backend.to_device(np.asarray(value), device))


def _gradients_of_jvp(
    loss: Callable[..., Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> list[Any]:
    leaves = [Tensor(x.data, requires_grad=True) for x in inputs]
    _, slope = jvp(loss, leaves, tangents)
    if slope.requires_grad:
        slope.backward()
    return [np.zeros(x.shape) if x.grad is None else backend.to_numpy(x.grad) for x in leaves]


def _each_jvp(
    gradient: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> list[Any]:
    return [
        jvp(lambda *xs, i=i: gradient(*xs)[i], inputs, tangents)[1].numpy()
        for i in range(len(inputs))
    ]


def tangent_and_products(
    f: Callable[..., Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor], g: Tensor
) -> list[Any]:
    """Return the tangent of f as an array, and the gradients of g times it by each input."""
    leaves = [Tensor(x.data, requires_grad=True) for x in inputs]
    _, t = jvp(f, leaves, tangents)
    t.backward(g)
    return [t.data, *[x.grad if x.grad is not None else 0 * x.data for x in leaves]]
