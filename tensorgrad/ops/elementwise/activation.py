"""Activation functions: ELU, GELU, ReLU, SiLU, SwiGLU; rows of the elementwise table, some fused.

Backward recomputes from the arguments rather than keep a second array.
Tests: tests/ops/test_activation.py.
"""

from __future__ import annotations

from typing import Any

from tensorgrad.core.checks import check_choice, check_number
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.ops.elementwise.fuse import fuse
from tensorgrad.ops.elementwise.row import Row, unary

__all__ = [
    "bias_gelu", "elu", "gelu", "leaky_relu", "relu", "sigmoid", "silu", "softplus", "swiglu",
]  # fmt: skip

relu = unary(
    "relu",
    "max(x, 0); the gradient at 0 is 0, and that of NaN passes",
    "[-1, 2] -> [0, 2]",
    "maximum(x, 0)",
    "where(y <= 0, 0, dy)",
)
sigmoid = unary(
    "sigmoid", "1 / (1 + exp(-x))", "[0, 1] -> [0.5, 0.731...]", "sigmoid(x)", "dy * y * (1 - y)"
)
SOFTPLUS = Row("softplus", "x", "softplus(x)", "dy * sigmoid(x)")
SCALED_SOFTPLUS = Row(
    "softplus",
    "x beta threshold",
    "where(beta * x > threshold, x, softplus(beta * x) / beta)",
    "where(beta * x > threshold, dy, dy * sigmoid(beta * x))",
    "",  # beta and threshold are numbers
    "",
)


def softplus(x: ArrayLike, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Return log(1 + exp(beta * x)) / beta.

    Gradient: dx = dy * sigmoid(beta * x)

    Args:
        x: any shape.
        beta: a number above 0.
        threshold: x itself is returned where beta * x is above this; the difference at 20 is 2e-9,
            which float64 alone shows. inf: nowhere.

    Returns:
        The shape of x, in the dtype that NumPy promotes to.

    Raises:
        ArgumentError: beta is not above 0.

    Example:
        >>> tg.softplus([0, 30]).tolist()
        [0.693..., 30.0]
    """
    check_number("softplus", "beta", beta)
    check_number("softplus", "threshold", threshold)
    if not beta > 0:
        raise ArgumentError(f"softplus: beta is {beta}, expected more than 0")
    return SCALED_SOFTPLUS(x, float(beta), float(threshold))


SILU = Row("silu", "x", "x * sigmoid(x)", "dy * silu_derivative(x)")


def silu(x: ArrayLike) -> Tensor:
    """Return x * sigmoid(x).

    Gradient: dx = dy * sigmoid(x) * (1 + x * (1 - sigmoid(x)))

    Args:
        x: any shape.

    Returns:
        The shape of x, in the dtype that NumPy promotes to.

    Source: Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2 (there called SiL).

    Example:
        >>> tg.silu([0, 1]).tolist()
        [0.0, 0.731...]
    """
    return SILU(x)


LEAKY_RELU = Row(
    "leaky_relu",
    "x negative_slope",
    "where(x < 0, x * negative_slope, x)",
    "where(x < 0, dy * negative_slope, dy)",
    "where(x < 0, dy * x, 0)",
)


def leaky_relu(x: ArrayLike, negative_slope: Any = 0.01) -> Tensor:
    """Return x, or negative_slope * x where x < 0; the derivative at 0 is 1.

    Args:
        x: any shape.
        negative_slope: a number or a tensor that broadcasts with x, which may be learned (PReLU).

    Returns:
        The shape of x, in the dtype that NumPy promotes to.

    Example:
        >>> tg.leaky_relu([-4, 2], 0.25).tolist()
        [-1.0, 2.0]
    """
    return LEAKY_RELU(x, negative_slope)


ELU = Row(
    "elu",
    "x alpha",
    "where(x < 0, alpha * expm1(minimum(x, 0)), x)",  # exp(x) of large x would overflow
    "where(x < 0, dy * alpha * exp(minimum(x, 0)), dy)",
    "where(x < 0, dy * expm1(minimum(x, 0)), 0)",
)


def elu(x: ArrayLike, alpha: ArrayLike = 1.0) -> Tensor:
    """Return x, or alpha * (exp(x) - 1) where x < 0; the derivative at 0 is 1.

    Args:
        x: any shape.
        alpha: a number, or a tensor that broadcasts with x.

    Returns:
        The shape of x, in the dtype that NumPy promotes to.

    Source: Clevert et al. 2015, arXiv:1511.07289, eq. 15.

    Example:
        >>> tg.elu([-1, 2]).tolist()
        [-0.632..., 2.0]
    """
    return ELU(x, alpha)


GELU_TANH = Row("gelu", "x", "gelu_tanh(x)", "dy * gelu_tanh_derivative(x)")
GELU_ERF = Row(
    "gelu",
    "x",
    "x * normal_cdf(x)",
    "dy * (normal_cdf(x) + minimum(maximum(x, -40), 40) * normal_pdf(x))",  # inf * 0 is NaN
)


def gelu(x: ArrayLike, *, approximate: str = "none") -> Tensor:
    """Return x times the normal distribution's probability of being below x.

    Args:
        x: any shape.
        approximate: "none": x/2 * (1 + erf(x / sqrt(2))), exact; "tanh": as in GPT-2,
            x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).

    Returns:
        The shape of x, in the dtype that NumPy promotes to.

    Raises:
        ArgumentError: another name for `approximate`.
    Source: Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2.

    Example:
        >>> tg.gelu([0.0, 1.0]).tolist()
        [0.0, 0.8413...]
        >>> tg.gelu([0.0, 1.0], approximate="tanh").tolist()
        [0.0, 0.8411...]
    """
    check_choice("gelu", "approximate", approximate, ("tanh", "none"))
    return GELU_TANH(x) if approximate == "tanh" else GELU_ERF(x)


@fuse
def _bias_gelu(x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
    return gelu(x + bias, approximate=approximate)


def bias_gelu(x: ArrayLike, bias: ArrayLike, *, approximate: str = "tanh") -> Tensor:
    """Return gelu(x + bias, approximate), in one kernel that does not save the sum.

    Args:
        x: any shape.
        bias: broadcasts to x, usually (C,).
        approximate: see `gelu`, whose default is another one.

    Returns:
        The shape of x, in the dtype that NumPy promotes to.

    Example:
        >>> tg.bias_gelu([0, 1], [1, 0], approximate="none").tolist()
        [0.841..., 0.841...]
    """
    return _bias_gelu(x, bias, approximate=approximate)


@fuse
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def swiglu(gate: ArrayLike, up: ArrayLike) -> Tensor:
    """Return silu(gate) * up, in one kernel; backward needs only the two arguments.

    Args:
        gate, up: tensors, arrays or numbers that broadcast, usually of one shape (..., C).

    Returns:
        The shape that gate and up broadcast to, in the dtype that NumPy promotes to.

    Source: Shazeer 2020, arXiv:2002.05202, eq. 6.

    Example:
        >>> tg.swiglu([0, 1], [2, 2]).tolist()
        [0.0, 1.462...]
    """
    return _swiglu(gate, up)
