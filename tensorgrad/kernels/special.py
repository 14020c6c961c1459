"""erf, sigmoid, GELU and other functions that NumPy lacks, for the elementwise table on NumPy.

kernels/elementwise.cuh has each under the same name. All take and return arrays of one float dtype,
never overflow, and are accurate to a few units in the last place of float64. Those that are rows of
the table by themselves accept integers too, which they convert to floats first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad.core.dtypes import bfloat16, float16

Values = np.ndarray[Any, Any]

# erf(x) = 2/sqrt(pi) * sum of (-1)^n x^(2n+1) / (n! (2n+1)), enough terms for |x| <= 1
_ERF_TAYLOR = [
    2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1))
    for n in range(17, -1, -1)
]
# x * exp(x^2) * erfc(x) for 1 <= x <= 27.5, where erfc underflows, as a polynomial of
# u = 1.5849... * t - 0.32075..., t = (x - 2.5) / (x + 2.5), which runs over [-1, 1]: interpolated
# at the 21 Chebyshev points
_ERFC_POLYNOMIAL = [
    1.4756382738292506e-12, -2.3584241685963065e-11, -5.118545041705333e-11,
    2.871763047543469e-10, 8.227710008659648e-10, -2.2372941366045047e-09,
    -1.0240367644633848e-08, 1.6740191803069427e-08, 1.2028148186453867e-07,
    -1.7087890218781025e-07, -1.4524904057797915e-06, 3.0296892220328056e-06,
    1.7319807673508482e-05, -7.630787935971998e-05, -9.722071649451366e-05,
    0.0018422609174446587, -0.00831764276886486, 0.02290001241289514,
    -0.042026684310127, 0.043448024432760315, 0.5461260092804002,
]  # fmt: skip
_HALVES = (float16, bfloat16)
_NUMBERS = (bool, int, float)  # each holds those before it
_GELU_SCALE = 2 * math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715


def number(x: Any) -> Any:
    """Return x to compute with: 16-bit floats as float32."""
    return x.astype(np.float32) if getattr(x, "dtype", None) in _HALVES else x


def where(c: Any, a: Any, b: Any) -> Any:
    """Return a where the condition holds, else b; of Python numbers a number, of the wider type."""
    if type(c) is bool and type(a) in _NUMBERS and type(b) in _NUMBERS:
        return max(type(a), type(b), key=_NUMBERS.index)(a if c else b)
    try:
        return np.where(c, a, b)
    except TypeError:  # it does not promote bfloat16 and wide integers as NumPy's ufuncs do
        return np.where(c, number(a), number(b))


def rint(x: Any) -> Any:
    """Return the nearest integer, of integers themselves."""
    return +x if getattr(x, "dtype", np.dtype(type(x))).kind in "iu" else np.rint(x)


def erf(x: Values) -> Values:
    """Return the error function, 2/sqrt(pi) times the integral of exp(-t^2) from 0 to x."""
    size, near, far = _erf_parts(x)
    return np.copysign(np.where(size < 1, near, 1 - far), x)


def _erf_parts(x: Values) -> tuple[Values, Values, Values]:
    """Return |x|, erf(|x|) that holds up to 1, and erfc(|x|) that holds from there on."""
    size = np.minimum(np.abs(x * 1.0), 27.5)  # abs alone leaves the least integer negative
    square = size * size
    near = polynomial(_ERF_TAYLOR, np.minimum(square, 1.0)) * size
    t = np.maximum(size, 1.0)
    far = (t - 2.5) / (t + 2.5)
    far = polynomial(_ERFC_POLYNOMIAL, 1.5849056603773586 * far + -0.32075471698113206)
    far *= np.exp(-square)
    far /= t
    return size, near, far


def normal_cdf(x: Values) -> Values:
    """Return the CDF of the standard normal distribution, accurate where it is near 0."""
    size, near, far = _erf_parts(x * 0.7071067811865476)
    y: Values = np.where(size < 1, 1 + np.copysign(near, x), np.where(x < 0, far, 2 - far))
    y *= 0.5
    return y


def normal_pdf(x: Values) -> Values:
    """Return the PDF of the standard normal distribution."""
    x = np.minimum(np.abs(x), 40.0)  # where it is 0; the square of more may overflow
    y: Values = np.exp(-0.5 * x * x) * 0.3989422804014327
    return y


def sigmoid(x: Values) -> Values:
    """Return 1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # 1 / inf is the limit
        t = np.exp(x * -1.0)  # -x of unsigned integers would wrap around
    t += 1
    y: Values = 1 / t
    return y


def silu_derivative(x: Values) -> Values:
    """Return sigmoid(x) * (1 + x * (1 - sigmoid(x)))."""
    bound = 87.0 if x.dtype == np.float32 else 700.0  # exp overflows farther out
    x = np.clip(x, -bound, bound)
    t = np.exp(-x)
    y: Values = t + 1
    y **= -1.0  # in place: at most four arrays of a block are in use
    t *= y  # 1 - y, with its digits
    t *= x
    t += 1
    y *= t
    return y


def softplus(x: Values) -> Values:
    """Return log(1 + exp(x)) without overflow."""
    y: Values = np.maximum(x, 0.0)
    y = y + np.log1p(np.exp(np.minimum(x, 0.0) - y))
    return y


def gelu_tanh(x: Values) -> Values:
    """Return x/2 * (1 + tanh(u)), u = sqrt(2/pi) * (x + 0.044715 x^3).

    (1 + tanh(u)) / 2 is sigmoid(2 u), which loses no digits where tanh is close to -1.
    """
    if x.dtype.kind in "iub":
        x = x.astype(np.float64)
    with np.errstate(over="ignore"):  # the same overflow is harmless in `sigmoid`
        t = _exp_minus_2u(x)
    t += 1
    y: Values = x / t
    return y


def gelu_tanh_with_derivative(x: Values) -> tuple[Values, Values]:
    """Return `gelu_tanh` and its derivative, which share one exponential."""
    with np.errstate(over="ignore"):  # the same overflow is harmless in `sigmoid`
        square = x * x
        # From this bound on the exponential overflows or is 0, and infinity would make NaN.
        np.minimum(square, 121.0 if x.dtype == np.float32 else 484.0, out=square)
        t = square * (-_GELU_SCALE * _GELU_CUBE)
        t -= _GELU_SCALE
        t *= x
        np.exp(t, out=t)
    divisor = t + 1
    y: Values = x / divisor
    np.minimum(t, np.finfo(t.dtype).max, out=t)
    derivative: Values = np.divide(1, divisor, out=divisor)
    t *= derivative  # 1 - sigmoid, with its digits
    t *= x
    square *= 3 * _GELU_CUBE * _GELU_SCALE
    square += _GELU_SCALE
    t *= square
    t += 1
    derivative *= t
    return y, derivative


def gelu_tanh_derivative(x: Values) -> Values:
    """Return the derivative of `gelu_tanh`, s + x * s * (1 - s) * 2u', s = sigmoid(2 u)."""
    bound = 10.0 if x.dtype == np.float32 else 21.0  # exp overflows farther out
    x = np.clip(x, -bound, bound)
    t = _exp_minus_2u(x)
    y: Values = 1 / (1 + t)
    t *= y  # 1 - y, with its digits
    t *= x
    square = x * x  # not kept from above: at most four arrays of a block are in use
    square *= 3 * _GELU_CUBE * _GELU_SCALE
    square += _GELU_SCALE
    t *= square
    t += 1
    y *= t
    return y


def _exp_minus_2u(x: Values) -> Values:
    """Return exp(-2 u), u as in `gelu_tanh`."""
    t = x * x
    t *= -_GELU_SCALE * _GELU_CUBE
    t -= _GELU_SCALE
    t *= x
    y: Values = np.exp(t)
    return y


def polynomial(coefficients: Sequence[float], x: Values) -> Values:
    """Return the polynomial with these coefficients, highest power first."""
    y: Values = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        y += coefficient
        y *= x
    y += coefficients[-1]
    return y
