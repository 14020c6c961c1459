"""Discrete Fourier transforms under NumPy's and the array API standard's names.

NumPy and CuPy compute them: float32 becomes complex64, float64 and integers complex128, 16-bit
floats are converted to float32.

There are no gradients, as complex numbers carry none. Every transform raises GradError where x
requires a gradient, ArgumentError where x lacks an axis or an option is none of these, and those of
real numbers raise DtypeError for complex ones. Tests: tests/ops/test_complex.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from tensorgrad.compat.omitted import missing as _missing
from tensorgrad.core.backend import Axis, namespace, namespace_on, upcast
from tensorgrad.core.checks import axis_index, axis_tuple, shape_of
from tensorgrad.core.dtypes import DtypeLike, as_dtype, float32, is_float
from tensorgrad.core.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.core.operands import constant_of
from tensorgrad.core.signature import Count, Real, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.ops.shape import roll

__all__ = [
    "fft", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifftn", "ifftshift", "ihfft", "irfft",
    "irfftn", "rfft", "rfftfreq", "rfftn",
]  # fmt: skip

Norm = Literal["backward", "ortho", "forward"]
Lengths = Sequence[int] | None

takes = Signatures(globals())


def fft(
    x: ArrayLike, n: Count | None = None, axis: SupportsIndex = -1, norm: Norm = "backward"
) -> Tensor:
    """Return y[k] = sum_j x[j] exp(-2 pi i j k / n) along an axis.

    Args:
        x: real or complex numbers, any shape with at least one axis.
        n: the length to which the axis is cut or padded with zeros; default: its own length.
        axis: the axis to transform.
        norm: "backward" divides the inverse transform by the length, "forward" the forward one,
            "ortho" both by the square root of the length.

    Returns:
        Complex numbers in the shape of x, with n elements along the axis.

    Raises:
        ArgumentError: n is not 1 or more.

    Example:
        >>> tg.fft.fft([1, 2, 3, 4])
        tensor([10.+0.j, -2.+2.j, -2.+0.j, -2.-2.j], dtype=complex128)
    """
    (x,) = takes.fft(x, n, norm)
    return _line("fft", x, n, axis, norm)


def ifft(
    x: ArrayLike, n: Count | None = None, axis: SupportsIndex = -1, norm: Norm = "backward"
) -> Tensor:
    """Return the inverse of `fft`.

    Args:
        x: real or complex numbers, any shape with at least one axis.
        n: the length to which the axis is cut or padded with zeros; default: its own length.
        axis: the axis to transform.
        norm: "backward" divides the inverse transform by the length, "forward" the forward one,
            "ortho" both by the square root of the length.

    Returns:
        Complex numbers in the shape of x, with n elements along the axis.

    Raises:
        ArgumentError: n is not 1 or more.

    Example:
        >>> tg.fft.ifft([10, -2 + 2j, -2, -2 - 2j])
        tensor([1.+0.j, 2.+0.j, 3.+0.j, 4.+0.j], dtype=complex64)
    """
    (x,) = takes.ifft(x, n, norm)
    return _line("ifft", x, n, axis, norm)


def rfft(
    x: Real[ArrayLike, "..."],
    n: Count | None = None,
    axis: SupportsIndex = -1,
    norm: Norm = "backward",
) -> Tensor:
    """Return the first n // 2 + 1 elements of `fft` of real numbers; they determine the others.

    Args:
        x: real numbers, any shape with at least one axis.
        n: the length to which the axis is cut or padded with zeros; default: its own length.
        axis: the axis to transform.
        norm: "backward" divides the inverse transform by the length, "forward" the forward one,
            "ortho" both by the square root of the length.

    Returns:
        Complex numbers in the shape of x, with n // 2 + 1 elements along the axis.

    Raises:
        DtypeError: x holds complex numbers.
        ArgumentError: n is not 1 or more.

    Example:
        >>> tg.fft.rfft([1, 2, 3, 4])
        tensor([10.+0.j, -2.+2.j, -2.+0.j], dtype=complex128)
    """
    (x,) = takes.rfft(x, n, norm)
    return _line("rfft", x, n, axis, norm)


def irfft(
    x: ArrayLike, n: Count | None = None, axis: SupportsIndex = -1, norm: Norm = "backward"
) -> Tensor:
    """Return the inverse of `rfft`, real; n is the length of the result, default 2 (len - 1).

    Args:
        x: the first n // 2 + 1 elements of a transform, real or complex.
        n: the number of elements of the result; default: 2 (length - 1), which is even.
        axis: the axis to transform.
        norm: "backward" divides the inverse transform by the length, "forward" the forward one,
            "ortho" both by the square root of the length.

    Returns:
        Real numbers in the shape of x, with n elements along the axis.

    Raises:
        ArgumentError: n is not 1 or more.

    Example:
        >>> tg.fft.irfft([10, -2 + 2j, -2])
        tensor([1., 2., 3., 4.], dtype=float32)
    """
    (x,) = takes.irfft(x, n, norm)
    return _line("irfft", x, n, axis, norm)


def hfft(
    x: ArrayLike, n: Count | None = None, axis: SupportsIndex = -1, norm: Norm = "backward"
) -> Tensor:
    """Return the `fft` of a Hermitian signal, which is real, from the first half of the signal.

    Args:
        x: the first n // 2 + 1 elements of a signal a with a[-j] = conj(a[j]), real or complex.
        n: the number of elements of the result; default: 2 (length - 1), which is even.
        axis: the axis to transform.
        norm: "backward" divides the inverse transform by the length, "forward" the forward one,
            "ortho" both by the square root of the length.

    Returns:
        Real numbers in the shape of x, with n elements along the axis.

    Raises:
        ArgumentError: n is not 1 or more.

    Example:
        >>> tg.fft.hfft([10, -2 + 2j, -2])
        tensor([ 4., 16., 12.,  8.], dtype=float32)
    """
    (x,) = takes.hfft(x, n, norm)
    return _line("hfft", x, n, axis, norm)


def ihfft(
    x: Real[ArrayLike, "..."],
    n: Count | None = None,
    axis: SupportsIndex = -1,
    norm: Norm = "backward",
) -> Tensor:
    """Return the inverse of `hfft`, complex.

    Args:
        x: real numbers, any shape with at least one axis.
        n: the length to which the axis is cut or padded with zeros; default: its own length.
        axis: the axis to transform.
        norm: "backward" divides the inverse transform by the length, "forward" the forward one,
            "ortho" both by the square root of the length.

    Returns:
        Complex numbers in the shape of x, with n // 2 + 1 elements along the axis.

    Raises:
        DtypeError: x holds complex numbers.
        ArgumentError: n is not 1 or more.

    Example:
        >>> tg.fft.hfft(tg.fft.ihfft([1, 2, 3, 4]))
        tensor([1., 2., 3., 4.], dtype=float64)
    """
    (x,) = takes.ihfft(x, n, norm)
    return _line("ihfft", x, n, axis, norm)


def fftn(x: ArrayLike, s: Lengths = None, axes: Axis = None, norm: Norm = "backward") -> Tensor:
    """Return `fft` along several axes.

    Args:
        x: real or complex numbers, any shape with at least one axis.
        s: the length of each of the axes, cut or padded with zeros; default: their own lengths.
        axes: the axes to transform; default: the last len(s), or all where s is None.
        norm: "backward" divides the inverse transform by the length, "forward" the forward one,
            "ortho" both by the square root of the length.

    Returns:
        Complex numbers in the shape of x, with the lengths s along the axes.

    Example:
        >>> tg.fft.fftn([[1, 2], [3, 4]])
        tensor([[10.+0.j, -2.+0.j],
                [-4.+0.j,  0.+0.j]], dtype=complex128)
    """
    (x,) = takes.fftn(x, norm)
    return _lines("fftn", x, s, axes, norm)


def ifftn(x: ArrayLike, s: Lengths = None, axes: Axis = None, norm: Norm = "backward") -> Tensor:
    """Return the inverse of `fftn`.

    Args:
        x: real or complex numbers, any shape with at least one axis.
        s: the length of each of the axes, cut or padded with zeros; default: their own lengths.
        axes: the axes to transform; default: the last len(s), or all where s is None.
        norm: "backward" divides the inverse transform by the length, "forward" the forward one,
            "ortho" both by the square root of the length.

    Returns:
        Complex numbers in the shape of x, with the lengths s along the axes.

    Example:
        >>> tg.fft.ifftn([[10, -2], [-4, 0]])
        tensor([[1.+0.j, 2.+0.j],
                [3.+0.j, 4.+0.j]], dtype=complex128)
    """
    (x,) = takes.ifftn(x, norm)
    return _lines("ifftn", x, s, axes, norm)


def rfftn(
    x: Real[ArrayLike, "..."], s: Lengths = None, axes: Axis = None, norm: Norm = "backward"
) -> Tensor:
    """Return `rfft` along the last of several axes and `fft` along the others.

    Args:
        x: real numbers, any shape with at least one axis.
        s: the length of each of the axes, cut or padded with zeros; default: their own lengths.
        axes: the axes to transform; default: the last len(s), or all where s is None.
        norm: "backward" divides the inverse transform by the length, "forward" the forward one,
            "ortho" both by the square root of the length.

    Returns:
        Complex numbers in the shape of x, with the lengths s along the axes, but s[-1] // 2 + 1
        along the last of them.

    Raises:
        DtypeError: x holds complex numbers.

    Example:
        >>> tg.fft.rfftn(tg.ones((4, 4))).shape
        (4, 3)
    """
    (x,) = takes.rfftn(x, norm)
    return _lines("rfftn", x, s, axes, norm)


def irfftn(x: ArrayLike, s: Lengths = None, axes: Axis = None, norm: Norm = "backward") -> Tensor:
    """Return the inverse of `rfftn`, real.

    Args:
        x: a transform as `rfftn` returns it, real or complex.
        s: the lengths of the result along the axes; default: those of x, but
            2 (length - 1) along the last axis.
        axes: the axes to transform; default: the last len(s), or all where s is None.
        norm: "backward" divides the inverse transform by the length, "forward" the forward one,
            "ortho" both by the square root of the length.

    Returns:
        Real numbers in the shape of x, with the lengths s along the axes.

    Example:
        >>> tg.fft.irfftn([[10, -2], [-4, 0]])
        tensor([[1., 2.],
                [3., 4.]], dtype=float64)
    """
    (x,) = takes.irfftn(x, norm)
    return _lines("irfftn", x, s, axes, norm)


def fftfreq(
    n: Count, d: float = 1.0, *, dtype: DtypeLike | None = None, device: str | None = None
) -> Tensor:
    """Return the frequencies of the elements of `fft`.

    Args:
        n: the length of the signal, 1 or more.
        d: the distance between two samples, in the unit of time or length.
        dtype: a float dtype; default float32.
        device: "cpu", "cuda" or "cuda:N"; default "cpu".

    Returns:
        (n,): 0, 1, ..., then the negative ones, divided by n d: cycles per unit of d.

    Raises:
        ArgumentError: n is not 1 or more.

    Example:
        >>> tg.fft.fftfreq(4)
        tensor([ 0.  ,  0.25, -0.5 , -0.25], dtype=float32)
    """
    takes.fftfreq(n, d)
    return _frequencies("fftfreq", n, d, dtype, device)


def rfftfreq(
    n: Count, d: float = 1.0, *, dtype: DtypeLike | None = None, device: str | None = None
) -> Tensor:
    """Return the frequencies of the elements of `rfft`.

    Args:
        n: the length of the signal, 1 or more.
        d: the distance between two samples, in the unit of time or length.
        dtype: a float dtype; default float32.
        device: "cpu", "cuda" or "cuda:N"; default "cpu".

    Returns:
        (n // 2 + 1,): 0, 1, ..., n // 2, divided by n d: cycles per unit of d.

    Raises:
        ArgumentError: n is not 1 or more.

    Example:
        >>> tg.fft.rfftfreq(4)
        tensor([0.  , 0.25, 0.5 ], dtype=float32)
    """
    takes.rfftfreq(n, d)
    return _frequencies("rfftfreq", n, d, dtype, device)


def fftshift(x: ArrayLike, axes: Axis = None) -> Tensor:
    """Return x with frequency 0 in the middle of the axes; the gradient flows back.

    Args:
        x: any dtype and shape.
        axes: the axes to shift; default: all.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.fft.fftshift([0, 1, 2, -2, -1])
        tensor([-2, -1,  0,  1,  2], dtype=int64)
    """
    (x,) = takes.fftshift(x)
    places = axis_tuple("fftshift", axes, x.ndim, "axes")
    return roll(x, [x.shape[axis] // 2 for axis in places], places) if places else x


def ifftshift(x: ArrayLike, axes: Axis = None) -> Tensor:
    """Return the inverse of `fftshift`; the gradient flows back.

    Args:
        x: any dtype and shape.
        axes: the axes to shift; default: all.

    Returns:
        The shape and dtype of x.

    Example:
        >>> tg.fft.ifftshift([-2, -1, 0, 1, 2])
        tensor([ 0,  1,  2, -2, -1], dtype=int64)
    """
    (x,) = takes.ifftshift(x)
    places = axis_tuple("ifftshift", axes, x.ndim, "axes")
    return roll(x, [-(x.shape[axis] // 2) for axis in places], places) if places else x


def _line(op: str, x: Tensor, n: int | None, axis: SupportsIndex, norm: str) -> Tensor:
    return _computed(op, x, n, axis_index(op, axis, x.ndim), norm)


def _lines(op: str, x: Tensor, s: Lengths, axes: Axis, norm: str) -> Tensor:
    lengths = None if s is None else shape_of(op, s, "s")
    if axes is None and lengths is not None:
        axes = tuple(range(x.ndim - len(lengths), x.ndim))
    places = axis_tuple(op, axes, x.ndim, "axes")
    if lengths is not None and len(lengths) != len(places):
        raise ArgumentError(f"{op}: s is {s}, expected {len(places)} lengths")
    if op != "fftn" and op != "ifftn" and not places:
        raise ShapeError(f"{op}: x has shape {x.shape}, expected an axis to transform")
    return _computed(op, x, lengths, places, norm)


def _computed(op: str, x: Tensor, lengths: Any, axes: Any, norm: str) -> Tensor:
    array = upcast(constant_of(op, "x", x))
    try:
        return Tensor(getattr(namespace(array).fft, op)(array, lengths, axes, norm))
    except ValueError as error:
        raise ShapeError(
            f"{op}: x has shape {x.shape}, expected elements along the axes {axes}: {error}"
        ) from error


def _frequencies(op: str, n: int, d: float, dtype: DtypeLike | None, device: str | None) -> Tensor:
    target = float32 if dtype is None else as_dtype(dtype)
    if not is_float(target):
        raise DtypeError(f"{op}: dtype is {target}, expected a float")
    return Tensor(
        getattr(namespace_on("cpu" if device is None else device).fft, op)(n, d).astype(target)
    )


if not TYPE_CHECKING:  # to a type checker every name would exist

    def __getattr__(name: str) -> Any:
        raise _missing(__name__, name)
