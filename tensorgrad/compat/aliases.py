"""Second names of what exists, all in one place.

First those of the array API standard and of NumPy: each is the op itself. Then PyTorch's names of
tensor methods, where the meaning is equal: each is a line of other ops, and the arguments keep our
names, `axis` and not `dim`. Tests: tests/ops/test_torch_aliases.py.
"""

from __future__ import annotations

from typing import Any, Never

from tensorgrad.core import backend
from tensorgrad.core.checks import axis_index, unexpected
from tensorgrad.core.dtypes import DtypeLike, is_float
from tensorgrad.core.errors import ArgumentError, DtypeError, GradError, ShapeError
from tensorgrad.core.operands import operands, tensor_of
from tensorgrad.core.tensor import Tensor
from tensorgrad.ops import elementwise, shape
from tensorgrad.ops.arguments import check_holds
from tensorgrad.ops.creation import tensor
from tensorgrad.ops.indexing import take, take_along_axis
from tensorgrad.ops.reduce import max, min
from tensorgrad.ops.shape import concatenate, transpose

__all__ = [
    "absolute", "acos", "acosh", "amax", "amin", "around", "array", "asin", "asinh", "atan",
    "atan2", "atanh", "bitwise_invert", "bitwise_left_shift", "bitwise_not",
    "bitwise_right_shift", "concat", "conjugate", "degrees", "fix", "mod", "permute_dims", "pow",
    "radians", "true_divide",
]  # fmt: skip

absolute = elementwise.abs
acos, acosh = elementwise.arccos, elementwise.arccosh
asin, asinh = elementwise.arcsin, elementwise.arcsinh
atan, atan2, atanh = elementwise.arctan, elementwise.arctan2, elementwise.arctanh
amax, amin = max, min
around = elementwise.round
array = tensor
bitwise_invert = bitwise_not = elementwise.invert
bitwise_left_shift, bitwise_right_shift = elementwise.left_shift, elementwise.right_shift
concat, permute_dims = concatenate, transpose
conjugate = elementwise.conj
degrees, radians = elementwise.rad2deg, elementwise.deg2rad
fix = elementwise.trunc
mod, pow, true_divide = elementwise.remainder, elementwise.power, elementwise.divide


def to(x: Tensor, device: Any = None, dtype: DtypeLike | None = None) -> Tensor:
    """Return x on a device and as a dtype; a single argument may be either.

    x itself is returned where nothing changes. The gradient flows back.

    Args:
        x: any shape and dtype.
        device: "cpu", "cuda" or "cuda:N"; default: where x is. A dtype here counts as one.
        dtype: default: that of x.

    Returns:
        In the shape of x.

    Raises:
        DeviceError: there is no such device here.
        DtypeError: the library has no such dtype.

    Example:
        >>> tg.tensor([1.5, 2.5]).to("int64")
        tensor([1, 2], dtype=int64)
    """
    if dtype is None and not backend.is_device(device):
        device, dtype = None, device
    if dtype is not None:
        x = shape.astype(x, dtype, copy=False)
    return x if device is None else shape.to(x, device)


def cuda(x: Tensor, device: int | None = None) -> Tensor:
    """Return x on the current GPU, or on that of a number.

    Args:
        x: any shape and dtype.
        device: the number of a GPU; default: where x is, the current GPU for x on the CPU.

    Returns:
        In the shape and dtype of x.

    Raises:
        DeviceError: there is no such device here.

    Example:
        >>> tg.tensor([1.5, 2.5]).cuda().device  # doctest: +SKIP
        'cuda:0'
    """
    if device is None and x.device != "cpu":
        return x
    return shape.to(x, "cuda" if device is None else f"cuda:{device}")


def clone(x: Tensor) -> Tensor:
    """Return a copy, through which the gradient flows back.

    Args:
        x: any shape and dtype.

    Returns:
        In the shape and dtype of x.

    Example:
        >>> tg.tensor([1.5, 2.5]).clone()
        tensor([1.5, 2.5], dtype=float32)
    """
    return shape.astype(x, x.dtype)


def masked_fill(x: Tensor, mask: Any, value: Any) -> Tensor:
    """Return x with `value` where the mask is True.

    Args:
        x: any shape and dtype.
        mask: bools that broadcast to x.
        value: a number or a tensor without axes.

    Returns:
        In the shape and dtype of x.

    Raises:
        DtypeError: mask does not hold bools.
        ShapeError: mask or value does not fit.

    Example:
        >>> x = tg.tensor([1.0, -2.0])
        >>> x.masked_fill(x < 0, 0.0)
        tensor([1., 0.], dtype=float32)
    """
    mask = tensor_of("masked_fill", "mask", mask)
    x, value = operands("masked_fill", ("x", "value"), (x, value))
    if mask.dtype != bool:
        raise DtypeError(f"masked_fill: mask has dtype {mask.dtype}, expected bool")
    if value.ndim:
        raise ShapeError(f"masked_fill: value has shape {value.shape}, expected ()")
    check_holds("masked_fill", "value", value.data, x.dtype)
    value = shape.astype(value, x.dtype, copy=False)
    y = elementwise.where(mask, shape.to(value, x.device), x)
    if y.shape != x.shape:
        raise ShapeError(
            f"masked_fill: mask has shape {mask.shape}, expected one that broadcasts to {x.shape}"
        )
    return y


def gather(x: Tensor, axis: int, index: Any, **unknown: Never) -> Tensor:
    """Return y[i][j][k] = x[index[i][j][k]][j][k] for axis 0, and so for the others.

    Args:
        x: any shape and dtype.
        axis: the axis to index.
        index: integers; as many axes as x, none longer than that of x, but for `axis`.

    Returns:
        In the shape of the index and the dtype of x.

    Raises:
        OutOfRangeError: an index lies outside the axis (not checked on the GPU).
        ShapeError: the index has another number of axes than x, or a longer one.
        DtypeError: the index does not hold integers.

    Example:
        >>> tg.tensor([[1, 2, 3], [4, 5, 6]]).gather(1, [[2], [0]])
        tensor([[3],
                [4]], dtype=int64)
    """
    if unknown:
        raise unexpected("gather", unknown)
    index = tensor_of("gather", "index", index)
    axis = axis_index("gather", axis, x.ndim)
    lengths = [n for place, n in enumerate(index.shape) if place != axis]
    limits = [n for place, n in enumerate(x.shape) if place != axis]
    if index.ndim != x.ndim or any(n > most for n, most in zip(lengths, limits, strict=True)):
        raise ShapeError(
            f"gather: index has shape {index.shape}, expected at most {x.shape} but for axis {axis}"
        )
    if lengths != limits:
        x = x[tuple([slice(None if p == axis else n) for p, n in enumerate(index.shape)])]
    return take_along_axis(x, index, axis)


def unfold(x: Tensor, axis: int, size: int, step: int = 1, **unknown: Never) -> Tensor:
    """Return the windows of an axis: x[i * step : i * step + size] for each i, on a new last axis.

    Args:
        x: any shape and dtype.
        axis: the axis to take windows of; it becomes the axis of their numbers.
        size: elements of a window.
        step: from the first of a window to that of the next.

    Returns:
        One axis more than x has, of length `size`.

    Raises:
        ArgumentError: the axis is shorter than a window, or step is less than 1.

    Example:
        >>> tg.arange(5).unfold(0, 3)
        tensor([[0, 1, 2],
                [1, 2, 3],
                [2, 3, 4]], dtype=int64)
    """
    if unknown:
        raise unexpected("unfold", unknown)
    axis = axis_index("unfold", axis, x.ndim) if x.ndim else 0
    length = x.shape[axis] if x.ndim else 1
    if not 0 <= size <= length:
        raise ArgumentError(f"unfold: size is {size}, expected 0 to {length}, the length")
    if step < 1:
        raise ArgumentError(f"unfold: step is {step}, expected 1 or more")
    y = x if x.ndim else shape.reshape(x, (1,))
    starts = backend.namespace(x.data).arange(0, length - size + 1, step)
    places = starts[:, None] + backend.namespace(x.data).arange(size)
    windows = shape.moveaxis(take(y, places, axis), axis + 1, -1)
    return windows if x.ndim else windows[0]


def view(x: Tensor, *lengths: Any) -> Tensor:
    """Return the elements in another shape, a view where strides allow: see `reshape`.

    Args:
        x: any shape and dtype.
        *lengths: the lengths, or one tuple of them; one may be -1.

    Returns:
        The elements in C order, in the dtype of x.

    Raises:
        ArgumentError: given a dtype, as NumPy's method has.

    Example:
        >>> tg.arange(6).view(2, -1).shape
        (2, 3)
    """
    given = lengths[0] if len(lengths) == 1 else lengths
    if not isinstance(given, int | tuple | list):
        raise ArgumentError(
            f"view: shape is {given!r}, expected integers; for another dtype, astype()"
        )
    return shape.reshape(x, given)


def requires_grad_(x: Tensor, requires_grad: bool = True) -> Tensor:
    """Set whether backward computes the gradient of a leaf; return x.

    Args:
        x: a leaf.
        requires_grad: whether.

    Returns:
        x itself.

    Raises:
        GradError: x is the result of an op, whose gradient would be lost.
        DtypeError: x does not hold floats.

    Example:
        >>> tg.zeros(2).requires_grad_()
        tensor([0., 0.], dtype=float32, requires_grad=True)
    """
    if not is_leaf(x):
        raise GradError(
            "requires_grad_: the tensor is the result of an op, expected a leaf; detach() it"
        )
    if requires_grad and not is_float(x.dtype):
        raise DtypeError(f"requires_grad_: the tensor has dtype {x.dtype}, expected a float")
    x.requires_grad = requires_grad
    return x


def is_leaf(x: Tensor) -> bool:
    """Return whether x is not the result of an op that gradients flow through.

    Args:
        x: any tensor.

    Returns:
        A bool of Python.

    Example:
        >>> x = tg.ones(2, requires_grad=True)
        >>> x.is_leaf, (x * 2).is_leaf
        (True, False)
    """
    return x.node is None
