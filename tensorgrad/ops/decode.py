"""One step of attention for sequences of different lengths. Kernels: kernels/attention/decode.cu.

Arrays in, arrays out, no gradients: for generation. `lengths` lies where the cache does and is
never read by the host on the GPU. Tests: tests/ops/test_decode.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.errors import DtypeError, ShapeError
from tensorgrad.kernels import decode as decode_cuda
from tensorgrad.kernels.attention.rule import ALL, Rule
from tensorgrad.kernels.prepared import now
from tensorgrad.ops import attention_numpy
from tensorgrad.ops.attention import attention
from tensorgrad.ops.elementwise import where
from tensorgrad.ops.rotary import rotary
from tensorgrad.tensor import Tensor

Angles = tuple[Array, Array]  # cosines and sines, float32 (steps, D / 2): a row for each position


def attend(
    qkv: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    window: int | None = None,
    angles: Angles | None = None,
    interleaved: bool = False,
) -> Array:
    """Add one key and value to each sequence, and attend to all that it has now.

        keys[b, :, lengths[b]], values[b, :, lengths[b]] = the new ones
        y[b] = softmax(q[b] keys[b, :, : lengths[b] + 1]^T / sqrt(D)) values[b, :, : lengths[b] + 1]

    Args:
        qkv: (B, (H + 2 * Hkv) * D): for each sequence the queries of all heads, then the new keys,
            then the new values. H is a multiple of Hkv (grouped-query attention).
        keys, values: (B, Hkv, steps, D), dtype of qkv; changed. Views with strides may be given.
        lengths: (B,), int32, from 0 to steps - 1: how many keys a sequence has.
        window: how many keys a query attends to, its own included. Default: all.
        angles: of rotary positions, by which the queries and the new keys are turned first.
        interleaved: see `ops.rotary`.

    Returns:
        (B, H * D), dtype of qkv.

    Raises:
        ShapeError: the shapes do not fit as above.
        DtypeError: keys or values have another dtype, or lengths are not int32.
        DeviceError: the arguments are on different devices.
    """
    op = "attend"
    arrays = (qkv, keys, values, lengths)
    backend.same_device(op, ("qkv", "keys", "values", "lengths"), arrays)
    if keys.ndim != 4:
        raise ShapeError(f"{op}: keys have shape {keys.shape}, expected (B, Hkv, steps, D)")
    batch, kv_heads, _, width = keys.shape
    if values.shape != keys.shape:
        raise ShapeError(f"{op}: values have shape {values.shape}, expected {keys.shape} like keys")
    heads = qkv.shape[-1] // width - 2 * kv_heads if width else 0
    fits = qkv.shape == (batch, (heads + 2 * kv_heads) * width) and heads > 0 == heads % kv_heads
    if not fits:
        raise ShapeError(
            f"{op}: qkv has shape {qkv.shape}, expected ({batch}, (H + {2 * kv_heads}) * {width}), "
            f"H a multiple of {kv_heads}"
        )
    if lengths.shape != (batch,):
        raise ShapeError(f"{op}: lengths have shape {lengths.shape}, expected ({batch},)")
    for name, array, dtype in (
        ("keys", keys, qkv.dtype), ("values", values, qkv.dtype), ("lengths", lengths, np.int32),
    ):  # fmt: skip
        if array.dtype != dtype:
            raise DtypeError(f"{op}: {name} have dtype {array.dtype}, expected {np.dtype(dtype)}")
    y = backend.empty((batch, heads * width), qkv.dtype, like=qkv)
    if not y.size:
        return y
    together = keys.strides[3] == values.strides[3] == keys.itemsize
    if not backend.is_numpy(qkv) and together and decode_cuda.supports(qkv, width):
        workspace = decode_cuda.AttentionWorkspace(qkv, keys, values, window)
        qkv, lengths = backend.contiguous(qkv), backend.contiguous(lengths)
        if angles is not None:
            angles = backend.contiguous(angles[0]), backend.contiguous(angles[1])
        decode_cuda.attention(
            now, y, qkv, keys, values, lengths, workspace, window, angles, interleaved
        )
        return y
    each = _turned(qkv.reshape(batch, -1, width), heads + kv_heads, lengths, angles, interleaved)
    q, new_keys, new_values = (
        each[:, :heads], each[:, heads : heads + kv_heads], each[:, heads + kv_heads :]
    )  # fmt: skip
    rows = backend.namespace(qkv).arange(batch)
    keys[rows, :, lengths] = new_keys
    values[rows, :, lengths] = new_values
    forward = _forward_numpy if backend.is_numpy(qkv) else _forward_masked
    forward(y.reshape(batch, heads, width), q, keys, values, lengths, window)
    return y


def _turned(
    each: Array, heads: int, lengths: Array, angles: Angles | None, interleaved: bool
) -> Array:
    """Return (B, H + 2 Hkv, D) with the first heads turned by the angles of their positions."""
    if angles is None:
        return each
    cos, sin = (Tensor(table[lengths][:, None]) for table in angles)
    return rotary(Tensor(each), cos, sin, heads, interleaved).data


def _forward_numpy(
    y: Array, q: Array, keys: Array, values: Array, lengths: Array, window: int | None
) -> None:
    """Write (B, H, D); sequences of different lengths one after the other."""
    before = ALL if window is None else window - 1
    rule = Rule(1 / math.sqrt(q.shape[2]), before=before, after=0)
    alike = (lengths == lengths[0]).all()
    for first, last in [(0, len(q))] if alike else [(b, b + 1) for b in range(len(q))]:
        seen = slice(first, last), slice(None), slice(None, int(lengths[first]) + 1)
        arrays = q[first:last, :, None], keys[seen], values[seen]
        mixed, _ = attention_numpy.forward(arrays, rule)
        y[first:last] = mixed[:, :, 0]


def _forward_masked(
    y: Array, q: Array, keys: Array, values: Array, lengths: Array, window: int | None
) -> None:
    """Do as `_forward_numpy` on the GPU, where no kernel is for it, over all workspace there is."""
    places = backend.cupy.arange(keys.shape[2])
    seen: Any = places <= lengths[:, None]
    if window is not None:
        seen &= places > lengths[:, None] - window
    # What memory holds beyond may be NaN, of which a weight of 0 makes NaN.
    k, v = (where(seen[:, None, :, None], array, 0) for array in (keys, values))
    y[...] = attention(q[:, :, None], k, v, seen[:, None, None]).data[:, :, 0]
