"""Order statistics, averages that skip NaN, histograms and differences.

Names and meanings are NumPy's. Quantiles and averages are compositions of sorting and sums, which
have gradients; what counts (histogram, digitize) has none. Tests: tests/ops/test_statistics.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Never, SupportsIndex

import numpy as np

from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.arrays import array_of
from tensorgrad.core.backend import Array, Axis, namespace, upcast
from tensorgrad.core.checks import axis_index, axis_tuple, check_flag, check_number
from tensorgrad.core.dtypes import (
    Dtype,
    DtypeLike,
    as_dtype,
    compute_dtype,
    float32,
    float64,
    int64,
    is_complex,
    is_float,
)
from tensorgrad.core.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.operands import array_beside, constant_of, operands, tensor_of
from tensorgrad.core.record import record
from tensorgrad.core.signature import Real, Shaped, Signatures, Size
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.ops import reduce
from tensorgrad.ops.diagonals import diagonal
from tensorgrad.ops.elementwise import clip, equal, isnan, not_equal, where
from tensorgrad.ops.indexing import take_along_axis
from tensorgrad.ops.shape import (
    astype,
    broadcast_to,
    concatenate,
    expand_dims,
    moveaxis,
    reshape,
    stack,
    transpose,
)
from tensorgrad.ops.sorting import sort

__all__ = [
    "average", "bincount", "corrcoef", "cov", "diff", "digitize", "histogram", "median",
    "nanargmax", "nanargmin", "nancumprod", "nancumsum", "nanmax", "nanmean", "nanmedian",
    "nanmin", "nanpercentile", "nanprod", "nanquantile", "nanstd", "nansum", "nanvar",
    "percentile", "ptp", "quantile", "trapezoid",
]  # fmt: skip

takes = Signatures(globals())
QuantileMethod = Literal[
    "linear", "lower", "higher", "nearest", "midpoint", "inverted_cdf", "averaged_inverted_cdf",
    "closest_observation", "interpolated_inverted_cdf", "hazen", "weibull", "median_unbiased",
    "normal_unbiased",
]  # fmt: skip


def quantile(
    x: Real[ArrayLike, "..."],
    q: Any,
    axis: Axis = None,
    *,
    method: QuantileMethod = "linear",
    keepdims: bool = False,
    **unknown: Never,
) -> Tensor:
    """Return the numbers below which the fractions q of the elements lie; NaN if there is one.

    Args:
        x: any shape.
        q: a number from 0 to 1, or a sequence of them, on the host.
        axis: axes to reduce; all by default.
        method: where between two elements a fraction lies, NumPy's names. "lower", "higher",
            "nearest", "inverted_cdf" and "closest_observation" take one of the two.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, behind an axis for a sequence of fractions; the dtype of x where
        elements are taken, otherwise floats, float64 for integers or for an array q of float64.

    Raises:
        DtypeError: x holds complex numbers.
        ArgumentError: a fraction is outside 0 to 1, or there is no such method.
        GradError: q requires a gradient, which there is none of.
        ShapeError: there are no elements to reduce, or q has more than two axes (one beside NaN).
    Source: Hyndman & Fan 1996, doi:10.2307/2684934.

    Example:
        >>> tg.quantile([1.0, 2.0, 3.0, 5.0], 0.5)
        tensor(2.5, dtype=float32)
        >>> tg.quantile([1.0, 2.0, 3.0, 5.0], 0.5, method="lower")
        tensor(2., dtype=float32)
    """
    (x,) = takes.quantile(x, method, keepdims, unknown)
    return _quantile("quantile", x, q, axis, method, keepdims, skip_nan=False)


def percentile(
    x: Real[ArrayLike, "..."],
    q: Any,
    axis: Axis = None,
    *,
    method: QuantileMethod = "linear",
    keepdims: bool = False,
    **unknown: Never,
) -> Tensor:
    """Return `quantile` of q / 100; NaN if there is one.

    Args:
        x: any shape.
        q: a number from 0 to 100, or a sequence of them, on the host.
        axis: axes to reduce; all by default.
        method: where between two elements a fraction lies; see `quantile`.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, behind an axis for a sequence of percentages; dtype and errors are
        those of `quantile`.

    Raises:
        DtypeError: x holds complex numbers.

    Example:
        >>> tg.percentile([[1.0, 2.0, 3.0], [4.0, 6.0, 8.0]], 50, axis=1)
        tensor([2., 6.], dtype=float32)
    """
    (x,) = takes.percentile(x, method, keepdims, unknown)
    return _quantile("percentile", x, q, axis, method, keepdims, skip_nan=False)


def median(
    x: Real[ArrayLike, "..."], axis: Axis = None, *, keepdims: bool = False, **unknown: Never
) -> Tensor:
    """Return the element in the middle, or the mean of the two there; NaN for no elements.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, in its dtype; float64 for integers and bool.

    Raises:
        DtypeError: x holds complex numbers.

    Example:
        >>> tg.median([1.0, 7.0, 3.0, 2.0])
        tensor(2.5, dtype=float32)
    """
    (x,) = takes.median(x, keepdims, unknown)
    return _quantile("median", x, 0.5, axis, "median", keepdims, skip_nan=False)


def nanquantile(
    x: Real[ArrayLike, "..."],
    q: Any,
    axis: Axis = None,
    *,
    method: QuantileMethod = "linear",
    keepdims: bool = False,
    **unknown: Never,
) -> Tensor:
    """Return `quantile` of the elements that are not NaN; NaN where all are.

    Args:
        x: any shape.
        q: a number from 0 to 1, or a sequence of them, on the host.
        axis: axes to reduce; all by default.
        method: where between two elements a fraction lies; see `quantile`.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, behind an axis for a sequence of fractions; dtype and errors are
        those of `quantile`.

    Raises:
        DtypeError: x holds complex numbers.

    Example:
        >>> tg.nanquantile([1.0, float("nan"), 2.0, 3.0], 0.5)
        tensor(2., dtype=float32)
    """
    (x,) = takes.nanquantile(x, method, keepdims, unknown)
    return _quantile("nanquantile", x, q, axis, method, keepdims, skip_nan=True)


def nanpercentile(
    x: Real[ArrayLike, "..."],
    q: Any,
    axis: Axis = None,
    *,
    method: QuantileMethod = "linear",
    keepdims: bool = False,
    **unknown: Never,
) -> Tensor:
    """Return `nanquantile` of q / 100.

    Args:
        x: any shape.
        q: a number from 0 to 100, or a sequence of them, on the host.
        axis: axes to reduce; all by default.
        method: where between two elements a fraction lies; see `quantile`.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, behind an axis for a sequence of percentages; dtype and errors are
        those of `quantile`.

    Raises:
        DtypeError: x holds complex numbers.

    Example:
        >>> tg.nanpercentile([1.0, float("nan"), 2.0, 3.0], [0, 100])
        tensor([1., 3.], dtype=float32)
    """
    (x,) = takes.nanpercentile(x, method, keepdims, unknown)
    return _quantile("nanpercentile", x, q, axis, method, keepdims, skip_nan=True)


def nanmedian(
    x: Real[ArrayLike, "..."], axis: Axis = None, *, keepdims: bool = False, **unknown: Never
) -> Tensor:
    """Return `median` of the elements that are not NaN; NaN where all are.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, in its dtype; float64 for integers and bool.

    Raises:
        DtypeError: x holds complex numbers.

    Example:
        >>> tg.nanmedian([[1.0, float("nan"), 4.0], [2.0, 3.0, 9.0]], axis=1)
        tensor([2.5, 3. ], dtype=float32)
    """
    (x,) = takes.nanmedian(x, keepdims, unknown)
    return _quantile("nanmedian", x, 0.5, axis, "median", keepdims, skip_nan=True)


def _quantile(
    op: str, x: Tensor, q: Any, axis: Axis, method: str, keepdims: bool, skip_nan: bool
) -> Tensor:
    axes = axis_tuple(op, axis, x.ndim)
    fractions = _fractions(op, q, 1 if skip_nan else 2)
    one = method in _TAKES or (method == "linear" and fractions.dtype.kind in "biu")
    dtype = x.dtype if one or is_float(x.dtype) else float64
    if not one and isinstance(q, Tensor | np.ndarray | np.generic):
        dtype = np.result_type(dtype, fractions.dtype)
    kept = [i for i in range(x.ndim) if i not in axes]
    shape = [x.shape[i] for i in kept]
    length = math.prod([x.shape[i] for i in axes])
    whole = tuple([1 if i in axes else n for i, n in enumerate(x.shape)]) if keepdims else shape
    if not length and (skip_nan or method == "median"):
        dtype = dtype if is_float(dtype) else float64
        return Tensor(namespace(x.data).full((*fractions.shape, *whole), math.nan, dtype))
    if not length:
        raise ShapeError(f"{op}: x has shape {x.shape}, expected elements along {axes}")
    rows = moveaxis(x, axes, tuple(range(len(kept), x.ndim))) if axes else expand_dims(x, -1)
    rows = reshape(rows, (*shape, length))
    if is_float(x.dtype):
        rows = astype(rows, compute_dtype(dtype), copy=False)
    missing = isnan(rows.detach()).data.sum(-1, keepdims=True)
    present = length - missing if skip_nan else namespace(rows.data).full_like(missing, length)
    rows = sort(rows, -1)
    results = []
    for fraction in fractions.reshape(-1).tolist():
        value = reshape(_at_fraction(rows, present, fraction, method, one), shape)
        if not skip_nan and is_float(x.dtype):
            value = where(missing.reshape(shape) > 0, float("nan"), value)
        results.append(astype(reshape(value, whole), dtype, copy=False))
    if not results:
        return Tensor(namespace(x.data).zeros((*fractions.shape, *whole), dtype))
    return reshape(stack(results), (*fractions.shape, *whole))


def _fractions(op: str, q: Any, most: int) -> np.ndarray[Any, Any]:
    """Return the fractions, on the host; integers stay integers, which `quantile` asks for."""
    if isinstance(q, Tensor):
        q = backend.to_numpy(constant_of(op, "q", q, "quantiles are those of numbers"))
    fractions = np.asarray(array_of(op, "q", q))
    if fractions.dtype.kind not in "biuf":
        raise DtypeError(f"{op}: q has dtype {fractions.dtype}, expected real numbers")
    if "percentile" in op:
        fractions = fractions / 100
    if fractions.ndim > most:
        raise ShapeError(f"{op}: q has shape {fractions.shape}, expected {most} axes at most")
    if not ((fractions >= 0) & (fractions <= 1)).all():
        raise ArgumentError(f"{op}: q is {q}, expected 0 to {100 if 'percentile' in op else 1}")
    return fractions


# Methods that take one of two elements.
_TAKES = {"lower", "higher", "nearest", "inverted_cdf", "closest_observation"}
# Methods that interpolate: the alpha and beta of Hyndman & Fan.
_OFFSETS = {
    "interpolated_inverted_cdf": (0.0, 1.0), "hazen": (0.5, 0.5), "weibull": (0.0, 0.0),
    "median_unbiased": (1 / 3, 1 / 3), "normal_unbiased": (3 / 8, 3 / 8),
}  # fmt: skip


def _at_fraction(rows: Tensor, count: Array, fraction: float, method: str, one: bool) -> Tensor:
    """Return the value at a fraction of the first `count` of sorted rows; NaN where that is 0."""
    xp = namespace(rows.data)
    last = xp.maximum(count - 1, 0)
    place = _place(count, fraction, method)
    low = xp.floor(place).astype(int64)
    weight = _weight(xp, place, low, method)
    high = xp.clip(low + 1, 0, last)
    low = xp.clip(low, 0, last)
    if one:
        return take_along_axis(rows, xp.where(weight > 0, high, low), -1)
    below, above = (take_along_axis(rows, index, -1) for index in (low, high))
    if not is_float(rows.dtype):
        below, above = astype(below, float64), astype(above, float64)
    if method == "median":
        return where(weight == 0, below, (below + above) / 2)
    weight = weight.astype(below.dtype)
    difference = above - below
    return where(weight < 0.5, below + difference * weight, above - difference * (1 - weight))


def _place(count: Array, fraction: float, method: str) -> Array:
    """Return the index, not rounded, that a method gives a fraction of `count` elements."""
    if method in _OFFSETS:
        alpha, beta = _OFFSETS[method]
        return count * fraction + (alpha + fraction * (1 - alpha - beta)) - 1
    if method in ("inverted_cdf", "averaged_inverted_cdf"):
        return count * fraction - 1
    if method == "closest_observation":
        return count * fraction - 1.5
    return (count - 1) * fraction


def _weight(xp: Any, place: Array, low: Array, method: str) -> Array:
    """Return how much the element above a place counts, 0 to 1."""
    part = place - low
    if method == "lower":
        return xp.zeros_like(part)
    if method in ("higher", "inverted_cdf"):
        return xp.where(part > 0, 1.0, 0.0)
    if method == "nearest":
        return xp.rint(place) - low
    if method in ("midpoint", "median"):
        return xp.where(part > 0, 0.5, 0.0)
    if method == "averaged_inverted_cdf":
        return xp.where(part > 0, 1.0, 0.5)
    if method == "closest_observation":
        return xp.where((part == 0) & (low % 2 == 1), 0.0, 1.0)
    return part


def average(
    x: ArrayLike,
    axis: Axis = None,
    weights: ArrayLike | None = None,
    *,
    keepdims: bool = False,
    **unknown: Never,
) -> Tensor:
    """Return sum(x * weights) / sum(weights); the mean without weights.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        weights: the shape of x, or the lengths of x along `axis`.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, in the dtype that x and weights have in common; float64 for
        integers and bool.

    Raises:
        DeviceError: the operands are on different devices.
        ShapeError: the weights have another shape.
        ArgumentError: weights sum to 0 (on the GPU the result is not finite instead).

    Example:
        >>> tg.average([1.0, 2.0, 6.0], weights=[1.0, 1.0, 2.0])
        tensor(3.75, dtype=float32)
    """
    x, weights = takes.average(x, weights, keepdims, unknown)
    if weights is None:
        return reduce.mean(x, axis, keepdims=keepdims)
    if weights.shape != x.shape:
        weights = _along_axes(x, axis, weights)
    dtype = np.result_type(x.dtype, weights.dtype)
    if not (is_float(dtype) or is_complex(dtype)):
        dtype = float64
    wide = dtype if is_complex(dtype) else compute_dtype(dtype)
    x, weights = (astype(t, wide, copy=False) for t in (x, weights))
    scale = reduce.sum(broadcast_to(weights, x.shape), axis, keepdims=keepdims)
    if backend.is_numpy(scale.data) and (scale.data == 0).any():
        raise ArgumentError("average: weights sum to 0, expected another sum")
    return astype(reduce.sum(x * weights, axis, keepdims=keepdims) / scale, dtype, copy=False)


def _along_axes(x: Tensor, axis: Axis, weights: Tensor) -> Tensor:
    """Return weights of the reduced axes in a shape that broadcasts to x."""
    axes = axis_tuple("average", axis, x.ndim)
    if axis is None or weights.shape != tuple([x.shape[i] for i in axes]):
        expected = x.shape if axis is None else f"{x.shape}, or the lengths along {axes}"
        raise ShapeError(f"average: weights has shape {weights.shape}, expected {expected}")
    weights = transpose(weights, np.argsort(axes).tolist())
    return reshape(weights, [n if i in axes else 1 for i, n in enumerate(x.shape)])


def ptp(x: ArrayLike, axis: Axis = None, *, keepdims: bool = False, **unknown: Never) -> Tensor:
    """Return the maximum minus the minimum ("peak to peak").

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, in its dtype.

    Raises:
        ShapeError: there are no elements to reduce.

    Example:
        >>> tg.ptp([[1, 5, 2], [4, 4, 7]], axis=1)
        tensor([4, 3], dtype=int64)
    """
    (x,) = takes.ptp(x, keepdims, unknown)
    return reduce.max(x, axis, keepdims=keepdims) - reduce.min(x, axis, keepdims=keepdims)


def nansum(x: ArrayLike, axis: Axis = None, *, keepdims: bool = False, **unknown: Never) -> Tensor:
    """Return the sum of the elements that are not NaN; 0 where all are.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, in its dtype; 64 bits for integers and bool.

    Example:
        >>> tg.nansum([1.0, float("nan"), 2.0])
        tensor(3., dtype=float32)
    """
    (x,) = takes.nansum(x, keepdims, unknown)
    return reduce.sum(_filled(x, 0), axis, keepdims=keepdims)


def nanprod(x: ArrayLike, axis: Axis = None, *, keepdims: bool = False, **unknown: Never) -> Tensor:
    """Return the product of the elements that are not NaN; 1 where all are.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, in its dtype; 64 bits for integers and bool.

    Example:
        >>> tg.nanprod([2.0, float("nan"), 3.0])
        tensor(6., dtype=float32)
    """
    (x,) = takes.nanprod(x, keepdims, unknown)
    return reduce.prod(_filled(x, 1), axis, keepdims=keepdims)


def nancumsum(x: ArrayLike, axis: SupportsIndex | None = None, **unknown: Never) -> Tensor:
    """Return `cumsum` with 0 in place of NaN.

    Args:
        x: any shape.
        axis: the axis to sum along; None sums over the flattened x.

    Returns:
        The shape of x (one axis without `axis`), in its dtype; 64 bits for integers and bool.

    Example:
        >>> tg.nancumsum([1.0, float("nan"), 2.0])
        tensor([1., 1., 3.], dtype=float32)
    """
    (x,) = takes.nancumsum(x, unknown)
    return reduce.cumsum(_filled(x, 0), axis)


def nancumprod(x: ArrayLike, axis: SupportsIndex | None = None, **unknown: Never) -> Tensor:
    """Return `cumprod` with 1 in place of NaN.

    Args:
        x: any shape.
        axis: the axis to multiply along; None multiplies over the flattened x.

    Returns:
        The shape of x (one axis without `axis`), in its dtype; 64 bits for integers and bool.

    Example:
        >>> tg.nancumprod([2.0, float("nan"), 3.0])
        tensor([2., 2., 6.], dtype=float32)
    """
    (x,) = takes.nancumprod(x, unknown)
    return reduce.cumprod(_filled(x, 1), axis)


def nanmean(x: ArrayLike, axis: Axis = None, *, keepdims: bool = False, **unknown: Never) -> Tensor:
    """Return the mean of the elements that are not NaN; NaN where all are.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, in its dtype; float64 for integers and bool.

    Example:
        >>> tg.nanmean([[1.0, float("nan")], [2.0, 6.0]], axis=1)
        tensor([1., 4.], dtype=float32)
    """
    (x,) = takes.nanmean(x, keepdims, unknown)
    return _nan_mean(x, axis, keepdims)


def _nan_mean(x: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    if not (is_float(x.dtype) or is_complex(x.dtype)):
        return reduce.mean(x, axis, keepdims=keepdims)
    wide = astype(x, compute_dtype(x.dtype), copy=False) if is_float(x.dtype) else x
    total = reduce.sum(_filled(wide, 0), axis, keepdims=keepdims)
    return astype(total / _count(x, axis, keepdims), x.dtype, copy=False)


def nanvar(
    x: ArrayLike, axis: Axis = None, *, ddof: float = 0, keepdims: bool = False, **unknown: Never
) -> Tensor:
    """Return the variance of the elements that are not NaN; NaN for `ddof` of them or fewer.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        ddof: what is subtracted from their number n in the divisor; 1 gives the unbiased estimate.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, in its dtype; float64 for integers and bool.

    Example:
        >>> tg.nanvar([1.0, float("nan"), 5.0])
        tensor(4., dtype=float32)
    """
    (x,) = takes.nanvar(x, ddof, keepdims, unknown)
    return _nan_variance(x, axis, ddof, keepdims, 1.0)


def nanstd(
    x: ArrayLike, axis: Axis = None, *, ddof: float = 0, keepdims: bool = False, **unknown: Never
) -> Tensor:
    """Return the standard deviation of what is not NaN, the square root of `nanvar`.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        ddof: what is subtracted from their number n in the divisor.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, in its dtype; float64 for integers and bool.

    Example:
        >>> tg.nanstd([1.0, float("nan"), 5.0])
        tensor(2., dtype=float32)
    """
    (x,) = takes.nanstd(x, ddof, keepdims, unknown)
    return _nan_variance(x, axis, ddof, keepdims, 0.5)


def _nan_variance(x: Tensor, axis: Axis, ddof: float, keepdims: bool, power: float) -> Tensor:
    if not is_float(x.dtype):
        return (reduce.var if power == 1 else reduce.std)(x, axis, ddof=ddof, keepdims=keepdims)
    wide = astype(x, compute_dtype(x.dtype), copy=False)
    centered = where(isnan(wide), 0, wide - _nan_mean(wide, axis, True))
    variance = reduce.sum(centered * centered, axis, keepdims=keepdims) / _count(
        x, axis, keepdims, ddof
    )
    return astype(variance**power if power != 1 else variance, x.dtype, copy=False)


def nanmax(x: ArrayLike, axis: Axis = None, *, keepdims: bool = False, **unknown: Never) -> Tensor:
    """Return the maximum of the elements that are not NaN; NaN where all are.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, in its dtype.

    Raises:
        ShapeError: there are no elements to reduce.

    Example:
        >>> tg.nanmax([[1.0, float("nan")], [2.0, 6.0]], axis=1)
        tensor([1., 6.], dtype=float32)
    """
    (x,) = takes.nanmax(x, keepdims, unknown)
    return _nan_extremum(reduce.max, x, axis, keepdims)


def nanmin(x: ArrayLike, axis: Axis = None, *, keepdims: bool = False, **unknown: Never) -> Tensor:
    """Return the minimum of the elements that are not NaN; NaN where all are.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, in its dtype.

    Raises:
        ShapeError: there are no elements to reduce.

    Example:
        >>> tg.nanmin([[1.0, float("nan")], [2.0, 6.0]], axis=1)
        tensor([1., 2.], dtype=float32)
    """
    (x,) = takes.nanmin(x, keepdims, unknown)
    return _nan_extremum(reduce.min, x, axis, keepdims)


def _nan_extremum(function: Any, x: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    worst = float("-inf") if function is reduce.max else float("inf")
    y: Tensor = function(_filled(x, worst), axis, keepdims=keepdims)
    empty = reduce.all(isnan(x), axis, keepdims=keepdims)
    return where(empty, float("nan"), y) if is_float(x.dtype) or is_complex(x.dtype) else y


def nanargmax(
    x: ArrayLike, axis: SupportsIndex | None = None, *, keepdims: bool = False, **unknown: Never
) -> Tensor:
    """Return the index of the first maximum beside NaN, int64.

    Args:
        x: any shape.
        axis: the axis to search; None searches the flattened x.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, int64; without a gradient.

    Raises:
        ArgumentError: all are NaN (on the GPU the result is 0 instead).

    Example:
        >>> tg.nanargmax([float("nan"), 2.0, 6.0, 6.0])
        tensor(2, dtype=int64)
    """
    (x,) = takes.nanargmax(x, keepdims, unknown)
    filled = _filled_but_some("nanargmax", x, float("-inf"), axis)
    return reduce.argmax(filled, axis, keepdims=keepdims)


def nanargmin(
    x: ArrayLike, axis: SupportsIndex | None = None, *, keepdims: bool = False, **unknown: Never
) -> Tensor:
    """Return the index of the first minimum beside NaN, int64.

    Args:
        x: any shape.
        axis: the axis to search; None searches the flattened x.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, int64; without a gradient.

    Raises:
        ArgumentError: all are NaN (on the GPU the result is 0 instead).

    Example:
        >>> tg.nanargmin([[float("nan"), 2.0], [3.0, 1.0]], axis=1)
        tensor([1, 1], dtype=int64)
    """
    (x,) = takes.nanargmin(x, keepdims, unknown)
    filled = _filled_but_some("nanargmin", x, float("inf"), axis)
    return reduce.argmin(filled, axis, keepdims=keepdims)


def _filled_but_some(op: str, x: Tensor, value: float, axis: Any) -> Tensor:
    """Do as `_filled`; raise ArgumentError on the CPU where everything along the axis is NaN."""
    if x.size and backend.is_numpy(x.data) and reduce.all(isnan(x), axis).data.any():
        raise ArgumentError(f"{op}: x holds nothing but NaN along axis {axis}, expected a number")
    return _filled(x, value)


def _filled(x: Tensor, value: float) -> Tensor:
    """Return x with a number in place of NaN."""
    return where(isnan(x), value, x) if is_float(x.dtype) or is_complex(x.dtype) else x


def _count(x: Tensor, axis: Axis, keepdims: bool, ddof: float = 0) -> Tensor:
    """Return how many numbers are not NaN, in the compute dtype, of complex ones float32."""
    dtype = compute_dtype(x.dtype) if is_float(x.dtype) else float32
    count = astype(reduce.sum(equal(x.detach(), x.detach()), axis, keepdims=keepdims), dtype)
    count = count - ddof if ddof else count
    return where(count > 0, count, float("nan"))


def cov(
    x: Real[ArrayLike, "..."],
    y: Real[ArrayLike, "..."] | None = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: Any = None,
    aweights: Any = None,
    *,
    dtype: DtypeLike | None = None,
) -> Tensor:
    """Return the covariance matrix of variables.

    Args:
        x: (variables, observations), or (observations,) of one.
        y: more of them, in the same form.
        rowvar: False where the variables are the columns.
        bias: whether to divide by the number of observations n instead of n - 1.
        ddof: an integer, to divide by n - ddof; the result is not finite where that is 0 or less.
        fweights: (observations,) integers from 0: how often each counts.
        aweights: (observations,) from 0: how much each counts.
        dtype: a float to compute in, float64 by default, as in NumPy.

    Returns:
        (variables, variables), or a number for one.

    Raises:
        DtypeError: x or y holds complex numbers.
        DeviceError: the operands are on different devices.
        ArgumentError: a weight is negative.
        DtypeError: `fweights` holds fractions.
        ShapeError: x or y has more than two axes, or weights do not fit.

    Example:
        >>> tg.cov([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
        tensor([[1., 2.],
                [2., 4.]], dtype=float64)
    """
    x, y = takes.cov(x, y, rowvar, bias, ddof)
    dtype = float64 if dtype is None else as_dtype(dtype)
    first = _variables("x", x, rowvar, dtype)
    if not first.shape[0]:
        return Tensor(namespace(first.data).zeros((0, 0), dtype))
    joined = first if y is None else concatenate([first, _variables("y", y, rowvar, dtype)], 0)
    delta = (0 if bias else 1) if ddof is None else ddof
    weights, total, divisor = _observation_weights(joined, fweights, aweights, delta)
    weighted = joined if weights is None else joined * weights
    centered = joined - reduce.sum(weighted, 1, keepdims=True) / total
    products = (centered if weights is None else centered * weights) @ centered.T
    result = products / where(divisor > 0, divisor, 0.0)
    return result if result.size != 1 else reshape(result, ())


def _observation_weights(
    x: Tensor, fweights: Any, aweights: Any, ddof: int
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the weights of observations, their sum, and what sums of squares are divided by."""
    frequencies, importances = (
        _weights_of_cov(name, given, x)
        for name, given in (("fweights", fweights), ("aweights", aweights))
    )
    given = [w for w in (frequencies, importances) if w is not None]
    if not given:
        count = tensor_of("cov", "x", namespace(x.data).asarray(float(x.shape[1]), x.dtype))
        return None, count, count - ddof
    weights = given[0] if len(given) == 1 else given[0] * given[1]
    total = reduce.sum(weights)
    if importances is None or not ddof:
        return weights, total, total - ddof
    return weights, total, total - ddof * reduce.sum(weights * importances) / total


def _weights_of_cov(name: str, given: Any, x: Tensor) -> Tensor | None:
    if given is None:
        return None
    weights = tensor_of("cov", name, given, x)
    if weights.shape != x.shape[1:]:
        raise ShapeError(f"cov: {name} has shape {weights.shape}, expected {x.shape[1:]}")
    if name == "fweights" and not (weights.data == weights.data.round()).all():
        raise DtypeError("cov: fweights holds fractions, expected integers")
    if (weights.data < 0).any():
        raise ArgumentError(f"cov: {name} holds negative numbers, expected 0 or more")
    return astype(weights, x.dtype, copy=False)


def corrcoef(
    x: ArrayLike, y: ArrayLike | None = None, rowvar: bool = True, *, dtype: DtypeLike | None = None
) -> Tensor:
    """Return the matrix of correlation coefficients, -1 to 1: `cov` divided by the deviations.

    Args:
        x: (variables, observations), or (observations,) of one.
        y: more of them, in the same form.
        rowvar: False where the variables are the columns.
        dtype: a float to compute in, float64 by default, as in NumPy.

    Returns:
        (variables, variables), or a number for one; NaN for a variable that does not vary.

    Raises:
        DtypeError: x holds complex numbers.
        ShapeError: x has more than two axes.

    Example:
        >>> tg.corrcoef([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]).round(3)
        tensor([[ 1., -1.],
                [-1.,  1.]], dtype=float64)
    """
    matrix = cov(x, y, rowvar, dtype=dtype)
    if not matrix.ndim:
        return matrix / matrix
    deviations = diagonal(matrix) ** 0.5
    return clip(matrix / expand_dims(deviations, 1) / deviations, -1, 1)


def _variables(name: str, x: Tensor, rowvar: bool, dtype: Dtype) -> Tensor:
    if x.ndim > 2:
        raise ShapeError(f"cov: {name} has shape {x.shape}, expected two axes at most")
    x = astype(x, dtype, copy=False)
    if x.ndim < 2:
        return reshape(x, (1, -1))
    return x if rowvar or (name == "y" and x.shape[0] == 1) else x.T


def diff(
    x: ArrayLike,
    n: Size = 1,
    axis: SupportsIndex = -1,
    prepend: ArrayLike | None = None,
    append: ArrayLike | None = None,
    **unknown: Never,
) -> Tensor:
    """Return the differences of neighbours along an axis, n times; of bool, whether they differ.

    Args:
        x: one axis or more.
        n: how often, from 0, for which x is returned as it is.
        axis: the axis to subtract along.
        prepend, append: what to join to x first, a tensor or one number.

    Returns:
        The shape of x with n fewer elements along the axis, beside those joined to it; its dtype.

    Raises:
        ArgumentError: n is not 0 or more.
        DeviceError: the operands are on different devices.
        ArgumentError: x has no such axis.

    Example:
        >>> tg.diff([1, 4, 9, 16])
        tensor([3, 5, 7], dtype=int64)
        >>> tg.diff([1, 4, 9, 16], 2)
        tensor([2, 2], dtype=int64)
    """
    x, *edges = takes.diff(x, n, prepend, append, unknown)
    place = axis_index("diff", axis, x.ndim)
    if not n:
        return x
    before, after = [[] if edge is None else [_edge(edge, x, place)] for edge in edges]
    y = concatenate([*before, x, *after], place) if before or after else x
    outer = (slice(None),) * place
    for _ in range(n):
        last, first = y[(*outer, slice(1, None))], y[(*outer, slice(None, -1))]
        y = not_equal(last, first) if y.dtype.kind == "b" else last - first
    return y


def _edge(value: Tensor, x: Tensor, axis: int) -> Tensor:
    if value.ndim:
        return value
    shape = [1 if i == axis else length for i, length in enumerate(x.shape)]
    return value + astype(Tensor(namespace(x.data).zeros(shape)), x.dtype)


def trapezoid(
    y: ArrayLike,
    x: ArrayLike | None = None,
    dx: Any = 1.0,
    axis: SupportsIndex = -1,
    **unknown: Never,
) -> Tensor:
    """Return the integral of y by the trapezoidal rule.

    Args:
        y: the values.
        x: (n,), or the shape of y: where they were taken.
        dx: their distance, without x.
        axis: the axis to integrate along.

    Returns:
        The remaining axes of y, floats.

    Raises:
        DeviceError: the operands are on different devices.
        ArgumentError: y has no such axis.

    Example:
        >>> tg.trapezoid([0.0, 1.0, 4.0], dx=0.5)
        tensor(1.5, dtype=float32)
        >>> tg.trapezoid([0.0, 1.0, 4.0], [0.0, 1.0, 3.0])
        tensor(5.5, dtype=float32)
    """
    y, x = takes.trapezoid(y, x, unknown)
    y = moveaxis(y, axis_index("trapezoid", axis, y.ndim), -1)
    array_beside("trapezoid", "dx", dx, y)  # raises an error that names it
    widths: Any = dx
    if x is not None:
        widths = diff(x if x.ndim == 1 else moveaxis(x, axis, -1))
    return reduce.sum(widths * (y[..., 1:] + y[..., :-1]) / 2, -1)


def bincount(
    x: Shaped[ArrayLike, "N"], weights: Shaped[ArrayLike, "N"] | None = None, minlength: Size = 0
) -> Tensor:
    """Return how often each of the integers 0, 1, ... occurs in x, or the sums of their weights.

    Args:
        x: (N,) integers from 0.
        weights: (N,), with a gradient.
        minlength: the least length of the result, which otherwise ends with the largest integer.

    Returns:
        (max(x) + 1,) or longer: int64, float64 with weights.

    Raises:
        ShapeError: x is not (N,), weights not (N,).
        ArgumentError: minlength is not 0 or more.
        DeviceError: the operands are on different devices.
        DtypeError: x has no integers, or weights complex numbers.
        ArgumentError: an integer is negative.

    Example:
        >>> tg.bincount([0, 2, 2], minlength=4)
        tensor([1, 0, 2, 0], dtype=int64)
        >>> tg.bincount([0, 2, 2], [0.5, 1.0, 2.0])
        tensor([0.5, 0. , 3. ], dtype=float64)
    """
    x = tensor_of("bincount", "x", np.zeros(0, int64) if isinstance(x, list) and not x else x)
    x, weights = takes.bincount(x, weights, minlength)
    if x.dtype.kind not in "biu":
        raise DtypeError(f"bincount: x has dtype {x.dtype}, expected integers")
    xp, places = namespace(x.data), x.data.astype(int64)
    if x.size and int(places.min()) < 0:  # beyond int64 too
        outside = int(x.data.max() if x.dtype.kind == "u" else places.min())
        raise ArgumentError(f"bincount: x holds {outside}, expected 0 or more, below 2^63")
    if weights is None:
        return Tensor(xp.bincount(places, minlength=minlength))
    if is_complex(weights.dtype):
        raise DtypeError(f"bincount: weights has dtype {weights.dtype}, expected real numbers")
    y = xp.bincount(places, upcast(weights.data), minlength)
    return record("bincount", y.astype(float64), (weights,), _bincount_backward, (places,))


def _bincount_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    return (dy[saved[0]],)


@tangent_of(_bincount_backward)
def _bincount_tangent(op: Op, t: Tensor) -> Tensor:
    return bincount(op.saved[0], t, op.node.shape[0])


def histogram(
    x: ArrayLike,
    bins: int | str | Sequence[float] = 10,
    range: tuple[float, float] | None = None,
    density: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return how many elements lie in each bin, and the edges of the bins; without a gradient.

    Args:
        x: any shape.
        bins: how many of one width, the name of a rule of NumPy's for that ("auto"), or their
            edges in ascending order.
        range: the first and the last edge; by default the extremes of x.
        density: whether to divide by the number of elements and the widths.

    Returns:
        (bins,) int64 (float64 of a density) and (bins + 1,).

    Raises:
        ArgumentError: the edges are not ascending, or there is no bin.
        GradError: x or the edges require a gradient.

    Example:
        >>> counts, edges = tg.histogram([1.0, 1.5, 4.0], bins=3, range=(0, 6))
        >>> counts, edges.tolist()
        (tensor([2, 0, 1], dtype=int64), [0.0, 2.0, 4.0, 6.0])
    """
    (x,) = takes.histogram(x, density)
    constant_of("histogram", "x", x, "counts have none")
    if isinstance(bins, Tensor):
        bins = backend.to_numpy(constant_of("histogram", "bins", bins, "counts have none"))
    if range is not None:
        if not isinstance(range, tuple | list | np.ndarray) or len(range) != 2:
            raise ArgumentError(f"histogram: range is {range!r:.60}, expected two numbers")
        for end in range:
            check_number("histogram", "range", end)
    xp = namespace(x.data)
    try:
        edges_or_count = bins if isinstance(bins, int | str) else xp.asarray(bins)
        if isinstance(bins, str):
            edges_or_count = xp.asarray(
                np.histogram_bin_edges(backend.to_numpy(x.data), bins, range)
            )
        counts, edges = xp.histogram(upcast(x.data), edges_or_count, range)
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"histogram: bins is {bins!r:.60} and range {range}, expected a count, a name or "
            f"ascending edges: {error}"
        ) from error
    if density:
        counts = counts / (xp.diff(edges) * counts.sum())
    return Tensor(counts), Tensor(edges)


def digitize(x: ArrayLike, bins: ArrayLike, right: bool = False) -> Tensor:
    """Return for each element the number of the bin that it lies in, int64; without a gradient.

    Args:
        x: any shape.
        bins: (n,) edges, ascending or descending; 0 is below (above) all of them.
        right: whether a bin includes its right edge instead of its left.

    Returns:
        In the shape of x, int64 from 0 to n.

    Raises:
        ArgumentError: the edges are neither ascending nor descending.

    Example:
        >>> tg.digitize([0.5, 1.0, 9.0], [1.0, 2.0, 3.0])
        tensor([0, 1, 3], dtype=int64)
    """
    check_flag("digitize", "right", right)
    x, edges = operands("digitize", ("x", "bins"), (x, bins), compared=True)
    if edges.ndim != 1:
        raise ShapeError(f"digitize: bins has shape {edges.shape}, expected one axis")
    xp = namespace(x.data)
    try:
        return Tensor(xp.asarray(xp.digitize(upcast(x.data), xp.asarray(edges.data), right)))
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"digitize: bins is {bins!r:.60} and x has dtype {x.dtype}, expected ascending or "
            f"descending edges and real numbers: {error}"
        ) from error
