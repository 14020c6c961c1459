"""Rotary position embedding (RoPE): pairs of elements rotated by angles. Kernel: kernels/rotary.cu.

The inverse of a rotation is the one by the opposite angle, so backward is forward with -sin.
Tests: tests/ops/test_rotary.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.accumulation import Gradients, Needs, Saved
from tensorgrad.autograd import record
from tensorgrad.backend import Array, widened
from tensorgrad.checks import broadcast, check_integer
from tensorgrad.errors import ArgumentError, ShapeError
from tensorgrad.kernels import rotary as kernel
from tensorgrad.operands import float_tensor
from tensorgrad.tensor import Tensor

__all__ = ["rotary"]


def rotary(
    x: Any, cos: Any, sin: Any, heads: int | None = None, interleaved: bool = False
) -> Tensor:
    """Rotate each pair (a, b) of the last axis: (a cos - b sin, b cos + a sin).

    Args:
        x: (..., H, D), any float dtype, D even.
        cos: broadcastable to (..., H, D / 2), floats; one value a pair.
        sin: the shape of cos.
        heads: how many of the H are rotated, the first ones; the others are copied. Default: all.
        interleaved: pairs are neighbours (2 i, 2 i + 1); otherwise i and i + D / 2.

    Returns:
        The shape and dtype of x. No gradient flows to cos and sin.

    Raises:
        ShapeError: D is odd, or cos or sin does not broadcast.
        ArgumentError: heads outside [0, H].
        DtypeError: an argument is not a float.
        DeviceError: the arguments are on different devices.
    Source: Su et al. 2021, arXiv:2104.09864, eq. 34.
    """
    op = "rotary"
    x = float_tensor(op, "x", x)
    cos, sin = float_tensor(op, "cos", cos), float_tensor(op, "sin", sin)
    backend.same_device(op, ("x", "cos", "sin"), (x.data, cos.data, sin.data))
    if x.ndim < 2 or x.shape[-1] % 2:
        raise ShapeError(f"{op}: x has shape {x.shape}, expected (..., H, D), D even")
    if heads is None:
        heads = x.shape[-2]
    else:
        check_integer(op, "heads", heads)
    if not 0 <= heads <= x.shape[-2]:
        raise ArgumentError(f"{op}: heads is {heads}, expected 0 to {x.shape[-2]}")
    pairs = (*x.shape[:-2], heads, x.shape[-1] // 2)
    cosines = broadcast(op, "cos", cos.data, pairs)
    sines = broadcast(op, "sin", sin.data, pairs)
    if type(x.data) is not np.ndarray:
        if cos.shape == sin.shape:
            cosines, sines = cos.data, sin.data
        cosines, sines = (kernel.angles(a, x.data, heads) for a in (cosines, sines))
    y = _rotated(x.data, cosines, sines, 1, heads, interleaved)
    return record(op, y, (x,), _backward, (cosines, sines, heads, interleaved))


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    cos, sin, heads, interleaved = saved
    return (_rotated(dy, cos, sin, -1, heads, interleaved),)


def _rotated(
    x: Array, cos: Array, sin: Array, direction: int, heads: int, interleaved: bool
) -> Array:
    """Return x with the first heads rotated by the angles (direction 1) or back (-1)."""
    rotated = _rotated_numpy if type(x) is np.ndarray else kernel.turn
    return rotated(x, cos, sin, direction, heads, interleaved)


def _rotated_numpy(
    x: Array, cos: Array, sin: Array, direction: int, heads: int, interleaved: bool
) -> Array:
    y = backend.empty_like(x)
    y[..., heads:, :] = x[..., heads:, :]
    a, b = _pairs(x[..., :heads, :], interleaved)
    a_out, b_out = _pairs(y[..., :heads, :], interleaved)

    def run(piece: slice) -> None:
        one, two, across = widened(a[piece]), widened(b[piece]), direction * sin[piece]
        a_out[piece] = one * cos[piece] - two * across
        b_out[piece] = two * cos[piece] + one * across

    if a.size:
        backend.parallel_blocks(run, len(a), max(1, backend.BLOCK * len(a) // a.size))
    return y


def _pairs(x: Array, interleaved: bool) -> tuple[Array, Array]:
    """Return views of the first and the second element of each pair."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
