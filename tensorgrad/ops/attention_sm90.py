"""Launches of kernels/attention_forward_sm90.cu and attention_backward_sm90.cu.

Arrays are (B, H, T, D) views of any layout that the copy engine reads in place; others are copied.
Which tiles serve which widths is a matter of registers and was measured on an H200.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import c_name
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.tensor_map import TensorMap, fits, tensor_map
from tensorgrad.ops.attention_rule import ALL, Arrays, Rule, empty_result

_FORWARD, _BACKWARD = "attention_forward_sm90.cu", "attention_backward_sm90.cu"
_SHARED = 226 * 1024  # bytes a block: all that there is but for the barriers
_WARPGROUP = 128
_PROBLEM = np.dtype(
    [(name, "i4") for name in ("heads", "kv_heads", "queries", "keys", "together", "heads_total")]
    + [("scale", "f4")]
)
_STRIDES = np.dtype([(name, "i8") for name in ("batch", "head", "row")])
# By head width: warpgroups of 64 rows in a block, and columns that they meet at a time.
_FORWARD_TILES = {64: (3, 128), 128: (2, 128)}
_FORWARD_TILES_LONG = {64: (3, 128), 128: (2, 176)}
_LONG = 8192  # keys
_KEYS_TILES = {64: (2, 96), 128: (2, 64)}
_QUERIES_TILES = {64: (3, 64), 128: (2, 80)}


def supports(arrays: Arrays, rule: Rule) -> bool:
    """Whether the kernels are for this GPU, for these arrays and this rule."""
    q, _, _ = arrays
    return (
        q.itemsize == 2
        and q.shape[3] in _FORWARD_TILES
        and rule.scale > 0
        and rule.before == ALL
        and rule.bias is None
        and not rule.dropout
        and rule.sequences is None
        and _gpu(q.device.id)[0] == 90
    )


def forward(arrays: Arrays, rule: Rule) -> tuple[Array, Array]:
    """Return the result, in the memory order of (B, T, H, D), and the logsumexp."""
    y, causal = empty_result(arrays[0], arrays[0].dtype), rule.after == 0
    q, k, v = (_readable(array) for array in arrays)
    batch, heads, length, width = q.shape
    groups, columns = (_FORWARD_TILES_LONG if k.shape[2] >= _LONG else _FORWARD_TILES)[width]
    logsumexp = backend.empty((batch, heads, length), np.dtype(np.float32), like=q)
    load(_FORWARD, f"attention_forward<{_types(q, groups, columns, causal)}>")(
        _grid(q, groups),
        (_WARPGROUP * (groups + 1),),
        (y, logsumexp, _rows(q), _boxes(k, columns), _boxes(v, columns),
         _problem(q, k, q, rule.scale, causal)),
        _SHARED,
    )  # fmt: skip
    return y, logsumexp


def backward(
    dy: Array, arrays: Arrays, y: Array, logsumexp: Array, rule: Rule, gradients: Arrays
) -> None:
    """Write the gradients, of the dtype of q; dk and dv have equal strides."""
    causal = rule.after == 0
    q, k, v = (_readable(array) for array in arrays)
    dy = _readable(dy.astype(q.dtype, copy=False))
    batch, heads, length, width = q.shape
    dq, dk, dv = gradients
    groups, columns = _KEYS_TILES[width]
    pitch = -(-length // columns) * columns
    sums = backend.empty((batch, heads, 2, pitch), np.dtype(np.float32), like=q)
    load(_BACKWARD, f"attention_backward_rows<{c_name(q.dtype)}, {width}>")(
        (-(-batch * heads * pitch * width // (8 * 256)),),
        (256,),
        (sums, y, dy, logsumexp, np.int32(batch), np.int32(heads), np.int32(length),
         np.int32(pitch), *map(np.int64, _steps(dy))),
    )  # fmt: skip
    load(_BACKWARD, f"attention_backward<{_types(q, groups, columns, causal)}, true>")(
        _grid(k, groups),
        (_WARPGROUP * (groups + 1),),
        (dk, dv, sums, _rows(k), _rows(v), _boxes(q, columns), _boxes(dy, columns),
         _problem(q, k, k, rule.scale, causal), np.int32(pitch), _strides(dk)),
        _SHARED,
    )  # fmt: skip
    groups, columns = _QUERIES_TILES[width]
    load(_BACKWARD, f"attention_backward<{_types(q, groups, columns, causal)}, false>")(
        _grid(q, groups),
        (_WARPGROUP * (groups + 1),),
        (dq, dq, sums, _rows(q), _rows(dy), _boxes(k, columns), _boxes(v, columns),
         _problem(q, k, q, rule.scale, causal), np.int32(pitch), _strides(dq)),
        _SHARED,
    )  # fmt: skip


@cache
def _gpu(index: int) -> tuple[int, int]:
    """Return the compute capability of a GPU and its number of multiprocessors."""
    runtime = backend.cupy.cuda.runtime
    capability = int(backend.cupy.cuda.Device(index).compute_capability)
    return capability, runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, index)


def _readable(array: Array) -> Array:
    """Return the array where the copy engine can read it."""
    return array if fits(array) else array.copy()


def _types(q: Array, groups: int, columns: int, causal: bool) -> str:
    """Return the template arguments that all kernels have."""
    return f"{c_name(q.dtype)}, {q.shape[3]}, {groups}, {columns}, {'true' if causal else 'false'}"


def _grid(rows: Array, groups: int) -> tuple[int]:
    """Return a block for each multiprocessor, if there are so many tiles of rows."""
    batch, heads, length, _ = rows.shape
    return (min(_gpu(rows.device.id)[1], -(-length // (64 * groups)) * batch * heads),)


def _rows(array: Array) -> TensorMap:
    """Return the map for copies of 64 rows."""
    return _boxes(array, 64)


def _boxes(array: Array, rows: int) -> TensorMap:
    """Return the map for copies of boxes of 64 columns."""
    return tensor_map(array, (1, 1, rows, 64))


def _problem(q: Array, k: Array, rows: Array, scale: float, causal: bool) -> Any:
    """Return the struct Problem for tiles of rows of q or of k."""
    total = rows.shape[0] * rows.shape[1]
    together = total if causal else 1
    return _struct(_PROBLEM, q.shape[1], k.shape[1], q.shape[2], k.shape[2], together, total, scale)


def _strides(array: Array) -> Any:
    """Return the struct Strides."""
    return _struct(_STRIDES, *_steps(array))


def _steps(array: Array) -> list[int]:
    """Return the strides of (B, H, T) in elements."""
    return [stride // array.itemsize for stride in array.strides[:3]]


@lru_cache(maxsize=1024)
def _struct(dtype: Any, *fields: float) -> Any:
    """Return an array of one element, which a kernel takes by value."""
    return np.array([fields], dtype)
