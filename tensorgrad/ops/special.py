"""Functions that NumPy lacks, for the NumPy path of the elementwise table.

Each has a twin of the same name in kernels/elementwise.cuh. All take and return arrays of one
float dtype, overflow nowhere, and are accurate to a few units in the last place of float64. Those
that are rows of the table by themselves take integers too, which they turn into floats first.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tensorgrad.dtypes import bfloat16, float16

Values = np.ndarray[Any, Any]

# erf(x) = 2/sqrt(pi) * sum of (-1)^n x^(2n+1) / (n! (2n+1)), enough terms for |x| <= 1
_ERF_TAYLOR = [
    2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1))
    for n in range(17, -1, -1)
]
# x * exp(x^2) * erfc(x) for 1 <= x <= 6.5 as a polynomial of u = 2.2909... * t - 0.01818...,
# t = (x - 2.5) / (x + 2.5), which runs over [-1, 1]: interpolated at the 19 Chebyshev points
_ERFC_POLYNOMIAL = [
    8.034967907120344e-14,
    2.0752135186950225e-13,
    -1.618817348150087e-12,
    -9.043291038215617e-12,
    1.772803962514295e-11,
    2.659136427999542e-10,
    3.149276611428524e-11,
    -7.2427687453121605e-09,
    -8.266943695289146e-09,
    2.1754831697608373e-07,
    2.0936021011566927e-07,
    -7.91058079715431e-06,
    1.1353943785082017e-05,
    0.00029252778773838445,
    -0.0025672806659497957,
    0.011567126103750344,
    -0.03277859591950336,
    0.05322468588968628,
    0.5279945374195303,
]
_HALVES = (float16, bfloat16)
_NUMBERS = (bool, int, float)  # each holds those before it
_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715


def number(x: Any) -> Any:
    """Return x to compute with: 16-bit floats as float32."""
    return x.astype(np.float32) if getattr(x, "dtype", None) in _HALVES else x


def where(c: Any, a: Any, b: Any) -> Any:
    """Return a where the condition holds, else b; of Python numbers a number, of the wider type."""
    if type(c) is bool and type(a) in _NUMBERS and type(b) in _NUMBERS:
        return max(type(a), type(b), key=_NUMBERS.index)(a if c else b)
    return np.where(c, a, b)


def erf(x: Values) -> Values:
    """Return the error function, 2/sqrt(pi) times the integral of exp(-t^2) from 0 to x."""
    size = np.minimum(np.abs(x * 1.0), 6.5)  # abs alone leaves the least integer negative
    square = size * size
    t = (np.maximum(size, 1.0) - 2.5) / (np.maximum(size, 1.0) + 2.5)
    near = _polynomial(_ERF_TAYLOR, np.minimum(square, 1.0)) * size
    far = _polynomial(_ERFC_POLYNOMIAL, 2.290909090909091 * t + -0.01818181818181818)
    far = 1 - far * np.exp(-square) / np.maximum(size, 1.0)
    return np.copysign(np.where(size < 1, near, far), x)


def normal_share(x: Values) -> Values:
    """Return the share of the normal distribution below x."""
    y = erf(x * 0.7071067811865476)
    y += 1
    y *= 0.5
    return y


def normal_density(x: Values) -> Values:
    """Return the density of the normal distribution."""
    y: Values = np.exp(-0.5 * x * x) * 0.3989422804014327
    return y


def sigmoid(x: Values) -> Values:
    """Return 1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # 1 / inf is what is left of it
        t = np.exp(x * -1.0)  # -x of unsigned integers would wrap around
    t += 1
    y: Values = 1 / t
    return y


def softplus(x: Values) -> Values:
    """Return log(1 + exp(x)) without overflow."""
    y: Values = np.maximum(x, 0.0)
    y = y + np.log1p(np.exp(np.minimum(x, 0.0) - y))
    return y


def gelu_tanh(x: Values) -> Values:
    """Return x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))."""
    t = _gelu_inner_tanh(x)
    t += 1
    t *= x
    t *= 0.5
    return t


def gelu_tanh_slope(x: Values) -> Values:
    """Return the derivative of `gelu_tanh`."""
    t = _gelu_inner_tanh(x)
    slope = x * x
    slope *= 3 * _GELU_CUBE * _GELU_SCALE
    slope += _GELU_SCALE
    slope *= x
    slope *= 1 - t * t
    slope += t
    slope += 1
    slope *= 0.5
    return slope


def _gelu_inner_tanh(x: Values) -> Values:
    t = x * x
    t *= _GELU_CUBE * _GELU_SCALE
    t += _GELU_SCALE
    t *= x
    y: Values = np.tanh(t)
    return y


def _polynomial(coefficients: list[float], x: Values) -> Values:
    """Return the polynomial with these coefficients, highest power first."""
    y: Values = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        y += coefficient
        y *= x
    y += coefficients[-1]
    return y
