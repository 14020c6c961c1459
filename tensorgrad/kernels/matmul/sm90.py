"""Matrix products of 16 bits on Hopper, by wgmma and TMA: launches matmul/sm90.cu.

Operands are read in place, with the terms of the sums along rows or along columns. Tiles are
computed whole or, where they would leave SMs idle, by stream-K: each cluster takes an
equal number of steps over K, and a second kernel adds the partial sums of a tile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.dtypes import Dtype, bfloat16, c_name, float16, float32
from tensorgrad.kernels import overlap
from tensorgrad.kernels.capturing import is_capturing
from tensorgrad.kernels.counter import counter
from tensorgrad.kernels.device import capability, sm_count
from tensorgrad.kernels.loader import Kernel, load
from tensorgrad.kernels.matmul.problem import MatmulProblem
from tensorgrad.kernels.structs import NULL, MatmulSm90Arguments, address, by_value, number
from tensorgrad.kernels.tensor_map import TensorMap, map_memory

Steps = tuple[int, int, int]  # in elements, to the next matrix, row and column

_FILE = "matmul/sm90.cu"
_SHARED = 226 * 1024  # bytes a block: all that there is but for the barriers
_THREADS = 384
_EPILOGUE_WARPS = 3  # the kernel's constant
_BAND = 8  # rows of tiles, in clusters, before the next column of them
_ROWS, _STEP = 128, 64  # rows of a block's tile, and terms of a step over K
# cuBLASLt is faster by about 5 %. In products of up to this number of operations, 50 us, that our
# kernels overlap with their neighbours in a graph makes up for it.
_OVERLAP_PAYS = 32e9
# With 768 terms sharing saves 36 us of 324, with 1,024 8 of 246; with 1,600 it costs 18 of 262.
_SHARED_GELU_UP_TO = 1024


class Tiling(NamedTuple):
    """Columns of a tile, blocks of 128 rows in a cluster, and the steps over K of each cluster.

    The last is 0 where each cluster computes whole tiles.
    """

    columns: int
    cluster: int
    split_steps: int


def refusal(p: MatmulProblem) -> str | None:
    """Return what the kernels would need to do this product, or None."""
    addresses = p.y.data.ptr | p.a.array.data.ptr | p.b.array.data.ptr
    for array in (p.residual, p.derivative, p.scale, p.column_sums):
        if array is not None:
            addresses |= array.data.ptr
    if p.before_gelu is not None or p.gelu_of is not None or p.gate is not None:
        return "the derivative of GELU instead of its operand, and no gate"
    return _refusal(
        p.rows, p.width, p.columns, p.a[1:], p.b[1:], p.a.array.dtype, p.y.dtype, addresses & 15,
        None if p.bias is None else p.bias.data.ptr & 7, _epilogue(p), p.residual is not None,
        p.add, p.y.device.id,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _refusal(
    rows: int, terms: int, columns: int, a: Steps, b: Steps, dtype: Dtype, y_dtype: Dtype,
    misplaced: int, bias_misplaced: int | None, epilogue: str, residual: bool, add: bool,
    device: int,
) -> str | None:  # fmt: skip
    if dtype not in (float16, bfloat16) or capability(device) != 90:
        return "float16 or bfloat16 on a GPU of compute capability 9.0"
    layout = _layout(rows, terms, columns, a, b)
    if misplaced or layout is None or terms == 0:
        return "operands that TMA reads in place, with rows of a multiple of 16 bytes"
    if columns * y_dtype.itemsize % 16:
        return "results with rows of a multiple of 16 bytes"
    if bias_misplaced:
        return "a bias that begins at a multiple of 8 bytes"
    if add if y_dtype == dtype else epilogue != "NARROW" or residual:
        return "a result of 16 bits, or of float32 to add to"
    if epilogue == "GELU" and (layout != (False, False) or residual):
        return "the layout of a linear layer for GELU, and no residual"
    if epilogue == "SCALED" and (layout != (False, True) or bias_misplaced is not None or residual):
        return "the layout of a linear layer's gradient for a scale, and nothing else to add"
    return None


def is_fast(p: MatmulProblem) -> bool:
    """Whether the kernels are, as far as was measured, about as fast as cuBLASLt or faster.

    They are where tiles of 256 columns occupy most of the GPU, except for GELU without its
    derivative, and for long products without GELU.
    """
    if p.derivative is None and 2.0 * p.rows * p.width * p.columns > _OVERLAP_PAYS:
        return False
    if p.batch > 1 or (p.gelu and p.derivative is None):
        return False
    sizes = p.rows, p.width, p.columns, p.y.itemsize
    return refusal(p) is None and fills(*sizes, sm_count(p.y.device.id))


@lru_cache(maxsize=4096)
def fills(rows: int, terms: int, columns: int, item: int, processors: int = 132) -> bool:
    """Whether a product is so large that tiles of 256 columns occupy most of the GPU.

    Args:
        rows, terms, columns: of the product.
        item: bytes of an element of the result.
        processors: of the GPU; those of an H200 are 132.
    """
    if terms < 256 or rows * columns * item < 1 << 22:
        return False
    width, cluster, _ = tiling_of(1, rows, terms, columns, processors, False)
    clusters = processors // cluster
    tiles = -(-rows // (_ROWS * cluster)) * -(-columns // width)
    busy = rows * columns / (_ROWS * cluster * width)
    return width == 256 and busy / (-(-tiles // clusters) * clusters) >= 0.85


def column_sums_for(p: MatmulProblem) -> Array:
    """Return an array (parts, columns) for `column_sums`, whose sum over parts is the sums."""
    parts = -(-p.rows // _ROWS) * _EPILOGUE_WARPS
    return backend.empty((parts, p.columns), float32, like=p.y)


def derivative_for(rows: int, columns: int, like: Array) -> Array:
    """Return an array for `derivative` of so large a product, and later `scale`: one byte each.

    It holds 200 times the derivative of GELU, and 27: 0 and 1 are exact there, others are off
    by 0.0025 at most; see sm90.cuh. Its shape is (boxes of 16 rows, boxes of 64 columns, 1024).
    """
    return backend.empty((-(-rows // 16), -(-columns // 64), 1024), np.dtype(np.uint8), like=like)


def derivative_values(kept: Array, rows: int, columns: int) -> Array:
    """Return the derivatives in an array from `derivative_for`, (rows, columns), float32."""
    down, across, _ = kept.shape
    row = backend.cupy.arange(16)
    units = backend.cupy.arange(8) ^ (row // 2 % 4)[:, None]  # 8 columns each, for rows of a box
    boxes = kept.reshape(down, across, 16, 8, 8)[:, :, row[:, None], units]
    values = boxes.transpose(0, 2, 1, 3, 4).reshape(16 * down, 64 * across)[:rows, :columns]
    return (values.astype(float32) - 27) / 200


def _epilogue(p: MatmulProblem) -> str:
    """Return the epilogue, as the kernels' enum Epilogue names it."""
    if p.scale is not None:
        return "SCALED"
    return "GELU" if p.gelu or p.derivative is not None else "NARROW"


def _sizes(p: MatmulProblem) -> tuple[int, int, int, int]:
    return p.batch, p.rows, p.width, p.columns


def multiply(p: MatmulProblem, tiling: Tiling | None = None) -> None:
    """Compute y, which has elements; `tiling` is for measurements."""
    y, device, epilogue = p.y, p.y.device.id, _epilogue(p)
    wide = y.dtype == float32
    if tiling is None:
        bare = p.bias is None and p.residual is None and epilogue == "NARROW" and p.batch == 1
        tiling = tiling_of(*_sizes(p), sm_count(device), bare)
    a, b = p.a, p.b
    derivative = p.scale if p.derivative is None else p.derivative
    operands = (a[1:], b[1:], a.array.data.ptr, b.array.data.ptr, a.array.dtype)
    if not tiling.split_steps:
        bias = p.bias
        kernel, grid, arguments = _launch(
            *_sizes(p), *operands, y.data.ptr, "WIDE" if wide else epilogue, address(bias),
            bias is not None and bias.dtype == float32, address(p.residual), address(derivative),
            address(p.column_sums), p.add, tiling, device, is_capturing(),
        )  # fmt: skip
        overlap.launch_in_graph(
            kernel, grid, (_THREADS,), (*arguments, counter(y)), _SHARED,
            writes=(y, p.derivative, p.column_sums),
        )  # fmt: skip
        return
    parts = backend.empty((_parts(p.width, tiling), p.rows, p.columns), float32, like=y)
    kernel, grid, arguments = _launch(
        *_sizes(p), *operands, parts.data.ptr, "WIDE", 0, False, 0, 0, 0, False, tiling, device,
        False,
    )  # fmt: skip
    kernel(grid, (_THREADS,), (*arguments, NULL), _SHARED)
    sizes = MatmulSm90Arguments.from_buffer_copy(arguments[-1].value)
    sizes.add = p.add
    load(_FILE, f"matmul_sum<{c_name(y.dtype)}>")(
        (-(-y.size // 1024),),
        (256,),
        (y, parts, number("i4", _ROWS * tiling.cluster), number("i4", tiling.columns),
         by_value(sizes)),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _launch(
    batch: int, rows: int, terms: int, columns: int, a: Steps, b: Steps, a_pointer: int,
    b_pointer: int, dtype: Dtype, y: int, epilogue: str, bias: int, wide_bias: bool, residual: int,
    derivative: int, column_sums: int, add: bool, tiling: Tiling, device: int, overlaps: bool,
) -> tuple[Kernel, tuple[int], tuple[Any, ...]]:  # fmt: skip
    """Return the kernel, its grid and its arguments, which recur from step to step."""
    layout = _layout(rows, terms, columns, a, b)
    assert layout is not None, "refused"
    width, cluster, split_steps = tiling
    tile_rows = -(-rows // (_ROWS * cluster))
    tiles = tile_rows * -(-columns // width) * batch
    clusters = sm_count(device) // cluster
    grid = (clusters if split_steps else min(tiles, clusters)) * cluster
    flags = ", ".join("true" if across else "false" for across in layout)
    name = epilogue
    if epilogue == "GELU" and terms <= _SHARED_GELU_UP_TO:
        name = "SHARED_GELU"
    kernel = load(_FILE, f"matmul<{c_name(dtype)}, {name}, {width}, {cluster}, {flags}>")
    item = 4 if epilogue == "WIDE" else 2
    result = (_parts(terms, tiling) if split_steps else 1, batch, rows, columns)
    maps = (
        _result_map(y, item, result),
        _result_map(residual or y, item, result),
        _operand_map(a_pointer, a, batch, rows, terms, layout[0]),
        _operand_map(b_pointer, _transposed(b), batch, columns, terms, layout[1]),
    )
    sizes = MatmulSm90Arguments(
        bias, residual, derivative, column_sums, rows, columns, terms, batch, a[0] > 0, b[0] > 0,
        tile_rows if split_steps else _BAND, split_steps, wide_bias, add, overlaps,
    )  # fmt: skip
    return kernel, (grid,), (*maps, by_value(sizes))


@lru_cache(maxsize=4096)
def tiling_of(
    batch: int, rows: int, terms: int, columns: int, processors: int, stream_k: bool
) -> Tiling:
    """Return the tiling with the fewest clocks, as a model of measurements estimates them.

    A step of 64 terms takes a block 1,300 clocks with 256 columns and 750 with 128; a tile takes
    1,500 or 1,000 more. Stream-K writes partial sums, which a second kernel reads.
    """
    steps = -(-terms // _STEP)
    clocks = {}
    for width, cluster, step, tile in ((256, 2, 1300, 1500), (128, 1, 750, 1000)):
        tiles = -(-rows // (_ROWS * cluster)) * -(-columns // width) * batch
        clusters = processors // cluster
        clocks[Tiling(width, cluster, 0)] = -(-tiles // clusters) * (steps * step + tile)
        split = -(-tiles * steps // clusters)
        if stream_k and 4 <= split < steps:
            parts = (steps / split + 1) * rows * columns
            total = split * step + 2 * tile + 15000 + int(parts // 250)
            clocks[Tiling(width, cluster, split)] = total
    return min(clocks, key=lambda tiling: clocks[tiling])


def _parts(terms: int, tiling: Tiling) -> int:
    """Return the most partial sums that a tile may have."""
    return -(-terms // _STEP) // tiling.split_steps + 2


def _transposed(steps: Steps) -> Steps:
    """Return the steps of b as of an operand whose rows are the columns of y."""
    return steps[0], steps[2], steps[1]


def _layout(rows: int, terms: int, columns: int, a: Steps, b: Steps) -> tuple[bool, bool] | None:
    """Return whether a and b are contiguous across the terms; None if TMA cannot read them."""
    left, right = _across(a, rows, terms), _across(_transposed(b), columns, terms)
    return None if left is None or right is None or left > right else (left, right)


def _across(steps: Steps, length: int, terms: int) -> bool | None:
    """Return whether memory is contiguous across the terms (else along them); None if neither."""
    batch, row, column = steps
    if batch % 8:
        return None
    if (column == 1 or terms == 1) and (length == 1 or (row > 0 and row % 8 == 0)):
        return False
    if (row == 1 or length == 1) and (terms == 1 or (column > 0 and column % 8 == 0)):
        return True
    return None


def _operand_map(
    pointer: int, steps: Steps, batch: int, length: int, terms: int, across: bool
) -> TensorMap:
    """Return the tensor map for boxes of 128 rows of 64 terms, or of 64 terms of 64 rows."""
    distance, row, column = steps
    if across:
        shape, far, box = (terms, length), column, (64, 64)
    else:
        shape, far, box = (length, terms), row, (128, 64)
    strides = (0, 2 * distance, 2 * far, 2)
    return map_memory(pointer, 2, (1, batch if distance else 1, *shape), strides, (1, 1, *box))


def _result_map(pointer: int, item: int, shape: Shape) -> TensorMap:
    """Return the tensor map for boxes of 16 rows of 128 bytes of (parts, batch, rows, columns)."""
    _, batch, rows, columns = shape
    strides = (batch * rows * columns * item, rows * columns * item, columns * item, item)
    return map_memory(pointer, item, shape, strides, (1, 1, 16, 128 // item))
