"""The tangent of layer norm and RMS norm as one op. Kernels: kernels/norm_tangent.cu.

With x_hat the normalised rows and E the mean of a row, which rms_norm lacks but in E(u x_hat):

    y = rstd (u - E(u) - x_hat E(u x_hat)) weight + x_hat tw + tb

u, tw and tb are the tangents of x, weight and bias. On the CPU, and for its own tangent, it follows
from the norm in recorded ops. Tests: tests/ops/test_fused_derivatives.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from tensorgrad.autograd.tangents import Op, along, tangent_of
from tensorgrad.core.backend import Array, namespace
from tensorgrad.core.dtypes import compute_dtype
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.operands import data_of
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels import norm_tangent as cuda
from tensorgrad.ops.column_sums import column_sums
from tensorgrad.ops.elementwise import rsqrt
from tensorgrad.ops.reduce import mean as mean_of
from tensorgrad.ops.shape import astype


def norm_tangent(
    x: Tensor, weight: Tensor | None, tangents: Sequence[Tensor | None], statistics: Saved
) -> Tensor:
    """Return the tangent of a norm.

    Args:
        x: (..., C), what was normalised.
        weight: (C,) or None.
        tangents: of x, weight and bias, None for those without one.
        statistics: mean and rstd of the rows of x, and eps; without a mean it is rms_norm.
    """
    mean, rstd, eps = statistics
    u, tweight, tbias = tangents
    if type(x.data) is np.ndarray:
        t = _defined(x, weight, u, tweight, eps=eps, centre=mean is not None)
        return cast(Tensor, _sum(t, tbias))
    if u is None:
        u = Tensor(namespace(x.data).zeros_like(x.data))
    arrays = u.data, x.data, data_of(weight), (data_of(tweight), data_of(tbias)), mean, rstd
    y, stats = cuda.forward(*arrays)
    saved = (x.data, data_of(weight), u.data, data_of(tweight), stats, mean, rstd, eps)
    return record("tangent of a norm", y, (x, weight, u, tweight, tbias), _backward, saved)


def _backward(g: Array, saved: Saved, needs: Needs) -> Gradients:
    x, weight, u, tweight, stats, mean, rstd, _ = saved
    dx, du = cuda.backward(g, u, x, weight, tweight, stats, mean, rstd)
    sums: list[Array | None] = [None] * 3
    wanted = needs[1], needs[3], needs[4]
    if any(wanted):
        parts = cuda.columns(g, u, x, stats, mean, rstd)
        sums = column_sums([parts[:, i] for i in range(3)], wanted)
    return dx, sums[0], du, *sums[1:]


@tangent_of(_backward)
def _tangent(op: Op, *given: Tensor | None) -> Tensor | None:
    *arrays, _, mean, _, eps = op.saved
    primals = [None if array is None else op.input(i, array) for i, array in enumerate(arrays)]
    f = partial(_defined, eps=eps, centre=mean is not None)
    return _sum(along(f, primals, given[:4])[0], given[4])


def _sum(t: Tensor | None, of_bias: Tensor | None) -> Tensor | None:
    return t if of_bias is None else of_bias if t is None else t + of_bias


def _defined(
    x: Any, weight: Tensor | None, u: Any, tweight: Any, *, eps: float, centre: bool
) -> Tensor | None:
    """Return the tangent, without that of the bias, from the norm in recorded ops."""
    dtype = compute_dtype(x.dtype)

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        x = astype(x, dtype, copy=False)
        x = x - mean_of(x, -1, keepdims=True) if centre else x
        normed = x * rsqrt(mean_of(x * x, -1, keepdims=True) + eps)
        return normed if weight is None else normed * weight

    return along(norm, [x, weight], [u, tweight])[0]
