"""Matrix products of 16 bits on Hopper: launches of kernels/matmul_sm90.cu.

Operands are read where they lie, along the terms of the sums or across. Nothing is copied.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import bfloat16, c_name, float16, float32
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.tensor_map import TensorMap, map_memory
from tensorgrad.ops.matmul_problem import Operand, Problem

_FILE = "matmul_sm90.cu"
_SHARED = 226 * 1024  # bytes a block: all that there is but for the barriers
_THREADS = 384
_ROWS, _STEP = 128, 64  # of a block's tile, and the terms of each sum that are brought at a time
_PRODUCT = np.dtype(
    [(name, "u8") for name in ("bias", "residual", "pre")]
    + [
        (name, "i4")
        for name in ("rows", "columns", "terms", "matrices", "a_step", "b_step",
                     "band", "share", "wide_bias", "add")
    ]
)  # fmt: skip


class Plan(NamedTuple):
    """Columns of a tile, blocks of 128 rows in a cluster, and the steps over K of each cluster.

    The last is 0 where each tile is computed by one cluster.
    """

    columns: int
    cluster: int
    share: int


def refusal(p: Problem) -> str | None:
    """Say what the kernels need and the problem has not."""
    dtype, y = p.a.array.dtype, p.y
    if dtype not in (float16, bfloat16) or _gpu(y.device.id)[0] != 90:
        return "float16 or bfloat16 on a GPU of compute capability 9.0"
    layout = _layout(p)
    if layout is None or p.width == 0:
        return "operands that the copy engine reads in place, with rows of a multiple of 16 bytes"
    whole = [array for array in (y, p.residual, p.before_gelu, p.gelu_of) if array is not None]
    if p.columns * y.itemsize % 16 or any(array.data.ptr % 16 for array in whole):
        return "results with rows of a multiple of 16 bytes"
    if p.bias is not None and p.bias.data.ptr % 8:
        return "a bias that begins at a multiple of 8 bytes"
    ending = _ending(p)
    if p.add if y.dtype == dtype else ending != "NARROW" or p.residual is not None:
        return "a result of 16 bits, or of float32 to add to"
    if ending == "GELU" and (layout != (False, False) or p.residual is not None):
        return "the layout of a linear layer for GELU, and no residual"
    if ending == "GELU_BACKWARD" and (
        layout != (False, True) or p.bias is not None or p.residual is not None
    ):
        return "the layout of a linear layer for the slope of GELU, and nothing else to add"
    return None


def is_fast(p: Problem) -> bool:
    """Whether the kernels are, as far as was measured, as fast as cuBLASLt or faster.

    They are where tiles of 256 columns leave little of the chip without work, but for GELU whose
    argument is not kept, and for its slope after short sums.
    """
    if p.batch > 1 or p.width < 256 or p.y.itemsize * p.rows * p.columns < 1 << 22:
        return False
    if (p.gelu and p.before_gelu is None) or (p.gelu_of is not None and p.width < 2048):
        return False
    if refusal(p) is not None:
        return False
    processors = _gpu(p.y.device.id)[1]
    width, cluster, _ = plan_of(*_sizes(p), processors, False)
    clusters = processors // cluster
    tiles = -(-p.rows // (_ROWS * cluster)) * -(-p.columns // width)
    busy = p.rows * p.columns / (_ROWS * cluster * width)
    return width == 256 and busy / (-(-tiles // clusters) * clusters) >= 0.85


def _ending(p: Problem) -> str:
    """Return the name of what is done with the sums, as the kernels' enum Ending has it."""
    if p.gelu_of is not None:
        return "GELU_BACKWARD"
    return "GELU" if p.gelu or p.before_gelu is not None else "NARROW"


def _sizes(p: Problem) -> tuple[int, int, int, int]:
    return p.batch, p.rows, p.width, p.columns


def multiply(p: Problem, plan: Plan | None = None) -> None:
    """Compute y, which has elements; `plan` is for measurements."""
    dtype, y = p.a.array.dtype, p.y
    layout = _layout(p)
    assert layout is not None, "refused"
    processors = _gpu(y.device.id)[1]
    wide = y.dtype == float32
    ending = _ending(p)
    bare = p.bias is None and p.residual is None and ending == "NARROW"
    width, cluster, share = plan or plan_of(*_sizes(p), processors, bare and p.batch == 1)
    tile_rows = -(-p.rows // (_ROWS * cluster))
    tiles = tile_rows * -(-p.columns // width) * p.batch
    clusters = processors // cluster if share else min(tiles, processors // cluster)
    a_map, a_step = _map(p.a, p.batch, p.rows, p.width, layout[0])
    b = Operand(p.b.array, p.b.batch, p.b.column, p.b.row)
    b_map, b_step = _map(b, p.batch, p.columns, p.width, layout[1])
    kernel = load(
        _FILE,
        f"matmul<{c_name(dtype)}, {'WIDE' if wide or share else ending}, {width}, {cluster}, "
        f"{', '.join('true' if across else 'false' for across in layout)}>",
    )
    wide_bias = p.bias is not None and p.bias.dtype == float32
    pre = p.gelu_of if p.before_gelu is None else p.before_gelu
    problem = np.array(
        [(_pointer(p.bias), _pointer(p.residual), _pointer(pre),
          p.rows, p.columns, p.width, p.batch, a_step, b_step,
          tile_rows if share else _BAND, share, wide_bias, p.add and not share)],
        _PRODUCT,
    )  # fmt: skip
    grid = (clusters * cluster,)
    if not share:
        to = _result_map(y, 1, p)
        beside = p.residual if pre is None else pre
        beside_map = to if beside is None else _result_map(beside, 1, p)
        kernel(grid, (_THREADS,), (to, beside_map, a_map, b_map, problem), _SHARED)
        return
    count = -(-p.width // _STEP) // share + 2
    parts = backend.empty((count, p.batch, p.rows, p.columns), float32, like=y)
    to = _result_map(parts, count, p)
    kernel(grid, (_THREADS,), (to, to, a_map, b_map, problem), _SHARED)
    problem["add"] = p.add
    load(_FILE, f"matmul_sum<{c_name(y.dtype)}>")(
        (-(-y.size // 1024),),
        (256,),
        (y, parts, np.int32(_ROWS * cluster), np.int32(width), problem),
    )


_BAND = 8  # rows of tiles, in clusters, that are worked on before the next


@lru_cache(maxsize=4096)
def plan_of(
    batch: int, rows: int, terms: int, columns: int, processors: int, sharing: bool
) -> Plan:
    """Return what should take the fewest clocks, by what was measured of each part.

    A step of 64 terms takes a block 1,300 clocks with 256 columns and 750 with 128, a tile as much
    again as the second number. The parts of shared sums are written, and read by a second kernel.
    """
    steps = -(-terms // _STEP)
    plans = {}
    for width, cluster, step, tile in ((256, 2, 1300, 1500), (128, 1, 750, 1000)):
        tiles = -(-rows // (_ROWS * cluster)) * -(-columns // width) * batch
        clusters = processors // cluster
        plans[Plan(width, cluster, 0)] = -(-tiles // clusters) * (steps * step + tile)
        share = -(-tiles * steps // clusters)
        if sharing and 4 <= share < steps:
            parts = (steps / share + 1) * rows * columns
            plans[Plan(width, cluster, share)] = share * step + 2 * tile + 15000 + int(parts // 250)
    return min(plans, key=lambda plan: plans[plan])


def _layout(p: Problem) -> tuple[bool, bool] | None:
    """Return whether memory goes across the terms in a and in b, where the kernels read them."""
    a = _across(p.a, p.rows, p.width)
    b = _across(Operand(p.b.array, p.b.batch, p.b.column, p.b.row), p.columns, p.width)
    return None if a is None or b is None or a > b else (a, b)


def _across(operand: Operand, length: int, terms: int) -> bool | None:
    """Return whether memory goes across the terms rather than along them, or None if neither."""
    array, batch, row, column = operand
    if array.data.ptr % 16 or batch % 8:
        return None
    if (column == 1 or terms == 1) and (length == 1 or (row > 0 and row % 8 == 0)):
        return False
    if (row == 1 or length == 1) and (terms == 1 or (column > 0 and column % 8 == 0)):
        return True
    return None


def _map(
    operand: Operand, batch: int, length: int, terms: int, across: bool
) -> tuple[TensorMap, int]:
    """Return the map for copies of 128 rows of 64 terms or 64 terms of 64 rows, and the step."""
    array, distance, row, column = operand
    matrices = batch if distance else 1
    if across:
        shape, steps, box = (terms, length), (column, 1), (64, 64)
    else:
        shape, steps, box = (length, terms), (row, 1), (128, 64)
    strides = tuple(2 * step for step in (0, distance, *steps))
    encoded = map_memory(array.data.ptr, 2, (1, matrices, *shape), strides, (1, 1, *box))
    return encoded, int(distance > 0)


def _result_map(array: Array, parts: int, p: Problem) -> TensorMap:
    """Return the map for copies of 16 rows of 128 bytes to (parts, batch, rows, columns)."""
    item = array.itemsize
    shape = (parts, p.batch, p.rows, p.columns)
    row = p.columns * item
    strides = (p.batch * p.rows * row, p.rows * row, row, item)
    return map_memory(array.data.ptr, item, shape, strides, (1, 1, 16, 128 // item))


def _pointer(array: Array | None) -> int:
    return 0 if array is None else array.data.ptr


@cache
def _gpu(index: int) -> tuple[int, int]:
    """Return the compute capability of a GPU and its number of multiprocessors."""
    runtime = backend.cupy.cuda.runtime
    capability = int(backend.cupy.cuda.Device(index).compute_capability)
    return capability, runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, index)
