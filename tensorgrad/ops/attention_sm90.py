"""Launches of kernels/attention_forward_sm90.cu and attention_backward_sm90.cu.

Arrays are (B, H, T, D) views of any layout that the copy engine reads in place; others are copied.
Kernels are compiled for a few widths of heads; one of another width takes the next larger, and the
copy engine fills the rest with zeros. Which tiles serve which widths is a matter of registers and
was measured on an H200. What few use (a mask, dropout, sequences of unequal length) has kernels of
its own, so that the others stay fast.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import c_name
from tensorgrad.kernels.counter import counter
from tensorgrad.kernels.loader import by_value, load
from tensorgrad.kernels.tensor_map import TensorMap, fits, tensor_map
from tensorgrad.ops.attention_rule import ALL, Arrays, Rule, empty_result

_FORWARD, _BACKWARD = "attention_forward_sm90.cu", "attention_backward_sm90.cu"
_SHARED = 226 * 1024  # bytes a block: all that there is but for the barriers
_WARPGROUP = 128
_CACHED = 24 * 2**20  # bytes of keys and values, or of queries, that stay in the L2 cache
_PROBLEM = np.dtype(
    [(name, "i4") for name in ("heads", "kv_heads", "queries", "keys", "width", "before", "after")]
    + [("together", "i4"), ("heads_total", "i4"), ("scale", "f4")]
)
_EXTRAS = np.dtype(
    [(name, "u8") for name in ("bias", "bias_batch", "bias_head", "bias_query", "bias_key")]
    + [(name, "u8") for name in ("query_starts", "key_starts", "seed", "draw", "stream", "offset")]
    + [("length", "i4"), ("columns", "i4"), ("threshold", "u4"), ("kept_scale", "f4")]
)
_STRIDES = np.dtype([(name, "i8") for name in ("batch", "head", "row")])
# By head width, without and with extras: warpgroups of 64 rows in a block, and columns that they
# meet at a time.
_Tiles = dict[int, tuple[int, int]]
_FORWARD_TILES: tuple[_Tiles, _Tiles] = (
    {32: (3, 128), 64: (3, 128), 96: (3, 96), 128: (2, 128), 256: (2, 80)},
    {64: (3, 64), 128: (2, 64), 256: (2, 32)},
)
_LONG_TILES = {128: (2, 176)}
_KEYS_TILES: tuple[_Tiles, _Tiles] = (
    {32: (2, 96), 64: (2, 96), 96: (2, 64), 128: (2, 64), 256: (2, 32)},
    {64: (2, 64), 128: (2, 64), 256: (2, 32)},
)
_QUERIES_TILES: tuple[_Tiles, _Tiles] = (
    {32: (3, 64), 64: (3, 64), 96: (3, 64), 128: (2, 80), 256: (2, 32)},
    {64: (2, 64), 128: (2, 64), 256: (2, 32)},
)
_BOTH_GRADIENTS = (128, 64)  # the widest heads of which registers hold dk and dv


def supports(arrays: Arrays, rule: Rule) -> bool:
    """Whether the kernels are for this GPU, for these arrays and this rule."""
    q = arrays[0]
    return (
        q.itemsize == 2 and q.shape[3] % 8 == 0 and q.shape[3] <= 256 and _gpu(q.device.id)[0] == 90
    )


def forward(arrays: Arrays, rule: Rule) -> tuple[Array, Array]:
    """Return the result, in the memory order of (B, T, H, D), and the logsumexp."""
    y = empty_result(arrays[0], arrays[0].dtype)
    q, k, v = (_readable(array) for array in arrays)
    problem = _Problem(q, k, rule)
    width, (groups, columns) = problem.tiles(_FORWARD_TILES)
    if not problem.extras and (problem.keys >= 8192 or (problem.keys >= 2048 and problem.even)):
        groups, columns = _LONG_TILES.get(width, (groups, columns))
    logsumexp = backend.empty(q.shape[:3], np.dtype(np.float32), like=q)
    load(_FORWARD, problem.kernel("attention_forward", width, groups, columns))(
        problem.grid(groups),
        (_WARPGROUP * (groups + 1),),
        (y, logsumexp, counter(q), _rows(q), _boxes(k, columns), _boxes(v, columns),
         problem.struct(), problem.extra()),
        _SHARED,
    )  # fmt: skip
    return y, logsumexp


def backward(
    dy: Array, arrays: Arrays, y: Array, logsumexp: Array, rule: Rule, gradients: Arrays
) -> None:
    """Write the gradients, of the dtype of q; dk and dv have equal strides."""
    q, k, v = (_readable(array) for array in arrays)
    dy = _readable(dy.astype(q.dtype, copy=False))
    dq, dk, dv = gradients
    problem = _Problem(q, k, rule)
    width, (groups, columns) = problem.tiles(_KEYS_TILES)
    padded = -(-problem.queries // columns) * columns
    pitch = padded
    if rule.sequences is not None:  # room to start each at a multiple of `columns`
        pitch = (q.shape[2] // columns + problem.batch + 1) * columns
    sums = backend.empty((*q.shape[:2], 2, pitch), np.dtype(np.float32), like=q)
    struct, extra = problem.struct(), problem.extra(columns)
    unit = np.float32(1 if problem.extras else 1 / np.log(2))
    load(_BACKWARD, f"attention_backward_rows<{c_name(q.dtype)}>")(
        (-(-problem.batch * problem.heads * padded * 8 // 256),),
        (256,),
        (sums, y, dy, logsumexp, struct, extra, np.int32(problem.batch), np.int32(columns),
         np.int32(pitch), unit, _strides(dy)),
    )  # fmt: skip
    both = width <= _BOTH_GRADIENTS[problem.extras]
    for part in ("BOTH",) if both else ("KEYS", "VALUES"):
        load(_BACKWARD, problem.kernel("attention_backward", width, groups, columns, part))(
            problem.grid(groups, of_keys=True),
            (_WARPGROUP * (groups + 1),),
            (dk, dv, sums, _rows(k), _rows(v), _boxes(q, columns), _boxes(dy, columns),
             problem.struct(of_keys=True), extra, np.int32(pitch), _strides(dk)),
            _SHARED,
        )  # fmt: skip
    width, (groups, columns) = problem.tiles(_QUERIES_TILES)
    load(_BACKWARD, problem.kernel("attention_backward", width, groups, columns, "QUERIES"))(
        problem.grid(groups),
        (_WARPGROUP * (groups + 1),),
        (dq, dq, sums, _rows(q), _rows(dy), _boxes(k, columns), _boxes(v, columns),
         struct, extra, np.int32(pitch), _strides(dq)),
        _SHARED,
    )  # fmt: skip


class _Problem:
    """What the structs Problem and Extras hold, and what follows from it for a launch."""

    def __init__(self, q: Array, k: Array, rule: Rule) -> None:
        self.q, self.rule = q, rule
        self.batch, self.heads, self.queries, self.width = q.shape
        self.kv_heads, self.keys = k.shape[1:3]
        if rule.sequences is not None:
            self.batch = len(rule.sequences.q_starts) - 1
            self.queries, self.keys = rule.sequences.longest
        self.extras = (
            rule.bias is not None
            or rule.dropout > 0
            or rule.sequences is not None
            or rule.scale <= 0
        )
        self.even = rule.before == rule.after == ALL and rule.sequences is None
        self.processors: int = _gpu(q.device.id)[1]

    def tiles(self, table: tuple[_Tiles, _Tiles]) -> tuple[int, tuple[int, int]]:
        """Return the smallest width of a table that does, and its tiles."""
        width = min(w for w in table[self.extras] if w >= self.width)
        return width, table[self.extras][width]

    def kernel(self, name: str, width: int, groups: int, columns: int, *part: str) -> str:
        """Return the name of an instantiation."""
        last = (*part, "true" if self.extras else "false")
        return f"{name}<{c_name(self.q.dtype)}, {width}, {groups}, {columns}, {', '.join(last)}>"

    def grid(self, groups: int, of_keys: bool = False) -> tuple[int]:
        """Return a block for each multiprocessor, if there are so many tiles of rows."""
        rows, heads = (self.keys, self.kv_heads) if of_keys else (self.queries, self.heads)
        count = -(-rows // (64 * groups)) * heads * self.batch
        return (min(self.processors, count),)

    def struct(self, of_keys: bool = False) -> Any:
        """Return the struct Problem for tiles of rows of q or of k."""
        heads = self.batch * (self.kv_heads if of_keys else self.heads)
        together = 1
        if not self.even:  # heads whose other side stays in the cache, in groups of equal size
            streamed = self.queries * self.heads if of_keys else self.keys * self.kv_heads
            streamed *= 4 * self.width * self.batch
            together = -(-heads // max(1, min(heads, -(-streamed // _CACHED))))
        rule = self.rule
        return _struct(
            _PROBLEM, self.heads, self.kv_heads, self.queries, self.keys, self.width, rule.before,
            rule.after, together, heads, rule.scale,
        )  # fmt: skip

    def extra(self, columns: int = 0) -> Any:
        """Return the struct Extras."""
        rule, starts, bias, key = self.rule, self.rule.sequences, self.rule.bias, self.rule.key
        kept = 1 - rule.dropout
        return _struct(
            _EXTRAS,
            *((0,) * 5 if bias is None else (bias.data.ptr, *(step // 4 for step in bias.strides))),
            *((0, 0) if starts is None else (starts.q_starts.data.ptr, starts.k_starts.data.ptr)),
            *((0, 0, 0) if key is None else key[:3]),
            0 if key is None or key.offset is None else key.offset.data.ptr,
            self.q.shape[2], columns, round(kept * 2**16), 1 / kept,
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


def _rows(array: Array) -> TensorMap:
    """Return the map for copies of 64 rows."""
    return _boxes(array, 64)


def _boxes(array: Array, rows: int) -> TensorMap:
    """Return the map for copies of boxes of 64 columns."""
    return tensor_map(array, (1, 1, rows, 64))


def _strides(array: Array) -> Any:
    """Return the struct Strides, in elements."""
    return _struct(_STRIDES, *(stride // array.itemsize for stride in array.strides[:3]))


@lru_cache(maxsize=1024)
def _struct(dtype: Any, *fields: float) -> Any:
    """Return a struct, as an argument of a kernel."""
    return by_value(np.array([fields], dtype))
