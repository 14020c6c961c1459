"""A decoding step of attention against a key-value cache. Kernel: kernels/attention/decode.cu.

Takes and returns arrays, without gradients: for generation. `lengths` is on the device of the cache
and is never read by the host on the GPU. Tests: tests/ops/test_decode.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tensorgrad.core import backend, instrument
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_shape
from tensorgrad.core.errors import DtypeError, ShapeError
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.attention import decode as decode_cuda
from tensorgrad.kernels.attention.options import ALL, AttentionOptions
from tensorgrad.ops import attention_numpy
from tensorgrad.ops.attention import attention
from tensorgrad.ops.elementwise import where
from tensorgrad.ops.rotary import rotary

Angles = tuple[Array, Array]  # cosines and sines, float32 (steps, D / 2): a row for each position


def attend(
    qkv: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    *,
    window: int | None = None,
    angles: Angles | None = None,
    interleaved: bool = False,
    counters: Array | None = None,
) -> Array:
    """Append one key and value to the cache of each sequence, and attend to all of its keys.

        keys[b, :, lengths[b]], values[b, :, lengths[b]] = the new ones
        y[b] = softmax(q[b] keys[b, :, : lengths[b] + 1]^T / sqrt(D)) values[b, :, : lengths[b] + 1]

    Args:
        qkv: (B, (H + 2 * Hkv) * D): for each sequence the queries of all heads, then the new keys,
            then the new values. H is a multiple of Hkv (grouped-query attention).
        keys, values: (B, Hkv, steps, D), dtype of qkv; changed. Views with strides may be given.
        lengths: (B,), int32, from 0 to steps - 1: the number of keys of each sequence.
        window: the number of keys that a query attends to, its own included. Default: all.
        angles: of rotary positions, by which the queries and the new keys are rotated first.
        interleaved: see `tensorgrad.rotary`.
        counters: for the kernel, uint32 (B * H,), all 0 before and after. Calls that may run at the
            same time need their own. Default: new ones each time, which takes another launch.

    Returns:
        (B, H * D), dtype of qkv.

    Raises:
        ShapeError: the shapes do not fit as above.
        DtypeError: keys or values have another dtype, or lengths are not int32.
        DeviceError: the arguments are on different devices.

    Example:
        >>> from tensorgrad.ops.decode import attend
        >>> keys, values = np.zeros((1, 1, 4, 2), "f4"), np.zeros((1, 1, 4, 2), "f4")
        >>> attend(np.array([[0, 0, 0, 0, 7, 8]], "f4"), keys, values, np.array([0], "i4")).tolist()
        [[7.0, 8.0]]
    """
    op = "attend"
    arrays = (qkv, keys, values, lengths)
    backend.same_device(op, ("qkv", "keys", "values", "lengths"), arrays)
    if keys.ndim != 4:
        raise ShapeError(f"{op}: keys have shape {keys.shape}, expected (B, Hkv, steps, D)")
    batch, kv_heads, _, width = keys.shape
    check_shape(op, "values", values, keys.shape, " like keys")
    heads = qkv.shape[-1] // width - 2 * kv_heads if width else 0
    fits = qkv.shape == (batch, (heads + 2 * kv_heads) * width) and heads > 0 == heads % kv_heads
    if not fits:
        raise ShapeError(
            f"{op}: qkv has shape {qkv.shape}, expected ({batch}, (H + {2 * kv_heads}) * {width}), "
            f"H a multiple of {kv_heads}"
        )
    check_shape(op, "lengths", lengths, (batch,))
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
        qkv, lengths = backend.contiguous(qkv), backend.contiguous(lengths)
        if angles is not None:
            angles = backend.contiguous(angles[0]), backend.contiguous(angles[1])
        decode_cuda.forward(y, qkv, keys, values, lengths, window, angles, interleaved, counters)
        if instrument.observer is not None:
            instrument.observer.op(op, y, (), None, (keys, values, lengths, *(angles or ())))
        return y
    each = qkv.reshape(batch, -1, width)
    if angles is not None:
        cos, sin = (Tensor(table[lengths][:, None]) for table in angles)
        each = rotary(Tensor(each), cos, sin, heads=heads + kv_heads, interleaved=interleaved).data
    q, new_keys, new_values = (
        each[:, :heads], each[:, heads : heads + kv_heads], each[:, heads + kv_heads :]
    )  # fmt: skip
    rows = backend.namespace(qkv).arange(batch)
    keys[rows, :, lengths] = new_keys
    values[rows, :, lengths] = new_values
    forward = _forward_numpy if backend.is_numpy(qkv) else _forward_masked
    forward(y.reshape(batch, heads, width), q, keys, values, lengths, window)
    return y


def _forward_numpy(
    y: Array, q: Array, keys: Array, values: Array, lengths: Array, window: int | None
) -> None:
    """Write y, (B, H, D); one sequence at a time unless all have the same length."""
    before = ALL if window is None else window - 1
    options = AttentionOptions(1 / math.sqrt(q.shape[2]), before=before, after=0)
    alike = (lengths == lengths[0]).all()
    for first, last in [(0, len(q))] if alike else [(b, b + 1) for b in range(len(q))]:
        seen = slice(first, last), slice(None), slice(None, int(lengths[first]) + 1)
        arrays = q[first:last, :, None], keys[seen], values[seen]
        mixed, _ = attention_numpy.forward(arrays, options)
        y[first:last] = mixed[:, :, 0]


def _forward_masked(
    y: Array, q: Array, keys: Array, values: Array, lengths: Array, window: int | None
) -> None:
    """Write y, (B, H, D), on a GPU without a kernel for it, with a mask over the whole cache."""
    steps = backend.cupy.arange(keys.shape[2])
    seen: Any = steps <= lengths[:, None]
    if window is not None:
        seen &= steps > lengths[:, None] - window
    # Unused memory of the cache may hold NaN, and a weight of 0 times NaN is NaN.
    k, v = (where(seen[:, None, :, None], array, 0) for array in (keys, values))
    y[...] = attention(q[:, :, None], k, v, seen[:, None, None]).data[:, :, 0]
