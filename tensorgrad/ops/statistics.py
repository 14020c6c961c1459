"""Order statistics, averages that skip NaN, histograms and differences.

Names and meanings are NumPy's. Quantiles and averages are compositions of sorting and sums, which
have gradients; what counts (histogram, digitize) has none. Tests: tests/ops/test_statistics.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from tensorgrad import backend
from tensorgrad.accumulation import Gradients, Needs, Saved
from tensorgrad.autograd import record
from tensorgrad.backend import Array, namespace, same_device, widened
from tensorgrad.checks import axis_index, axis_tuple, check_integer, renamed_dim
from tensorgrad.dtypes import compute_dtype, float64, int64, is_complex, is_float
from tensorgrad.errors import ArgumentError, DtypeError, GradError, ShapeError
from tensorgrad.operands import operands, tensor_of
from tensorgrad.ops.elementwise import equal, isnan, not_equal, where
from tensorgrad.ops.indexing import take_along_axis
from tensorgrad.ops.reduce import all, argmax, argmin, cumprod, cumsum, max, mean, min, prod, sum
from tensorgrad.ops.shape import astype, concatenate, expand_dims, moveaxis, reshape, stack
from tensorgrad.ops.sorting import sort
from tensorgrad.tensor import Axis, Tensor

__all__ = [
    "average", "bincount", "corrcoef", "cov", "diff", "digitize", "histogram", "median",
    "nanargmax", "nanargmin", "nancumprod", "nancumsum", "nanmax", "nanmean", "nanmedian",
    "nanmin", "nanpercentile", "nanprod", "nanquantile", "nanstd", "nansum", "nanvar",
    "percentile", "ptp", "quantile", "trapezoid",
]  # fmt: skip

QuantileMethod = Literal["linear", "lower", "higher", "nearest", "midpoint"]


def quantile(
    x: Any,
    q: Any,
    axis: Axis = None,
    method: QuantileMethod = "linear",
    keepdims: bool = False,
    *,
    dim: None = None,
) -> Tensor:
    """Return the numbers below which the fractions q of the elements lie; NaN if there is one.

    Args:
        x: any shape.
        q: a number from 0 to 1, or a sequence of them, on the host.
        axis: the axes to reduce; None for all.
        method: what to take between two elements.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, behind an axis for a sequence of fractions.

    Raises:
        ArgumentError: a fraction is outside 0 to 1, or there is no such method.
        GradError: q requires a gradient, which there is none of.
        ShapeError: there are no elements to reduce, or q has several axes.
    """
    if dim is not None:
        raise renamed_dim("quantile", dim)
    return _quantile("quantile", x, q, axis, method, keepdims, skip_nan=False)


def percentile(
    x: Any, q: Any, axis: Axis = None, method: QuantileMethod = "linear", keepdims: bool = False
) -> Tensor:
    """Return `quantile` of q / 100."""
    return quantile(x, _hundredths(q), axis, method, keepdims)


def median(x: Any, axis: Axis = None, keepdims: bool = False, *, dim: None = None) -> Tensor:
    """Return the element in the middle, or the mean of the two there: `quantile` of 0.5."""
    if dim is not None:
        raise renamed_dim("median", dim)
    return _quantile("median", x, 0.5, axis, "midpoint", keepdims, skip_nan=False)


def nanquantile(
    x: Any, q: Any, axis: Axis = None, method: QuantileMethod = "linear", keepdims: bool = False
) -> Tensor:
    """Return `quantile` of the elements that are not NaN; NaN where all are."""
    return _quantile("nanquantile", x, q, axis, method, keepdims, skip_nan=True)


def nanpercentile(
    x: Any, q: Any, axis: Axis = None, method: QuantileMethod = "linear", keepdims: bool = False
) -> Tensor:
    """Return `nanquantile` of q / 100."""
    return nanquantile(x, _hundredths(q), axis, method, keepdims)


def nanmedian(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return `median` of the elements that are not NaN; NaN where all are."""
    return _quantile("nanmedian", x, 0.5, axis, "midpoint", keepdims, skip_nan=True)


def _hundredths(q: Any) -> Any:
    return np.asarray(q.numpy() if isinstance(q, Tensor) else q, float64) / 100


def _quantile(
    op: str, x: Any, q: Any, axis: Axis, method: str, keepdims: bool, skip_nan: bool
) -> Tensor:
    x = tensor_of(op, "x", x)
    axes = axis_tuple(op, axis, x.ndim)
    if isinstance(q, Tensor) and q.requires_grad:
        raise GradError(f"{op}: q requires a gradient, expected numbers, or detach()")
    fractions = np.asarray(q.numpy() if isinstance(q, Tensor) else q, float64)
    if fractions.ndim > 1:
        raise ShapeError(f"{op}: q has shape {fractions.shape}, expected one axis at most")
    if not ((fractions >= 0) & (fractions <= 1)).all():
        raise ArgumentError(f"{op}: q is {q}, expected 0 to 1 (percentiles: 0 to 100)")
    if method not in get_args(QuantileMethod):
        raise ArgumentError(f"{op}: method is {method!r}, expected {get_args(QuantileMethod)}")
    dtype = x.dtype if is_float(x.dtype) else float64
    kept = [i for i in range(x.ndim) if i not in axes]
    shape = [x.shape[i] for i in kept]
    rows = moveaxis(x, axes, tuple(range(len(kept), x.ndim))) if axes else expand_dims(x, -1)
    length = int(np.prod([x.shape[i] for i in axes], dtype=int))
    if not length:
        raise ShapeError(f"{op}: x has shape {x.shape}, expected elements along {axes}")
    rows = sort(astype(reshape(rows, (*shape, length)), compute_dtype(dtype), copy=False), -1)
    missing = isnan(rows.detach()).data.sum(-1, keepdims=True)
    present = length - missing if skip_nan else namespace(rows.data).full_like(missing, length)
    found = []
    for fraction in fractions.reshape(-1).tolist():
        value = reshape(_at_fraction(rows, present, fraction, method), shape)
        if not skip_nan:
            value = where(missing.reshape(shape) > 0, float("nan"), value)
        if keepdims:
            value = reshape(value, [1 if i in axes else n for i, n in enumerate(x.shape)])
        found.append(astype(value, dtype, copy=False))
    return stack(found) if fractions.ndim else found[0]


def _at_fraction(rows: Tensor, count: Array, fraction: float, method: str) -> Tensor:
    """Return the element of sorted rows at a fraction of the first `count`; NaN where that is 0."""
    xp = namespace(rows.data)
    place = xp.maximum(count - 1, 0) * fraction
    low = xp.floor(place).astype(int64)
    high = xp.minimum(low + 1, rows.shape[-1] - 1)
    weight = place - low
    if method == "midpoint":
        weight = xp.where(weight > 0, 0.5, 0.0)
    elif method == "nearest":
        weight = xp.rint(place) - low
    elif method != "linear":
        weight = xp.where(weight > 0, float(method == "higher"), 0.0)
    below = take_along_axis(rows, low, -1)
    above = take_along_axis(rows, xp.where(weight > 0, high, low), -1)
    weight = weight.astype(rows.dtype)
    return where(
        weight < 0.5, below + (above - below) * weight, above - (above - below) * (1 - weight)
    )


def average(x: Any, axis: Axis = None, weights: Any = None, keepdims: bool = False) -> Tensor:
    """Return sum(x * weights) / sum(weights); the mean without weights.

    Args:
        x: any shape.
        axis: the axes to reduce; None for all.
        weights: the shape of x, or (n,) for one axis of that length.
        keepdims: whether the reduced axes stay with length 1.

    Raises:
        ShapeError: the weights have another shape.
    """
    if weights is None:
        return mean(x, axis, keepdims)
    x, weights = operands("average", ("x", "weights"), (x, weights))
    if weights.shape != x.shape:
        if not isinstance(axis, int) or weights.shape != (x.shape[axis],):
            raise ShapeError(f"average: weights has shape {weights.shape}, expected {x.shape}")
        place = axis_index("average", axis, x.ndim)
        weights = reshape(weights, [-1 if i == place else 1 for i in range(x.ndim)])
    total = sum(x * weights, axis, keepdims)
    return total / sum(weights * (x.data == x.data), axis, keepdims)


def ptp(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the maximum minus the minimum ("peak to peak").

    Raises:
        ShapeError: there are no elements to reduce.
    """
    return max(x, axis, keepdims) - min(x, axis, keepdims)


def nansum(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the sum of the elements that are not NaN."""
    return sum(_filled("nansum", x, 0), axis, keepdims)


def nanprod(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the product of the elements that are not NaN."""
    return prod(_filled("nanprod", x, 1), axis, keepdims)


def nancumsum(x: Any, axis: int | None = None) -> Tensor:
    """Return `cumsum` with 0 in place of NaN."""
    return cumsum(_filled("nancumsum", x, 0), axis)


def nancumprod(x: Any, axis: int | None = None) -> Tensor:
    """Return `cumprod` with 1 in place of NaN."""
    return cumprod(_filled("nancumprod", x, 1), axis)


def nanmean(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the mean of the elements that are not NaN; NaN where all are."""
    x = tensor_of("nanmean", "x", x)
    if not is_float(x.dtype):
        return mean(x, axis, keepdims)
    wide = astype(x, compute_dtype(x.dtype), copy=False)
    return astype(nansum(wide, axis, keepdims) / _present(x, axis, keepdims), x.dtype, copy=False)


def nanvar(x: Any, axis: Axis = None, ddof: float = 0, keepdims: bool = False) -> Tensor:
    """Return the variance of the elements that are not NaN; NaN for ddof of them or fewer."""
    return _nan_variance("nanvar", x, axis, ddof, keepdims, 1.0)


def nanstd(x: Any, axis: Axis = None, ddof: float = 0, keepdims: bool = False) -> Tensor:
    """Return the standard deviation of what is not NaN, the square root of `nanvar`."""
    return _nan_variance("nanstd", x, axis, ddof, keepdims, 0.5)


def _nan_variance(op: str, x: Any, axis: Axis, ddof: float, keepdims: bool, power: float) -> Tensor:
    x = tensor_of(op, "x", x)
    dtype = x.dtype if is_float(x.dtype) else float64
    wide = astype(x, compute_dtype(dtype), copy=False)
    centered = where(isnan(wide), 0, wide - nanmean(wide, axis, True))
    count = _present(x, axis, keepdims) - ddof
    count = where(count > 0, count, float("nan"))
    variance = sum(centered * centered, axis, keepdims) / count
    return astype(variance**power if power != 1 else variance, dtype, copy=False)


def nanmax(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the maximum of the elements that are not NaN; NaN where all are.

    Raises:
        ShapeError: there are no elements to reduce.
    """
    return _nan_extremum("nanmax", max, x, axis, keepdims)


def nanmin(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the minimum of the elements that are not NaN; NaN where all are.

    Raises:
        ShapeError: there are no elements to reduce.
    """
    return _nan_extremum("nanmin", min, x, axis, keepdims)


def _nan_extremum(op: str, function: Any, x: Any, axis: Axis, keepdims: bool) -> Tensor:
    x = tensor_of(op, "x", x)
    worst = float("-inf") if function is max else float("inf")
    y: Tensor = function(_filled(op, x, worst), axis, keepdims)
    return where(all(isnan(x), axis, keepdims), float("nan"), y) if is_float(x.dtype) else y


def nanargmax(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the index of the first maximum beside NaN, int64; 0 where all are NaN."""
    return argmax(_filled("nanargmax", x, float("-inf")), axis, keepdims)


def nanargmin(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the index of the first minimum beside NaN, int64; 0 where all are NaN."""
    return argmin(_filled("nanargmin", x, float("inf")), axis, keepdims)


def _filled(op: str, x: Any, value: float) -> Tensor:
    """Return x with a number in place of NaN."""
    x = tensor_of(op, "x", x)
    return where(isnan(x), value, x) if is_float(x.dtype) else x


def _present(x: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    """Return how many elements are not NaN, in the compute dtype; NaN for none."""
    dtype = compute_dtype(x.dtype) if is_float(x.dtype) else float64
    count = astype(sum(equal(x.detach(), x.detach()), axis, keepdims), dtype)
    return where(count > 0, count, float("nan"))


def cov(
    x: Any, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: int | None = None
) -> Tensor:
    """Return the covariance matrix of variables.

    Args:
        x: (variables, observations), or (observations,) of one.
        y: more of them, in the same form.
        rowvar: False where the variables are the columns.
        bias: whether to divide by the number of observations n instead of n - 1.
        ddof: to divide by n - ddof.

    Returns:
        (variables, variables), or a number for one.

    Raises:
        ShapeError: x has more than two axes.
    """
    given = operands("cov", ("x", "y"), (x, y), 1)
    variables = [_variables(each, rowvar) for each in given if each is not None]
    x = concatenate(variables, 0)
    delta = (0 if bias else 1) if ddof is None else ddof
    centered = x - mean(x, 1, True)
    result = centered @ centered.T / (x.shape[1] - delta)
    return result if result.size != 1 else reshape(result, ())


def corrcoef(x: Any, y: Any = None, rowvar: bool = True) -> Tensor:
    """Return the matrix of correlation coefficients; arguments and errors are those of `cov`."""
    matrix = cov(x, y, rowvar)
    if not matrix.ndim:
        return matrix / matrix
    places = namespace(matrix.data).arange(len(matrix))
    deviations = matrix[places, places] ** 0.5
    return matrix / expand_dims(deviations, 1) / deviations


def _variables(x: Tensor, rowvar: bool) -> Tensor:
    if x.ndim > 2:
        raise ShapeError(f"cov: x has shape {x.shape}, expected two axes at most")
    if x.ndim < 2:
        return reshape(x, (1, -1))
    return x if rowvar else x.T


def diff(
    x: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None, *, dim: None = None
) -> Tensor:
    """Return the differences of neighbours along an axis, n times; of bool, whether they differ.

    Args:
        x: one axis or more.
        n: how often, from 0, for which x is returned as it is.
        axis: the axis to subtract along.
        prepend, append: what to join to x first, a tensor or one number.

    Raises:
        ArgumentError: n is negative, or x has no such axis.
    """
    if dim is not None:
        raise renamed_dim("diff", dim)
    given: Tensor
    given, *edges = operands("diff", ("x", "prepend", "append"), (x, prepend, append), 2)
    check_integer("diff", "n", n, 0)
    axis = axis_index("diff", axis, given.ndim)
    if not n:
        return given
    before, after = [[] if edge is None else [_edge(edge, given, axis)] for edge in edges]
    y = concatenate([*before, given, *after], axis) if before or after else given
    outer = (slice(None),) * axis
    for _ in range(n):
        last, first = y[(*outer, slice(1, None))], y[(*outer, slice(None, -1))]
        y = not_equal(last, first) if y.dtype.kind == "b" else last - first
    return y


def _edge(value: Tensor, x: Tensor, axis: int) -> Tensor:
    if value.ndim:
        return value
    shape = [1 if i == axis else length for i, length in enumerate(x.shape)]
    return value + astype(Tensor(namespace(x.data).zeros(shape)), x.dtype)


def trapezoid(y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Tensor:
    """Return the integral of y by the trapezoidal rule.

    Args:
        y: the values.
        x: (n,), or the shape of y: where they were taken.
        dx: their distance, without x.
        axis: the axis to integrate along.
    """
    y, x = operands("trapezoid", ("y", "x"), (y, x), 1)
    y = moveaxis(y, axis, -1)
    widths: Any = dx
    if x is not None:
        widths = diff(x if x.ndim == 1 else moveaxis(x, axis, -1))
    return sum(widths * (y[..., 1:] + y[..., :-1]) / 2, -1)


def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Tensor:
    """Return how often each of the integers 0, 1, ... occurs in x, or the sums of their weights.

    Args:
        x: (n,) integers from 0.
        weights: (n,), with a gradient.
        minlength: the least length of the result, which otherwise ends with the largest integer.

    Raises:
        DtypeError: x does not hold integers, or the weights are complex.
        ArgumentError: an integer is negative.
        ShapeError: x does not have one axis, or the weights have another shape.
    """
    x, weights = operands("bincount", ("x", "weights"), (x, weights), 1)
    if x.dtype.kind not in "iu":
        raise DtypeError(f"bincount: x has dtype {x.dtype}, expected integers")
    if x.ndim != 1:
        raise ShapeError(f"bincount: x has shape {x.shape}, expected one axis")
    if x.size and int(x.data.min()) < 0:
        raise ArgumentError(f"bincount: x holds {int(x.data.min())}, expected 0 or more")
    check_integer("bincount", "minlength", minlength, 0)
    xp, places = namespace(x.data), x.data.astype(int64)
    if weights is None:
        return Tensor(xp.bincount(places, minlength=minlength))
    same_device("bincount", ("x", "weights"), (x.data, weights.data))
    if weights.shape != x.shape:
        raise ShapeError(f"bincount: weights has shape {weights.shape}, expected {x.shape}")
    if is_complex(weights.dtype):
        raise DtypeError(f"bincount: weights has dtype {weights.dtype}, expected real numbers")
    y = xp.bincount(places, widened(weights.data), minlength)
    return record("bincount", y.astype(float64), (weights,), _bincount_backward, (places,))


def _bincount_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    return (dy[saved[0]],)


def histogram(
    x: Any,
    bins: int | Sequence[float] = 10,
    range: tuple[float, float] | None = None,
    density: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return how many elements lie in each bin, and the edges of the bins; without a gradient.

    Args:
        x: any shape.
        bins: how many of one width, or their edges in ascending order.
        range: the first and the last edge; by default the extremes of x.
        density: whether to divide by the number of elements and the widths.

    Returns:
        (bins,) int64 (float64 of a density) and (bins + 1,).

    Raises:
        ArgumentError: the edges are not ascending, or there is no bin.
    """
    x = tensor_of("histogram", "x", x)
    xp = namespace(x.data)
    edges_or_count = bins if isinstance(bins, int) else xp.asarray(_host(bins))
    try:
        counts, edges = xp.histogram(widened(x.data), edges_or_count, range)
    except ValueError as error:
        raise ArgumentError(f"histogram: bins is {bins!r:.60}, range {range}: {error}") from error
    if density:
        counts = counts / (xp.diff(edges) * counts.sum())
    return Tensor(counts), Tensor(edges)


def digitize(x: Any, bins: Any, right: bool = False) -> Tensor:
    """Return for each element the number of the bin that it lies in, int64; without a gradient.

    Args:
        x: any shape.
        bins: (n,) edges, ascending or descending; 0 is below (above) all of them.
        right: whether a bin includes its right edge instead of its left.

    Raises:
        ArgumentError: the edges are neither ascending nor descending.
    """
    x, edges = operands("digitize", ("x", "bins"), (x, bins), compared=True)
    xp = namespace(x.data)
    try:
        return Tensor(xp.asarray(xp.digitize(widened(x.data), xp.asarray(edges.data), right)))
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"digitize: bins is {bins!r:.60}: {error}") from error


def _host(values: Any) -> Any:
    return backend.to_numpy(values.data) if isinstance(values, Tensor) else values
