"""Counter-based random numbers: arrays as functions of a key (Philox4x64-10).

Element i of an array is made of the same random bits on every device and with any number of
threads, and is computed from them with operations that round alike everywhere. So all devices agree
in every bit. On the CPU the generator is NumPy's, and large arrays are filled block by block on all
cores. Kernels: kernels/random.cu. Tests: tests/test_random.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import Dtype, bfloat16, c_name, float16, float32, float64, uint64
from tensorgrad.kernels.random import Key, attention_keep, fill, keep_threshold
from tensorgrad.kernels.special import polynomial

_PIECE = 8192  # elements that NumPy's temporaries hold: a few of them stay in the L2 cache
_BLOCK = 65536  # elements for which a bit generator is set up
_BITS = {float64: 53, float32: 24, float16: 11, bfloat16: 8}  # bits of the significand


def fill_normal(y: Array, key: Key, mean: float, std: float) -> None:
    """Fill a contiguous float array with mean + std * z, z standard normal.

    z is the inverse of the normal CDF at a uniform number of 52 bits.
    Source: Wichura 1988, "Algorithm AS 241", Applied Statistics 37(3), PPND16.
    """
    if not backend.is_numpy(y):
        fill(f"random_normal<{c_name(y.dtype)}>", 4, y, key, np.float64(mean), np.float64(std))
        return

    def transform(words: Array, out: Array) -> None:
        z = _normal_quantile(_centered(words))
        z *= std
        z += mean
        _assign(out, z)

    _fill(y, key, 1, transform, 2 * _PIECE)


def fill_uniform(y: Array, key: Key, low: float, high: float) -> None:
    """Fill a contiguous float array with uniform numbers from [low, high).

    They have as many random bits as the significand of the dtype."""
    bits = _BITS[y.dtype]
    width, limit = high - low, _largest_below(high, low, y.dtype)
    if not backend.is_numpy(y):
        fill(f"random_uniform<{c_name(y.dtype)}>", 4 if y.itemsize == 8 else 8, y, key,
                np.float64(low), np.float64(width), np.float64(limit), np.int32(bits))  # fmt: skip
        return
    lanes = 1 if y.itemsize == 8 else 2
    limit = y.dtype.type(limit)

    def transform(words: Array, out: Array) -> None:
        u = (words >> words.dtype.type(64 // lanes - bits)).astype(float64)
        u *= 2.0**-bits
        u *= width
        u += low
        _assign(out, u)
        np.minimum(out, limit, out=out)

    _fill(y, key, lanes, transform)


def fill_integers(y: Array, key: Key, low: int, high: int) -> None:
    """Fill a contiguous integer array with low + floor(word * (high - low) / 2^64).

    A value is more likely than another by at most (high - low) / 2^64.
    """
    base, width = np.uint64(low % 2**64), np.uint64((high - low) % 2**64)
    if not backend.is_numpy(y):
        fill(f"random_integers<{c_name(y.dtype)}>", 4, y, key, base, width)
        return

    def transform(words: Array, out: Array) -> None:
        out[...] = ((_multiply_high(words, width) if width else words) + base).astype(out.dtype)

    _fill(y, key, 1, transform)


def fill_bernoulli(y: Array, key: Key, probability: float) -> None:
    """Fill a contiguous bool array with True of this probability, rounded to 1 / 2^32."""
    _fill_below(y, key, 32, "random_bernoulli", probability)


def fill_keep(y: Array, key: Key, probability: float) -> None:
    """Fill a contiguous bool array with True of this probability, rounded to 1 / 2^16.

    Half the work of `fill_bernoulli`; made for dropout.
    """
    _fill_below(y, key, 16, "random_keep", probability)


def keep(key: Key, piece: slice, probability: float) -> Array:
    """Return the elements `piece` of the keep mask that `fill_keep` writes.

    The piece begins at a multiple of 16.
    """
    threshold = keep_threshold(probability)
    size = piece.stop - piece.start
    if threshold == 2**16:
        return np.ones(size, bool)
    words = _words(key, piece.start // 16, -(-size // 4)).view(np.uint16)
    return words[:size] < np.uint16(threshold)


def fill_attention_keep(y: Array, key: Key, probability: float) -> None:
    """Fill a bool array (B, H, Tq, Tk) with the keep mask of dropout in attention.

    True has this probability, rounded to 1 / 2^16. Other bits than those of `fill_keep`, for
    kernels that draw them where they need them: see kernels/attention/keep.cuh.
    """
    if not backend.is_numpy(y):
        attention_keep(y, key, probability)
        return
    *_, queries, keys = y.shape
    rows, columns = -(-queries // 16), -(-keys // 16)
    heads = y.reshape(-1, queries, keys)
    inner = int(_words(key, 0, 1)[0])

    def run(block: slice) -> None:
        """Fill blocks of 16 rows."""
        each = 8 * columns  # blocks of 32 bits
        index = np.arange(block.start * each, block.stop * each, dtype=uint64)
        words = _keep_words(inner, index, round(probability * 2**16)).view(np.uint8)
        bits = np.unpackbits(words, bitorder="little").view(np.bool_)
        tiles = bits.reshape(-1, 8, columns, 2, 16).transpose(0, 3, 1, 2, 4)
        tiles = tiles.reshape(-1, 16, 16 * columns)[..., :keys]
        for number, tile in enumerate(tiles, block.start):
            row = number % rows * 16
            heads[number // rows, row : row + 16] = tile[: queries - row]

    backend.parallel_blocks(run, len(heads) * rows, max(1, _PIECE // (8 * columns)))


def _keep_words(key: int, index: Array, threshold: int) -> Array:
    """Return 32 bits for each block, as `keep_bits` in kernels/attention/keep.cuh."""
    if threshold in (0, 2**16):
        return np.full(index.shape, -1 if threshold else 0, np.int32).view(np.uint32)
    kept = np.zeros(index.shape, uint64)
    for draw in range(((threshold & -threshold).bit_length() - 1) // 4, 4):
        for number, word in enumerate(_philox32(key, index, draw), 4 * draw):
            kept = word | kept if threshold >> number & 1 else word & kept
    return kept.astype(np.uint32)


def _philox32(key: int, index: Array, draw: int) -> tuple[Array, Array, Array, Array]:
    """Return four words of 32 bits of each block from Philox4x32-7, in uint64.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", table 2.
    """
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    c0, c1 = index & low, index >> half
    c2, c3 = np.full_like(index, draw), np.zeros_like(index)
    key0, key1 = key % 2**32, key >> 32
    for _ in range(7):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0 = product1 >> half
        c0 ^= c1
        c0 ^= np.uint64(key0)
        c2 = product0 >> half
        c2 ^= c3
        c2 ^= np.uint64(key1)
        product1 &= low
        product0 &= low
        c1, c3 = product1, product0
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def fill_words(y: Array, key: Key) -> None:
    """Fill a contiguous uint64 array with random bits."""
    if not backend.is_numpy(y):
        fill("random_words", 4, y, key)
        return

    def transform(words: Array, out: Array) -> None:
        out[...] = words

    _fill(y, key, 1, transform)


def add_gumbel(x: Array, key: Key) -> Array:
    """Return x - log(-log(u)) in float64 for a contiguous float array; u uniform in (0, 1)."""
    y = backend.empty(x.shape, float64, like=x)
    if not backend.is_numpy(y):
        fill(f"add_gumbel<{c_name(x.dtype)}>", 4, y, key, before=(x,))
        return y
    _fill(y, key, 1, _gumbel)
    y += x.astype(float64)
    return y


def _fill_below(y: Array, key: Key, bits: int, kernel: str, probability: float) -> None:
    """Fill with whether `bits` random bits are below the probability."""
    threshold = round(probability * 2**bits)
    if not backend.is_numpy(y):
        fill(kernel, 256 // bits, y, key, np.uint64(threshold))
    elif threshold in (0, 2**bits):
        y[...] = threshold > 0
    else:
        limit = np.dtype(f"uint{bits}").type(threshold)
        _fill(y, key, 64 // bits, lambda words, out: np.less(words, limit, out=out))


def _fill(
    y: Array, key: Key, lanes: int, transform: Callable[[Array, Array], Any], piece: int = _PIECE
) -> None:
    """Call transform(words, out) on pieces of y; `lanes` elements come from a word of 64 bits."""
    flat = y.reshape(-1)

    def run(block: slice) -> None:
        size = block.stop - block.start
        words = _words(key, block.start // (4 * lanes), -(-size // lanes))
        parts = words if lanes == 1 else words.view(f"uint{64 // lanes}")
        for start in range(0, size, piece):
            out = flat[block.start + start : min(block.start + start + piece, block.stop)]
            transform(parts[start : start + out.size], out)

    backend.parallel_blocks(run, flat.size, _BLOCK)


def _words(key: Key, block: int, count: int) -> Array:
    """Return words of 64 random bits, starting at word 4 * block."""
    counter = np.array([block, key.draw, key.stream, 0], uint64)
    bits = np.random.Philox(key=np.array([key.seed, 0], uint64), counter=counter)
    return bits.random_raw(count)


def _centered(words: Array) -> Array:
    """Turn words into (k + 0.5) / 2^52 - 0.5 for their high 52 bits k: exact, never -0.5 or 0.5."""
    words >>= np.uint64(12)
    words |= np.uint64(0x3FF0000000000000)
    q: Array = words.view(float64)  # 1 + k / 2^52
    q -= 1.5
    q += 2.0**-53
    return q


def _normal_quantile(q: Array) -> Array:
    """Return the inverse of the standard normal CDF at q + 0.5."""
    y = np.empty_like(q)
    for start in range(0, q.size, _PIECE):
        piece = q[start : start + _PIECE]
        inside = 0.180625 - piece * piece  # 0.425^2 - q^2
        ratio = polynomial(_A, inside)
        ratio /= polynomial(_B, inside)
        np.multiply(piece, ratio, out=y[start : start + _PIECE])
    far = np.flatnonzero(q * q > 0.180625)
    y[far] = _tail_quantile(q[far])
    return y


def _tail_quantile(q: Array) -> Array:
    r = np.sqrt(-_log(0.5 - np.abs(q)))
    y = polynomial(_C, r - 1.6) / polynomial(_D, r - 1.6)
    if (r > 5).any():
        y = np.where(r <= 5, y, polynomial(_E, r - 5) / polynomial(_F, r - 5))
    return np.copysign(y, q)


def _gumbel(words: Array, out: Array) -> None:
    u = _centered(words)
    u += 0.5
    np.negative(_log(-_log(u)), out=out)


def _log(x: Array) -> Array:
    """Return the natural logarithm of positive normal numbers, to about one unit in the last place.

    x = m * 2^e with m in [sqrt(1/2), sqrt(2)); log(m) = 2 atanh(s) with s = (m - 1) / (m + 1).
    """
    bits = x.view(np.int64)
    exponent = (bits - _SQRT_HALF) >> 52
    m = (bits - (exponent << 52)).view(float64)
    e = exponent.astype(float64)
    s = (m - 1) / (m + 1)
    z = s * s
    return e * LOG2_HIGH + (2 * s + (s * (z * polynomial(_ATANH, z)) + e * LOG2_LOW))


def _multiply_high(a: Array, b: np.uint64) -> Array:
    """Return the high 64 bits of the product of 64-bit words."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & low, b >> half, b & low
    middle = a_high * b_low + (a_low * b_low >> half)
    other = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> half) + (other >> half)


def _assign(out: Array, x: Array) -> None:
    """Round float64 into an array of another float; 16-bit types round twice, through float32."""
    out[...] = x if out.itemsize > 2 else x.astype(float32)


def _largest_below(high: float, low: float, dtype: Dtype) -> float:
    """Return the largest value of dtype below `high`, unless that is below `low`."""
    top = np.empty((), dtype)
    _assign(top, np.array(high, float64))
    below = top if float(top) < high else np.nextafter(top, dtype.type(-math.inf))
    return float(below if float(below) >= low else top)


_SQRT_HALF = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2)
LOG2_HIGH, LOG2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_ATANH = tuple([2 / k for k in range(21, 2, -2)])
# Numerator and denominator near 0, in the tails and far out, highest power first.
_A = (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4,
      4.5921953931549871457e4, 1.3731693765509461125e4, 1.9715909503065514427e3,
      1.3314166789178437745e2, 3.3871328727963666080e0)  # fmt: skip
_B = (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4,
      2.1213794301586595867e4, 5.3941960214247511077e3, 6.8718700749205790830e2,
      4.2313330701600911252e1, 1.0)  # fmt: skip
_C = (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1,
      1.27045825245236838258e0, 3.64784832476320460504e0, 5.76949722146069140550e0,
      4.63033784615654529590e0, 1.42343711074968357734e0)  # fmt: skip
_D = (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2,
      1.48103976427480074590e-1, 6.89767334985100004550e-1, 1.67638483018380384940e0,
      2.05319162663775882187e0, 1.0)  # fmt: skip
_E = (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3,
      2.65321895265761230930e-2, 2.96560571828504891230e-1, 1.78482653991729133580e0,
      5.46378491116411436990e0, 6.65790464350110377720e0)  # fmt: skip
_F = (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5,
      7.86869131145613259100e-4, 1.48753612908506148525e-2, 1.36929880922735805310e-1,
      5.99832206555887937690e-1, 1.0)  # fmt: skip
