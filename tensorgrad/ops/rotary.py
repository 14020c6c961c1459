"""Turning pairs of elements: rotary positions. Kernel: kernels/rotary.cu.

A turn is undone by the opposite turn, so backward is forward with -sin.
Tests: tests/ops/test_rotary.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.accumulation import Gradients, Needs, Saved
from tensorgrad.autograd import record
from tensorgrad.backend import Array, widened
from tensorgrad.checks import check_integer
from tensorgrad.errors import ArgumentError, ShapeError
from tensorgrad.kernels import rotary as kernel
from tensorgrad.operands import float_tensor
from tensorgrad.tensor import Tensor

__all__ = ["rotary"]


def rotary(
    x: Any, cos: Any, sin: Any, heads: int | None = None, interleaved: bool = False
) -> Tensor:
    """Turn each pair (a, b) of the last axis: (a cos - b sin, b cos + a sin).

    Args:
        x: (..., H, D), any float dtype, D even.
        cos: broadcastable to (..., H, D / 2), floats; one value a pair.
        sin: the shape of cos.
        heads: turn the first so many of the H and copy the others; default: all.
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
    try:
        cosines, sines = (backend.namespace(a).broadcast_to(a, pairs) for a in (cos.data, sin.data))
    except ValueError as error:
        raise ShapeError(
            f"{op}: cos has shape {cos.shape}, sin {sin.shape}, expected what broadcasts to {pairs}"
        ) from error
    if type(x.data) is np.ndarray:
        y = _turn_numpy(x.data, cosines, sines, 1, heads, interleaved)
        return record(op, y, (x,), _backward, (cosines, sines, heads, interleaved))
    if cos.shape == sin.shape:
        cosines, sines = cos.data, sin.data
    cosines, sines = (kernel.angles(a, x.data, heads) for a in (cosines, sines))
    y = kernel.turn(x.data, cosines, sines, 1, heads, interleaved)
    return record(op, y, (x,), _backward, (cosines, sines, heads, interleaved))


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    cos, sin, heads, interleaved = saved
    turn = _turn_numpy if type(dy) is np.ndarray else kernel.turn
    return (turn(dy, cos, sin, -1, heads, interleaved),)


def _turn_numpy(
    x: Array, cos: Array, sin: Array, direction: int, heads: int, interleaved: bool
) -> Array:
    """Return x with the first heads turned forwards (direction 1) or back (-1)."""
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
    """Return views of the first and of the second of each pair."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
