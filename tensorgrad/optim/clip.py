"""The norm of all gradients together, and clipping by it. Tests: tests/optim/test_clip.py.

Nothing here waits for a GPU: norms and factors stay 0-d arrays on the device of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array, is_numpy
from tensorgrad.checks import check_number
from tensorgrad.dtypes import float64
from tensorgrad.errors import ArgumentError
from tensorgrad.kernels.reduce import reduce_cuda
from tensorgrad.optim.flat import FlatParameters

_ROW = 4096  # elements whose squares are added in the dtype of the gradient, the rest in float64
_ROWS = 16
_LEAST = 1e-30  # a sum beside which squares that float32 rounds to 0 do not count

ReduceNorm = Callable[[Array], None]


def grad_norm(parameters: FlatParameters, reduce_norm: ReduceNorm | None = None) -> Array:
    """Return the 2-norm of all gradients together.

    norm = sqrt(sum of g^2 over every gradient g of every parameter)

    Args:
        parameters: where the gradients are.
        reduce_norm: adds to the sum of the squares, in place, what other ranks alone have.

    Returns:
        A 0-d float64 array on the device of the gradients.
    """
    return clip_factor(total_of_squares(parameters, reduce_norm), math.inf, None)[0]


def clip_grad_norm(
    parameters: FlatParameters, max_norm: float, reduce_norm: ReduceNorm | None = None
) -> Array:
    """Scale all gradients in place so that their norm is at most `max_norm`.

    grad = grad * min(1, max_norm / (norm + 1e-6))

    Gradients whose norm is not finite stay as they are. `Optimizer.step(max_norm=...)` clips
    without the extra pass over the gradients.

    Args:
        parameters: where the gradients are.
        max_norm: the norm to clip to.
        reduce_norm: as of `grad_norm`.

    Returns:
        The norm before, a 0-d float64 array on the device of the gradients.

    Raises:
        ArgumentError: `max_norm` is not positive.
    """
    check_max_norm("clip_grad_norm", max_norm)
    norm, factor = clip_factor(total_of_squares(parameters, reduce_norm), max_norm, None)
    for grad in parameters.grads:
        _scale(grad, factor)
    return norm


def total_of_squares(parameters: FlatParameters, reduce_norm: ReduceNorm | None) -> Array:
    """Return the sum of the squares of all gradients, as `sum_of_squares` does."""
    total = sum_of_squares(parameters.grads[0])
    for grad in parameters.grads[1:]:
        total += sum_of_squares(grad)
    if reduce_norm is not None:
        reduce_norm(total)
    return total


def sum_of_squares(array: Array) -> Array:
    """Return the sum of the squares of a 1-D float array, the same bits in each run.

    Returns:
        A 0-d float64 array on the device of `array`; inf or NaN where an element is.
    """
    if is_numpy(array):
        return _squares_numpy(array)
    if not array.size:
        return backend.cupy.zeros((), float64)
    return reduce_cuda("SumOfSquares", array, (0,), float64)


def clip_factor(squares: Array, max_norm: float, scale: Array | None) -> tuple[Array, Array]:
    """Return the norm of the gradients and what an optimizer shall multiply them with.

    norm = sqrt(squares) / scale
    factor = min(1, max_norm / (norm + 1e-6)) / scale, or 0 where the norm is not finite

    Args:
        squares: sum of the squares of the scaled gradients, 0-d float64.
        max_norm: the norm to clip to; inf does not clip.
        scale: what the loss was multiplied with, 0-d float64; None for 1.

    Returns:
        norm and factor, 0-d float64 arrays on the device of `squares`.
    """
    if not is_numpy(squares):
        one = backend.cupy.float64(1)
        norm, factor = _factor_kernel()(squares, max_norm, one if scale is None else scale)
        return norm, factor
    divisor = 1.0 if scale is None else float(scale)
    size = math.sqrt(squares) / divisor if squares >= 0 else math.nan
    clipped = min(1.0, max_norm / (size + 1e-6)) / divisor if math.isfinite(size) else 0.0
    return np.asarray(size), np.asarray(clipped)


def check_max_norm(op: str, max_norm: float) -> None:
    """Raise ArgumentError unless the norm to clip to is positive."""
    check_number(op, "max_norm", max_norm)
    if not max_norm > 0:
        raise ArgumentError(f"{op}: max_norm is {max_norm}, expected a number above 0")


def _scale(grad: Array, factor: Array) -> None:
    """Multiply by a factor on the same device, unless that is 0 or 1."""
    if not is_numpy(grad):
        _scale_kernel()(factor, grad)
    elif 0 < factor < 1:
        number = float(factor)

        def run(piece: slice) -> None:
            grad[piece] *= number

        backend.parallel_blocks(run, grad.size, _ROW * _ROWS)


def _squares_numpy(array: Array) -> Array:
    """Add the squares of short rows, which no thread shares, then the rows in order."""
    whole = array.size // _ROW
    sums = np.empty(whole + 1)
    rows = array[: whole * _ROW].reshape(whole, _ROW)
    rest = array[whole * _ROW :]

    def run(piece: slice) -> None:
        sums[piece] = np.einsum("ij,ij->i", rows[piece], rows[piece])

    with np.errstate(over="ignore", invalid="ignore"):
        backend.parallel_blocks(run, whole, _ROWS)
        sums[whole] = np.einsum("i,i->", rest, rest)
        if not _LEAST < sums.sum() < math.inf:  # squares too large or small for float32 alone
            sums[:whole] = np.einsum("ij,ij->i", rows, rows, dtype=float64)
            sums[whole] = np.einsum("i,i->", rest, rest, dtype=float64)
        return np.asarray(sums.sum())


@cache
def _factor_kernel() -> Any:
    return backend.cupy.ElementwiseKernel(
        "float64 squares, float64 max_norm, float64 scale",
        "float64 norm, float64 factor",
        "norm = sqrt(squares) / scale;"
        "factor = isfinite(norm) ? min(1.0, max_norm / (norm + 1e-6)) / scale : 0.0",
        "clip_factor",
    )


@cache
def _scale_kernel() -> Any:
    return backend.cupy.ElementwiseKernel(
        "float64 factor", "C grad", "if (factor != 0) grad *= C(factor)", "scale_gradient"
    )
