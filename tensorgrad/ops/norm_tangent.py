"""The tangent of layer norm and RMS norm as one op. Kernels: kernels/norm_tangent.cu.

With x_hat the normalised rows and E the mean of a row, which rms_norm lacks but in E(u x_hat):

    y = rstd (u - E(u) - x_hat E(u x_hat)) weight + x_hat tw + tb

u, tw and tb are the tangents of x, weight and bias. Tests: tests/ops/test_fused_derivatives.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad.autograd.tangents import Op, along, tangent_of
from tensorgrad.core.backend import Array, namespace, upcast
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
    if u is None:
        u = Tensor(namespace(x.data).zeros_like(x.data))
    arrays = u.data, x.data, data_of(weight), (data_of(tweight), data_of(tbias)), mean, rstd
    forward = _forward_numpy if type(x.data) is np.ndarray else cuda.forward
    y, stats = forward(*arrays)
    saved = (u.data, x.data, data_of(weight), data_of(tweight), stats, mean, rstd, eps)
    return record("tangent of a norm", y, (x, weight, u, tweight, tbias), _backward, saved)


def _backward(g: Array, saved: Saved, needs: Needs) -> Gradients:
    u, x, weight, tweight, stats, mean, rstd, _ = saved
    if type(g) is np.ndarray:
        return _backward_numpy(g, *saved[:-1])
    dx, du = cuda.backward(g, u, x, weight, tweight, stats, mean, rstd)
    sums: list[Array | None] = [None] * 3
    wanted = needs[1], needs[3], needs[4]
    if any(wanted):
        parts = cuda.columns(g, u, x, stats, mean, rstd)
        sums = column_sums([parts[:, i] for i in range(3)], wanted)
    return dx, sums[0], du, *sums[1:]


@tangent_of(_backward)
def _tangent(op: Op, *given: Tensor | None) -> Tensor | None:
    u, x, weight, tweight, _, mean, _, eps = op.saved
    places = {0: x, 1: weight, 2: u, 3: tweight}
    primals = [None if array is None else op.input(i, array) for i, array in places.items()]

    def f(*inputs: Tensor | None) -> Tensor:
        return _defined(*inputs, eps=eps, centre=mean is not None)

    (found,) = along(f, primals, given[:4])
    of_bias = given[4]
    return found if of_bias is None else of_bias if found is None else found + of_bias


def _defined(x: Any, weight: Any, u: Any, tweight: Any, *, eps: float, centre: bool) -> Tensor:
    """Return the tangent, without that of the bias, in recorded ops of other kinds."""
    dtype = compute_dtype(x.dtype)
    x, u = astype(x, dtype, copy=False), astype(u, dtype, copy=False)
    if centre:
        x, u = x - mean_of(x, -1, keepdims=True), u - mean_of(u, -1, keepdims=True)
    rstd = rsqrt(mean_of(x * x, -1, keepdims=True) + eps)
    normed = x * rstd
    y: Tensor = rstd * (u - normed * mean_of(u * normed, -1, keepdims=True))
    y = y if weight is None else y * weight
    return y if tweight is None else y + normed * tweight


def _forward_numpy(
    u: Array,
    x: Array,
    weight: Array | None,
    tangents: tuple[Array | None, Array | None],
    mean: Array | None,
    rstd: Array,
) -> tuple[Array, Array]:
    wide, normed, factor = upcast(u), _normed(x, mean, rstd), rstd.reshape(*x.shape[:-1], 1)
    width = max(x.shape[-1], 1)
    shift = wide.sum(-1, keepdims=True) / width * (mean is not None)
    projection = np.vecdot(wide, normed)[..., None] / width
    y = factor * (wide - shift - normed * projection)
    if weight is not None:
        y *= weight
    if tangents[0] is not None:
        y += normed * tangents[0]
    if tangents[1] is not None:
        y += tangents[1]
    return y.astype(x.dtype, copy=False), np.concatenate([shift, projection], -1)


def _backward_numpy(
    g: Array,
    u: Array,
    x: Array,
    weight: Array | None,
    tweight: Array | None,
    stats: Array,
    mean: Array | None,
    rstd: Array,
) -> Gradients:
    normed, factor = _normed(x, mean, rstd), rstd.reshape(*x.shape[:-1], 1)
    wide, centre = upcast(g), mean is not None
    shift, m = stats[..., :1], stats[..., 1:]
    a = wide if weight is None else wide * weight
    b = np.zeros_like(wide) if tweight is None else wide * tweight

    def average(value: Array) -> Array:
        total: Array = value.sum(-1, keepdims=True) / max(x.shape[-1], 1)
        return total

    centred = upcast(u) - shift
    p, b_hat, c = average(a * normed), average(b * normed), average(a * centred)
    own_a, own_u = a - average(a) * centre - normed * p, centred - normed * m
    dx = factor * (b - average(b) * centre - normed * b_hat)
    dx -= factor * factor * (p * own_u + m * own_a + normed * (c - m * p))
    axes = tuple(range(x.ndim - 1))
    sums = [(wide * term).sum(axes) for term in (factor * own_u, normed, np.ones_like(normed))]
    return dx, sums[0], factor * own_a, sums[1], sums[2]


def _normed(x: Array, mean: Array | None, rstd: Array) -> Array:
    """Return the normalised rows in the compute dtype."""
    rows = (*x.shape[:-1], 1)
    wide = upcast(x) if mean is None else upcast(x) - mean.reshape(rows)
    return wide * rstd.reshape(rows)
