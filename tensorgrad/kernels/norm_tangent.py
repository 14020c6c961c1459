"""The tangents of layer norm and RMS norm, and their gradients: launches norm_tangent.cu."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import c_name
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.norm import column_parts, computable, given
from tensorgrad.kernels.rows import strided_loop
from tensorgrad.kernels.structs import pointer

_SOURCE = "norm_tangent.cu"
_THREADS = 256  # threads of a row


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
    parameters = [given(computable(array, x), x) for array in (weight, *tangents)]
    _launch("norm_tangent", (y, stats, u, x, *chain(*parameters)), x, mean, rstd)
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
    parameters = [given(computable(array, x), x) for array in (weight, tweight)]
    arguments = (dx, du, g, u, x, *chain(*parameters), stats)
    _launch("norm_tangent_backward", arguments, x, mean, rstd)
    return dx, du


def columns(g: Array, u: Array, x: Array, stats: Array, mean: Array | None, rstd: Array) -> Array:
    """Return the gradients of weight, its tangent and the bias's tangent in parts that add up.

    Returns:
        (N, 3, C) in the compute type.
    """
    g, u = (backend.contiguous(each.astype(x.dtype, copy=False)) for each in (g, u))
    arrays = g, u, backend.contiguous(x), stats
    return column_parts(_SOURCE, "norm_tangent_columns", 3, arrays, mean, rstd)


def _launch(
    kernel: str, arguments: Sequence[Any], x: Array, mean: Array | None, rstd: Array
) -> None:
    """Launch a kernel for rows of x."""
    if x.size:
        rows, width = rstd.size, x.shape[-1]
        layout = strided_loop(width, _THREADS)
        load(_SOURCE, f"{kernel}<{c_name(x.dtype)}>")(
            layout.grid(rows),
            layout.block,
            (*arguments, pointer(mean), rstd, np.int64(rows), np.int32(width)),
        )
