"""The table of elementwise ops: arithmetic, exp and log, comparisons, rounding, logic, bits, where.

Each row is a name, what the op returns, its value as an expression and one gradient for each
operand (see `row.py`). An op with a longer docstring is a function below its row.

Operands broadcast as in NumPy; the result has the dtype that NumPy promotes to; 16-bit floats
are computed in float32 and rounded once. `x`, `a`, `b` may be tensors, arrays or Python numbers.
Gradients at kinks: abs and sign give 0 at 0, clip passes the gradient at its bounds, maximum and
minimum split it equally where the operands are equal and pass it to both beside NaN. Ops without a
gradient (comparisons, rounding, sign, bits) return tensors that no gradient flows through.
Tests: tests/ops/test_elementwise.py.
"""

from __future__ import annotations

from typing import Any

from tensorgrad.errors import ArgumentError
from tensorgrad.ops.elementwise.row import Row, binary, unary
from tensorgrad.tensor import Tensor

__all__ = [
    "abs", "add", "bitwise_and", "bitwise_or", "bitwise_xor", "ceil", "clip", "cos", "divide",
    "equal", "erf", "exp", "expm1", "floor", "greater", "greater_equal", "invert", "isfinite",
    "isinf", "isnan", "left_shift", "less", "less_equal", "log", "log1p", "logical_and",
    "logical_not", "logical_or", "logical_xor", "maximum", "minimum", "multiply", "negative",
    "not_equal", "power", "reciprocal", "right_shift", "round", "rsqrt", "sign", "sin", "sqrt",
    "square", "subtract", "tanh", "where",
]  # fmt: skip

negative = unary("negative", "-x", "-x", "-dy")
abs = unary("abs", "|x|", "absolute(x)", "dy * sign(x)")
exp = unary("exp", "e**x", "exp(x)", "dy * y")
expm1 = unary("expm1", "e**x - 1, accurate near 0", "expm1(x)", "dy * (y + 1)")
log = unary("log", "the natural logarithm", "log(x)", "dy / x")
log1p = unary("log1p", "log(1 + x), accurate near 0", "log1p(x)", "dy / (1 + x)")
sqrt = unary("sqrt", "the square root", "sqrt(x)", "dy * 0.5 / y")
rsqrt = unary("rsqrt", "1 / sqrt(x)", "1 / sqrt(x)", "dy * -0.5 * y * y * y")
reciprocal = unary("reciprocal", "1 / x (of integers, as a float)", "1 / x", "-dy * y * y")
square = unary("square", "x * x (of bool, as int8)", "square(x)", "dy * 2 * x")
sin = unary("sin", "the sine of x in radians", "sin(x)", "dy * cos(x)")
cos = unary("cos", "the cosine of x in radians", "cos(x)", "-dy * sin(x)")
tanh = unary("tanh", "the hyperbolic tangent", "tanh(x)", "dy * (1 - y * y)")
erf = unary(
    "erf",
    "the error function, 2/sqrt(pi) times the integral of exp(-t^2) from 0 to x",
    "erf(x)",
    "dy * 1.1283791670955126 * exp(-x * x)",
)
sign = unary("sign", "-1, 0 or 1; without a gradient", "sign(x)")
floor = unary(
    "floor", "the largest integer <= x, in the dtype of x; without a gradient", "round_down(x)"
)
ceil = unary(
    "ceil", "the smallest integer >= x, in the dtype of x; without a gradient", "round_up(x)"
)
round = unary(
    "round",
    "the nearest integer, halves to even, in the dtype of x; without a gradient",
    "round_nearest(x)",
)
isnan = unary("isnan", "whether x is NaN", "is_nan(x)")
isinf = unary("isinf", "whether x is +inf or -inf", "is_inf(x)")
isfinite = unary("isfinite", "whether x is neither NaN nor infinite", "is_finite(x)")
logical_not = unary("logical_not", "whether x is 0 or False", "logical_not(x)")

add = binary("add", "a + b", "a + b", "dy", "dy")
subtract = binary("subtract", "a - b", "a - b", "dy", "-dy")
multiply = binary("multiply", "a * b", "a * b", "dy * b", "dy * a")
divide = binary("divide", "a / b (of integers, as a float)", "a / b", "dy / b", "-dy * y / b")
maximum = binary(
    "maximum",
    "the larger of a and b; NaN where either is NaN",
    "maximum(a, b)",
    "where(a == b, dy * 0.5, where(a < b, 0, dy))",
    "where(a == b, dy * 0.5, where(b < a, 0, dy))",
)
minimum = binary(
    "minimum",
    "the smaller of a and b; NaN where either is NaN",
    "minimum(a, b)",
    "where(a == b, dy * 0.5, where(a > b, 0, dy))",
    "where(a == b, dy * 0.5, where(b > a, 0, dy))",
)
equal = binary("equal", "whether a == b, elementwise", "a == b")
not_equal = binary("not_equal", "whether a != b, elementwise", "a != b")
less = binary("less", "whether a < b, elementwise", "a < b")
less_equal = binary("less_equal", "whether a <= b, elementwise", "a <= b")
greater = binary("greater", "whether a > b, elementwise", "a > b")
greater_equal = binary("greater_equal", "whether a >= b, elementwise", "a >= b")
logical_and = binary("logical_and", "whether both a and b are true (not 0)", "logical_and(a, b)")
logical_or = binary("logical_or", "whether a or b is true (not 0)", "logical_or(a, b)")
logical_xor = binary(
    "logical_xor", "whether exactly one of a and b is true (not 0)", "logical_xor(a, b)"
)

_NO_FLOATS = ".\n\nRaises:\n    DtypeError: an operand holds floats"
invert = unary(
    "invert",
    "the integer with all bits inverted, -x - 1 where it has a sign; of bool, not x" + _NO_FLOATS,
    "invert(x)",
)
bitwise_and = binary(
    "bitwise_and",
    "the bits that are 1 in both integers; of bool, whether both are true" + _NO_FLOATS,
    "bitwise_and(a, b)",
)
bitwise_or = binary(
    "bitwise_or",
    "the bits that are 1 in either integer; of bool, whether a or b is true" + _NO_FLOATS,
    "bitwise_or(a, b)",
)
bitwise_xor = binary(
    "bitwise_xor",
    "the bits in which two integers differ; of bool, whether exactly one is true" + _NO_FLOATS,
    "bitwise_xor(a, b)",
)
left_shift = binary(
    "left_shift",
    "the integer a times 2**b, without the bits beyond the width of its dtype" + _NO_FLOATS,
    "left_shift(a, b)",
)
right_shift = binary(
    "right_shift", "the integer a divided by 2**b, rounded down" + _NO_FLOATS, "right_shift(a, b)"
)

POWER = Row(
    "power",
    "a b",
    "power(a, b)",
    "dy * b * power(a, where(b == 0, 0, number(b) - 1))",
    "dy * y * log(where(a <= 0, 1, number(a)))",
)


def power(a: Any, b: Any) -> Tensor:
    """Return a to the power of b, a tensor or a number.

    The gradient for a is 0 where b is 0. That for b is y log(a); where a <= 0 it is 0, and NaN
    where y is not finite.

    Raises:
        ArgumentError: an integer to a negative integer power; on the GPU, where the values are not
            inspected, it is rounded toward 0.
    """
    return POWER(a, b)


WHERE = Row("where", "c a b", "where(c, a, b)", "", "where(c, dy, 0)", "where(c, 0, dy)")


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """Return a where the condition holds, else b."""
    return WHERE(condition, a, b)


CLIP = Row(
    "clip",
    "x a b",
    "minimum(maximum(x, a), b)",
    "where(maximum(x, a) > b, 0, where(x < a, 0, dy))",
    "where(maximum(x, a) > b, 0, where(x < a, dy, 0))",
    "where(maximum(x, a) > b, dy, 0)",
)
CLIP_LOW = Row("clip", "x a", "maximum(x, a)", "where(x < a, 0, dy)", "where(x < a, dy, 0)")
CLIP_HIGH = Row("clip", "x b", "minimum(x, b)", "where(x > b, 0, dy)", "where(x > b, dy, 0)")


def clip(x: Any, low: Any = None, high: Any = None) -> Tensor:
    """Return x limited to [low, high]; a bound that is None does not limit.

    Raises:
        ArgumentError: neither bound is given.
    """
    if low is None and high is None:
        raise ArgumentError("clip: low and high are None, expected at least one bound")
    if high is None:
        return CLIP_LOW(x, low)
    return CLIP_HIGH(x, high) if low is None else CLIP(x, low, high)
