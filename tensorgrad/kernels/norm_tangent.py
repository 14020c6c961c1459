"""The tangents of layer norm and RMS norm, and their gradients: launches norm_tangent.cu."""

from __future__ import annotations

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import c_name
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.norm import computable, given
from tensorgrad.kernels.rows import strided_loop
from tensorgrad.kernels.structs import pointer

_SOURCE = "norm_tangent.cu"
_THREADS = 256  # threads of a row
_COLUMN_CHUNKS = 128  # chunks of the rows in the sums over rows


def forward(
    u: Array,
    x: Array,
    weight: Array | None,
    tangents: tuple[Array | None, Array | None],
    mean: Array | None,
    rstd: Array,
) -> tuple[Array, Array]:
    """Return the tangent of the normalised rows, and statistics of the rows of u.

    Args:
        u: (..., C), the tangent of x.
        x: (..., C), what was normalised.
        weight: (C,) or None.
        tangents: of weight and bias, (C,) each or None.
        mean, rstd: of the rows of x; without a mean it is rms_norm.
    """
    u, x = backend.contiguous(u.astype(x.dtype, copy=False)), backend.contiguous(x)
    y, rows, width = backend.empty_like(x), rstd.size, x.shape[-1]
    stats = backend.empty((rows, 2), rstd.dtype, like=x)
    if x.size:
        parameters = [computable(array, x) for array in (weight, *tangents)]
        layout = strided_loop(width, _THREADS)
        load(_SOURCE, f"norm_tangent<{c_name(x.dtype)}>")(
            layout.grid(rows),
            layout.block,
            (
                *(y, stats, u, x),
                *(value for parameter in parameters for value in given(parameter, x)),
                *(pointer(mean), rstd, np.int64(rows), np.int32(width)),
            ),
        )
    return y, stats


def backward(
    g: Array,
    u: Array,
    x: Array,
    weight: Array | None,
    tweight: Array | None,
    stats: Array,
    mean: Array | None,
    rstd: Array,
) -> tuple[Array, Array]:
    """Return the gradients of x and of u.

    Args:
        g: (..., C), the gradient of the tangent.
        u, x, weight, mean, rstd: of `forward`.
        tweight: the tangent of the weight, or None.
        stats: what `forward` returned.
    """
    g, u = (backend.contiguous(each.astype(x.dtype, copy=False)) for each in (g, u))
    x = backend.contiguous(x)
    dx, du, rows, width = backend.empty_like(x), backend.empty_like(x), rstd.size, x.shape[-1]
    if x.size:
        weight, tweight = computable(weight, x), computable(tweight, x)
        layout = strided_loop(width, _THREADS)
        load(_SOURCE, f"norm_tangent_backward<{c_name(x.dtype)}>")(
            layout.grid(rows),
            layout.block,
            (
                *(dx, du, g, u, x),
                *(*given(weight, x), *given(tweight, x)),
                *(stats, pointer(mean), rstd, np.int64(rows), np.int32(width)),
            ),
        )
    return dx, du


def columns(g: Array, u: Array, x: Array, stats: Array, mean: Array | None, rstd: Array) -> Array:
    """Return the gradients of weight, its tangent and the bias's tangent in parts that add up.

    Returns:
        (N, 3, C) in the compute type.
    """
    g, u = (backend.contiguous(each.astype(x.dtype, copy=False)) for each in (g, u))
    x, rows, width = backend.contiguous(x), rstd.size, x.shape[-1]
    chunk = max(1, -(-rows // _COLUMN_CHUNKS))
    chunks = -(-rows // chunk)
    partials = backend.empty((chunks, 3, width), rstd.dtype, like=x)
    if x.size:
        load(_SOURCE, f"norm_tangent_columns<{c_name(x.dtype)}>")(
            (-(-width // 32), chunks),
            (32, 8),
            (
                *(partials, g, u, x, stats, pointer(mean), rstd),
                *(np.int64(rows), np.int32(width), np.int64(chunk)),
            ),
        )
    return partials
