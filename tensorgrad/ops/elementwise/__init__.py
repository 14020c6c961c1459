"""The table of elementwise ops: arithmetic, exp and log, comparisons, rounding, logic, bits, where.

Each row is a name, what the op returns, its value as an expression and one gradient for each
operand (see `row.py`). An op with a longer docstring is a function below its row.

Operands broadcast as in NumPy; the result has the dtype that NumPy promotes to; 16-bit floats
are computed in float32 and rounded once. `x`, `a`, `b` may be tensors, arrays or Python numbers.
Gradients at kinks: abs and sign give 0 at 0, clip passes the gradient at its bounds, maximum and
minimum split it equally where the operands are equal and pass it to both beside NaN. Ops without a
gradient (comparisons, rounding, sign, bits) return tensors that no gradient flows through.
Complex operands carry no gradient; NumPy and CuPy compute with them.
Tests: tests/ops/test_elementwise.py and tests/ops/test_complex.py.
"""

from __future__ import annotations

import builtins
from typing import Any, overload

from ml_dtypes import finfo

from tensorgrad.core.backend import empty_like, namespace
from tensorgrad.core.checks import check_flag, check_integer, check_range
from tensorgrad.core.dtypes import compute_dtype, float32, is_complex, is_float
from tensorgrad.core.errors import ArgumentError, DtypeError
from tensorgrad.core.operands import array_beside, constant_of, tensor_of
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.ops.elementwise.row import Row, binary, unary
from tensorgrad.ops.indexing import nonzero

__all__ = [
    "abs",
    "add",
    "angle",
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctan2",
    "arctanh",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "cbrt",
    "ceil",
    "clip",
    "conj",
    "copysign",
    "cos",
    "cosh",
    "deg2rad",
    "divide",
    "divmod",
    "entr",
    "equal",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "frac",
    "greater",
    "greater_equal",
    "heaviside",
    "hypot",
    "imag",
    "invert",
    "isfinite",
    "isinf",
    "isnan",
    "left_shift",
    "lerp",
    "less",
    "less_equal",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logaddexp2",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logit",
    "maximum",
    "minimum",
    "multiply",
    "nan_to_num",
    "ndtr",
    "negative",
    "nextafter",
    "not_equal",
    "positive",
    "power",
    "rad2deg",
    "real",
    "reciprocal",
    "remainder",
    "right_shift",
    "rint",
    "round",
    "rsqrt",
    "sign",
    "signbit",
    "sin",
    "sinc",
    "sinh",
    "sqrt",
    "square",
    "subtract",
    "tan",
    "tanh",
    "trunc",
    "where",
    "xlog1py",
    "xlogy",
]  # fmt: skip

# fmt: off
negative = unary("negative", "-x", "[1, -2] -> [-1, 2]", "-x", "-dy")
abs = unary("abs", "|x|", "[-1, 2] -> [1, 2]", "absolute(x)", "dy * sign(x)")
exp = unary("exp", "e**x", "[0, 1] -> [1.0, 2.718...]", "exp(x)", "dy * y")
expm1 = unary("expm1", "e**x - 1, accurate near 0", "[0, 1] -> [0.0, 1.718...]", "expm1(x)",
    "dy * (y + 1)")
log = unary("log", "the natural logarithm", "[1, 2] -> [0.0, 0.693...]", "log(x)", "dy / x")
log1p = unary("log1p", "log(1 + x), accurate near 0", "[0, 1] -> [0.0, 0.693...]", "log1p(x)",
    "dy / (1 + x)")
sqrt = unary("sqrt", "the square root", "[4, 2] -> [2.0, 1.414...]", "sqrt(x)", "dy * 0.5 / y")
rsqrt = unary("rsqrt", "1 / sqrt(x)", "[1, 4] -> [1.0, 0.5]", "1 / sqrt(x)",
    "dy * -0.5 * y * y * y")
reciprocal = unary("reciprocal", "1 / x (of integers, as a float)", "[2, 4] -> [0.5, 0.25]",
    "1 / x", "-dy * y * y")
square = unary("square", "x * x (of bool, as int8)", "[3, -2] -> [9, 4]", "square(x)", "dy * 2 * x")
sin = unary("sin", "the sine of x in radians", "[0, 1] -> [0.0, 0.841...]", "sin(x)", "dy * cos(x)")
cos = unary("cos", "the cosine of x in radians", "[0, 1] -> [1.0, 0.540...]", "cos(x)",
    "-dy * sin(x)")
tan = unary("tan", "the tangent of x in radians", "[0, 1] -> [0.0, 1.557...]", "tan(x)",
    "dy * (1 + y * y)")
arcsin = unary("arcsin", "the angle whose sine is x", "[0, 1] -> [0.0, 1.570...]", "asin(x)",
    "dy / sqrt((1 - x) * (1 + x))")
arccos = unary("arccos", "the angle whose cosine is x", "[1, 0] -> [0.0, 1.570...]", "acos(x)",
    "-dy / sqrt((1 - x) * (1 + x))")
arctan = unary("arctan", "the angle whose tangent is x", "[0, 1] -> [0.0, 0.785...]", "atan(x)",
    "dy / (1 + x * x)")
sinh = unary("sinh", "the hyperbolic sine", "[0, 1] -> [0.0, 1.175...]", "sinh(x)", "dy * cosh(x)")
cosh = unary("cosh", "the hyperbolic cosine", "[0, 1] -> [1.0, 1.543...]", "cosh(x)",
    "dy * sinh(x)")
tanh = unary("tanh", "the hyperbolic tangent", "[0, 1] -> [0.0, 0.761...]", "tanh(x)",
    "dy * (1 - y * y)")
arcsinh = unary("arcsinh", "the inverse of sinh", "[0, 1] -> [0.0, 0.881...]", "asinh(x)",
    "dy / hypot(x, 1)")
arccosh = unary("arccosh", "the inverse of cosh, from 1", "[1, 2] -> [0.0, 1.316...]", "acosh(x)",
    "dy / (sqrt(x - 1) * sqrt(x + 1))")
arctanh = unary("arctanh", "the inverse of tanh", "[0, 0.5] -> [0.0, 0.549...]", "atanh(x)",
    "dy / ((1 - x) * (1 + x))")
log2 = unary("log2", "the logarithm to base 2", "[1, 8] -> [0.0, 3.0]", "log2(x)",
    "dy * 1.4426950408889634 / x")
log10 = unary("log10", "the logarithm to base 10", "[1, 100] -> [0.0, 2.0]", "log10(x)",
    "dy * 0.4342944819032518 / x")
exp2 = unary("exp2", "2**x", "[0, 3] -> [1.0, 8.0]", "exp2(x)", "dy * 0.6931471805599453 * y")
cbrt = unary("cbrt", "the cube root", "[8, -27] -> [2.0, -3.0]", "cbrt(x)", "dy / (3 * y * y)")
deg2rad = unary("deg2rad", "degrees in radians", "[0, 180] -> [0.0, 3.141...]",
    "x * 0.017453292519943295", "dy * 0.017453292519943295")
rad2deg = unary("rad2deg", "radians in degrees", "[0, 1] -> [0.0, 57.295...]",
    "x * 57.29577951308232", "dy * 57.29577951308232")
positive = unary("positive", "x, in memory of its own", "[1, -2] -> [1, -2]", "positive(x)", "dy")
erf = unary("erf", "the error function, 2/sqrt(pi) times the integral of exp(-t^2) from 0 to x",
    "[0, 1] -> [0.0, 0.842...]", "erf(x)", "dy * 1.1283791670955126 * exp(-x * x)")
erfc = unary("erfc", "1 - erf(x), accurate where that is near 0", "[0, 1] -> [1.0, 0.157...]",
    "2 * normal_cdf(-1.4142135623730951 * x)", "dy * -1.1283791670955126 * exp(-x * x)")
ndtr = unary("ndtr", "the probability that a normal variable is below x",
    "[0, 1] -> [0.5, 0.841...]", "normal_cdf(x)", "dy * normal_pdf(x)")
entr = unary("entr", "-x log(x), a term of the entropy: 0 where x is 0, -inf where it is negative",
    "[0.5, -1] -> [0.346..., -inf]", "where(x < 0, -inf, -x * log(where(x <= 0, 1, x)))",
    "where(x < 0, nan, -dy * (1 + log(where(x < 0, 1, x))))")
frac = unary("frac", "x - trunc(x), with the sign of x", "[1.5, -1.5] -> [0.5, -0.5]",
    "x - round_toward_zero(x)", "dy")
sign = unary("sign", "-1, 0 or 1; without a gradient", "[-2, 0, 3] -> [-1, 0, 1]", "sign(x)")
floor = unary("floor", "the largest integer <= x, in the dtype of x; without a gradient",
    "[1.5, -1.5] -> [1.0, -2.0]", "round_down(x)")
ceil = unary("ceil", "the smallest integer >= x, in the dtype of x; without a gradient",
    "[1.5, -1.5] -> [2.0, -1.0]", "round_up(x)")
trunc = unary("trunc", "the integer part, in the dtype of x; without a gradient",
    "[1.5, -1.5] -> [1.0, -1.0]", "round_toward_zero(x)")
rint = unary("rint",
    "the nearest integer, a half to the even one, in the dtype of x; without a gradient",
    "[0.5, 1.5, -1.2] -> [0.0, 2.0, -1.0]", "round_nearest(x)")
signbit = unary("signbit", "whether x is negative or -0.0", "[-1.0, 2.0] -> [True, False]",
    "sign_bit(x)")
isnan = unary("isnan", "whether x is NaN", "[1.0, np.nan] -> [False, True]", "is_nan(x)")
isinf = unary("isinf", "whether x is +inf or -inf", "[1.0, -np.inf] -> [False, True]", "is_inf(x)")
isfinite = unary("isfinite", "whether x is neither NaN nor infinite",
    "[1.0, np.nan] -> [True, False]", "is_finite(x)")
logical_not = unary("logical_not", "whether x is 0 or False", "[0, 2] -> [True, False]", "x == 0")

add = binary("add", "a + b", "[1, 2], 3 -> [4, 5]", "a + b", "dy", "dy")
subtract = binary("subtract", "a - b", "[5, 6], 3 -> [2, 3]", "a - b", "dy", "-dy")
multiply = binary("multiply", "a * b", "[1, 2], [3, 4] -> [3, 8]", "a * b", "dy * b", "dy * a")
divide = binary("divide", "a / b (of integers, as a float)", "[1, 6], 4 -> [0.25, 1.5]", "a / b",
    "dy / b", "-dy * y / b")
maximum = binary("maximum", "the larger of a and b; NaN where either is NaN",
    "[1, 5], [3, 2] -> [3, 5]", "maximum(a, b)", "where(a == b, dy * 0.5, where(a < b, 0, dy))",
    "where(a == b, dy * 0.5, where(b < a, 0, dy))")
minimum = binary("minimum", "the smaller of a and b; NaN where either is NaN",
    "[1, 5], [3, 2] -> [1, 2]", "minimum(a, b)", "where(a == b, dy * 0.5, where(a > b, 0, dy))",
    "where(a == b, dy * 0.5, where(b > a, 0, dy))")
fmax = binary("fmax", "the larger of a and b; the other where one is NaN",
    "[1.0, np.nan], 0.5 -> [1.0, 0.5]", "where(is_nan(a), b, where(is_nan(b), a, maximum(a, b)))",
    "where(a == b, dy * 0.5, where(a < b, 0, where(is_nan(a), 0, dy)))",
    "where(a == b, dy * 0.5, where(b < a, 0, where(is_nan(b), 0, dy)))")
fmin = binary("fmin", "the smaller of a and b; the other where one is NaN",
    "[1.0, np.nan], 0.5 -> [0.5, 0.5]", "where(is_nan(a), b, where(is_nan(b), a, minimum(a, b)))",
    "where(a == b, dy * 0.5, where(a > b, 0, where(is_nan(a), 0, dy)))",
    "where(a == b, dy * 0.5, where(b > a, 0, where(is_nan(b), 0, dy)))")
floor_divide = binary("floor_divide",
    "a / b rounded down, 0 for integers over 0; without a gradient", "[7, -7], 2 -> [3, -4]",
    "floor_quotient(a, b)")
remainder = binary("remainder", "a - b * floor(a / b), with the sign of b; 0 for integers over 0",
    "[7, -7], 3 -> [1, 2]", "floor_modulo(a, b)", "dy", "-dy * floor_quotient(a, b)")
fmod = binary("fmod", "a - b * trunc(a / b), with the sign of a; 0 for integers over 0",
    "[7, -7], 3 -> [1, -1]", "modulo(a, b)", "dy", "-dy * round_toward_zero(a / b)")
arctan2 = binary("arctan2", "the angle of the point (b, a), from -pi to pi",
    "[1, -1], 1 -> [0.785..., -0.785...]", "atan2(a, b)", "dy * b / (a * a + b * b)",
    "-dy * a / (a * a + b * b)")
hypot = binary("hypot", "sqrt(a^2 + b^2) without overflow; the gradients at 0 are 0",
    "[3, 5], [4, 12] -> [5.0, 13.0]", "hypot(a, b)", "dy * (a / where(y == 0, 1, y))",
    "dy * (b / where(y == 0, 1, y))",
    tangents=("dy * where(y == 0, 0, a / where(y == 0, 1, y))",
              "dy * where(y == 0, 0, b / where(y == 0, 1, y))"))
logaddexp = binary("logaddexp", "log(e**a + e**b) without overflow",
    "[0, 1], 0 -> [0.693..., 1.313...]", "logaddexp(a, b)", "dy * sigmoid(a - b)",
    "dy * sigmoid(b - a)")
logaddexp2 = binary("logaddexp2", "log2(2**a + 2**b) without overflow",
    "[0, 1], [1, 3] -> [1.584..., 3.321...]",
    "logaddexp(a * 0.6931471805599453, b * 0.6931471805599453) * 1.4426950408889634",
    "dy * sigmoid((a - b) * 0.6931471805599453)", "dy * sigmoid((b - a) * 0.6931471805599453)")
xlog1py = binary("xlog1py", "a * log1p(b), 0 where a is 0 and b is not NaN",
    "[0, 2], 1 -> [0.0, 1.386...]",
    "a * log1p(where(logical_and(a == 0, logical_not(is_nan(b))), 0, b))",
    "dy * log1p(where(logical_and(a == 0, b == -1), 0, b))", "dy * a / where(a == 0, 1, 1 + b)",
    tangents=("dy * log1p(where(logical_and(a == 0, b == -1), 0, b))",
              "where(logical_and(a == 0, logical_not(b > -1)), 0,"
              " dy * a / where(logical_and(a == 0, logical_not(b > -1)), 1, 1 + b))"))
xlogy = binary("xlogy",
    "a * log(b), 0 where a is 0 and b is not NaN; the gradient for a is 0 where a and b are 0",
    "[0, 3], [0, 2] -> [0.0, 2.079...]",
    "a * log(where(logical_and(a == 0, logical_not(is_nan(b))), 1, b))",
    "dy * log(where(logical_and(a == 0, b == 0), 1, b))", "dy * a / where(a == 0, 1, b)",
    tangents=("dy * log(where(logical_and(a == 0, b == 0), 1, b))",
              "where(logical_and(a == 0, logical_not(b > 0)), 0,"
              " dy * a / where(logical_and(a == 0, logical_not(b > 0)), 1, b))"))
copysign = binary("copysign", "|a| with the sign of b", "[1, 2], [-1, 3] -> [-1.0, 2.0]",
    "copysign(a, b)", "where(sign_bit(a) == sign_bit(b), dy, -dy)", "0 * dy")
heaviside = binary("heaviside", "0 where a < 0, b where a is 0, 1 where a > 0; NaN where a is",
    "[-1, 0, 2], 0.5 -> [0.0, 0.5, 1.0]", "where(a == 0, b, maximum(sign(a), 0.))", "0 * dy",
    "where(a == 0, dy, 0)")
equal = binary("equal", "whether a == b, elementwise", "[1, 2], [1, 3] -> [True, False]", "a == b")
not_equal = binary("not_equal", "whether a != b, elementwise", "[1, 2], [1, 3] -> [False, True]",
    "a != b")
less = binary("less", "whether a < b, elementwise", "[1, 2], 2 -> [True, False]", "a < b")
less_equal = binary("less_equal", "whether a <= b, elementwise", "[2, 3], 2 -> [True, False]",
    "a <= b")
greater = binary("greater", "whether a > b, elementwise", "[2, 3], 2 -> [False, True]", "a > b")
greater_equal = binary("greater_equal", "whether a >= b, elementwise", "[1, 2], 2 -> [False, True]",
    "a >= b")
logical_and = binary("logical_and", "whether both a and b are true (not 0)",
    "[0, 2], 1 -> [False, True]", "logical_and(a, b)")
logical_or = binary("logical_or", "whether a or b is true (not 0)", "[0, 2], 0 -> [False, True]",
    "logical_or(a, b)")
logical_xor = binary("logical_xor", "whether exactly one of a and b is true (not 0)",
    "[0, 2], 1 -> [True, False]", "logical_xor(a, b)")

_NO_FLOATS = "DtypeError: an operand holds floats."
invert = unary("invert",
    "the integer with all bits inverted, -x - 1 where it has a sign; of bool, not x",
    "[0, 5] -> [-1, -6]", "invert(x)", raises=_NO_FLOATS)
bitwise_and = binary("bitwise_and",
    "the bits that are 1 in both integers; of bool, whether both are true", "12, 10 -> 8",
    "bitwise_and(a, b)", raises=_NO_FLOATS)
bitwise_or = binary("bitwise_or",
    "the bits that are 1 in either integer; of bool, whether a or b is true", "12, 10 -> 14",
    "bitwise_or(a, b)", raises=_NO_FLOATS)
bitwise_xor = binary("bitwise_xor",
    "the bits in which two integers differ; of bool, whether exactly one is true", "12, 10 -> 6",
    "bitwise_xor(a, b)", raises=_NO_FLOATS)
left_shift = binary("left_shift",
    "the integer a times 2**b, without the bits beyond the width of its dtype",
    "[1, 3], 2 -> [4, 12]", "left_shift(a, b)", raises=_NO_FLOATS)
right_shift = binary("right_shift", "the integer a divided by 2**b, rounded down",
    "[8, 9], 2 -> [2, 2]", "right_shift(a, b)", raises=_NO_FLOATS)
# fmt: on

POWER = Row(
    "power",
    "a b",
    "power(a, b)",
    "dy * b * power(a, where(b == 0, 0, number(b) - 1))",
    "dy * y * log(where(a <= 0, 1, number(a)))",
    tangents=(
        "dy * where(b == 0, b / where(a > 0, a, 1), b * power(a, where(b == 0, 0, number(b) - 1)))",
        "dy * y * log(where(a <= 0, 1, number(a)))",
    ),
)


def power(a: ArrayLike, b: ArrayLike) -> Tensor:
    """Return a to the power of b.

    Gradients: da = dy * b * a**(b - 1), 0 where b is 0; db = dy * y * log(a), where a <= 0 it is 0,
    and NaN where y is not finite.

    Args:
        a, b: tensors, arrays or numbers that broadcast.

    Returns:
        The shape that a and b broadcast to, in the dtype that NumPy promotes to.

    Raises:
        ArgumentError: an integer to a negative integer power; on the GPU, where the values are not
            inspected, it is rounded toward 0.

    Example:
        >>> tg.power([2, 3], 2).tolist()
        [4, 9]
    """
    return POWER(a, b)


def divmod(a: ArrayLike, b: ArrayLike) -> tuple[Tensor, Tensor]:
    """Return floor_divide(a, b) and remainder(a, b).

    Args:
        a, b: tensors, arrays or numbers that broadcast.

    Returns:
        Two tensors of the shape that a and b broadcast to, in the dtype that NumPy promotes to.

    Example:
        >>> quotient, rest = tg.divmod([7, -7], 2)
        >>> quotient.tolist(), rest.tolist()
        ([3, -4], [1, 1])
    """
    return floor_divide(a, b), remainder(a, b)


WHERE = Row("where", "c a b", "where(c, a, b)", "", "where(c, dy, 0)", "where(c, 0, dy)")


@overload
def where(condition: Any) -> tuple[Tensor, ...]: ...
@overload
def where(condition: Any, a: Any, b: Any) -> Tensor: ...
def where(
    condition: ArrayLike, a: ArrayLike | None = None, b: ArrayLike | None = None
) -> Tensor | tuple[Tensor, ...]:
    """Return a where the condition holds, else b; of a condition alone, `nonzero(condition)`.

    Gradients: da = where(condition, dy, 0), db = where(condition, 0, dy)

    Args:
        condition: a tensor, array or bool, true where it is not 0.
        a, b: tensors, arrays or numbers that broadcast with it; both or neither.

    Returns:
        The shape that all broadcast to, in the dtype that NumPy promotes a and b to. Of a condition
        alone, int64 indices for each axis.

    Example:
        >>> tg.where([True, False, True], [1, 2, 3], 0).tolist()
        [1, 0, 3]
    """
    if a is None and b is None:
        return nonzero(condition)
    return WHERE(condition, a, b)


CLIP = Row(
    "clip",
    "x min max",
    "minimum(maximum(x, min), max)",
    "where(maximum(x, min) > max, 0, where(x < min, 0, dy))",
    "where(maximum(x, min) > max, 0, where(x < min, dy, 0))",
    "where(maximum(x, min) > max, dy, 0)",
)
CLIP_MIN = Row("clip", "x min", "maximum(x, min)", "where(x < min, 0, dy)", "where(x < min, dy, 0)")
CLIP_MAX = Row("clip", "x max", "minimum(x, max)", "where(x > max, 0, dy)", "where(x > max, dy, 0)")


def clip(x: ArrayLike, min: ArrayLike | None = None, max: ArrayLike | None = None) -> Tensor:
    """Return x limited to [min, max]; a bound that is None does not limit.

    Gradients: dy flows to x within the bounds and at them, elsewhere to the bound

    Args:
        x: any shape; a tensor, array or number.
        min, max: tensors, arrays or numbers that broadcast with x. Where min is above max, it is
            max.

    Returns:
        The shape that all broadcast to, in the dtype that NumPy promotes to.

    Example:
        >>> tg.clip([-2, 0, 5], 0, 3).tolist()
        [0, 0, 3]
    """
    if max is None:
        return positive(x) if min is None else CLIP_MIN(x, min)
    return CLIP_MAX(x, max) if min is None else CLIP(x, min, max)


NAN_TO_NUM = Row(
    "nan_to_num",
    "x fill high low",
    "where(is_nan(x), fill, where(is_inf(x), where(x > 0, high, where(x < 0, low, x)), x))",
    "where(is_finite(x), dy, 0)",
    "",
    "",
    "",
)


def nan_to_num(
    x: ArrayLike, *, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """Return x with numbers in place of NaN and infinities; integers are returned as they are.

    Gradient: dx = where(is_finite(x), dy, 0)

    Args:
        x: any shape and dtype.
        nan: in place of NaN.
        posinf, neginf: in place of inf and -inf; by default the extreme numbers of the dtype.

    Returns:
        The shape and dtype of x, in memory of its own.

    Raises:
        GradError: what comes in place requires a gradient.

    Example:
        >>> tg.nan_to_num([1.0, np.nan, np.inf], posinf=9.0).tolist()
        [1.0, 0.0, 9.0]
    """
    x = tensor_of("nan_to_num", "x", x)
    for name, number in (("nan", nan), ("posinf", posinf), ("neginf", neginf)):
        if isinstance(number, Tensor):
            constant_of("nan_to_num", name, number, "they are numbers")
        elif number is not None:
            array_beside("nan_to_num", name, number, x)  # raises an error that names it
    if not is_float(x.dtype):
        return Tensor(x.data.copy())
    largest = float(finfo(x.dtype).max)  # type: ignore[no-untyped-call]
    high = largest if posinf is None else posinf
    return NAN_TO_NUM(x, nan, high, -largest if neginf is None else neginf)


ROUND = Row("round", "x", "round_nearest(x)")


def round(x: ArrayLike, decimals: int = 0) -> Tensor:
    """Return the nearest number with that many decimals, in the dtype of x; without a gradient.

    Halves go to the even neighbour.

    Args:
        x: any shape; a tensor, array or number.
        decimals: from -308 to 308; negative ones count to the left of the point.

    Returns:
        The shape and dtype of x.

    Raises:
        ArgumentError: decimals is not an integer, or outside -308 to 308.

    Example:
        >>> tg.round([0.5, 1.5, -1.2]).tolist(), tg.round(1234, -2).tolist()
        ([0.0, 2.0, -1.0], 1200)
    """
    check_integer("round", "decimals", decimals)
    if not -308 <= decimals <= 308:
        raise ArgumentError(f"round: decimals is {decimals}, expected -308 to 308")
    if not decimals:
        return ROUND(x)
    x = tensor_of("round", "x", x)
    if decimals > 0 and x.dtype.kind in "iu":
        return ROUND(x)  # exact, where products with powers of 10 would wrap
    if is_complex(x.dtype):  # part by part: an infinite one would make both NaN
        y = Tensor(empty_like(x.data))
        for part, source in ((y.data.real, real(x.detach())), (y.data.imag, imag(x.detach()))):
            part[...] = round(source, decimals).data
        return y
    scale = 10.0 ** builtins.abs(decimals)
    scaled = x.detach() * scale if decimals > 0 else x.detach() / scale
    y = ROUND(scaled)
    return (y / scale if decimals > 0 else y * scale).astype(x.dtype, copy=False)


NEXTAFTER = Row("nextafter", "a b", "nextafter(a, b)")


def nextafter(a: ArrayLike, b: ArrayLike) -> Tensor:
    """Return the float after a on the way to b; without a gradient.

    Args:
        a, b: float32 or float64, tensors, arrays or numbers that broadcast.

    Returns:
        The shape that a and b broadcast to, in the dtype that NumPy promotes to.

    Raises:
        DtypeError: an operand has 16 bits, which are computed with in 32.
        GradError: an operand requires a gradient.

    Example:
        >>> float(tg.nextafter(np.float64(1), 2)) - 1
        2.220446049250313e-16
    """
    for name, value in (("a", a), ("b", b)):
        constant_of("nextafter", name, tensor_of("nextafter", name, value), "it has none")
        dtype = getattr(value, "dtype", float32)
        if compute_dtype(dtype) != dtype:
            raise DtypeError(f"nextafter: {name} has dtype {dtype}, expected float32 or float64")
    return NEXTAFTER(a, b)


def real(x: ArrayLike) -> Tensor:
    """Return the real part: a view of complex x, a copy of real x through which gradients flow.

    Args:
        x: any shape; a tensor, array or number.

    Returns:
        The shape of x; float32 for complex64, float64 for complex128, otherwise the dtype of x.

    Raises:
        GradError: complex x requires a gradient.

    Example:
        >>> tg.real(np.array([1 + 2j, 3])).tolist()
        [1.0, 3.0]
    """
    x = tensor_of("real", "x", x)
    if is_complex(x.dtype):
        return Tensor(constant_of("real", "x", x).real)
    return Tensor(x.data.copy()) if x.dtype.kind == "b" else positive(x)


def imag(x: ArrayLike) -> Tensor:
    """Return the imaginary part: a view of complex x, zeros for real x.

    Args:
        x: any shape; a tensor, array or number.

    Returns:
        The shape of x; float32 for complex64, float64 for complex128, otherwise the dtype of x.

    Raises:
        GradError: complex x requires a gradient.

    Example:
        >>> tg.imag(np.array([1 + 2j, 3])).tolist()
        [2.0, 0.0]
    """
    x = tensor_of("imag", "x", x)
    if is_complex(x.dtype):
        return Tensor(constant_of("imag", "x", x).imag)
    return Tensor(namespace(x.data).zeros_like(x.data))


def conj(x: ArrayLike) -> Tensor:
    """Return the complex conjugate; of real x a copy through which gradients flow, of bool int8.

    Args:
        x: any shape; a tensor, array or number.

    Returns:
        The shape and dtype of x; int8 for bool.

    Raises:
        GradError: complex x requires a gradient.

    Example:
        >>> tg.conj(np.array([1 + 2j, 3])).tolist()
        [(1-2j), (3-0j)]
    """
    x = tensor_of("conj", "x", x)
    if is_complex(x.dtype):
        return Tensor(namespace(x.data).asarray(constant_of("conj", "x", x).conj()))
    return Tensor(x.data.astype("int8")) if x.dtype.kind == "b" else positive(x)


sinc = unary(
    "sinc",
    "sin(pi x) / (pi x), 1 at 0",
    "[0, 0.5] -> [1.0, 0.636...]",
    "where(x == 0, 1, sin(3.141592653589793 * x) / where(x == 0, 1, 3.141592653589793 * x))",
    "where(x == 0, 0, dy * (cos(3.141592653589793 * x) - y) / where(x == 0, 1, x))",
    tangent="where(absolute(x) < 0.03,"  # the difference of two values close to 1 has few digits
    " dy * x * (-3.289868133696453 + x * x * (3.246969701133414"
    " + x * x * (-1.144510944732505 + x * x * 0.20918278254123832))),"
    " dy * (cos(3.141592653589793 * x) - y) / where(absolute(x) < 0.03, 1, x))",
)
LOGIT = Row("logit", "x", "log(x) - log1p(-x)", "dy / (x * (1 - x))")


def logit(x: ArrayLike, *, eps: float | None = None) -> Tensor:
    """Return log(x / (1 - x)), the inverse of `sigmoid`; infinite at 0 and 1, NaN beyond.

    Gradient: dx = dy / (x * (1 - x))

    Args:
        x: any shape; a tensor, array or number.
        eps: x is clipped to eps to 1 - eps first; None: it is not.

    Returns:
        The shape of x, in the dtype that NumPy promotes to.

    Example:
        >>> tg.logit([0.5, 0.75]).tolist()
        [0.0, 1.098...]
    """
    if eps is not None:
        check_range("logit", "eps", eps)
        x = clip(x, eps, 1 - eps)
    return LOGIT(x)


LERP = Row(
    "lerp", "a b weight", "a + weight * (b - a)", "dy * (1 - weight)", "dy * weight", "dy * (b - a)"
)


def lerp(a: ArrayLike, b: ArrayLike, weight: ArrayLike) -> Tensor:
    """Return a + weight * (b - a), elementwise: a where the weight is 0, b where it is 1.

    Gradients: da = dy * (1 - weight), db = dy * weight, dweight = dy * (b - a)

    Args:
        a, b, weight: tensors, arrays or numbers that broadcast.

    Returns:
        The shape that all broadcast to, in the dtype that NumPy promotes to.

    Example:
        >>> tg.lerp([0, 10], [10, 20], 0.5).tolist()
        [5.0, 15.0]
    """
    return LERP(a, b, weight)


ANGLE = Row("angle", "x", "atan2(where(is_nan(x), x, 0), x)", "0 * dy")


def angle(x: ArrayLike, deg: bool = False) -> Tensor:
    """Return the angle of complex numbers; of real ones pi where x < 0, else 0.

    Args:
        x: any shape; a tensor, array or number.
        deg: in degrees instead of radians.

    Returns:
        The shape of x, from -pi to pi, in the float dtype of x; float64 for integers.

    Raises:
        GradError: complex x requires a gradient.

    Example:
        >>> tg.angle(np.array([1j, -1]), deg=True).tolist()
        [90.0, 180.0]
    """
    check_flag("angle", "deg", deg)
    x = tensor_of("angle", "x", x)
    y = arctan2(imag(x), real(x)) if is_complex(x.dtype) else ANGLE(x)
    return rad2deg(y) if deg else y
