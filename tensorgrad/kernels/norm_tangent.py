"""The tangents of layer norm and RMS norm, and their gradients: launches norm_tangent.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    y, stats = backend.empty_like(x), backend.empty((rstd.size, 2), rstd.dtype, like=x)
    _launch("norm_tangent", x, (y, stats, u, x), (weight, *tangents), (pointer(mean), rstd))
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
    dx, du = backend.empty_like(x), backend.empty_like(x)
    arrays, parameters = (dx, du, g, u, x), (weight, tweight)
    _launch("norm_tangent_backward", x, arrays, parameters, (stats, pointer(mean), rstd))
    return dx, du


def _launch(
    kernel: str,
    x: Array,
    arrays: Sequence[Array],
    parameters: Sequence[Array | None],
    statistics: Sequence[Any],
) -> None:
    """Launch a kernel that takes rows like those of x, and parameters of a row or None."""
    if x.size:
        width = x.shape[-1]
        rows, layout = x.size // width, strided_loop(width, _THREADS)
        parameters = [computable(parameter, x) for parameter in parameters]
        load(_SOURCE, f"{kernel}<{c_name(x.dtype)}>")(
            layout.grid(rows),
            layout.block,
            (
                *(*arrays, *[value for p in parameters for value in given(p, x)]),
                *(*statistics, np.int64(rows), np.int32(width)),
            ),
        )


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
