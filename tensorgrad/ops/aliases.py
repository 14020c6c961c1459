"""Second names of ops, those of the array API standard and of NumPy; each is the op itself."""

from __future__ import annotations

from tensorgrad.ops.creation import tensor
from tensorgrad.ops.elementwise import (
    abs,
    arccos,
    arccosh,
    arcsin,
    arcsinh,
    arctan,
    arctan2,
    arctanh,
    deg2rad,
    divide,
    invert,
    left_shift,
    positive,
    power,
    rad2deg,
    remainder,
    right_shift,
    round,
    trunc,
)
from tensorgrad.ops.reduce import max, min
from tensorgrad.ops.shape import concatenate, transpose

__all__ = [
    "absolute", "acos", "acosh", "amax", "amin", "around", "array", "asin", "asinh", "atan",
    "atan2", "atanh", "bitwise_invert", "bitwise_left_shift", "bitwise_not",
    "bitwise_right_shift", "concat", "conj", "conjugate", "degrees", "fix", "mod",
    "permute_dims", "pow", "radians", "real", "rint", "true_divide",
]  # fmt: skip

absolute = abs
acos, acosh, asin, asinh = arccos, arccosh, arcsin, arcsinh
atan, atan2, atanh = arctan, arctan2, arctanh
amax, amin = max, min
around = rint = round
array = tensor
bitwise_invert = bitwise_not = invert
bitwise_left_shift, bitwise_right_shift = left_shift, right_shift
concat, permute_dims = concatenate, transpose
conj = conjugate = real = positive  # of real numbers
degrees, radians = rad2deg, deg2rad
fix = trunc
mod, pow, true_divide = remainder, power, divide
