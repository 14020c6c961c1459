"""Creating tensors: from values, zeros, ranges, one-hot rows. Tests: tests/ops/test_creation.py.

Without a dtype, Python floats and `zeros(3)` are float32; Python ints are int64, bools
bool, and arrays keep theirs. `device` is "cpu", "cuda" or "cuda:N".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, SupportsIndex

import numpy as np

from tensorgrad.compat.interop import from_dlpack
from tensorgrad.core import backend
from tensorgrad.core.arrays import array_of
from tensorgrad.core.backend import Array, namespace_on
from tensorgrad.core.checks import check_no_length, shape_of
from tensorgrad.core.dtypes import (
    Dtype,
    DtypeLike,
    as_dtype,
    bool_,
    compute_dtype,
    float32,
    float64,
    int64,
    is_float,
    uint64,
)
from tensorgrad.core.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.core.operands import constant_of, integer_array, leaves_of, values_of
from tensorgrad.core.signature import Interval, Shaped, Signatures, Size
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.ops.arguments import check_holds, check_indices
from tensorgrad.ops.elementwise import where
from tensorgrad.ops.shape import astype, stack, to
from tensorgrad.ops.shape import copy as copied

__all__ = [
    "arange",
    "asarray",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "geomspace",
    "identity",
    "indices",
    "linspace",
    "logspace",
    "one_hot",
    "ones",
    "ones_like",
    "tensor",
    "tril",
    "triu",
    "zeros",
    "zeros_like",
]

takes = Signatures(globals())
Shapes = int | Sequence[int]
_MOST = 2**60  # elements: more is a mistake, whatever the memory


def tensor(
    value: Any,
    dtype: DtypeLike | None = None,
    *,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a new tensor with a copy of the value; the gradient of a tensor flows back.

    Args:
        value: a number, nested lists of numbers, an array or a tensor.
        dtype: default: the value's own; of Python numbers float32, int64 or bool.
        device: default: where the value is; the CPU for numbers and lists.
        requires_grad: whether backward computes its gradient.

    Returns:
        In the shape of the value.

    Raises:
        ShapeError: nested lists of unequal length.
        DtypeError: the library has no such dtype, or lists hold tensors (stack them instead).
        GradError: `requires_grad` of the copy of a tensor that requires one itself.

    Example:
        >>> tg.tensor([1.0, 2.0], requires_grad=True)
        tensor([1., 2.], dtype=float32, requires_grad=True)
        >>> tg.array([[1, 2], [3, 4]])
        tensor([[1, 2],
                [3, 4]], dtype=int64)
    """
    if isinstance(value, Tensor):
        if requires_grad:
            constant_of("tensor", "value", value, "a new leaf is outside its graph")
        if value.requires_grad:
            copy = astype(value, value.dtype if dtype is None else dtype)
            return copy if device is None else to(copy, device)
    array = value.data if isinstance(value, Tensor) else values_of("tensor", "value", value, dtype)
    target = array.dtype if dtype is None else as_dtype(dtype)
    if device is not None:
        array = backend.to_device(array, device)
    return Tensor(array.astype(target), requires_grad)


def asarray(
    value: Any,
    dtype: DtypeLike | None = None,
    *,
    device: str | None = None,
    copy: bool | None = None,
) -> Tensor:
    """Return the value as a tensor that shares its memory where dtype and device allow.

    A tensor is returned as it is, or converted so that its gradient flows back.

    Args:
        value: as for `tensor`; also an object with `__dlpack__`, and lists that hold tensors, which
            are stacked.
        dtype: default: the value's own; of Python numbers float32, int64 or bool.
        device: default: where the value is; the CPU for numbers and lists.
        copy: True always copies, False raises an error where a copy is needed.

    Returns:
        In the shape of the value.

    Raises:
        ArgumentError: a copy is needed.
        ShapeError, DtypeError: as in `tensor`.

    Example:
        >>> values = np.zeros(3, "float32")
        >>> x = tg.asarray(values)
        >>> values[0] = 1
        >>> x
        tensor([1., 0., 0.], dtype=float32)
    """
    takes.asarray(copy)
    if isinstance(value, (list, tuple)) and any([isinstance(v, Tensor) for v in leaves_of(value)]):
        value = stack([asarray(part) for part in value])
    if not isinstance(value, Tensor):
        foreign = hasattr(value, "__dlpack__") and not hasattr(value, "__array__")
        value = from_dlpack(value) if foreign else value
    x = value if isinstance(value, Tensor) else Tensor(values_of("asarray", "value", value, dtype))
    y = x if dtype is None else astype(x, dtype, copy=False)
    y = y if device is None else to(y, device)
    fresh = y is not x or not (isinstance(value, Tensor) or backend.is_array(value))
    if copy is False and fresh:
        raise ArgumentError("asarray: copy is False, expected a value that needs no copy")
    return copied(y) if copy and not fresh else y


def _float_dtype(dtype: DtypeLike | None) -> Dtype:
    """Return the dtype, float32 by default."""
    return float32 if dtype is None else as_dtype(dtype)


def zeros(
    shape: Shapes,
    dtype: DtypeLike | None = None,
    *,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor of zeros.

    Args:
        shape: the lengths, or one length.
        dtype: float32 by default.
        device: "cpu", the default, "cuda" or "cuda:N".
        requires_grad: whether backward computes its gradient.

    Returns:
        A tensor of that shape.

    Example:
        >>> tg.zeros((2, 3))
        tensor([[0., 0., 0.],
                [0., 0., 0.]], dtype=float32)
    """
    check_no_length("zeros", "shape", dtype)
    data = namespace_on("cpu" if device is None else device).zeros(
        shape_of("zeros", shape), _float_dtype(dtype)
    )
    return Tensor(data, requires_grad)


def ones(
    shape: Shapes,
    dtype: DtypeLike | None = None,
    *,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor of ones.

    Args:
        shape: the lengths, or one length.
        dtype: float32 by default.
        device: "cpu", the default, "cuda" or "cuda:N".
        requires_grad: whether backward computes its gradient.

    Returns:
        A tensor of that shape.

    Example:
        >>> tg.ones(3, "int64")
        tensor([1, 1, 1], dtype=int64)
    """
    check_no_length("ones", "shape", dtype)
    return full(
        shape_of("ones", shape), 1, _float_dtype(dtype), device=device, requires_grad=requires_grad
    )


def empty(
    shape: Shapes,
    dtype: DtypeLike | None = None,
    *,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor whose values are whatever the memory held.

    Args:
        shape: the lengths, or one length.
        dtype: float32 by default.
        device: "cpu", the default, "cuda" or "cuda:N".
        requires_grad: whether backward computes its gradient.

    Returns:
        A tensor of that shape.

    Example:
        >>> tg.empty((2, 3)).shape
        (2, 3)
    """
    check_no_length("empty", "shape", dtype)
    data = namespace_on("cpu" if device is None else device).empty(
        shape_of("empty", shape), _float_dtype(dtype)
    )
    return Tensor(data, requires_grad)


def full(
    shape: Shapes,
    fill_value: ArrayLike,
    dtype: DtypeLike | None = None,
    *,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor filled with one number.

    Args:
        shape: the lengths, or one length.
        fill_value: the number.
        dtype: default: that of fill_value; of Python numbers float32, int64 or bool.
        device: "cpu", the default, "cuda" or "cuda:N".
        requires_grad: whether backward computes its gradient.

    Returns:
        A tensor of that shape.

    Raises:
        ShapeError: fill_value is more than one number.
        DtypeError: the dtype holds integers, fill_value is a float.
        ArgumentError: the dtype does not hold the integer.
        GradError: fill_value requires a gradient.

    Example:
        >>> tg.full((2, 2), 7.0)
        tensor([[7., 7.],
                [7., 7.]], dtype=float32)
    """
    lengths = shape_of("full", shape)
    check_no_length("full", "shape", dtype)
    if isinstance(fill_value, Tensor):
        why = "a new tensor is outside its graph; broadcast_to() keeps it"
        fill_value = constant_of("full", "fill_value", fill_value, why)
    fill = backend.to_numpy(values_of("full", "fill_value", fill_value, dtype))
    if fill.shape != ():
        raise ShapeError(f"full: fill_value has shape {fill.shape}, expected one number")
    target = fill.dtype if dtype is None else as_dtype(dtype)
    if dtype is not None:
        number = backend.to_numpy(array_of("full", "fill_value", fill_value))
        check_holds("full", "fill_value", number, target)
    data = namespace_on("cpu" if device is None else device).full(
        lengths, fill.item(), compute_dtype(target)
    )
    if is_float(target) and fill == 0 and np.signbit(fill):
        data = -abs(data)  # CuPy fills with +0
    return Tensor(data.astype(target, copy=False), requires_grad)


def zeros_like(
    x: ArrayLike,
    dtype: DtypeLike | None = None,
    *,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return zeros with the shape, dtype and device of x.

    Args:
        x: any shape and dtype.
        dtype: another dtype than that of x.
        device: another device than that of x.
        requires_grad: whether backward computes the gradient of the result.

    Returns:
        In the shape of x.

    Example:
        >>> tg.zeros_like([1.5, 2.5])
        tensor([0., 0.], dtype=float32)
    """
    return full_like(x, 0, dtype, device=device, requires_grad=requires_grad)


def ones_like(
    x: ArrayLike,
    dtype: DtypeLike | None = None,
    *,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return ones with the shape, dtype and device of x.

    Args:
        x: any shape and dtype.
        dtype: another dtype than that of x.
        device: another device than that of x.
        requires_grad: whether backward computes the gradient of the result.

    Returns:
        In the shape of x.

    Example:
        >>> tg.ones_like([[4, 5]])
        tensor([[1, 1]], dtype=int64)
    """
    return full_like(x, 1, dtype, device=device, requires_grad=requires_grad)


def empty_like(
    x: ArrayLike,
    dtype: DtypeLike | None = None,
    *,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor with the shape, dtype and device of x and whatever the memory held.

    Args:
        x: any shape and dtype.
        dtype: another dtype than that of x.
        device: another device than that of x.
        requires_grad: whether backward computes the gradient of the result.

    Returns:
        In the shape of x.

    Example:
        >>> tg.empty_like([[4, 5]], dtype="float16").dtype
        dtype('float16')
    """
    (x,) = takes.empty_like(x, requires_grad)
    device = x.device if device is None else device
    dtype = x.dtype if dtype is None else dtype
    return empty(x.shape, dtype, device=device, requires_grad=requires_grad)


def full_like(
    x: ArrayLike,
    fill_value: Any,
    dtype: DtypeLike | None = None,
    *,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor filled with one number, with the shape, dtype and device of x.

    Args:
        x: any shape and dtype.
        fill_value: the number; errors are those of `full`.
        dtype: another dtype than that of x.
        device: another device than that of x.
        requires_grad: whether backward computes the gradient of the result.

    Returns:
        In the shape of x.

    Example:
        >>> tg.full_like([1.5, 2.5], 3)
        tensor([3., 3.], dtype=float32)
    """
    (x,) = takes.full_like(x, requires_grad)
    device = x.device if device is None else device
    dtype = x.dtype if dtype is None else dtype
    return full(x.shape, fill_value, dtype, device=device, requires_grad=requires_grad)


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: DtypeLike | None = None,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return start, start + step, ... up to, but without, `stop`; arange(n) counts from 0.

    Args:
        start: the first number; the end where it is the only one, counted from 0.
        stop: the end, which the result does not hold.
        step: from one number to the next, not 0.
        dtype: default: int64 where all are integers, else float32.
        device: "cpu", the default, "cuda" or "cuda:N".
        requires_grad: whether backward computes its gradient.

    Returns:
        One axis of ceil((stop - start) / step) numbers, none where that is negative.

    Raises:
        ArgumentError: step is 0, a number is not finite, there are 2^60 or more of them, or
            the dtype does not hold all of them.
        DtypeError: more than two of bool.

    Example:
        >>> tg.arange(4)
        tensor([0, 1, 2, 3], dtype=int64)
        >>> tg.arange(1, 2, 0.25)
        tensor([1.  , 1.25, 1.5 , 1.75], dtype=float32)
    """
    takes.arange(start, stop, step, requires_grad)
    if stop is None:
        start, stop = 0, start
    named = {"start": start, "stop": stop, "step": step}
    for name, number in named.items():
        if not isinstance(number, int) and not math.isfinite(number):
            raise ArgumentError(f"arange: {name} is {number}, expected a finite number")
    if step == 0:
        raise ArgumentError("arange: step is 0, expected another number")
    integers = all(isinstance(n, (int, np.integer)) for n in named.values())
    target = as_dtype(dtype) if dtype is not None else int64 if integers else float32
    kind: Any = int if integers else float
    start, stop, step = (_number("arange", name, number, kind) for name, number in named.items())
    length = max(0, -((start - stop) // step) if integers else np.ceil((stop - start) / step))
    if length >= _MOST:
        raise ArgumentError(f"arange: stop is {stop}, expected fewer than 2^60 numbers up to there")
    if target == bool_ and length > 2:
        raise DtypeError(f"arange: dtype is bool for {length} numbers, expected at most 2 of them")
    ends = (start, start + (int(length) - 1) * step) if length else ()
    _check_holds("arange", target, ends)
    wide: Dtype = int64 if integers else float64
    if integers and any(not -(2**63) <= n < 2**63 for n in (start, stop, step)):
        wide = uint64 if target == uint64 and step > 0 else float64
    data = namespace_on("cpu" if device is None else device).arange(start, stop, step, wide)
    return Tensor(data.astype(target, copy=False), requires_grad)


def linspace(
    start: float,
    stop: float,
    num: Size = 50,
    endpoint: bool = True,
    *,
    dtype: DtypeLike | None = None,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return `num` evenly spaced numbers from start to stop, or to just before it.

    Args:
        start, stop: the ends.
        num: how many, from 0.
        endpoint: whether stop is the last of them.
        dtype: float32 by default; numbers of an integer dtype are rounded down.
        device: "cpu", the default, "cuda" or "cuda:N".
        requires_grad: whether backward computes its gradient.

    Returns:
        (num,).

    Raises:
        ArgumentError: num is not 0 or more.
        ArgumentError: the dtype does not hold the numbers.

    Example:
        >>> tg.linspace(0, 1, 5)
        tensor([0.  , 0.25, 0.5 , 0.75, 1.  ], dtype=float32)
    """
    takes.linspace(start, stop, num, endpoint, requires_grad)
    target = _float_dtype(dtype)
    first, last = (_number("linspace", n, v, float) for n, v in (("start", start), ("stop", stop)))
    _check_holds("linspace", target, (first, last) if num else ())
    xp = namespace_on("cpu" if device is None else device)
    y = xp.linspace(first, last, num, endpoint)
    return Tensor((xp.floor(y) if target.kind in "iu" else y).astype(target), requires_grad)


def logspace(
    start: float,
    stop: float,
    num: Size = 50,
    endpoint: bool = True,
    base: float = 10.0,
    dtype: DtypeLike | None = None,
    *,
    device: str | None = None,
) -> Tensor:
    """Return base to the powers `linspace(start, stop, num, endpoint)`.

    Args:
        start, stop: the first and the last power.
        num: how many, from 0.
        endpoint: whether stop is the last of them.
        base: the number that is raised to the powers.
        dtype: float32 by default.
        device: "cpu", the default, "cuda" or "cuda:N".

    Returns:
        (num,).

    Raises:
        ArgumentError: num is not 0 or more.

    Example:
        >>> tg.logspace(0, 3, 4, base=2)
        tensor([1., 2., 4., 8.], dtype=float32)
    """
    takes.logspace(start, stop, num, endpoint, base)
    powers = linspace(start, stop, num, endpoint, dtype=float64, device=device)
    return astype(float(base) ** powers, _float_dtype(dtype))


def geomspace(
    start: float,
    stop: float,
    num: Size = 50,
    endpoint: bool = True,
    dtype: DtypeLike | None = None,
    *,
    device: str | None = None,
) -> Tensor:
    """Return `num` numbers from start to stop with one ratio between neighbours.

    Args:
        start, stop: the ends, both above or both below 0.
        num: how many, from 0.
        endpoint: whether stop is the last of them.
        dtype: float32 by default.
        device: "cpu", the default, "cuda" or "cuda:N".

    Returns:
        (num,).

    Raises:
        ArgumentError: num is not 0 or more.
        ArgumentError: start and stop are not both above or below 0.

    Example:
        >>> tg.geomspace(1, 8, 4).round(3)
        tensor([1., 2., 4., 8.], dtype=float32)
    """
    takes.geomspace(start, stop, num, endpoint)
    if not start * stop > 0:
        raise ArgumentError(f"geomspace: stop is {stop}, expected the sign of start, {start}")
    ends = math.log10(abs(start)), math.log10(abs(stop))
    y = math.copysign(1, start) * logspace(*ends, num, endpoint, dtype=float64, device=device)
    return astype(y, _float_dtype(dtype))


def identity(n: int, dtype: DtypeLike | None = None, *, device: str | None = None) -> Tensor:
    """Return the matrix with ones on its diagonal and zeros elsewhere.

    Args:
        n: rows and columns.
        dtype: float32 by default.
        device: "cpu", the default, "cuda" or "cuda:N".

    Returns:
        (n, n).

    Example:
        >>> tg.identity(2)
        tensor([[1., 0.],
                [0., 1.]], dtype=float32)
    """
    return eye(n, dtype=dtype, device=device)


def indices(shape: Shapes, dtype: DtypeLike = int64, *, device: str | None = None) -> Tensor:
    """Return the index of each element of an array along each of its axes.

    Args:
        shape: the lengths of the array, or its one length.
        dtype: of the result.
        device: "cpu", the default, "cuda" or "cuda:N".

    Returns:
        (axes, *shape): along axis 0 the indices of one axis after the other.

    Example:
        >>> tg.indices((2, 3))
        tensor([[[0, 0, 0],
                 [1, 1, 1]],
        <BLANKLINE>
                [[0, 1, 2],
                 [0, 1, 2]]], dtype=int64)
    """
    lengths = shape_of("indices", shape)
    data = namespace_on("cpu" if device is None else device).indices(lengths, dtype=as_dtype(dtype))
    return Tensor(data)


def _number(op: str, name: str, value: Any, kind: Any) -> Any:
    """Return a number as a Python int or float."""
    try:
        return kind(value)
    except OverflowError as error:
        raise ArgumentError(f"{op}: {name} is {value}, expected a float64") from error


def _check_holds(op: str, dtype: Dtype, numbers: Sequence[float]) -> None:
    """Raise ArgumentError unless a dtype of integers holds all numbers, rounded down."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        for number in numbers:
            if not int(limits.min) <= number < int(limits.max) + 1:
                raise ArgumentError(
                    f"{op}: got {number}, expected numbers from {limits.min} to {limits.max} "
                    f"for {dtype}"
                )


def eye(
    rows: SupportsIndex,
    columns: SupportsIndex | None = None,
    k: int = 0,
    dtype: DtypeLike | None = None,
    *,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a matrix with ones on the k-th diagonal above the main one and zeros elsewhere.

    Args:
        rows: how many.
        columns: as many as rows by default.
        k: the diagonal; 0 is the main one, negative ones lie below it.
        dtype: float32 by default.
        device: "cpu", the default, "cuda" or "cuda:N".
        requires_grad: whether backward computes its gradient.

    Returns:
        (rows, columns).

    Raises:
        ShapeError: rows or columns is negative.

    Example:
        >>> tg.eye(2, 3, 1)
        tensor([[0., 1., 0.],
                [0., 0., 1.]], dtype=float32)
    """
    takes.eye(k, requires_grad)
    lengths = shape_of("eye", (rows, rows if columns is None else columns))
    target = _float_dtype(dtype)
    xp = namespace_on("cpu" if device is None else device)
    data = below(xp, lengths, k) & ~below(xp, lengths, k - 1)
    return Tensor(data.astype(target), requires_grad)


def tril(x: Shaped[ArrayLike, "... M N"], k: int = 0) -> Tensor:
    """Return x with zeros above the k-th diagonal of its last two axes.

    Args:
        x: (..., M, N).
        k: the diagonal; 0 is the main one, positive ones lie above it.

    Returns:
        In the shape and dtype of x.

    Raises:
        ShapeError: x is not (..., M, N).

    Example:
        >>> tg.tril([[1, 2], [3, 4]])
        tensor([[1, 0],
                [3, 4]], dtype=int64)
    """
    (x,) = takes.tril(x, k)
    return _triangle(x, k, lower=True)


def triu(x: Shaped[ArrayLike, "... M N"], k: int = 0) -> Tensor:
    """Return x with zeros below the k-th diagonal of its last two axes.

    Args:
        x: (..., M, N).
        k: the diagonal; 0 is the main one, positive ones lie above it.

    Returns:
        In the shape and dtype of x.

    Raises:
        ShapeError: x is not (..., M, N).

    Example:
        >>> tg.triu([[1, 2], [3, 4]], k=1)
        tensor([[0, 2],
                [0, 0]], dtype=int64)
    """
    (x,) = takes.triu(x, k)
    return _triangle(x, k, lower=False)


def _triangle(x: Tensor, k: int, lower: bool) -> Tensor:
    xp = backend.namespace(x.data)
    keep = below(xp, x.shape[-2:], k) if lower else ~below(xp, x.shape[-2:], k - 1)
    return where(keep, x, x.dtype == bool_ and False)


def below(xp: Any, shape: tuple[int, ...], k: int) -> Array:
    """Return where a matrix lies on or below its k-th diagonal."""
    k = min(max(k, -shape[0]), shape[1])  # int64 holds it, and no farther one has elements
    return xp.arange(shape[1]) <= xp.arange(shape[0])[:, None] + k


def one_hot(
    indices: Any, num_classes: Annotated[int, Interval(int, -1)] = -1, *, dtype: DtypeLike = int64
) -> Tensor:
    """Return for each index i a row of zeros with a one at position i.

    Args:
        indices: integers from 0 to num_classes - 1, any shape.
        num_classes: the length of the rows; -1: the largest index plus 1, which the host waits for.
        dtype: of the result.

    Returns:
        (*indices.shape, num_classes).

    Raises:
        ArgumentError: num_classes is not -1 or more.
        ArgumentError: num_classes is -1 without an index.
        OutOfRangeError: an index is outside its range (on the GPU its row is all zeros instead).
        DtypeError: the indices are not integers.

    Example:
        >>> tg.one_hot([0, 2], 3)
        tensor([[1, 0, 0],
                [0, 0, 1]], dtype=int64)
    """
    takes.one_hot(num_classes)
    classes = integer_array("one_hot", "indices", indices)
    if num_classes == -1:
        if not classes.size:
            raise ArgumentError("one_hot: num_classes is -1 without an index, expected a number")
        num_classes = max(int(classes.max()) + 1, 0)
    if backend.is_numpy(classes):
        outside = (classes < 0) | (classes >= num_classes)
        check_indices("one_hot", "indices", classes, outside, f"0 to {num_classes - 1}")
    columns = backend.namespace(classes).arange(num_classes)
    return Tensor((classes[..., None] == columns).astype(as_dtype(dtype)))
