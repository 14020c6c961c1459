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
from tensorgrad.core.checks import check_integer
from tensorgrad.core.dtypes import compute_dtype, float32, is_complex, is_float
from tensorgrad.core.errors import ArgumentError, DtypeError
from tensorgrad.core.operands import constant_of, tensor_of
from tensorgrad.core.tensor import Tensor
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
tan = unary("tan", "the tangent of x in radians", "tan(x)", "dy * (1 + y * y)")
arcsin = unary("arcsin", "the angle whose sine is x", "asin(x)", "dy / sqrt((1 - x) * (1 + x))")
arccos = unary("arccos", "the angle whose cosine is x", "acos(x)", "-dy / sqrt((1 - x) * (1 + x))")
arctan = unary("arctan", "the angle whose tangent is x", "atan(x)", "dy / (1 + x * x)")
sinh = unary("sinh", "the hyperbolic sine", "sinh(x)", "dy * cosh(x)")
cosh = unary("cosh", "the hyperbolic cosine", "cosh(x)", "dy * sinh(x)")
tanh = unary("tanh", "the hyperbolic tangent", "tanh(x)", "dy * (1 - y * y)")
arcsinh = unary("arcsinh", "the inverse of sinh", "asinh(x)", "dy / hypot(x, 1)")
arccosh = unary(
    "arccosh", "the inverse of cosh, from 1", "acosh(x)", "dy / (sqrt(x - 1) * sqrt(x + 1))"
)
arctanh = unary("arctanh", "the inverse of tanh", "atanh(x)", "dy / ((1 - x) * (1 + x))")
log2 = unary("log2", "the logarithm to base 2", "log2(x)", "dy * 1.4426950408889634 / x")
log10 = unary("log10", "the logarithm to base 10", "log10(x)", "dy * 0.4342944819032518 / x")
exp2 = unary("exp2", "2**x", "exp2(x)", "dy * 0.6931471805599453 * y")
cbrt = unary("cbrt", "the cube root", "cbrt(x)", "dy / (3 * y * y)")
deg2rad = unary(
    "deg2rad", "degrees in radians", "x * 0.017453292519943295", "dy * 0.017453292519943295"
)
rad2deg = unary("rad2deg", "radians in degrees", "x * 57.29577951308232", "dy * 57.29577951308232")
positive = unary("positive", "x, in memory of its own", "positive(x)", "dy")
erf = unary(
    "erf",
    "the error function, 2/sqrt(pi) times the integral of exp(-t^2) from 0 to x",
    "erf(x)",
    "dy * 1.1283791670955126 * exp(-x * x)",
)
erfc = unary(
    "erfc",
    "1 - erf(x), accurate where that is near 0",
    "2 * normal_cdf(-1.4142135623730951 * x)",
    "dy * -1.1283791670955126 * exp(-x * x)",
)
ndtr = unary(
    "ndtr",
    "the probability that a normal variable is below x",
    "normal_cdf(x)",
    "dy * normal_pdf(x)",
)
entr = unary(
    "entr",
    "-x log(x), a term of the entropy: 0 where x is 0, -inf where it is negative",
    "where(x < 0, -inf, -x * log(where(x <= 0, 1, x)))",
    "where(x < 0, nan, -dy * (1 + log(where(x < 0, 1, x))))",
)
frac = unary("frac", "x - trunc(x), with the sign of x", "x - round_toward_zero(x)", "dy")
sign = unary("sign", "-1, 0 or 1; without a gradient", "sign(x)")
floor = unary(
    "floor", "the largest integer <= x, in the dtype of x; without a gradient", "round_down(x)"
)
ceil = unary(
    "ceil", "the smallest integer >= x, in the dtype of x; without a gradient", "round_up(x)"
)
trunc = unary(
    "trunc", "the integer part, in the dtype of x; without a gradient", "round_toward_zero(x)"
)
rint = unary(
    "rint",
    "the nearest integer, a half to the even one, in the dtype of x; without a gradient",
    "round_nearest(x)",
)
signbit = unary("signbit", "whether x is negative or -0.0", "sign_bit(x)")
isnan = unary("isnan", "whether x is NaN", "is_nan(x)")
isinf = unary("isinf", "whether x is +inf or -inf", "is_inf(x)")
isfinite = unary("isfinite", "whether x is neither NaN nor infinite", "is_finite(x)")
logical_not = unary("logical_not", "whether x is 0 or False", "x == 0")

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
fmax = binary(
    "fmax",
    "the larger of a and b; the other where one is NaN",
    "where(is_nan(a), b, where(is_nan(b), a, maximum(a, b)))",
    "where(a == b, dy * 0.5, where(a < b, 0, where(is_nan(a), 0, dy)))",
    "where(a == b, dy * 0.5, where(b < a, 0, where(is_nan(b), 0, dy)))",
)
fmin = binary(
    "fmin",
    "the smaller of a and b; the other where one is NaN",
    "where(is_nan(a), b, where(is_nan(b), a, minimum(a, b)))",
    "where(a == b, dy * 0.5, where(a > b, 0, where(is_nan(a), 0, dy)))",
    "where(a == b, dy * 0.5, where(b > a, 0, where(is_nan(b), 0, dy)))",
)
floor_divide = binary(
    "floor_divide",
    "a / b rounded down, 0 for integers over 0; without a gradient",
    "floor_quotient(a, b)",
)
remainder = binary(
    "remainder",
    "a - b * floor(a / b), with the sign of b; 0 for integers over 0",
    "floor_modulo(a, b)",
    "dy",
    "-dy * floor_quotient(a, b)",
)
fmod = binary(
    "fmod",
    "a - b * trunc(a / b), with the sign of a; 0 for integers over 0",
    "modulo(a, b)",
    "dy",
    "-dy * round_toward_zero(a / b)",
)
arctan2 = binary(
    "arctan2",
    "the angle of the point (b, a), from -pi to pi",
    "atan2(a, b)",
    "dy * b / (a * a + b * b)",
    "-dy * a / (a * a + b * b)",
)
hypot = binary(
    "hypot",
    "sqrt(a^2 + b^2) without overflow; the gradients at 0 are 0",
    "hypot(a, b)",
    "dy * (a / where(y == 0, 1, y))",
    "dy * (b / where(y == 0, 1, y))",
)
logaddexp = binary(
    "logaddexp",
    "log(e**a + e**b) without overflow",
    "logaddexp(a, b)",
    "dy * sigmoid(a - b)",
    "dy * sigmoid(b - a)",
)
logaddexp2 = binary(
    "logaddexp2",
    "log2(2**a + 2**b) without overflow",
    "logaddexp(a * 0.6931471805599453, b * 0.6931471805599453) * 1.4426950408889634",
    "dy * sigmoid((a - b) * 0.6931471805599453)",
    "dy * sigmoid((b - a) * 0.6931471805599453)",
)
xlog1py = binary(
    "xlog1py",
    "a * log1p(b), 0 where a is 0 and b is not NaN",
    "a * log1p(where(logical_and(a == 0, logical_not(is_nan(b))), 0, b))",
    "dy * log1p(where(logical_and(a == 0, b == -1), 0, b))",
    "dy * a / where(a == 0, 1, 1 + b)",
)
xlogy = binary(
    "xlogy",
    "a * log(b), 0 where a is 0 and b is not NaN; the gradient for a is 0 where a and b are 0",
    "a * log(where(logical_and(a == 0, logical_not(is_nan(b))), 1, b))",
    "dy * log(where(logical_and(a == 0, b == 0), 1, b))",
    "dy * a / where(a == 0, 1, b)",
)
copysign = binary(
    "copysign",
    "|a| with the sign of b",
    "copysign(a, b)",
    "where(sign_bit(a) == sign_bit(b), dy, -dy)",
    "0 * dy",
)
heaviside = binary(
    "heaviside",
    "0 where a < 0, b where a is 0, 1 where a > 0; NaN where a is",
    "where(a == 0, b, maximum(sign(a), 0.))",
    "0 * dy",
    "where(a == 0, dy, 0)",
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


def divmod(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Return floor_divide(a, b) and remainder(a, b)."""
    return floor_divide(a, b), remainder(a, b)


WHERE = Row("where", "c a b", "where(c, a, b)", "", "where(c, dy, 0)", "where(c, 0, dy)")


@overload
def where(condition: Any) -> tuple[Tensor, ...]: ...
@overload
def where(condition: Any, a: Any, b: Any) -> Tensor: ...
def where(condition: Any, a: Any = None, b: Any = None) -> Tensor | tuple[Tensor, ...]:
    """Return a where the condition holds, else b; of a condition alone, `nonzero(condition)`."""
    if a is None and b is None:
        return nonzero(condition)
    return WHERE(condition, a, b)


CLIP = Row(
    "clip",
    "x a b",
    "minimum(maximum(x, a), b)",
    "where(maximum(x, a) > b, 0, where(x < a, 0, dy))",
    "where(maximum(x, a) > b, 0, where(x < a, dy, 0))",
    "where(maximum(x, a) > b, dy, 0)",
)
CLIP_MIN = Row("clip", "x a", "maximum(x, a)", "where(x < a, 0, dy)", "where(x < a, dy, 0)")
CLIP_MAX = Row("clip", "x b", "minimum(x, b)", "where(x > b, 0, dy)", "where(x > b, dy, 0)")


def clip(x: Any, min: Any = None, max: Any = None) -> Tensor:
    """Return x limited to [min, max]; a bound that is None does not limit."""
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
    x: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """Return x with numbers in place of NaN and infinities; integers are returned as they are.

    Args:
        x: any shape and dtype.
        nan: in place of NaN.
        posinf, neginf: in place of inf and -inf; by default the extreme numbers of the dtype.

    Raises:
        GradError: what comes in place requires a gradient.
    """
    x = tensor_of("nan_to_num", "x", x)
    for name, number in (("nan", nan), ("posinf", posinf), ("neginf", neginf)):
        if isinstance(number, Tensor):
            constant_of("nan_to_num", name, number, "they are numbers")
    if not is_float(x.dtype):
        return Tensor(x.data.copy())
    largest = float(finfo(x.dtype).max)  # type: ignore[no-untyped-call]
    high = largest if posinf is None else posinf
    return NAN_TO_NUM(x, nan, high, -largest if neginf is None else neginf)


ROUND = Row("round", "x", "round_nearest(x)")


def round(x: Any, decimals: int = 0) -> Tensor:
    """Return the nearest number with that many decimals, in the dtype of x; without a gradient.

    Halves go to the even neighbour. Negative decimals count to the left of the point.

    Raises:
        ArgumentError: decimals is not an integer, or outside -308 to 308.
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


def nextafter(a: Any, b: Any) -> Tensor:
    """Return the float after a on the way to b; without a gradient.

    Raises:
        DtypeError: an operand has 16 bits, which are computed with in 32.
        GradError: an operand requires a gradient.
    """
    for name, value in (("a", a), ("b", b)):
        constant_of("nextafter", name, tensor_of("nextafter", name, value), "it has none")
        dtype = getattr(value, "dtype", float32)
        if compute_dtype(dtype) != dtype:
            raise DtypeError(f"nextafter: {name} has dtype {dtype}, expected float32 or float64")
    return NEXTAFTER(a, b)


def real(x: Any) -> Tensor:
    """Return the real part: a view of complex x, a copy of real x through which gradients flow.

    Raises:
        GradError: complex x requires a gradient.
    """
    x = tensor_of("real", "x", x)
    if is_complex(x.dtype):
        return Tensor(constant_of("real", "x", x).real)
    return Tensor(x.data.copy()) if x.dtype.kind == "b" else positive(x)


def imag(x: Any) -> Tensor:
    """Return the imaginary part: a view of complex x, zeros for real x.

    Raises:
        GradError: complex x requires a gradient.
    """
    x = tensor_of("imag", "x", x)
    if is_complex(x.dtype):
        return Tensor(constant_of("imag", "x", x).imag)
    return Tensor(namespace(x.data).zeros_like(x.data))


def conj(x: Any) -> Tensor:
    """Return the complex conjugate; of real x a copy through which gradients flow, of bool int8.

    Raises:
        GradError: complex x requires a gradient.
    """
    x = tensor_of("conj", "x", x)
    if is_complex(x.dtype):
        return Tensor(namespace(x.data).asarray(constant_of("conj", "x", x).conj()))
    return Tensor(x.data.astype("int8")) if x.dtype.kind == "b" else positive(x)


sinc = unary(
    "sinc",
    "sin(pi x) / (pi x), 1 at 0",
    "where(x == 0, 1, sin(3.141592653589793 * x) / where(x == 0, 1, 3.141592653589793 * x))",
    "where(x == 0, 0, dy * (cos(3.141592653589793 * x) - y) / where(x == 0, 1, x))",
)
LOGIT = Row("logit", "x", "log(x) - log1p(-x)", "dy / (x * (1 - x))")


def logit(x: Any, eps: float | None = None) -> Tensor:
    """Return log(x / (1 - x)), the inverse of `sigmoid`; infinite at 0 and 1, NaN beyond.

    Args:
        x: any shape.
        eps: x is clipped to eps to 1 - eps first.
    """
    return LOGIT(x if eps is None else clip(x, eps, 1 - eps))


LERP = Row(
    "lerp", "a b weight", "a + weight * (b - a)", "dy * (1 - weight)", "dy * weight", "dy * (b - a)"
)


def lerp(a: Any, b: Any, weight: Any) -> Tensor:
    """Return a + weight * (b - a), elementwise: a where the weight is 0, b where it is 1.

    Args:
        a, b, weight: tensors, arrays or numbers that broadcast.
    """
    return LERP(a, b, weight)


ANGLE = Row("angle", "x", "atan2(where(is_nan(x), x, 0), x)", "0 * dy")


def angle(x: Any, deg: bool = False) -> Tensor:
    """Return the angle of complex numbers; of real ones pi where x < 0, else 0.

    Args:
        x: any shape.
        deg: in degrees instead of radians.

    Raises:
        GradError: complex x requires a gradient.
    """
    x = tensor_of("angle", "x", x)
    y = arctan2(imag(x), real(x)) if is_complex(x.dtype) else ANGLE(x)
    return rad2deg(y) if deg else y
