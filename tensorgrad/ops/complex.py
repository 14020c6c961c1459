"""Real and imaginary parts and conjugates. Tests: tests/test_complex.py.

Complex numbers carry no gradient: NumPy and CuPy compute with them. Of real numbers, `real` and `conj`
are x in memory of its own, with its gradient, and `imag` is zeros.
"""

from __future__ import annotations

from typing import Any

from tensorgrad.backend import Array
from tensorgrad.dtypes import is_complex
from tensorgrad.engine import mode
from tensorgrad.errors import GradError
from tensorgrad.operands import tensor_of
from tensorgrad.ops.creation import zeros_like
from tensorgrad.ops.elementwise import positive
from tensorgrad.tensor import Tensor

__all__ = ["conj", "conjugate", "imag", "real"]


def real(x: Any) -> Tensor:
    """Return the real part, of complex numbers a view.

    Raises:
        GradError: complex x requires a gradient.
    """
    x = tensor_of("real", "x", x)
    return Tensor(constant("real", x).real) if is_complex(x.dtype) else positive(x)


def imag(x: Any) -> Tensor:
    """Return the imaginary part, of complex numbers a view; zeros of real ones.

    Raises:
        GradError: complex x requires a gradient.
    """
    x = tensor_of("imag", "x", x)
    return Tensor(constant("imag", x).imag) if is_complex(x.dtype) else zeros_like(x)


def conj(x: Any) -> Tensor:
    """Return the complex conjugate.

    Raises:
        GradError: complex x requires a gradient.
    """
    x = tensor_of("conj", "x", x)
    return Tensor(constant("conj", x).conj()) if is_complex(x.dtype) else positive(x)


conjugate = conj


def constant(op: str, x: Tensor) -> Array:
    """Return the array of an operand whose gradient would be lost.

    Raises:
        GradError: it requires one.
    """
    if x.requires_grad and mode.grad_enabled:
        raise GradError(
            f"{op}: x requires a gradient, expected one that does not: complex numbers carry no "
            "gradient; use detach()"
        )
    return x.data
