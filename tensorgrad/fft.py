"""Discrete Fourier transforms under NumPy's and the array API standard's names.

NumPy and CuPy compute them: float32 becomes complex64, float64 and integers complex128, 16-bit
floats are converted to float32. Transforms of one axis take `n`, the length to cut it or to pad it
with zeros to, and those of several take `s`, a length for each of `axes` (default: all, or the last
ones where s is given). `norm` says which direction divides by the length, "ortho" both by its root.

There are no gradients, as complex numbers carry none. Every transform raises GradError where x
requires a gradient, ArgumentError where x lacks an axis or an option is none of these, and those of
real numbers raise DtypeError for complex ones. Tests: tests/ops/test_complex.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from tensorgrad.compat.omitted import missing as _missing
from tensorgrad.core.backend import Axis, namespace, namespace_on, upcast
from tensorgrad.core.checks import axis_index, axis_tuple, check_integer, check_number
from tensorgrad.core.dtypes import DtypeLike, as_dtype, float32, is_complex, is_float
from tensorgrad.core.errors import ArgumentError, DtypeError
from tensorgrad.core.operands import constant_of, tensor_of
from tensorgrad.core.tensor import Tensor
from tensorgrad.ops.shape import roll

__all__ = [
    "fft", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifftn", "ifftshift", "ihfft", "irfft",
    "irfftn", "rfft", "rfftfreq", "rfftn",
]  # fmt: skip

Norm = Literal["backward", "ortho", "forward"]
Lengths = Sequence[int] | None


def fft(x: Any, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """Return y[k] = sum_j x[j] exp(-2 pi i j k / n) along an axis."""
    return _line("fft", x, n, axis, norm)


def ifft(x: Any, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """Return the inverse of `fft`."""
    return _line("ifft", x, n, axis, norm)


def rfft(x: Any, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """Return the first n // 2 + 1 elements of `fft` of real numbers; they determine the others."""
    return _line("rfft", _real("rfft", x), n, axis, norm)


def irfft(x: Any, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """Return the inverse of `rfft`, real; n is the length of the result, default 2 (len - 1)."""
    return _line("irfft", x, n, axis, norm)


def hfft(x: Any, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """Return the real `fft` of what x, its first n // 2 + 1 elements, determines by symmetry."""
    return _line("hfft", x, n, axis, norm)


def ihfft(x: Any, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """Return the inverse of `hfft`, complex."""
    return _line("ihfft", _real("ihfft", x), n, axis, norm)


def fftn(x: Any, s: Lengths = None, axes: Axis = None, norm: Norm = "backward") -> Tensor:
    """Return `fft` along several axes."""
    return _lines("fftn", x, s, axes, norm)


def ifftn(x: Any, s: Lengths = None, axes: Axis = None, norm: Norm = "backward") -> Tensor:
    """Return the inverse of `fftn`."""
    return _lines("ifftn", x, s, axes, norm)


def rfftn(x: Any, s: Lengths = None, axes: Axis = None, norm: Norm = "backward") -> Tensor:
    """Return `rfft` along the last of several axes and `fft` along the others."""
    return _lines("rfftn", _real("rfftn", x), s, axes, norm)


def irfftn(x: Any, s: Lengths = None, axes: Axis = None, norm: Norm = "backward") -> Tensor:
    """Return the inverse of `rfftn`, real; s has the lengths of the result."""
    return _lines("irfftn", x, s, axes, norm)


def fftfreq(
    n: int, d: float = 1.0, dtype: DtypeLike | None = None, device: str | None = None
) -> Tensor:
    """Return the frequencies of the elements of `fft`, (n,), for samples at a distance d."""
    return _frequencies("fftfreq", n, d, dtype, device)


def rfftfreq(
    n: int, d: float = 1.0, dtype: DtypeLike | None = None, device: str | None = None
) -> Tensor:
    """Return the frequencies of the elements of `rfft`, (n // 2 + 1,)."""
    return _frequencies("rfftfreq", n, d, dtype, device)


def fftshift(x: Any, axes: Axis = None) -> Tensor:
    """Return x with frequency 0 in the middle of the axes; the gradient flows back."""
    x = tensor_of("fftshift", "x", x)
    places = axis_tuple("fftshift", axes, x.ndim, "axes")
    return roll(x, [x.shape[axis] // 2 for axis in places], places)


def ifftshift(x: Any, axes: Axis = None) -> Tensor:
    """Return the inverse of `fftshift`."""
    x = tensor_of("ifftshift", "x", x)
    places = axis_tuple("ifftshift", axes, x.ndim, "axes")
    return roll(x, [-(x.shape[axis] // 2) for axis in places], places)


def _real(op: str, x: Any) -> Tensor:
    tensor = tensor_of(op, "x", x)
    if is_complex(tensor.dtype):
        raise DtypeError(f"{op}: x has dtype {tensor.dtype}, expected real numbers")
    return tensor


def _line(op: str, x: Any, n: int | None, axis: int, norm: str) -> Tensor:
    x = tensor_of(op, "x", x)
    if n is not None:
        check_integer(op, "n", n, 1)
    return _computed(op, x, n, axis_index(op, axis, x.ndim), norm)


def _lines(op: str, x: Any, s: Lengths, axes: Axis, norm: str) -> Tensor:
    x = tensor_of(op, "x", x)
    if axes is None and s is not None:
        axes = tuple(range(x.ndim - len(s), x.ndim))
    places = axis_tuple(op, axes, x.ndim, "axes")
    if s is not None and len(s) != len(places):
        raise ArgumentError(f"{op}: s is {s}, expected {len(places)} lengths")
    return _computed(op, x, s, places, norm)


def _computed(op: str, x: Tensor, lengths: Any, axes: Any, norm: str) -> Tensor:
    if norm not in ("backward", "ortho", "forward"):
        raise ArgumentError(f"{op}: norm is {norm!r}, expected 'backward', 'ortho' or 'forward'")
    array = upcast(constant_of(op, "x", x))
    return Tensor(getattr(namespace(array).fft, op)(array, lengths, axes, norm))


def _frequencies(op: str, n: int, d: float, dtype: DtypeLike | None, device: str | None) -> Tensor:
    check_integer(op, "n", n, 1)
    check_number(op, "d", d)
    target = float32 if dtype is None else as_dtype(dtype)
    if not is_float(target):
        raise DtypeError(f"{op}: dtype is {target}, expected a float")
    return Tensor(getattr(namespace_on(device or "cpu").fft, op)(n, d).astype(target))


if not TYPE_CHECKING:  # to a type checker every name would exist

    def __getattr__(name: str) -> Any:
        raise _missing(__name__, name)
