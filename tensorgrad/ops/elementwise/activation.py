"""Activation functions: GELU, ReLU, SiLU, SwiGLU; rows of the elementwise table, some fused.

Backward recomputes from the arguments rather than keep a second array.
Tests: tests/ops/test_activation.py.
"""

from __future__ import annotations

from typing import Any

from tensorgrad.errors import ArgumentError
from tensorgrad.ops.elementwise.fuse import fuse
from tensorgrad.ops.elementwise.row import Row, unary
from tensorgrad.tensor import Tensor

__all__ = ["bias_gelu", "gelu", "relu", "sigmoid", "silu", "softplus", "swiglu"]

relu = unary(
    "relu",
    "max(x, 0); the gradient at 0 is 0, and that of NaN passes",
    "maximum(x, 0)",
    "where(y <= 0, 0, dy)",
)
sigmoid = unary("sigmoid", "1 / (1 + exp(-x))", "sigmoid(x)", "dy * y * (1 - y)")
softplus = unary("softplus", "log(1 + exp(x))", "softplus(x)", "dy * sigmoid(x)")
SILU = Row("silu", "x", "x * sigmoid(x)", "dy * silu_derivative(x)")


def silu(x: Any) -> Tensor:
    """Return x * sigmoid(x).

    Source: Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2 (there called SiL).
    """
    return SILU(x)


GELU_TANH = Row("gelu", "x", "gelu_tanh(x)", "dy * gelu_tanh_derivative(x)")
GELU_ERF = Row(
    "gelu",
    "x",
    "x * normal_cdf(x)",
    "dy * (normal_cdf(x) + minimum(maximum(x, -40), 40) * normal_pdf(x))",  # inf * 0 is NaN
)


def gelu(x: Any, approximate: str = "tanh") -> Tensor:
    """Return x times the normal distribution's probability of being below x.

    "tanh": x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))), as in GPT-2.
    "none": x/2 * (1 + erf(x / sqrt(2))), exact.

    Raises:
        ArgumentError: another name for `approximate`.
    Source: Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2.
    """
    if approximate == "tanh":
        return GELU_TANH(x)
    if approximate == "none":
        return GELU_ERF(x)
    raise ArgumentError(f"gelu: approximate is {approximate!r}, expected 'tanh' or 'none'")


@fuse
def _bias_gelu(x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
    return gelu(x + bias, approximate)


def bias_gelu(x: Any, bias: Any, approximate: str = "tanh") -> Tensor:
    """Return gelu(x + bias, approximate), in one kernel that does not save the sum.

    Args:
        x: any shape.
        bias: broadcasts to x, usually (C,).
        approximate: see `gelu`.
    """
    return _bias_gelu(x, bias, approximate=approximate)


@fuse
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def swiglu(gate: Any, up: Any) -> Tensor:
    """Return silu(gate) * up, in one kernel; backward needs only the two arguments.

    Source: Shazeer 2020, arXiv:2002.05202, eq. 6.
    """
    return _swiglu(gate, up)
