"""Turning pairs of elements: rotary positions. Tests: tests/ops/test_rotary.py.

A turn is undone by the opposite turn, so backward is forward with -sin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.autograd import record
from tensorgrad.backend import Array
from tensorgrad.errors import ArgumentError, ShapeError
from tensorgrad.ops.operand import float_tensor, widened
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
    heads = x.shape[-2] if heads is None else heads
    if not 0 <= heads <= x.shape[-2]:
        raise ArgumentError(f"{op}: heads is {heads}, expected 0 to {x.shape[-2]}")
    pairs = (*x.shape[:-2], heads, x.shape[-1] // 2)
    try:
        cosines, sines = (backend.namespace(a).broadcast_to(a, pairs) for a in (cos.data, sin.data))
    except ValueError as error:
        raise ShapeError(
            f"{op}: cos has shape {cos.shape}, sin {sin.shape}, expected what broadcasts to {pairs}"
        ) from error
    y = _turn(x.data, cosines, sines, heads, interleaved)
    return record(op, y, (x,), _backward, (cosines, sines, heads, interleaved))


def _backward(dy: Array, saved: tuple[Any, ...], needs: Sequence[bool]) -> tuple[Array | None]:
    cos, sin, heads, interleaved = saved
    return (_turn(dy, cos, -sin, heads, interleaved),)


def _turn(x: Array, cos: Array, sin: Array, heads: int, interleaved: bool) -> Array:
    y = backend.empty_like(x)
    y[..., heads:, :] = x[..., heads:, :]
    run = _turn_numpy if type(x) is np.ndarray else _turn_cuda
    run(*_pairs(x[..., :heads, :], interleaved), cos, sin, *_pairs(y[..., :heads, :], interleaved))
    return y


def _pairs(x: Array, interleaved: bool) -> tuple[Array, Array]:
    """Return views of the first and of the second of each pair."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _turn_numpy(a: Array, b: Array, cos: Array, sin: Array, a_out: Array, b_out: Array) -> None:
    def run(piece: slice) -> None:
        one, two = widened(a[piece]), widened(b[piece])
        a_out[piece] = one * cos[piece] - two * sin[piece]
        b_out[piece] = two * cos[piece] + one * sin[piece]

    if a.size:
        backend.parallel_blocks(run, len(a), max(1, backend.BLOCK * len(a) // a.size))


def _turn_cuda(a: Array, b: Array, cos: Array, sin: Array, a_out: Array, b_out: Array) -> None:
    one, two = widened(a), widened(b)
    a_out[...] = one * cos - two * sin
    b_out[...] = two * cos + one * sin
