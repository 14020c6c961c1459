"""Reductions and running sums: launches reduce.cu.

An array is seen as (outer, length, inner), its middle axis the one to reduce. The launch geometry
depends on the shape and the dtype alone, never on the GPU, so that equal inputs give equal bits.
Rows are reduced by a thread, a warp or a block, as their size and number decide; columns by blocks
that read whole vectors of them. Long axes are cut into chunks, whose results a second launch joins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.core import arrays, backend
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.dtypes import (
    Dtype,
    bool_,
    c_name,
    compute_dtype,
    int32,
    int64,
    is_float,
    uint64,
)
from tensorgrad.kernels import overlap
from tensorgrad.kernels.capturing import is_capturing
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.rows import power_of_two
from tensorgrad.kernels.structs import NULL, PartialSums, address, by_value, number

_THREADS = 256  # the kernels' __launch_bounds__
_BLOCKS = 4096  # below this many blocks the reduced axis is split, if it is long enough
_TILE_ROWS = 128  # rows of a block in which each thread reduces one
_TILE_BYTES = 256  # at most, of such a row
_WARP_BYTES = 2048  # rows up to this size are always reduced by a warp
_WARP_BYTES_MANY = 16384  # and up to this one where the rows are many
_MANY_ROWS = 1024
_CHUNK_BYTES = 16384  # the least that a block reads of a long row
_CHUNK_ROWS = 16  # the least that a thread reads down a long column
_FOLDED_ROWS = 128  # the least for which rows are joined so that vectors fit
_ADD = 1.0  # the parameter of a sum that is added to what is there


def reduce_cuda(
    op: str, x: Array, axes: tuple[int, ...], dtype: Dtype, parameter: float = 0
) -> Array:
    """Reduce the axes, none of them empty.

    Args:
        op: an operation of reduce.cu, such as "Sum".
        x: any layout.
        axes: ascending.
        dtype: of the result, as `ops/reduce.py` chooses it.
        parameter: what the operation's `finish` takes.

    Returns:
        The results, without the reduced axes.
    """
    shape = tuple(n for axis, n in enumerate(x.shape) if axis not in axes)
    x, outer, length, inner = _three_axes(_operand(op, x), axes)
    y = backend.empty(shape, _result_dtype(op, x.dtype, dtype), like=x)
    if y.size:
        if inner == 1:
            _rows(op, y, x, outer, length, parameter)
        else:
            _columns(op, y, x, outer, length, inner, parameter)
    return y if y.dtype == dtype else y.astype(dtype)


def sum_rows_into(total: Array, x: Array, beta: int) -> None:
    """Write the sum of the rows of a matrix of floats, which has elements, into an array.

    Args:
        total: (C,), contiguous, of the dtype that x is summed in.
        x: (N, C), any layout.
        beta: 1: add it to what is there; 0: overwrite that.
    """
    length, inner = x.shape
    if inner > 1:
        _columns("Sum", total, backend.contiguous(x), 1, length, inner, _ADD if beta else 0.0)
    elif beta:
        arrays.add_into(total, reduce_cuda("Sum", x, (0,), total.dtype))
    else:
        total[...] = reduce_cuda("Sum", x, (0,), total.dtype)


class PartialSum(NamedTuple):
    """A sum over rows that a kernel has added up in parts, beside its results."""

    total: Array  # (C,), contiguous; the dtype of parts, or of 16 bits
    beta: int  # 1: add to what is there; 0: overwrite it
    parts: Array  # (N, C), N > 0, float32 or float64; rows contiguous


def sum_parts(sums: Sequence[PartialSum]) -> None:
    """Add up parts of sums, all of one dtype, with as few launches as possible."""
    for dtype in dict.fromkeys(part.total.dtype for part in sums):
        _sum_parts_to(dtype, [part for part in sums if part.total.dtype is dtype])


def _sum_parts_to(dtype: Dtype, sums: Sequence[PartialSum]) -> None:
    """Add up parts of sums whose totals are of a dtype."""
    types = f"{c_name(sums[0].parts.dtype)}, {c_name(dtype)}"
    for start in range(0, len(sums), PartialSums.MOST):
        table, blocks = PartialSums(overlaps=is_capturing()), 0
        together = sums[start : start + PartialSums.MOST]
        table.count = len(together)
        for i, (total, beta, parts) in enumerate(together):
            table.totals[i], table.parts[i] = address(total), address(parts)
            table.columns[i], table.rows[i], table.add[i] = total.size, len(parts), beta
            table.pitch[i] = parts.strides[0] // parts.itemsize
            table.first_block[i] = blocks
            blocks += -(-total.size // 32)
        overlap.launch_in_graph(
            load("reduce.cu", f"sum_parts<{types}>"),
            (blocks,),
            (32, 32),
            (by_value(table),),
            writes=[part.total for part in together],
        )


def cumsum_cuda(x: Array, axis: int, dtype: Dtype) -> Array:
    """Return the running sums along one axis, which is moved last while it is summed."""
    move = backend.cupy.moveaxis
    x = backend.contiguous(move(_operand("Sum", x), axis, -1))
    y = backend.empty(x.shape, _result_dtype("Sum", x.dtype, dtype), like=x)
    if y.size:
        length = x.shape[-1]
        rows = x.size // length
        op = _operation("Sum", x, y)
        chunk, splits = _split(rows, length, _CHUNK_BYTES // x.itemsize)
        totals: Any = NULL
        if splits > 1:
            sums = _partials("Sum", x, rows * splits)
            totals = backend.empty_like(sums)
            _launch_rows(f"First<{op}>", sums, x, rows, length, chunk, splits, 0)
            _launch_scan(f"First<Last<{op}>>", totals, sums, NULL, rows, splits, splits, 1)
        _launch_scan(op, y, x, totals, rows, length, chunk, splits)
    y = y if y.dtype == dtype else y.astype(dtype)
    return move(y, -1, axis)


def _operation(op: str, x: Array, y: Array) -> str:
    """Return the C++ type of an operation on the dtypes of x and y."""
    if op == "Sum" and y.dtype != x.dtype:
        return f"Sum<{c_name(x.dtype)}, {c_name(y.dtype)}>"
    return f"{op}<{c_name(x.dtype)}>"


def _operand(op: str, x: Array) -> Array:
    """Return x in one of the dtypes that the kernels of the operation are made for."""
    dtype = x.dtype
    if op in ("Any", "All"):
        return x if dtype == bool_ else x != 0
    if is_float(dtype) or dtype == int64:
        return x
    if op == "Sum" and dtype in (bool_, int32):
        return x
    if op in ("Sum", "Prod"):  # wraps around as unsigned numbers do
        return x.view(int64) if dtype == uint64 else x.astype(int64)
    if dtype in (uint64, int32):
        return x
    return x.astype(int64 if dtype.itemsize == 4 else int32)


def _result_dtype(op: str, operand: Dtype, wanted: Dtype) -> Dtype:
    """Return the dtype that the kernel writes for an operand."""
    if op in ("Any", "All"):
        return bool_
    if op in ("ArgMax", "ArgMin"):
        return int64
    if op == "SumOfSquares":
        return wanted
    if op == "Sum":
        return wanted if is_float(operand) else int64
    return operand if op in ("Mean", "Prod", "Max", "Min") else compute_dtype(operand)


def _three_axes(x: Array, axes: tuple[int, ...]) -> tuple[Array, int, int, int]:
    """Return contiguous x and the lengths of (outer, reduced, inner)."""
    if not axes:
        return backend.contiguous(x), x.size, 1, 1
    first, last = axes[0], axes[-1]
    if last - first + 1 != len(axes):  # not side by side: bring them to the end
        kept = tuple(axis for axis in range(x.ndim) if axis not in axes)
        x = x.transpose(kept + axes)
        first, last = len(kept), x.ndim - 1
    lengths: list[Shape] = [x.shape[:first], x.shape[first : last + 1], x.shape[last + 1 :]]
    outer, length, inner = map(math.prod, lengths)
    return backend.contiguous(x), outer, length, inner


def _rows(op: str, y: Array, x: Array, rows: int, length: int, parameter: float) -> None:
    """Reduce (rows, length) over its last axis."""
    size = length * x.itemsize
    name = _operation(op, x, y)
    if size <= _TILE_BYTES and size % 16 and x.data.ptr % 16 == 0:
        load("reduce.cu", f"reduce_rows_tile<{name}>")(
            (-(-rows // _TILE_ROWS),),
            (_TILE_ROWS,),
            (y, x, np.int64(rows), np.int32(length), np.float64(parameter)),
            _TILE_ROWS * size,
        )
        return
    if size <= _WARP_BYTES or (size <= _WARP_BYTES_MANY and rows >= _MANY_ROWS):
        lanes = min(32, power_of_two(-(-size // 32)))  # two accesses of 16 bytes for each lane
        load("reduce.cu", f"reduce_rows_warp<{name}>")(
            (-(-rows * lanes // _THREADS),),
            (_THREADS,),
            (y, x, np.int64(rows), np.int32(length), np.int32(lanes.bit_length() - 1),
             np.float64(parameter)),
        )  # fmt: skip
        return
    chunk, splits = _split(rows, length, _CHUNK_BYTES // x.itemsize)
    if splits == 1:
        _launch_rows(name, y, x, rows, length, chunk, 1, parameter)
        return
    partials = _partials(op, x, rows * splits)
    _launch_rows(f"First<{name}>", partials, x, rows, length, chunk, splits, parameter)
    _launch_rows(f"Last<{name}>", y, partials, rows, splits, splits, 1, parameter)


class _Pass(NamedTuple):
    """A launch of reduce_columns but for its arrays."""

    kernel: str
    grid: tuple[int]
    block: Shape
    numbers: tuple[Any, ...]


def _columns(
    op: str, y: Array, x: Array, outer: int, length: int, inner: int, parameter: float
) -> None:
    """Reduce (outer, length, inner) over its middle axis."""
    name, misaligned = _operation(op, x, y), x.data.ptr % 16
    passes, count = _passes(name, x.itemsize, misaligned, outer, length, inner, parameter)
    *before, last = passes
    for launch in before:
        partials = _partials(op, x, count)
        load("reduce.cu", launch.kernel)(launch.grid, launch.block, (partials, x, *launch.numbers))
        x = partials
    load("reduce.cu", last.kernel)(last.grid, last.block, (y, x, *last.numbers))


@lru_cache(maxsize=4096)
def _passes(
    name: str, itemsize: int, misaligned: int, outer: int, length: int, inner: int, parameter: float
) -> tuple[list[_Pass], int]:
    """Return the launches and the number of partial results. Cached from step to step."""
    width = min(8, 16 // itemsize)
    fold = width // math.gcd(inner, width)  # rows that end where a vector does
    if misaligned % (width * itemsize) or (
        fold > 1 and (length % fold or length < _FOLDED_ROWS or name.startswith("Arg"))
    ):
        width = fold = 1
    length, inner = length // fold, inner * fold
    block = _block_shape(outer, length, inner // width)
    units = -(-inner // (width * block[0])) * -(-outer // block[2])
    chunk, splits = _split(units, length, block[1] * _CHUNK_ROWS)
    view = (outer, length, inner)
    if splits == fold == 1:
        return [_pass(name, width, view, chunk, 1, parameter)], 0
    first = _pass(f"First<{name}>", width, view, chunk, splits, parameter)
    view = (outer, splits * fold, inner // fold)
    last = _pass(f"Last<{name}>", 1, view, splits * fold, 1, parameter)
    return [first, last], outer * splits * inner


def _pass(name: str, width: int, view: Shape, chunk: int, splits: int, parameter: float) -> _Pass:
    """Return the launch that reduces the middle axis of a view in `splits` chunks."""
    outer, length, inner = view
    block = _block_shape(outer, length, inner // width)
    tiles = -(-inner // (width * block[0]))
    numbers = (
        number("i8", outer), number("i8", length), number("i8", inner), number("i4", chunk),
        number("i4", splits), number("i4", tiles), number("f8", parameter),
    )  # fmt: skip
    kernel = f"reduce_columns<{name}, {'true' if width > 1 else 'false'}>"
    return _Pass(kernel, (tiles * splits * -(-outer // block[2]),), block, numbers)


def _split(units: int, length: int, least: int) -> tuple[int, int]:
    """Return the length and number of chunks of the reduced axis, for enough blocks."""
    splits = max(1, min(_BLOCKS // units, length // least))
    chunk = -(-length // splits)
    if splits > 1:
        chunk = -(-chunk // 16) * 16  # keeps chunks aligned where the row is
    return chunk, -(-length // chunk)


def _partials(op: str, x: Array, count: int) -> Array:
    """Return memory for `count` accumulators of an operation on the dtype of x."""
    wide = op == "SumOfSquares" or (op == "Sum" and not is_float(x.dtype))
    number = 8 if wide or x.itemsize == 8 else 4
    size = {"Var": 3 * number, "LogSumExp": 2 * number, "ArgMax": 16, "ArgMin": 16}.get(op, number)
    return backend.empty((count * size // 4,), int32, like=x)


@lru_cache(maxsize=4096)
def _block_shape(outer: int, length: int, columns: int) -> tuple[int, int, int]:
    """Return threads along inner, down the axis and along outer: 256 where there is work."""
    along = power_of_two(columns)
    down = min(_THREADS // min(along, 32), power_of_two(-(-length // 4)))
    along = min(along, _THREADS // down)
    along = -(-columns // -(-columns // along))  # equally many in each tile
    return along, down, min(_THREADS // (along * down), power_of_two(outer), 64)  # CUDA's limit


def _launch_rows(
    name: str, y: Array, x: Array, rows: int, length: int, chunk: int, splits: int, parameter: float
) -> None:
    load("reduce.cu", f"reduce_rows_block<{name}>")(
        (rows * splits,),
        (_THREADS,),
        (y, x, np.int64(length), np.int32(chunk), np.int32(splits), np.float64(parameter)),
    )


def _launch_scan(
    name: str, y: Array, x: Array, totals: Any, rows: int, length: int, chunk: int, splits: int
) -> None:
    load("reduce.cu", f"scan_rows<{name}>")(
        (rows * splits,),
        (_THREADS,),
        (y, x, totals, np.int64(length), np.int32(chunk), np.int32(splits)),
    )
