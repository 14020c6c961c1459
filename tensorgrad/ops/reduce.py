"""Sums, means, extrema, norms and other reductions. Kernels: kernels/reduce.cu.

Names and meanings are NumPy's. `axis` is None for all axes, an int or a tuple of ints; `keepdims`
keeps the reduced axes with length 1. `where` is None or bools that broadcast to x: elements that
are False do not count. 16-bit floats accumulate in float32 and are rounded once.
Sums and products of integers and bool are 64 bits wide, their means and other statistics float64.
x may be a tensor or an array. Every function raises ArgumentError where x has no such axis.
Tests: tests/ops/test_reduce.py.
"""

from __future__ import annotations

import builtins
import math
from typing import Any, Never, SupportsIndex

import numpy as np

from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.autograd.tangents import along as tangents_along
from tensorgrad.core import backend
from tensorgrad.core.arrays import cast, keep_axes, sum_array, sum_dtype
from tensorgrad.core.backend import Array, Axis, Shape, upcast
from tensorgrad.core.checks import axis_index, axis_tuple, check_no_number
from tensorgrad.core.dtypes import (
    Dtype,
    DtypeLike,
    bool_,
    compute_dtype,
    float64,
    int64,
    is_complex,
)
from tensorgrad.core.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.operands import array_beside, tensor_of
from tensorgrad.core.record import record
from tensorgrad.core.signature import Bool, Real, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.kernels.reduce import cumsum_cuda, reduce_cuda
from tensorgrad.ops.arguments import along, check_holds
from tensorgrad.ops.elementwise import exp, sign, sqrt
from tensorgrad.ops.elementwise import where as choose
from tensorgrad.ops.elementwise.row import Row
from tensorgrad.ops.shape import (
    astype,
    concatenate,
    moveaxis,
    pad,
    reshape,
    squeeze,
    stack,
    transpose,
)

__all__ = [
    "all",
    "any",
    "argmax",
    "argmin",
    "cumprod",
    "cumsum",
    "cumulative_prod",
    "cumulative_sum",
    "logsumexp",
    "max",
    "mean",
    "min",
    "norm",
    "prod",
    "std",
    "sum",
    "var",
]

takes = Signatures(globals())
Axes = tuple[int, ...]


def sum(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DtypeLike | None = None,
    *,
    keepdims: bool = False,
    where: Bool[ArrayLike, "..."] | None = None,
    **unknown: Never,
) -> Tensor:
    """Return the sum; 0 for no elements.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        dtype: to convert x to first, and of the result; default: that of x, 64 bits for integers
            and bool.
        keepdims: whether the reduced axes stay with length 1.
        where: bools that broadcast to x: which elements count; all by default.

    Returns:
        The remaining axes of x.

    Raises:
        DtypeError: where does not hold bools.
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.sum([[1, 2], [3, 4]], 0)
        tensor([4, 6], dtype=int64)
    """
    x, where = takes.sum(x, keepdims, where, unknown)
    if where is not None:
        x = _counted("sum", x, where, 0)
    if dtype is not None:
        x = _converted("sum", x, dtype)
    axes = _axes("sum", axis, x.data.ndim)
    total = sum_array(x.data, axes, keepdims)
    y = record("sum", total, (x,), _sum_backward, (x.data.shape, axes))
    return y if dtype is None else astype(y, dtype, copy=False)


def _sum_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    return (_spread(dy, *saved),)


@tangent_of(_sum_backward)
def _sum_tangent(op: Op, t: Tensor) -> Tensor:
    _, axes = op.saved
    return sum(t, axes).reshape(op.node.shape)


def mean(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DtypeLike | None = None,
    *,
    keepdims: bool = False,
    where: Bool[ArrayLike, "..."] | None = None,
    **unknown: Never,
) -> Tensor:
    """Return the mean, sum(x) / n; NaN for no elements.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        dtype: to convert x to first, and of the result; default: that of x, float64 for integers
            and bool.
        keepdims: whether the reduced axes stay with length 1.
        where: bools that broadcast to x: which elements count; all by default.

    Returns:
        The remaining axes of x.

    Raises:
        DtypeError: where does not hold bools.
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.mean([[1.0, 2.0], [3.0, 6.0]], 1)
        tensor([1.5, 4.5], dtype=float32)
    """
    x, where = takes.mean(x, keepdims, where, unknown)
    if dtype is not None:
        x = _converted("mean", x, dtype)
    if where is not None:
        y = _mean_where(x, where, axis, keepdims)
    else:
        axes = _axes("mean", axis, x.data.ndim)
        array, count = _as_float(x.data), _count(x.data.shape, axes)
        average = _reduce("Mean", array, axes, keepdims, array.dtype, count)
        y = record("mean", average, (x,), _mean_backward, (array.shape, axes, count))
    return y if dtype is None else astype(y, dtype, copy=False)


def _mean_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    shape, axes, count = saved
    each = backend.namespace(dy).asarray(upcast(dy) / (count or 1))  # 0-d results come as scalars
    return (_spread(each, shape, axes),)


@tangent_of(_mean_backward)
def _mean_tangent(op: Op, t: Tensor) -> Tensor:
    _, axes, count = op.saved
    return (mean if count else sum)(t, axes).reshape(op.node.shape)


def var(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DtypeLike | None = None,
    *,
    ddof: float = 0,
    keepdims: bool = False,
    where: Bool[ArrayLike, "..."] | None = None,
    correction: float | None = None,
    **unknown: Never,
) -> Tensor:
    """Return the variance, sum((x - mean(x))^2) / (n - ddof).

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        dtype: to convert x to first.
        ddof: 1 gives the unbiased estimate. Where n <= ddof the result is inf or NaN.
        keepdims: whether the reduced axes stay with length 1.
        where: bools that broadcast to x: which elements count; all by default.
        correction: another name for ddof, as in the array API standard.

    Returns:
        The remaining axes of x, in its dtype; float64 for integers and bool.

    Raises:
        DtypeError: where does not hold bools.
        DeviceError: the operands are on different devices.
        ArgumentError: both ddof and correction are given.
        DtypeError: x has complex numbers.

    Example:
        >>> tg.var([1.0, 2.0, 6.0], ddof=1)
        tensor(7., dtype=float32)
    """
    x, where = takes.var(x, ddof, keepdims, where, correction, unknown)
    return _deviation("var", x, axis, ddof, keepdims, dtype, correction, where)


def std(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DtypeLike | None = None,
    *,
    ddof: float = 0,
    keepdims: bool = False,
    where: Bool[ArrayLike, "..."] | None = None,
    correction: float | None = None,
    **unknown: Never,
) -> Tensor:
    """Return the standard deviation, the square root of `var`; its gradient is 0 where it is 0.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        dtype: to convert x to first.
        ddof: 1 gives the root of the unbiased variance. Where n <= ddof the result is inf or NaN.
        keepdims: whether the reduced axes stay with length 1.
        where: bools that broadcast to x: which elements count; all by default.
        correction: another name for ddof, as in the array API standard.

    Returns:
        The remaining axes of x, in its dtype; float64 for integers and bool.

    Raises:
        DtypeError: where does not hold bools.
        DeviceError: the operands are on different devices.
        ArgumentError: both ddof and correction are given.
        DtypeError: x has complex numbers.

    Example:
        >>> tg.std([[1.0, 3.0], [2.0, 8.0]], axis=1)
        tensor([1., 3.], dtype=float32)
    """
    x, where = takes.std(x, ddof, keepdims, where, correction, unknown)
    return _deviation("std", x, axis, ddof, keepdims, dtype, correction, where)


def _deviation(
    op: str, x: Tensor, axis: Axis, ddof: float, keepdims: bool, dtype: DtypeLike | None,
    correction: float | None, where: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the variance, or its root for `std`."""
    if correction is not None:
        if ddof != 0:
            raise ArgumentError(f"{op}: got ddof={ddof} and correction={correction}, expected one")
        ddof = correction
    if dtype is not None:
        x = _converted(op, x, dtype)
    if is_complex(x.data.dtype):
        raise DtypeError(f"{op}: x has dtype {x.dtype}, expected real numbers")
    if where is not None:
        return _deviation_where(op, x, where, axis, ddof, keepdims)
    axes = _axes(op, axis, x.data.ndim)
    array = _as_float(x.data)
    divisor = _divisor(array.shape, axes, ddof)
    wide = _reduce("Var", array, axes, keepdims, compute_dtype(array.dtype), divisor)
    saved: Saved = (array, axes, ddof)
    if op == "std":
        wide = backend.namespace(array).sqrt(wide)
        saved = (*saved, wide)
    return record(op, cast(wide, array.dtype), (x,), _deviation_backward, saved)


VAR_GRADIENT = Row("var_gradient", "dy x mean divisor", "dy * 2 * (x - mean) / divisor")
STD_GRADIENT = Row(
    "std_gradient",
    "dy x mean std divisor",
    "where(std == 0, 0, dy * (x - mean) / where(std == 0, 1, std * divisor))",
)


def _deviation_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    x, axes, ddof, *std = saved
    divisor = _divisor(x.shape, axes, ddof) or math.nan
    dy, mean = keep_axes(dy, x.shape, axes), _mean_array(x, axes)
    if not std:
        return (VAR_GRADIENT(dy, x, mean, divisor).data,)
    return (STD_GRADIENT(dy, x, mean, keep_axes(std[0], x.shape, axes), divisor).data,)


@tangent_of(_deviation_backward)
def _deviation_tangent(op: Op, t: Tensor) -> Tensor:
    array, axes, ddof, *std = op.saved
    divisor = _divisor(array.shape, axes, ddof) or math.nan
    x = astype(op.input(0, array), compute_dtype(array.dtype), copy=False)
    total = sum(t * (x - mean(x, axes, keepdims=True)), axes).reshape(op.node.shape)
    return total / _nonzero(op, *std) / divisor if std else total * (2 / divisor)


def _nonzero(op: Op, y: Array) -> Tensor:
    """Return the output of an op to divide by: infinity where it is 0, so the quotient is 0."""
    return choose(Tensor(y) == 0, math.inf, op.output(y))


def max(
    x: ArrayLike,
    axis: Axis = None,
    *,
    keepdims: bool = False,
    initial: float | None = None,
    where: Bool[ArrayLike, "..."] | None = None,
    **unknown: Never,
) -> Tensor:
    """Return the maximum; NaN if there is one. The gradient is split equally among equal maxima.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.
        initial: a number that counts as another element. `where` needs it.
        where: bools that broadcast to x: which elements count; all by default.

    Returns:
        The remaining axes of x, in its dtype.

    Raises:
        DtypeError: where does not hold bools.
        DeviceError: the operands are on different devices.
        ShapeError: there are no elements to reduce, and no `initial`.
        ArgumentError: `where` without `initial`.

    Example:
        >>> tg.max([[1, 5], [7, 2]], axis=1, keepdims=True)
        tensor([[5],
                [7]], dtype=int64)
        >>> tg.amax([1, 5], initial=6)
        tensor(6, dtype=int64)
    """
    if initial is not None:
        x = tensor_of("max", "x", x, initial)  # a literal takes its dtype with it
    x, where = takes.max(x, keepdims, initial, where, unknown)
    return _extremum("max", "Max", x, axis, keepdims, initial, where)


def min(
    x: ArrayLike,
    axis: Axis = None,
    *,
    keepdims: bool = False,
    initial: float | None = None,
    where: Bool[ArrayLike, "..."] | None = None,
    **unknown: Never,
) -> Tensor:
    """Return the minimum; NaN if there is one. The gradient is split equally among equal minima.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.
        initial: a number that counts as another element. `where` needs it.
        where: bools that broadcast to x: which elements count; all by default.

    Returns:
        The remaining axes of x, in its dtype.

    Raises:
        DtypeError: where does not hold bools.
        DeviceError: the operands are on different devices.
        ShapeError: there are no elements to reduce, and no `initial`.
        ArgumentError: `where` without `initial`.

    Example:
        >>> tg.min([[1, 5], [7, 2]], axis=1)
        tensor([1, 2], dtype=int64)
        >>> tg.amin([1, 5], initial=0)
        tensor(0, dtype=int64)
    """
    if initial is not None:
        x = tensor_of("min", "x", x, initial)  # a literal takes its dtype with it
    x, where = takes.min(x, keepdims, initial, where, unknown)
    return _extremum("min", "Min", x, axis, keepdims, initial, where)


def _extremum(
    name: str, op: str, x: Tensor, axis: Axis, keepdims: bool, initial: float | None,
    where: Tensor | None,
) -> Tensor:  # fmt: skip
    if initial is not None or where is not None:
        x, axis, keepdims = _with_initial(name, x, axis, keepdims, initial, where)
    axes = _axes(name, axis, x.data.ndim)
    y = _reduce(op, x.data, axes, keepdims, x.data.dtype)
    return record(name, y, (x,), _extremum_backward, (x.data, y, axes))


TIES = Row("ties", "x best", "logical_or(x == best, is_nan(x))")
EQUAL_PARTS = Row("equal_parts", "c dy count", "where(c, dy / count, 0)")


def _extremum_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    x, y, axes = saved
    ties = TIES(x, keep_axes(y, x.shape, axes)).data
    count = sum_array(ties, axes, keepdims=True).astype(compute_dtype(dy.dtype))
    return (EQUAL_PARTS(ties, keep_axes(dy, x.shape, axes), count).data,)


@tangent_of(_extremum_backward)
def _extremum_tangent(op: Op, t: Tensor) -> Tensor:
    x, y, axes = op.saved
    return _mean_of_ties(op, t, TIES(x, keep_axes(y, x.shape, axes)), axes)


def _mean_of_ties(op: Op, t: Tensor, ties: Tensor, axes: Axes) -> Tensor:
    """Return the mean of the tangents of equal extrema."""
    count = sum(ties, axes).data.astype(compute_dtype(t.dtype))
    total = sum(choose(ties, t, 0), axes, dtype=count.dtype)
    return reshape(total / count, op.node.shape)


def prod(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DtypeLike | None = None,
    *,
    keepdims: bool = False,
    where: Bool[ArrayLike, "..."] | None = None,
    **unknown: Never,
) -> Tensor:
    """Return the product; 1 for no elements. The gradient is exact where factors are 0.

    Args:
        x: any shape.
        axis: axes to reduce; all by default.
        dtype: to convert x to first, and of the result; default: that of x, 64 bits for integers
            and bool.
        keepdims: whether the reduced axes stay with length 1.
        where: bools that broadcast to x: which elements count; all by default.

    Returns:
        The remaining axes of x.

    Raises:
        DtypeError: where does not hold bools.
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.prod([[1, 2], [3, 4]], axis=1)
        tensor([ 2, 12], dtype=int64)
    """
    x, where = takes.prod(x, keepdims, where, unknown)
    if where is not None:
        x = _counted("prod", x, where, 1)
    if dtype is not None:
        x = _converted("prod", x, dtype)
    axes = _axes("prod", axis, x.data.ndim)
    product = _reduce("Prod", x.data, axes, keepdims, sum_dtype(x.data.dtype))
    y = record("prod", product, (x,), _prod_backward, (x.data, axes))
    return y if dtype is None else astype(y, dtype, copy=False)


IS_ZERO = Row("is_zero", "x", "x == 0")
WITHOUT_ZEROS = Row("without_zeros", "x", "where(x == 0, 1, x)")
PROD_GRADIENT = Row(
    "prod_gradient",
    "dy x product zeros",
    "where(x == 0, where(zeros == 1, dy * product, 0),"
    " where(zeros == 0, dy * product / where(x == 0, 1, x), 0))",
)


def _prod_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    """Return the product of all other factors, from that of the nonzero ones and the zero count."""
    x, axes = saved
    x = upcast(x)
    product = _reduce("Prod", WITHOUT_ZEROS(x).data, axes, True, x.dtype)
    zeros = sum_array(IS_ZERO(x).data, axes, keepdims=True).astype(x.dtype)
    return (PROD_GRADIENT(keep_axes(dy, x.shape, axes), x, product, zeros).data,)


@tangent_of(_prod_backward)
def _prod_tangent(op: Op, t: Tensor) -> Tensor | None:
    """Multiply pairs of factors, then pairs of products: without a division, exact at 0."""
    array, axes = op.saved
    order = (*axes, *[axis for axis in range(array.ndim) if axis not in axes])
    shape = (_count(array.shape, axes), *[array.shape[axis] for axis in order[len(axes) :]])

    def product(x: Tensor) -> Tensor:
        x = astype(x, compute_dtype(array.dtype), copy=False)
        x = reshape(transpose(x, order), shape)
        while (half := x.shape[0] // 2) > 0:
            x = concatenate([x[:half] * x[half : 2 * half], x[2 * half :]])
        return sum(x, 0).reshape(op.node.shape)

    return tangents_along(product, [op.input(0, array)], [t])[0]


def argmax(
    x: ArrayLike, axis: SupportsIndex | None = None, *, keepdims: bool = False, **unknown: Never
) -> Tensor:
    """Return the index of the first maximum or NaN, int64; into the flattened x without an axis.

    Args:
        x: any shape.
        axis: the axis to search; None searches the flattened x.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, int64; without a gradient.

    Raises:
        ShapeError: there are no elements to reduce.

    Example:
        >>> tg.argmax([[1, 5, 5], [7, 2, 0]], axis=1)
        tensor([1, 0], dtype=int64)
    """
    (x,) = takes.argmax(x, keepdims, unknown)
    return _arg("argmax", "ArgMax", x, axis, keepdims)


def argmin(
    x: ArrayLike, axis: SupportsIndex | None = None, *, keepdims: bool = False, **unknown: Never
) -> Tensor:
    """Return the index of the first minimum or NaN, int64; into the flattened x without an axis.

    Args:
        x: any shape.
        axis: the axis to search; None searches the flattened x.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, int64; without a gradient.

    Raises:
        ShapeError: there are no elements to reduce.

    Example:
        >>> tg.argmin([[1, 5, 5], [7, 2, 0]])
        tensor(5, dtype=int64)
    """
    (x,) = takes.argmin(x, keepdims, unknown)
    return _arg("argmin", "ArgMin", x, axis, keepdims)


def _arg(name: str, op: str, x: Tensor, axis: SupportsIndex | None, keepdims: bool) -> Tensor:
    ndim = x.data.ndim
    axes = _axes(name, None, ndim) if axis is None else (axis_index(name, axis, ndim),)
    return Tensor(_reduce(op, x.data, axes, keepdims, int64))


def any(
    x: ArrayLike,
    axis: Axis = None,
    *,
    keepdims: bool = False,
    where: Bool[ArrayLike, "..."] | None = None,
    **unknown: Never,
) -> Tensor:
    """Return whether any element is true (not 0); False for no elements.

    Args:
        x: any shape and dtype.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.
        where: bools that broadcast to x: which elements count; all by default.

    Returns:
        The remaining axes of x, bool.

    Raises:
        DtypeError: where does not hold bools.
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.any([[0, 1], [0, 0]], axis=1)
        tensor([ True, False], dtype=bool)
    """
    x, where = takes.any(x, keepdims, where, unknown)
    x = x if where is None else _counted("any", x, where, 0)
    axes = _axes("any", axis, x.data.ndim)
    return Tensor(_reduce("Any", x.data, axes, keepdims, bool_))


def all(
    x: ArrayLike,
    axis: Axis = None,
    *,
    keepdims: bool = False,
    where: Bool[ArrayLike, "..."] | None = None,
    **unknown: Never,
) -> Tensor:
    """Return whether all elements are true (not 0); True for no elements.

    Args:
        x: any shape and dtype.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.
        where: bools that broadcast to x: which elements count; all by default.

    Returns:
        The remaining axes of x, bool.

    Raises:
        DtypeError: where does not hold bools.
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.all([[0, 1], [2, 3]], axis=1)
        tensor([False,  True], dtype=bool)
    """
    x, where = takes.all(x, keepdims, where, unknown)
    x = x if where is None else _counted("all", x, where, 1)
    axes = _axes("all", axis, x.data.ndim)
    return Tensor(_reduce("All", x.data, axes, keepdims, bool_))


def logsumexp(
    x: Real[ArrayLike, "..."], axis: Axis = None, *, keepdims: bool = False, **unknown: Never
) -> Tensor:
    """Return log(sum(exp(x))) without overflow; -inf for no elements.

    The gradient is softmax(x), NaN at what makes the result infinite: an inf, or all that is -inf.

    Args:
        x: any shape, real numbers.
        axis: axes to reduce; all by default.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, in its dtype; float64 for integers and bool.

    Raises:
        DtypeError: x holds complex numbers.

    Example:
        >>> tg.logsumexp([1000.0, 1000.0]).round(3)
        tensor(1000.693, dtype=float32)
    """
    (x,) = takes.logsumexp(x, keepdims, unknown)
    return _real("logsumexp", "LogSumExp", x, axis, keepdims, _logsumexp_backward)


def _real(
    name: str, op: str, x: Tensor, axis: Axis, keepdims: bool, backward: Any, *options: Any
) -> Tensor:
    """Return a reduction of real numbers to floats, whose backward needs the unrounded result."""
    axes = _axes(name, axis, x.data.ndim)
    array = _as_float(x.data)
    wide = _reduce(op, array, axes, keepdims, compute_dtype(array.dtype))
    y = cast(wide, array.dtype)
    return record(name, y, (x,), backward, (array, wide, axes, *options))


LOGSUMEXP_GRADIENT = Row("logsumexp_gradient", "dy x value", "dy * exp(x - value)")


def _logsumexp_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    x, y, axes = saved
    return (LOGSUMEXP_GRADIENT(keep_axes(dy, x.shape, axes), x, keep_axes(y, x.shape, axes)).data,)


@tangent_of(_logsumexp_backward)
def _logsumexp_tangent(op: Op, t: Tensor) -> Tensor:
    array, wide, axes = op.saved
    x, y = op.input(0, array), _kept(op.output(wide), array.shape, axes)
    return sum(t * exp(x - y), axes).reshape(op.node.shape)


def _kept(y: Tensor, shape: Shape, axes: Axes) -> Tensor:
    """Return the result of a reduction with the reduced axes, as of length 1."""
    return reshape(y, [1 if axis in axes else n for axis, n in enumerate(shape)])


def norm(
    x: Real[ArrayLike, "..."],
    axis: Axis = None,
    *,
    ord: int | float = 2,
    keepdims: bool = False,
    **unknown: Never,
) -> Tensor:
    """Return the norm of x as a vector; 0 for no elements. The gradient at 0 is 0.

    Args:
        x: any shape, real numbers.
        axis: axes to reduce; all by default.
        ord: 1 for sum(|x|), 2 for sqrt(sum(x^2)), inf for max(|x|).
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The remaining axes of x, in its dtype; float64 for integers and bool.

    Raises:
        DtypeError: x holds complex numbers.
        ArgumentError: ord is none of these.

    Example:
        >>> tg.norm([[3.0, 4.0], [0.0, -2.0]], axis=1)
        tensor([5., 2.], dtype=float32)
    """
    (x,) = takes.norm(x, keepdims, unknown)
    if not isinstance(ord, (int, float, np.number)) or ord not in _NORMS:
        raise ArgumentError(f"norm: ord is {ord!r}, expected 1, 2 or inf")
    return _real("norm", _NORMS[ord], x, axis, keepdims, _norm_backward, ord)


_NORMS = {1: "NormOne", 2: "NormTwo", math.inf: "NormMax"}
NORM_ONE_GRADIENT = Row("norm_gradient", "dy x", "dy * sign(x)")
NORM_TWO_GRADIENT = Row(
    "norm_gradient", "dy x norm", "where(norm == 0, 0, dy * x / where(norm == 0, 1, norm))"
)
NORM_MAX_TIES = Row("norm_ties", "x norm", "logical_or(absolute(x) == norm, is_nan(x))")
NORM_MAX_GRADIENT = Row("norm_gradient", "c dy x count", "where(c, dy * sign(x) / count, 0)")


def _norm_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    x, y, axes, ord = saved
    dy, y = keep_axes(dy, x.shape, axes), keep_axes(y, x.shape, axes)
    if ord == 1:
        return (NORM_ONE_GRADIENT(dy, x).data,)
    if ord == 2:
        return (NORM_TWO_GRADIENT(dy, x, y).data,)
    ties = NORM_MAX_TIES(x, y).data
    count = sum_array(ties, axes, keepdims=True).astype(y.dtype)
    return (NORM_MAX_GRADIENT(ties, dy, x, count).data,)


@tangent_of(_norm_backward)
def _norm_tangent(op: Op, t: Tensor) -> Tensor:
    array, wide, axes, ord = op.saved
    if ord == 2:
        y = _kept(_nonzero(op, wide), array.shape, axes)
        return sum(t * (op.input(0, array) / y), axes).reshape(op.node.shape)
    t = t * sign(Tensor(array))
    if ord == 1:
        return sum(t, axes).reshape(op.node.shape)
    ties = NORM_MAX_TIES(array, keep_axes(wide, array.shape, axes))
    return _mean_of_ties(op, t, ties, axes)


def cumsum(
    x: ArrayLike,
    axis: SupportsIndex | None = None,
    dtype: DtypeLike | None = None,
    **unknown: Never,
) -> Tensor:
    """Return the running sums along an axis, y[i] = x[0] + ... + x[i].

    Args:
        x: any shape.
        axis: the axis to sum along; None sums over the flattened x.
        dtype: to convert x to first, and of the result; default: that of x, 64 bits for integers
            and bool.

    Returns:
        The shape of x (one axis without `axis`).

    Example:
        >>> tg.cumsum([1, 2, 3])
        tensor([1, 3, 6], dtype=int64)
    """
    (x,) = takes.cumsum(x, unknown)
    if dtype is not None:
        x = _converted("cumsum", x, dtype)
    array, place = along("cumsum", x.data, axis)
    sums = _cumsum_array(array, place)
    y = record("cumsum", sums, (x,), _cumsum_backward, (x.data.shape, place))
    return y if dtype is None else astype(y, dtype, copy=False)


def _cumsum_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    shape, axis = saved
    return (_cumsum_from_end(upcast(dy), axis).reshape(shape),)


@tangent_of(_cumsum_backward)
def _cumsum_tangent(op: Op, t: Tensor) -> Tensor:
    return cumsum(t.reshape(op.node.shape), op.saved[1])


def _cumsum_from_end(x: Array, axis: int) -> Array:
    flip = backend.namespace(x).flip
    return flip(_cumsum_array(flip(x, axis), axis), axis)


def cumprod(
    x: ArrayLike,
    axis: SupportsIndex | None = None,
    dtype: DtypeLike | None = None,
    **unknown: Never,
) -> Tensor:
    """Return the running products along an axis, y[i] = x[0] * ... * x[i].

    The gradient is exact where factors are 0.

    Args:
        x: any shape.
        axis: the axis to multiply along; None multiplies over the flattened x.
        dtype: to convert x to first, and of the result; default: that of x, 64 bits for integers
            and bool.

    Returns:
        The shape of x (one axis without `axis`).

    Example:
        >>> tg.cumprod([[1, 2, 3], [4, 5, 6]], axis=1)
        tensor([[  1,   2,   6],
                [  4,  20, 120]], dtype=int64)
    """
    (x,) = takes.cumprod(x, unknown)
    if dtype is not None:
        x = _converted("cumprod", x, dtype)
    array, place = along("cumprod", x.data, axis)
    products = _cumprod_array(array, place)
    y = record("cumprod", products, (x,), _cumprod_backward, (x.data.shape, array, place))
    return y if dtype is None else astype(y, dtype, copy=False)


FIRST_ZERO = Row("first_zero", "x count", "logical_and(x == 0, count == 1)")
WITHOUT_FIRST = Row("without_first", "c x", "where(c, 1, x)")
CUMPROD_GRADIENT = Row(
    "cumprod_gradient",
    "c x count total at_zero",
    "where(c, at_zero, where(count > 0, 0, total / where(x == 0, 1, x)))",
)


def _cumprod_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    """Return sum_{j >= i} dy[j] y[j] / x[i]; for the first 0, with 1 in its place in y."""
    shape, x, axis = saved
    x, dy = upcast(x), upcast(dy)
    count = _cumsum_array(x == 0, axis)
    first = FIRST_ZERO(x, count).data
    total = _cumsum_from_end(dy * _cumprod_array(x, axis), axis)
    at_zero = _cumsum_from_end(dy * _cumprod_array(WITHOUT_FIRST(first, x).data, axis), axis)
    return (CUMPROD_GRADIENT(first, x, count, total, at_zero).data.reshape(shape),)


@tangent_of(_cumprod_backward)
def _cumprod_tangent(op: Op, t: Tensor) -> Tensor | None:
    shape, array, axis = op.saved

    def products(x: Tensor) -> Tensor:
        x = astype(x, compute_dtype(array.dtype), copy=False).reshape(array.shape)
        return moveaxis(_running_products(moveaxis(x, axis, 0)), 0, axis)

    return tangents_along(products, [op.input(0, array.reshape(shape))], [t])[0]


def _running_products(x: Tensor) -> Tensor:
    """Return running products along the first axis, without a division: exact at 0.

    Those up to odd places are the running products of pairs; one more factor gives the others.
    """
    half, others = divmod(x.shape[0], 2)
    if not half:
        return x
    odd = _running_products(x[: 2 * half : 2] * x[1::2])
    even = concatenate([x[:1], odd[: half - 1 + others] * x[2::2]])
    pairs = stack([even[:half], odd], 1).reshape(2 * half, *x.shape[1:])
    return concatenate([pairs, even[half:]])


def cumulative_sum(
    x: ArrayLike,
    *,
    axis: SupportsIndex | None = None,
    dtype: DtypeLike | None = None,
    include_initial: bool = False,
    **unknown: Never,
) -> Tensor:
    """Return `cumsum` along an axis, which x of several axes needs.

    Args:
        x: any shape; a number counts as one axis.
        axis: the axis to sum along.
        dtype: to convert x to first, and of the result; default: that of x, 64 bits for integers
            and bool.
        include_initial: whether a 0 comes first.

    Returns:
        The shape of x, one element longer along the axis with `include_initial`.

    Raises:
        ArgumentError: axis is None for x of several axes.

    Example:
        >>> tg.cumulative_sum([1, 2, 3], include_initial=True)
        tensor([0, 1, 3, 6], dtype=int64)
    """
    (x,) = takes.cumulative_sum(x, include_initial, unknown)
    return _cumulative("cumulative_sum", x, axis, dtype, include_initial)


def cumulative_prod(
    x: ArrayLike,
    *,
    axis: SupportsIndex | None = None,
    dtype: DtypeLike | None = None,
    include_initial: bool = False,
    **unknown: Never,
) -> Tensor:
    """Return `cumprod` along an axis, which x of several axes needs.

    Args:
        x: any shape; a number counts as one axis.
        axis: the axis to multiply along.
        dtype: to convert x to first, and of the result; default: that of x, 64 bits for integers
            and bool.
        include_initial: whether a 1 comes first.

    Returns:
        The shape of x, one element longer along the axis with `include_initial`.

    Raises:
        ArgumentError: axis is None for x of several axes.

    Example:
        >>> tg.cumulative_prod([2, 3, 4], include_initial=True)
        tensor([ 1,  2,  6, 24], dtype=int64)
    """
    (x,) = takes.cumulative_prod(x, include_initial, unknown)
    return _cumulative("cumulative_prod", x, axis, dtype, include_initial)


def _cumulative(
    op: str, x: Tensor, axis: SupportsIndex | None, dtype: Any, include_initial: bool
) -> Tensor:
    running, initial = (cumsum, 0) if op == "cumulative_sum" else (cumprod, 1)
    if axis is None and x.ndim > 1:
        raise ArgumentError(f"{op}: axis is None for x of {x.ndim} axes, expected an axis")
    if axis is None and not x.ndim:
        x = x[None]
    place = axis_index(op, 0 if axis is None else axis, x.ndim)
    y = running(x, place, dtype)
    if include_initial:
        y = pad(y, [(int(i == place), 0) for i in range(y.ndim)], constant_values=initial)
    return y


def _converted(op: str, x: Tensor, dtype: DtypeLike) -> Tensor:
    """Return x as a dtype; raise ArgumentError where PyTorch's `keepdim` stands in its place."""
    check_no_number(op, dtype, "keepdims and ddof are given by name")
    return astype(x, dtype, copy=False)


def _counted(op: str, x: Tensor, where: Tensor, otherwise: float) -> Tensor:
    """Return x with a number in the place of elements that do not count.

    Raises:
        ShapeError: `where` does not broadcast to x.
    """
    along_x = x.shape[x.ndim - where.ndim :] if where.ndim <= x.ndim else ()
    if where.ndim > x.ndim or not builtins.all(
        n in (1, most) for n, most in zip(where.shape, along_x, strict=True)
    ):
        raise ShapeError(
            f"{op}: where has shape {where.shape}, expected one that broadcasts to {x.shape}"
        )
    return choose(where, x, x.dtype.type(otherwise))


def _widened(x: Tensor) -> tuple[Tensor, Dtype]:
    """Return x to compute with in several steps, and the dtype of the result."""
    dtype = _as_float(x.data.reshape(-1)[:0]).dtype
    return astype(x, compute_dtype(dtype), copy=False), dtype


def _mean_of(op: str, x: Tensor, where: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return the mean of what counts and how many elements count; reduced axes are kept."""
    ones = Tensor(backend.namespace(x.data).ones(x.shape, x.dtype))
    count = sum(_counted(op, ones, where, 0), axis, keepdims=True)
    return sum(_counted(op, x, where, 0), axis, keepdims=True) / count, count


def _finished(op: str, y: Tensor, axis: Axis, keepdims: bool, dtype: Dtype) -> Tensor:
    """Return a result whose reduced axes were kept, rounded."""
    y = y if keepdims else squeeze(y, axis_tuple(op, axis, y.ndim))
    return astype(y, dtype, copy=False)


def _mean_where(x: Tensor, where: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    """Return the mean of what counts."""
    wide, dtype = _widened(x)
    mean, _ = _mean_of("mean", wide, where, axis)
    return _finished("mean", mean, axis, keepdims, dtype)


def _deviation_where(
    op: str, x: Tensor, where: Tensor, axis: Axis, ddof: float, keepdims: bool
) -> Tensor:
    """Return the variance of what counts, or its root, whose gradient is 0 where it is 0."""
    wide, dtype = _widened(x)
    mean, count = _mean_of(op, wide, where, axis)
    centered = wide - mean
    total = sum(_counted(op, centered * centered, where, 0), axis, keepdims=True)
    y = total / choose(count > ddof, count - ddof, 0.0)
    if op == "std":
        zero = y.data == 0
        y = choose(zero, 0.0, sqrt(choose(zero, 1.0, y)))
    return _finished(op, y, axis, keepdims, dtype)


def _with_initial(
    op: str, x: Tensor, axis: Axis, keepdims: bool, initial: float | None, where: Tensor | None
) -> tuple[Tensor, Axis, bool]:
    """Return x with another element along an axis, and with it in the place of uncounted ones."""
    if initial is None:
        raise ArgumentError(f"{op}: initial is None, expected a number with `where`")
    check_holds(op, "initial", array_beside(op, "initial", initial, x), x.data.dtype)
    if where is not None:
        x = _counted(op, x, where, initial)
    axes = axis_tuple(op, axis, x.ndim)
    if not axes:  # each element alone
        x, axes, axis, keepdims = x[None], (0,), 0, False
    lengths = [(0, int(place == axes[0])) for place in range(x.ndim)]
    return pad(x, lengths, constant_values=initial), axis, keepdims


def _axes(op: str, axis: Axis, ndim: int) -> Axes:
    """Return the axes to reduce in ascending order."""
    if axis is None:
        return tuple(range(ndim))
    if type(axis) is int and -ndim <= axis < ndim:
        return (axis % ndim,)
    return tuple(sorted(axis_tuple(op, axis, ndim)))


def _reduce(
    op: str, x: Array, axes: Axes, keepdims: bool, dtype: Dtype, parameter: float = 0
) -> Array:
    """Run an operation of reduce.cu, or its NumPy reference."""
    if type(x) is np.ndarray and x.size:
        y = np.asarray(_NUMPY[op](upcast(x), axes, keepdims, parameter))
        return y if y.dtype is dtype else cast(y, dtype)
    if op in _COMPLEX and is_complex(x.dtype):
        return getattr(backend.namespace(x), _COMPLEX[op])(x, axes, keepdims=keepdims)
    y = (reduce_cuda if x.size else _reduce_empty)(op, x, axes, dtype, parameter)
    return keep_axes(y, x.shape, axes) if keepdims else y


def _reduce_empty(op: str, x: Array, axes: Axes, dtype: Dtype, parameter: float) -> Array:
    """Return the result of an operation on an array without elements."""
    shape = tuple([n for axis, n in enumerate(x.shape) if axis not in axes])
    if math.prod(shape) and op not in _OF_NOTHING:
        raise ShapeError(f"{op.lower()}: x has shape {x.shape}, expected elements along {axes}")
    value = 0 if op == "Var" and parameter > 0 else _OF_NOTHING.get(op, 0)
    return backend.namespace(x).full(shape, value, dtype)


_COMPLEX = {"Mean": "mean", "Prod": "prod", "Any": "any", "All": "all"}
_OF_NOTHING = {
    "Prod": 1, "Mean": math.nan, "Var": math.nan, "LogSumExp": -math.inf, "Any": False,
    "All": True, "NormOne": 0, "NormTwo": 0, "NormMax": 0,
}  # fmt: skip


def _divisor(shape: Shape, axes: Axes, ddof: float) -> float:
    divisor = float(_count(shape, axes) - ddof)
    return divisor if divisor > 0 else 0.0


def _mean_array(x: Array, axes: Axes) -> Array:
    """Return the mean in the compute dtype, reduced axes kept."""
    total = sum_array(x, axes, keepdims=True, dtype=compute_dtype(x.dtype))
    return total / (_count(x.shape, axes) or 1)


def _cumsum_array(x: Array, axis: int) -> Array:
    dtype = sum_dtype(x.dtype)
    if type(x) is np.ndarray:
        y = np.cumsum(upcast(x), axis)
        return cast(y, dtype)
    return x.cumsum(axis) if is_complex(dtype) else cumsum_cuda(x, axis, dtype)


def _cumprod_array(x: Array, axis: int) -> Array:
    return cast(backend.namespace(x).cumprod(upcast(x), axis), sum_dtype(x.dtype))


def _as_float(x: Array) -> Array:
    """Return integers and bools as float64; floats and complex numbers as they are."""
    return x.astype(float64) if x.dtype.kind in "biu" else x


def _count(shape: Shape, axes: Axes) -> int:
    return math.prod(map(shape.__getitem__, axes))


def _spread(dy: Array, shape: Shape, axes: Axes) -> Array:
    """Return dy in the shape before reduction, as a view where that is cheaper."""
    dy = keep_axes(dy, shape, axes)
    if type(dy) is not np.ndarray:
        return backend.cupy.broadcast_to(dy, shape)
    if math.prod(shape) > _SMALL:
        return np.broadcast_to(dy, shape)
    dx = np.empty(shape, dy.dtype)
    dx[...] = dy
    return dx


_SMALL = 4096  # up to here, NumPy copies faster than it makes a view that broadcasts


def _var_numpy(x: Array, axes: Axes, keepdims: bool, divisor: float) -> Array:
    centered = x - x.mean(axes, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (centered * centered).sum(axes, keepdims=keepdims) / x.dtype.type(divisor)


def _logsumexp_numpy(x: Array, axes: Axes, keepdims: bool, _: float) -> Array:
    peak = x.max(axes, keepdims=True)
    shift = np.where(np.isfinite(peak), peak, 0)
    with np.errstate(divide="ignore", over="ignore"):  # log(0); beside an infinite peak
        y = np.log(np.exp(x - shift).sum(axes, keepdims=True)) + shift
    return y if keepdims else y.squeeze(axes)


def _single(axes: Axes) -> int | None:
    """Return the only axis, or None for all."""
    return axes[0] if len(axes) == 1 else None


def _folded(function: Any) -> Any:
    return lambda x, axes, keepdims, _: function.reduce(x, axes, None, None, keepdims)


# The operations of reduce.cu: (x in its compute dtype, axes, keepdims, parameter).
_NUMPY: dict[str, Any] = {
    "Mean": lambda x, axes, keepdims, n: x.sum(axes, keepdims=keepdims) / x.dtype.type(n),
    "Prod": _folded(np.multiply),
    "Max": _folded(np.maximum),
    "Min": _folded(np.minimum),
    "ArgMax": lambda x, axes, keepdims, _: np.argmax(x, _single(axes), keepdims=keepdims),
    "ArgMin": lambda x, axes, keepdims, _: np.argmin(x, _single(axes), keepdims=keepdims),
    "Any": _folded(np.logical_or),
    "All": _folded(np.logical_and),
    "Var": _var_numpy,
    "LogSumExp": _logsumexp_numpy,
    "NormOne": lambda x, axes, keepdims, _: np.abs(x).sum(axes, keepdims=keepdims),
    "NormTwo": lambda x, axes, keepdims, _: np.sqrt((x * x).sum(axes, keepdims=keepdims)),
    "NormMax": lambda x, axes, keepdims, _: np.abs(x).max(axes, keepdims=keepdims),
}
