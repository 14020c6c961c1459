"""The global gradient norm, and clipping by it. Tests: tests/optim/test_clip.py.

Nothing here synchronizes with a GPU: norms and factors are 0-d arrays on the gradients' device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, is_numpy, upcast
from tensorgrad.core.checks import check_number
from tensorgrad.core.dtypes import c_name, compute_dtype, float64
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.gradient import LeafGradient
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.reduce import reduce_cuda
from tensorgrad.optim.flat import FlatParameters

_ROW = 4096  # elements whose squares are summed in the gradient's dtype; rows are in float64
_ROWS = 16  # rows of a block
_LEAST = 1e-30  # below it, squares that float32 rounds to 0 may matter

ReduceNorm = Callable[[Array], None]


def grad_norm(
    parameters: FlatParameters | Iterable[Tensor], reduce_norm: ReduceNorm | None = None
) -> np.ndarray[Any, Any]:
    """Return the global gradient norm.

    norm = sqrt(sum of g^2 over all elements g of all gradients)

    Args:
        parameters: the parameters with their gradients, as `Module.parameters()` gives them, or
            flat. Those without a gradient are skipped.
        reduce_norm: adds other ranks' squares to the sum of squares, in place.

    Returns:
        A 0-d float64 array on the device of the gradients.

    Example:
        >>> w = tg.tensor([1.5, 2.0], requires_grad=True)
        >>> (w * w).sum().backward()
        >>> float(tg.optim.grad_norm([w]))  # the gradient is [3, 4]
        5.0
    """
    return clip_factor(_total(_grads(parameters), reduce_norm), math.inf, None)[0]


def clip_grad_norm(
    parameters: FlatParameters | Iterable[Tensor],
    max_norm: float,
    *,
    reduce_norm: ReduceNorm | None = None,
) -> np.ndarray[Any, Any]:
    """Scale all gradients in place so that their norm is at most `max_norm`.

    grad = grad * min(1, max_norm / (norm + 1e-6))

    Gradients whose norm is not finite do not change. `Optimizer.step(max_norm=...)` clips without
    an extra pass over the gradients.

    Args:
        parameters: as for `grad_norm`.
        max_norm: above 0.
        reduce_norm: as for `grad_norm`.

    Returns:
        The norm before clipping, a 0-d float64 array on the device of the gradients.

    Raises:
        ArgumentError: `max_norm` is not positive.

    Example:
        >>> w = tg.tensor([1.5, 2.0], requires_grad=True)
        >>> (w * w).sum().backward()
        >>> float(tg.optim.clip_grad_norm([w], 1.0))
        5.0
        >>> w.grad.round(3)
        array([0.6, 0.8], dtype=float32)
    """
    check_max_norm("clip_grad_norm", max_norm)
    if not isinstance(parameters, FlatParameters):
        parameters = list(parameters)
    _drop_histories(parameters)
    grads = _grads(parameters)
    norm, factor = clip_factor(_total(grads, reduce_norm), max_norm, None)
    for grad in grads:
        _scale(grad, factor)
    return norm


def total_of_squares(parameters: FlatParameters, reduce_norm: ReduceNorm | None) -> Array:
    """Return the sum of the squares of all gradients, a 0-d float64 array."""
    return _total(parameters.grads, reduce_norm)


def _grads(parameters: FlatParameters | Iterable[Tensor]) -> Sequence[Array]:
    """Return the gradients as 1-D arrays, views of those of tensors."""
    if isinstance(parameters, FlatParameters):
        return parameters.grads
    gradients = [p.gradient for p in parameters if p.grad is not None]  # with what waited for them
    return [g.array.ravel(order="K") for g in gradients if g is not None]


def _drop_histories(parameters: FlatParameters | list[Tensor]) -> None:
    """Make arrays of gradients with a history, which would be that of other values."""
    if isinstance(parameters, FlatParameters):
        parameters = list(parameters.parameters.values())
    for parameter in parameters:
        if parameter.gradient is not None and type(parameter.gradient) is not LeafGradient:
            parameter.gradient.plain()


def _total(grads: Sequence[Array], reduce_norm: ReduceNorm | None) -> Array:
    """Return the sum of the squares of 1-D gradients."""
    total: Array = sum_of_squares(grads[0]) if grads else np.zeros(())
    for grad in grads[1:]:
        total += sum_of_squares(grad)
    if reduce_norm is not None:
        reduce_norm(total)
    return total


def sum_of_squares(array: Array) -> Array:
    """Return the sum of the squares of a 1-D float array; equal bits in every run.

    Returns:
        A 0-d float64 array on the device of `array`; inf or NaN where an element is.
    """
    if is_numpy(array):
        return _squares_numpy(array)
    if not array.size:
        return backend.cupy.zeros((), float64)
    return reduce_cuda("SumOfSquares", array, (0,), float64)


def clip_factor(
    squares: Array, max_norm: float, scale: Array | None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the gradient norm, and the factor by which an optimizer multiplies the gradients.

    norm = sqrt(squares) / scale
    factor = min(1, max_norm / (norm + 1e-6)) / scale, or 0 where the norm is not finite

    Args:
        squares: sum of the squares of the scaled gradients, 0-d float64.
        max_norm: above 0; inf does not clip.
        scale: the loss scale, 0-d float64; None for 1.

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
    """Raise ArgumentError unless max_norm is above 0."""
    check_number(op, "max_norm", max_norm)
    if not max_norm > 0:
        raise ArgumentError(f"{op}: max_norm is {max_norm}, expected a number above 0")


def _scale(grad: Array, factor: Array) -> None:
    """Multiply a gradient in place by a factor on its device, unless it is 0 or 1.

    Gradients of 16 bits are rounded once: their factor is float32.
    """
    wide = compute_dtype(grad.dtype)
    if not is_numpy(grad):
        _scale_kernel(c_name(wide))(factor, grad)
    elif 0 < factor < 1:

        def run(piece: slice) -> None:
            np.multiply(grad[piece], factor, out=grad[piece], dtype=wide, casting="unsafe")

        backend.parallel_blocks(run, grad.size, _ROW * _ROWS)


def _squares_numpy(array: Array) -> Array:
    """Sum the squares of each row in one thread, then the rows in order."""
    whole = array.size // _ROW
    sums = np.empty(whole + 1)
    rows = array[: whole * _ROW].reshape(whole, _ROW)
    rest = upcast(array[whole * _ROW :])

    def run(piece: slice) -> None:
        block = upcast(rows[piece])
        sums[piece] = np.einsum("ij,ij->i", block, block)

    with np.errstate(over="ignore", invalid="ignore"):
        backend.parallel_blocks(run, whole, _ROWS)
        sums[whole] = np.einsum("i,i->", rest, rest)
        if not _LEAST < sums.sum() < math.inf:  # float32 overflows or underflows
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
def _scale_kernel(compute: str) -> Any:
    return backend.cupy.ElementwiseKernel(
        "float64 factor",
        "T grad",
        f"if (factor != 0) grad = T({compute}(grad) * {compute}(factor))",
        f"scale_gradient_{compute}",
    )
