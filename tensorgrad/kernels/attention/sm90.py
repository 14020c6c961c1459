"""Launches of kernels/attention/forward_sm90.cu and attention/backward_sm90.cu.

Arrays are (B, H, T, D) views of any layout that the copy engine reads in place; others are copied.
Kernels are compiled for a few widths of heads; one of another width takes the next larger, and the
copy engine fills the rest with zeros. Which tiles serve which widths is a matter of registers and
was measured on an H200. What few use (a mask, dropout, sequences of unequal length) has kernels of
its own, so that the others stay fast.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array, Shape
from tensorgrad.dtypes import Dtype, c_name, float32
from tensorgrad.kernels.attention.options import ALL, Arrays, AttentionOptions, empty_result
from tensorgrad.kernels.counter import counter
from tensorgrad.kernels.device import capability, multiprocessors
from tensorgrad.kernels.loader import Kernel, by_value, load
from tensorgrad.kernels.tensor_map import TensorMap, fits, tensor_map

_FORWARD, _BACKWARD = "attention/forward_sm90.cu", "attention/backward_sm90.cu"
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


def supports(arrays: Arrays, options: AttentionOptions) -> bool:
    """Whether the kernels support this GPU, these arrays and these options."""
    q = arrays[0]
    fit = q.itemsize == 2 and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    return fit and capability(q.device.id) == 90


def forward(arrays: Arrays, options: AttentionOptions) -> tuple[Array, Array]:
    """Return the result, in the memory order of (B, T, H, D), and the logsumexp."""
    y = empty_result(arrays[0], arrays[0].dtype)
    q, k, v = [_readable(array) for array in arrays]
    logsumexp = backend.empty(q.shape[:3], float32, like=q)
    kernel, grid, block, columns, struct = _problem(q, k, options).forward
    kernel(
        grid,
        block,
        (y, logsumexp, counter(q), _rows(q), _boxes(k, columns), _boxes(v, columns), struct,
         _extra(options, q.shape[2], 0)),
        _SHARED,
    )  # fmt: skip
    return y, logsumexp


def backward(
    dy: Array,
    arrays: Arrays,
    y: Array,
    logsumexp: Array,
    options: AttentionOptions,
    gradients: Arrays,
) -> None:
    """Write the gradients, of the dtype of q; dk and dv have equal strides."""
    q, k, v = [_readable(array) for array in arrays]
    dy = _readable(dy.astype(q.dtype, copy=False))
    dq, dk, dv = gradients
    problem = _problem(q, k, options)
    sums = backend.empty((*q.shape[:2], 2, problem.pitch), float32, like=q)
    kernel, grid, block, columns, struct = problem.backward_rows
    extra, numbers = _extra(options, q.shape[2], columns), problem.numbers
    kernel(grid, block, (sums, y, dy, logsumexp, struct, extra, *numbers, _strides(dy)))
    pitch, rows_of_k, rows_of_v = numbers[2], _rows(k), _rows(v)
    for kernel, grid, block, columns, struct in problem.backward_keys:
        kernel(
            grid,
            block,
            (dk, dv, sums, rows_of_k, rows_of_v, _boxes(q, columns), _boxes(dy, columns), struct,
             extra, pitch, _strides(dk)),
            _SHARED,
        )  # fmt: skip
    kernel, grid, block, columns, struct = problem.backward_queries
    kernel(
        grid,
        block,
        (dq, dq, sums, _rows(q), _rows(dy), _boxes(k, columns), _boxes(v, columns), struct, extra,
         pitch, _strides(dq)),
        _SHARED,
    )  # fmt: skip


class _Launch(NamedTuple):
    """A kernel and what it takes besides arrays."""

    kernel: Kernel
    grid: tuple[int]
    block: tuple[int]
    columns: int  # that its rows meet at a time
    struct: Any  # Problem


def _problem(q: Array, k: Array, options: AttentionOptions) -> _Problem:
    """Return what follows from the sizes: the same from step to step."""
    starts = options.sequences
    extras = (
        options.bias is not None or options.dropout > 0 or starts is not None or options.scale <= 0
    )
    lengths = None if starts is None else (len(starts.q_starts) - 1, *starts.longest)
    return _problem_of(
        q.dtype, q.shape, k.shape, lengths, options.before, options.after, options.scale, extras,
        q.device.id,
    )  # fmt: skip


class _Problem:
    """What the structs Problem hold, and the launches that follow from it.

    Args:
        dtype, q_shape, k_shape: of the arrays.
        lengths: how many sequences there are and the longest of q and of k; None: those of arrays.
        before, after, scale: as in `AttentionOptions`.
        extras: whether the kernels for what few use are needed.
        device: the GPU, which is the current one.
    """

    def __init__(
        self, dtype: Dtype, q_shape: Shape, k_shape: Shape, lengths: tuple[int, int, int] | None,
        before: int, after: int, scale: float, extras: bool, device: int,
    ) -> None:  # fmt: skip
        self.dtype, self.extras, self.scale = dtype, extras, scale
        self.batch, self.heads, self.queries, self.width = q_shape
        self.kv_heads, self.keys = k_shape[1:3]
        if lengths is not None:
            self.batch, self.queries, self.keys = lengths
        self.before, self.after = before, after
        self.even = before == after == ALL and lengths is None
        self.processors = multiprocessors(device)
        columns = self._tiles(_KEYS_TILES)[2]
        self.padded = self.pitch = -(-self.queries // columns) * columns
        if lengths is not None:  # room to start each at a multiple of `columns`
            self.pitch = (q_shape[2] // columns + self.batch + 1) * columns
        self.numbers = (
            *(by_value(np.int32(n)) for n in (self.batch, columns, self.pitch)),
            by_value(np.float32(1 if extras else 1 / np.log(2))),
        )

    @cached_property
    def forward(self) -> _Launch:
        """The kernel of the forward pass."""
        width, groups, columns = self._tiles(_FORWARD_TILES)
        if not self.extras and (self.keys >= 8192 or (self.keys >= 2048 and self.even)):
            groups, columns = _LONG_TILES.get(width, (groups, columns))
        return self._launch(_FORWARD, "attention_forward", width, groups, columns)

    @cached_property
    def backward_rows(self) -> _Launch:
        """The kernel for what backward needs of each query, in tiles as `backward_keys` has."""
        kernel = load(_BACKWARD, f"attention_backward_rows<{c_name(self.dtype)}>")
        blocks = -(-self.batch * self.heads * self.padded * 8 // 256)
        return _Launch(kernel, (blocks,), (256,), self._tiles(_KEYS_TILES)[2], self._struct())

    @cached_property
    def backward_keys(self) -> list[_Launch]:
        """The kernels for dk and dv, one where registers hold both."""
        tiles = self._tiles(_KEYS_TILES)
        both = tiles[0] <= _BOTH_GRADIENTS[self.extras]
        return [
            self._launch(_BACKWARD, "attention_backward", *tiles, part, of_keys=True)
            for part in (("BOTH",) if both else ("KEYS", "VALUES"))
        ]

    @cached_property
    def backward_queries(self) -> _Launch:
        """The kernel for dq."""
        tiles = self._tiles(_QUERIES_TILES)
        return self._launch(_BACKWARD, "attention_backward", *tiles, "QUERIES")

    def _tiles(self, table: tuple[_Tiles, _Tiles]) -> tuple[int, int, int]:
        """Return the smallest width of a table that does, and its tiles."""
        width = min(w for w in table[self.extras] if w >= self.width)
        return (width, *table[self.extras][width])

    def _launch(
        self, file: str, name: str, width: int, groups: int, columns: int, *part: str,
        of_keys: bool = False,
    ) -> _Launch:  # fmt: skip
        """Return a kernel with a block for each multiprocessor, if there are so many tiles."""
        rows, heads = (self.keys, self.kv_heads) if of_keys else (self.queries, self.heads)
        count = -(-rows // (64 * groups)) * heads * self.batch
        sizes = ", ".join([c_name(self.dtype), *map(str, (width, groups, columns))])
        last = ", ".join([*part, "true" if self.extras else "false"])
        kernel = load(file, f"{name}<{sizes}, {last}>")
        block = _WARPGROUP * (groups + 1)
        grid = min(self.processors, count)
        return _Launch(kernel, (grid,), (block,), columns, self._struct(of_keys))

    def _struct(self, of_keys: bool = False) -> Any:
        """Return the struct Problem for tiles of rows of q or of k."""
        heads = self.batch * (self.kv_heads if of_keys else self.heads)
        together = 1
        if not self.even:  # heads whose other side stays in the cache, in groups of equal size
            streamed = self.queries * self.heads if of_keys else self.keys * self.kv_heads
            streamed *= 4 * self.width * self.batch
            together = -(-heads // max(1, min(heads, -(-streamed // _CACHED))))
        fields = (
            self.heads, self.kv_heads, self.queries, self.keys, self.width, self.before,
            self.after, together, heads, self.scale,
        )  # fmt: skip
        return by_value(np.array([fields], _PROBLEM))


_problem_of = lru_cache(maxsize=1024)(_Problem)


def _extra(options: AttentionOptions, length: int, columns: int) -> Any:
    """Return the struct Extras."""
    starts, bias, key = options.sequences, options.bias, options.key
    if starts is None and bias is None and key is None:
        return _no_extra(length, columns)
    kept = 1 - options.dropout
    fields = (
        *((0,) * 5 if bias is None else (bias.data.ptr, *(step // 4 for step in bias.strides))),
        *((0, 0) if starts is None else (starts.q_starts.data.ptr, starts.k_starts.data.ptr)),
        *((0, 0, 0) if key is None else key[:3]),
        0 if key is None or key.offset is None else key.offset.data.ptr,
        length, columns, round(kept * 2**16), 1 / kept,
    )  # fmt: skip
    return by_value(np.array([fields], _EXTRAS))


@lru_cache(maxsize=1024)
def _no_extra(length: int, columns: int) -> Any:
    return by_value(np.array([((0,) * 11 + (length, columns, 2**16, 1.0))], _EXTRAS))


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
    return _strides_of(array.strides, array.itemsize)


@lru_cache(maxsize=1024)
def _strides_of(strides: Shape, item: int) -> Any:
    fields = tuple(stride // item for stride in strides[:3])
    return by_value(np.array([fields], _STRIDES))
