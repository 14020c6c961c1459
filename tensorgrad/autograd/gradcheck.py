"""Checking gradients against numeric differences. Tests: tests/autograd/test_gradcheck.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.arrays import not_an_operand
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_function, check_integer, check_range, check_seed
from tensorgrad.core.dtypes import float64, is_float
from tensorgrad.core.errors import ArgumentError, GradError
from tensorgrad.core.record import no_grad
from tensorgrad.core.tensor import Tensor


def gradcheck(
    f: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    eps: float = 1e-6,
    tolerance: float = 2e-6,
    directions: int = 3,
    seed: int = 0,
) -> bool:
    """Return True, or raise where a gradient of f differs from central differences.

    For L = sum of w * f(x) with random weights w in [-1, 1], and random directions v, it
    compares sum of dL/dx * v with (L(x + eps v) - L(x - eps v)) / (2 eps), in float64. One
    direction costs two calls of f however many elements x has; a wrong element of the gradient
    shows in every direction.

    Args:
        f: takes one tensor per input, returns a tensor or a sequence of tensors. It must give
            the same values each time (seed its random numbers).
        inputs: tensors or arrays. Floats are converted to float64 and differentiated, others
            handed on. Keep away from kinks: the differences straddle them.
        eps: the step, in units of the inputs.
        tolerance: of the difference, relative to the number plus the gradient's length.
        directions: how many to try for each input.
        seed: of the weights and directions.

    Returns:
        True, so that `assert gradcheck(f, inputs)` reads as in PyTorch; it never returns False.

    Raises:
        GradError: the gradient of an input is missing or wrong; names it and both numbers.
        ArgumentError: f is not a function, or no input holds floats.

    Example:
        >>> tg.gradcheck(lambda x, y: x * tg.exp(y), [np.array([1.0, 2.0]), np.array([0.5, 0.0])])
        True
    """
    check_function("gradcheck", f)
    if isinstance(inputs, Tensor) or not isinstance(inputs, Iterable):
        raise not_an_operand("gradcheck", "inputs", inputs, "a list or tuple of tensors")
    for name, number in (("eps", eps), ("tolerance", tolerance)):
        check_range("gradcheck", name, number)
    check_integer("gradcheck", "directions", directions, 1)
    check_seed("gradcheck", seed)
    arrays = [x.data if isinstance(x, Tensor) else x for x in inputs]
    for i, array in enumerate(arrays):
        if not backend.is_array(array):
            raise not_an_operand("gradcheck", f"inputs[{i}]", array, "a tensor or array")
    arrays = [a.astype(float64) if is_float(a.dtype) else a for a in arrays]
    if not any(is_float(a.dtype) for a in arrays):
        raise ArgumentError("gradcheck: inputs hold no floats, expected at least one to move")
    rng = np.random.default_rng(seed)
    leaves = [Tensor(a, requires_grad=is_float(a.dtype)) for a in arrays]
    outputs = _outputs(f(*leaves))
    weights = [
        backend.asarray_like(rng.uniform(-1, 1, y.shape), y.data) if is_float(y.dtype) else None
        for y in outputs
    ]
    for y, weight in zip(outputs, weights, strict=True):
        if y.requires_grad:
            y.backward(weight, retain_graph=True)
    size = _weighted_sum(f, arrays, weights, abs)
    for i, leaf in enumerate(leaves):
        if not leaf.requires_grad or not leaf.size:
            continue
        if leaf.grad is None:
            raise GradError(f"gradcheck: input {i} got no gradient, expected one")
        for _ in range(directions):
            direction = backend.asarray_like(rng.standard_normal(leaf.shape), leaf.data)
            ends = []
            for sign in (1, -1):
                moved = list(arrays)
                moved[i] = leaf.data.copy()
                moved[i] += sign * eps * direction
                ends.append(_weighted_sum(f, moved, weights))
            numeric = (ends[0] - ends[1]) / (2 * eps)
            analytic = float((leaf.grad * direction).sum())
            length = float((leaf.grad * leaf.grad).sum()) ** 0.5
            scale = abs(numeric) + length + 1e-3
            rounding = size * 2.0**-50 / eps  # rounding errors of the two sums
            if not abs(numeric - analytic) <= tolerance * scale + rounding:  # NaN fails too
                raise GradError(
                    f"gradcheck: the gradient of input {i} along a direction is {analytic:.9g}, "
                    f"expected {numeric:.9g} (by differences)"
                )
    return True


def _outputs(y: Any) -> list[Tensor]:
    return list(y) if isinstance(y, (list, tuple)) else [y]


def _weighted_sum(
    f: Callable[..., Any],
    arrays: Sequence[Array],
    weights: Sequence[Array | None],
    of: Callable[[Array], Array] = lambda term: term,
) -> float:
    with no_grad():
        outputs = _outputs(f(*map(Tensor, arrays)))
    pairs = zip(outputs, weights, strict=True)
    return sum(float(of(y.data * weight).sum()) for y, weight in pairs if weight is not None)
