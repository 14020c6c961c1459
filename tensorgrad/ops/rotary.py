"""Rotary position embedding (RoPE): pairs of elements rotated by angles. Kernel: kernels/rotary.cu.

The inverse of a rotation is the one by the opposite angle, so backward is forward with -sin.
Tests: tests/ops/test_rotary.py.
"""

from __future__ import annotations

import numpy as np

from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.backend import Array, upcast
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.record import record
from tensorgrad.core.signature import Float, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.kernels import rotary as kernel
from tensorgrad.kernels.rotary import Rotation
from tensorgrad.ops.arguments import broadcast
from tensorgrad.ops.shape import pad

__all__ = ["rotary"]

takes = Signatures(globals())


def rotary(
    x: Float[ArrayLike, "... H D"],
    cos: Float[ArrayLike, "..."],
    sin: Float[ArrayLike, "..."],
    *,
    heads: int | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Rotate each pair (a, b) of the last axis: (a cos - b sin, b cos + a sin).

    Args:
        x: (..., H, D), any float dtype, D even.
        cos: broadcastable to (..., H, D / 2), floats; one value a pair.
        sin: the shape of cos.
        heads: how many of the H are rotated, the first ones; the others are copied. Default: all.
        interleaved: pairs are neighbours (2 i, 2 i + 1); otherwise i and i + D / 2.

    Returns:
        The shape and dtype of x.

    Raises:
        DtypeError: x, cos or sin does not hold floats.
        ShapeError: x is not (..., H, D).
        DeviceError: the operands are on different devices.
        ShapeError: D is odd, or cos or sin does not broadcast.
        ArgumentError: heads outside [0, H].
    Source: Su et al. 2021, arXiv:2104.09864, eq. 34.

    Example:
        >>> quarter = tg.rotary([[1.0, 0.0]], cos=[[0.0]], sin=[[1.0]])
        >>> quarter.tolist()
        [[0.0, 1.0]]
    """
    x, cos, sin = takes.rotary(x, cos, sin, heads, interleaved)
    rotation = rotation_of("rotary", "x", x.data, cos, sin, heads, interleaved)
    y = rotated(x.data, rotation, 1)
    given = cos.requires_grad or sin.requires_grad
    of_angles = (x.data, cos.data, sin.data) if given else ()
    return record("rotary", y, (x, cos, sin), _backward, (*rotation, *of_angles))


def rotation_of(
    op: str, name: str, x: Array, cos: Tensor, sin: Tensor, heads: int | None, interleaved: bool
) -> Rotation:
    """Return how an op rotates its operand x, (..., H, D), by arguments as of `rotary`."""
    if x.shape[-1] % 2:
        raise ShapeError(f"{op}: {name} has shape {x.shape}, expected (..., H, D), D even")
    heads = x.shape[-2] if heads is None else heads
    if not 0 <= heads <= x.shape[-2]:
        raise ArgumentError(f"{op}: heads is {heads}, expected 0 to {x.shape[-2]}")
    pairs = (*x.shape[:-2], heads, x.shape[-1] // 2)
    cosines = broadcast(op, "cos", cos.data, pairs)
    sines = broadcast(op, "sin", sin.data, pairs)
    if type(x) is not np.ndarray:
        if cos.shape == sin.shape:
            cosines, sines = cos.data, sin.data
        cosines, sines = (kernel.angles(a, x, heads) for a in (cosines, sines))
    return Rotation(cosines, sines, heads, interleaved)


def rotated(x: Array, rotation: Rotation, direction: int, in_place: bool = False) -> Array:
    """Return x with the first heads rotated by the angles (direction 1) or back (-1).

    Args:
        in_place: x is contiguous and is overwritten; its other heads are not copied.
    """
    turn = _turn_numpy if type(x) is np.ndarray else kernel.turn
    return turn(x, rotation, direction, x if in_place else None)


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    rotation, of_angles = Rotation(*saved[:4]), saved[4:]
    dx = rotated(dy, rotation, -1) if needs[0] else None
    if not of_angles:
        return dx, None, None
    (a, b), (da, db) = (_pairs(upcast(t), rotation) for t in (of_angles[0], dy))
    return dx, a * da + b * db, a * db - b * da


@tangent_of(_backward)
def _tangent(op: Op, tx: Tensor | None, tcos: Tensor | None, tsin: Tensor | None) -> Tensor | None:
    rotation, arrays = Rotation(*op.saved[:4]), op.saved[4:]
    if not arrays:
        assert tx is not None  # the angles are constant
        return turned(tx, rotated(tx.data, rotation, 1), rotation)
    x, cos, sin = (op.input(i, array) for i, array in enumerate(arrays))
    heads, options = rotation.heads, {"interleaved": rotation.interleaved}
    t = None if tx is None else rotary(tx, cos, sin, heads=heads, **options)
    if tcos is None and tsin is None:
        return t
    tcos, tsin = (Tensor(0 * a.data) if u is None else u for a, u in ((cos, tcos), (sin, tsin)))
    of_angles = rotary(x[..., :heads, :], tcos, tsin, **options)  # linear in both
    if heads < x.shape[-2]:
        of_angles = pad(of_angles, [*[(0, 0)] * (x.ndim - 2), (0, x.shape[-2] - heads), (0, 0)])
    return of_angles if t is None else t + of_angles


def turned(x: Tensor, y: Array, rotation: Rotation) -> Tensor:
    """Return y, the rotated array of x, as the result of `rotary` by constant angles."""
    return record("rotary", y, (x, None, None), _backward, tuple(rotation))


def _turn_numpy(x: Array, rotation: Rotation, direction: int, out: Array | None) -> Array:
    cos, sin, heads, _ = rotation
    y = out
    if y is None:
        y = backend.empty_like(x)
        y[..., heads:, :] = x[..., heads:, :]
    (a, b), (a_out, b_out) = _pairs(x, rotation), _pairs(y, rotation)

    def run(piece: slice) -> None:
        one, two, across = upcast(a[piece]), upcast(b[piece]), direction * sin[piece]
        first = one * cos[piece] - two * across  # may not overwrite `one` yet
        b_out[piece] = two * cos[piece] + one * across
        a_out[piece] = first

    if a.size:
        backend.parallel_blocks(run, len(a), max(1, backend.BLOCK * len(a) // a.size))
    return y


def _pairs(x: Array, rotation: Rotation) -> tuple[Array, Array]:
    """Return views of the first and the second element of each pair of the rotated heads."""
    x = x[..., : rotation.heads, :]
    if rotation.interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
