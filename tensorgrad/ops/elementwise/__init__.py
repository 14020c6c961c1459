"""Map and zip: each op is a row of expressions (see `row.py`) and the typed function below it.

Operands broadcast as in NumPy; the result has the dtype that NumPy promotes to; 16-bit floats
are computed in float32 and rounded once. `x`, `a`, `b` may be tensors, arrays or Python numbers.
Gradients at kinks: abs and sign give 0 at 0, clip passes the gradient at its bounds, maximum and
minimum share it equally where the operands are equal and give it to both beside NaN. Ops without a
gradient (comparisons, rounding, sign, bits) return tensors that no gradient flows through.
Tests: tests/ops/test_elementwise.py.
"""

from __future__ import annotations

from typing import Any

from tensorgrad.errors import ArgumentError
from tensorgrad.ops.elementwise.row import Row
from tensorgrad.tensor import Tensor

__all__ = [
    "abs",
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "ceil",
    "clip",
    "cos",
    "divide",
    "equal",
    "erf",
    "exp",
    "expm1",
    "floor",
    "greater",
    "greater_equal",
    "invert",
    "isfinite",
    "isinf",
    "isnan",
    "left_shift",
    "less",
    "less_equal",
    "log",
    "log1p",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "not_equal",
    "power",
    "reciprocal",
    "right_shift",
    "round",
    "rsqrt",
    "sign",
    "sin",
    "sqrt",
    "square",
    "subtract",
    "tanh",
    "where",
]

NEGATIVE = Row("negative", "x", "-x", "-dy")


def negative(x: Any) -> Tensor:
    """Return -x."""
    return NEGATIVE(x)


ABS = Row("abs", "x", "absolute(x)", "dy * sign(x)")


def abs(x: Any) -> Tensor:
    """Return |x|."""
    return ABS(x)


SIGN = Row("sign", "x", "sign(x)", "")


def sign(x: Any) -> Tensor:
    """Return -1, 0 or 1; without a gradient."""
    return SIGN(x)


EXP = Row("exp", "x", "exp(x)", "dy * y")


def exp(x: Any) -> Tensor:
    """Return e**x."""
    return EXP(x)


EXPM1 = Row("expm1", "x", "expm1(x)", "dy * (y + 1)")


def expm1(x: Any) -> Tensor:
    """Return e**x - 1, accurate near 0."""
    return EXPM1(x)


LOG = Row("log", "x", "log(x)", "dy / x")


def log(x: Any) -> Tensor:
    """Return the natural logarithm."""
    return LOG(x)


LOG1P = Row("log1p", "x", "log1p(x)", "dy / (1 + x)")


def log1p(x: Any) -> Tensor:
    """Return log(1 + x), accurate near 0."""
    return LOG1P(x)


SQRT = Row("sqrt", "x", "sqrt(x)", "dy * 0.5 / y")


def sqrt(x: Any) -> Tensor:
    """Return the square root."""
    return SQRT(x)


RSQRT = Row("rsqrt", "x", "1 / sqrt(x)", "dy * -0.5 * y * y * y")


def rsqrt(x: Any) -> Tensor:
    """Return 1 / sqrt(x)."""
    return RSQRT(x)


RECIPROCAL = Row("reciprocal", "x", "1 / x", "-dy * y * y")


def reciprocal(x: Any) -> Tensor:
    """Return 1 / x (of integers, as a float)."""
    return RECIPROCAL(x)


SQUARE = Row("square", "x", "square(x)", "dy * 2 * x")


def square(x: Any) -> Tensor:
    """Return x * x (of bool, as int8)."""
    return SQUARE(x)


SIN = Row("sin", "x", "sin(x)", "dy * cos(x)")


def sin(x: Any) -> Tensor:
    """Return the sine of x in radians."""
    return SIN(x)


COS = Row("cos", "x", "cos(x)", "-dy * sin(x)")


def cos(x: Any) -> Tensor:
    """Return the cosine of x in radians."""
    return COS(x)


TANH = Row("tanh", "x", "tanh(x)", "dy * (1 - y * y)")


def tanh(x: Any) -> Tensor:
    """Return the hyperbolic tangent."""
    return TANH(x)


ERF = Row("erf", "x", "erf(x)", "dy * 1.1283791670955126 * exp(-x * x)")


def erf(x: Any) -> Tensor:
    """Return the error function, 2/sqrt(pi) times the integral of exp(-t^2) from 0 to x."""
    return ERF(x)


FLOOR = Row("floor", "x", "round_down(x)", "")


def floor(x: Any) -> Tensor:
    """Return the largest integer <= x, in the dtype of x; without a gradient."""
    return FLOOR(x)


CEIL = Row("ceil", "x", "round_up(x)", "")


def ceil(x: Any) -> Tensor:
    """Return the smallest integer >= x, in the dtype of x; without a gradient."""
    return CEIL(x)


ROUND = Row("round", "x", "round_nearest(x)", "")


def round(x: Any) -> Tensor:
    """Return the nearest integer, halves to even, in the dtype of x; without a gradient."""
    return ROUND(x)


ISNAN = Row("isnan", "x", "is_nan(x)", "")


def isnan(x: Any) -> Tensor:
    """Return whether x is NaN."""
    return ISNAN(x)


ISINF = Row("isinf", "x", "is_inf(x)", "")


def isinf(x: Any) -> Tensor:
    """Return whether x is +inf or -inf."""
    return ISINF(x)


ISFINITE = Row("isfinite", "x", "is_finite(x)", "")


def isfinite(x: Any) -> Tensor:
    """Return whether x is neither NaN nor infinite."""
    return ISFINITE(x)


LOGICAL_NOT = Row("logical_not", "x", "logical_not(x)", "")


def logical_not(x: Any) -> Tensor:
    """Return whether x is 0 or False."""
    return LOGICAL_NOT(x)


INVERT = Row("invert", "x", "invert(x)", "")


def invert(x: Any) -> Tensor:
    """Return the integer with all bits inverted, -x - 1 where it has a sign; of bool, not x.

    Raises:
        DtypeError: x holds floats.
    """
    return INVERT(x)


ADD = Row("add", "a b", "a + b", "dy", "dy")


def add(a: Any, b: Any) -> Tensor:
    """Return a + b."""
    return ADD(a, b)


SUBTRACT = Row("subtract", "a b", "a - b", "dy", "-dy")


def subtract(a: Any, b: Any) -> Tensor:
    """Return a - b."""
    return SUBTRACT(a, b)


MULTIPLY = Row("multiply", "a b", "a * b", "dy * b", "dy * a")


def multiply(a: Any, b: Any) -> Tensor:
    """Return a * b."""
    return MULTIPLY(a, b)


DIVIDE = Row("divide", "a b", "a / b", "dy / b", "-dy * y / b")


def divide(a: Any, b: Any) -> Tensor:
    """Return a / b (of integers, as a float)."""
    return DIVIDE(a, b)


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


MAXIMUM = Row(
    "maximum",
    "a b",
    "maximum(a, b)",
    "where(a == b, dy * 0.5, where(a < b, 0, dy))",
    "where(a == b, dy * 0.5, where(b < a, 0, dy))",
)


def maximum(a: Any, b: Any) -> Tensor:
    """Return the larger of a and b; NaN where either is NaN."""
    return MAXIMUM(a, b)


MINIMUM = Row(
    "minimum",
    "a b",
    "minimum(a, b)",
    "where(a == b, dy * 0.5, where(a > b, 0, dy))",
    "where(a == b, dy * 0.5, where(b > a, 0, dy))",
)


def minimum(a: Any, b: Any) -> Tensor:
    """Return the smaller of a and b; NaN where either is NaN."""
    return MINIMUM(a, b)


EQUAL = Row("equal", "a b", "a == b", "", "")


def equal(a: Any, b: Any) -> Tensor:
    """Return whether a == b, elementwise."""
    return EQUAL(a, b)


NOT_EQUAL = Row("not_equal", "a b", "a != b", "", "")


def not_equal(a: Any, b: Any) -> Tensor:
    """Return whether a != b, elementwise."""
    return NOT_EQUAL(a, b)


LESS = Row("less", "a b", "a < b", "", "")


def less(a: Any, b: Any) -> Tensor:
    """Return whether a < b, elementwise."""
    return LESS(a, b)


LESS_EQUAL = Row("less_equal", "a b", "a <= b", "", "")


def less_equal(a: Any, b: Any) -> Tensor:
    """Return whether a <= b, elementwise."""
    return LESS_EQUAL(a, b)


GREATER = Row("greater", "a b", "a > b", "", "")


def greater(a: Any, b: Any) -> Tensor:
    """Return whether a > b, elementwise."""
    return GREATER(a, b)


GREATER_EQUAL = Row("greater_equal", "a b", "a >= b", "", "")


def greater_equal(a: Any, b: Any) -> Tensor:
    """Return whether a >= b, elementwise."""
    return GREATER_EQUAL(a, b)


LOGICAL_AND = Row("logical_and", "a b", "logical_and(a, b)", "", "")


def logical_and(a: Any, b: Any) -> Tensor:
    """Return whether both a and b are true (not 0)."""
    return LOGICAL_AND(a, b)


LOGICAL_OR = Row("logical_or", "a b", "logical_or(a, b)", "", "")


def logical_or(a: Any, b: Any) -> Tensor:
    """Return whether a or b is true (not 0)."""
    return LOGICAL_OR(a, b)


LOGICAL_XOR = Row("logical_xor", "a b", "logical_xor(a, b)", "", "")


def logical_xor(a: Any, b: Any) -> Tensor:
    """Return whether exactly one of a and b is true (not 0)."""
    return LOGICAL_XOR(a, b)


BITWISE_AND = Row("bitwise_and", "a b", "bitwise_and(a, b)", "", "")


def bitwise_and(a: Any, b: Any) -> Tensor:
    """Return the bits that are 1 in both integers; of bool, whether both are true.

    Raises:
        DtypeError: an operand holds floats.
    """
    return BITWISE_AND(a, b)


BITWISE_OR = Row("bitwise_or", "a b", "bitwise_or(a, b)", "", "")


def bitwise_or(a: Any, b: Any) -> Tensor:
    """Return the bits that are 1 in either integer; of bool, whether a or b is true.

    Raises:
        DtypeError: an operand holds floats.
    """
    return BITWISE_OR(a, b)


BITWISE_XOR = Row("bitwise_xor", "a b", "bitwise_xor(a, b)", "", "")


def bitwise_xor(a: Any, b: Any) -> Tensor:
    """Return the bits in which two integers differ; of bool, whether exactly one is true.

    Raises:
        DtypeError: an operand holds floats.
    """
    return BITWISE_XOR(a, b)


LEFT_SHIFT = Row("left_shift", "a b", "left_shift(a, b)", "", "")


def left_shift(a: Any, b: Any) -> Tensor:
    """Return the integer a times 2**b, without the bits that its dtype has no place for.

    Raises:
        DtypeError: an operand holds floats.
    """
    return LEFT_SHIFT(a, b)


RIGHT_SHIFT = Row("right_shift", "a b", "right_shift(a, b)", "", "")


def right_shift(a: Any, b: Any) -> Tensor:
    """Return the integer a divided by 2**b, rounded down.

    Raises:
        DtypeError: an operand holds floats.
    """
    return RIGHT_SHIFT(a, b)


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
