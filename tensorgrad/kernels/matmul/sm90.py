"""Matrix products of 16 bits on Hopper: launches of kernels/matmul/sm90.cu.

Operands are read where they lie, along the terms of the sums or across. Nothing is copied.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Shape
from tensorgrad.dtypes import Dtype, bfloat16, c_name, float16, float32
from tensorgrad.kernels.counter import counter
from tensorgrad.kernels.device import capability, multiprocessors
from tensorgrad.kernels.loader import NULL, Kernel, address, by_value, load
from tensorgrad.kernels.matmul.problem import Problem
from tensorgrad.kernels.tensor_map import TensorMap, map_memory

Steps = tuple[int, int, int]  # in elements, to the next matrix, row and column

_FILE = "matmul/sm90.cu"
_SHARED = 226 * 1024  # bytes a block: all that there is but for the barriers
_THREADS = 384
_BAND = 8  # rows of tiles, in clusters, that are worked on before the next
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
    places = p.y.data.ptr | p.a.array.data.ptr | p.b.array.data.ptr
    for array in (p.residual, p.before_gelu, p.gelu_of):
        if array is not None:
            places |= array.data.ptr
    return _refusal(
        p.rows, p.width, p.columns, p.a[1:], p.b[1:], p.a.array.dtype, p.y.dtype, places & 15,
        None if p.bias is None else p.bias.data.ptr & 7, _ending(p), p.residual is not None, p.add,
        p.y.device.id,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _refusal(
    rows: int, terms: int, columns: int, a: Steps, b: Steps, dtype: Dtype, y_dtype: Dtype,
    misplaced: int, bias_misplaced: int | None, ending: str, residual: bool, add: bool, device: int,
) -> str | None:  # fmt: skip
    if dtype not in (float16, bfloat16) or capability(device) != 90:
        return "float16 or bfloat16 on a GPU of compute capability 9.0"
    layout = _layout(rows, terms, columns, a, b)
    if misplaced or layout is None or terms == 0:
        return "operands that the copy engine reads in place, with rows of a multiple of 16 bytes"
    if columns * y_dtype.itemsize % 16:
        return "results with rows of a multiple of 16 bytes"
    if bias_misplaced:
        return "a bias that begins at a multiple of 8 bytes"
    if add if y_dtype == dtype else ending != "NARROW" or residual:
        return "a result of 16 bits, or of float32 to add to"
    if ending == "GELU" and (layout != (False, False) or residual):
        return "the layout of a linear layer for GELU, and no residual"
    if ending == "GELU_BACKWARD" and (
        layout != (False, True) or bias_misplaced is not None or residual
    ):
        return "the layout of a linear layer for the slope of GELU, and nothing else to add"
    return None


def is_fast(p: Problem) -> bool:
    """Whether the kernels are, as far as was measured, about as fast as cuBLASLt or faster.

    They are where tiles of 256 columns leave little of the chip without work, but for GELU whose
    argument is not kept, and for its slope after short sums.
    """
    if p.batch > 1 or p.width < 256 or p.y.itemsize * p.rows * p.columns < 1 << 22:
        return False
    if (p.gelu and p.before_gelu is None) or (p.gelu_of is not None and p.width < 2048):
        return False
    return refusal(p) is None and _is_busy(*_sizes(p), multiprocessors(p.y.device.id))


@lru_cache(maxsize=4096)
def _is_busy(batch: int, rows: int, terms: int, columns: int, processors: int) -> bool:
    width, cluster, _ = plan_of(batch, rows, terms, columns, processors, False)
    clusters = processors // cluster
    tiles = -(-rows // (_ROWS * cluster)) * -(-columns // width)
    busy = rows * columns / (_ROWS * cluster * width)
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
    y, device, ending = p.y, p.y.device.id, _ending(p)
    wide = y.dtype == float32
    if plan is None:
        bare = p.bias is None and p.residual is None and ending == "NARROW" and p.batch == 1
        plan = plan_of(*_sizes(p), multiprocessors(device), bare)
    a, b = p.a, p.b
    pre = p.gelu_of if p.before_gelu is None else p.before_gelu
    operands = (a[1:], b[1:], a.array.data.ptr, b.array.data.ptr, a.array.dtype)
    if not plan.share:
        bias = p.bias
        kernel, grid, arguments = _launch(
            *_sizes(p), *operands, y.data.ptr, "WIDE" if wide else ending, address(bias),
            bias is not None and bias.dtype == float32, address(p.residual), address(pre), p.add,
            plan, device,
        )  # fmt: skip
        kernel(grid, (_THREADS,), (*arguments, counter(y)), _SHARED)
        return
    parts = backend.empty((_parts(p.width, plan), p.rows, p.columns), float32, like=y)
    kernel, grid, arguments = _launch(
        *_sizes(p), *operands, parts.data.ptr, "WIDE", 0, False, 0, 0, False, plan, device
    )
    kernel(grid, (_THREADS,), (*arguments, NULL), _SHARED)
    problem = arguments[-1].struct.copy()
    problem["add"] = p.add
    load(_FILE, f"matmul_sum<{c_name(y.dtype)}>")(
        (-(-y.size // 1024),),
        (256,),
        (y, parts, np.int32(_ROWS * plan.cluster), np.int32(plan.columns), by_value(problem)),
    )


@lru_cache(maxsize=4096)
def _launch(
    batch: int, rows: int, terms: int, columns: int, a: Steps, b: Steps, a_pointer: int,
    b_pointer: int, dtype: Dtype, y: int, ending: str, bias: int, wide_bias: bool, residual: int,
    pre: int, add: bool, plan: Plan, device: int,
) -> tuple[Kernel, tuple[int], tuple[Any, ...]]:  # fmt: skip
    """Return the kernel, its grid and its arguments, which recur from step to step."""
    layout = _layout(rows, terms, columns, a, b)
    assert layout is not None, "refused"
    width, cluster, share = plan
    tile_rows = -(-rows // (_ROWS * cluster))
    tiles = tile_rows * -(-columns // width) * batch
    clusters = multiprocessors(device) // cluster
    grid = (clusters if share else min(tiles, clusters)) * cluster
    flags = ", ".join("true" if across else "false" for across in layout)
    kernel = load(_FILE, f"matmul<{c_name(dtype)}, {ending}, {width}, {cluster}, {flags}>")
    item = 4 if ending == "WIDE" else 2
    result = (_parts(terms, plan) if share else 1, batch, rows, columns)
    beside = pre or residual or y
    maps = (
        _result_map(y, item, result),
        _result_map(beside, item, result),
        _operand_map(a_pointer, a, batch, rows, terms, layout[0]),
        _operand_map(b_pointer, _turned(b), batch, columns, terms, layout[1]),
    )
    band = tile_rows if share else _BAND
    steps = int(a[0] > 0), int(b[0] > 0)
    problem = (
        bias,
        residual,
        pre,
        rows,
        columns,
        terms,
        batch,
        *steps,
        band,
        share,
        wide_bias,
        add,
    )
    return kernel, (grid,), (*maps, by_value(np.array([problem], _PRODUCT)))


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


def _parts(terms: int, plan: Plan) -> int:
    """Return how many parts of each sum there may be."""
    return -(-terms // _STEP) // plan.share + 2


def _turned(steps: Steps) -> Steps:
    """Return the steps of b as of an operand whose rows are the columns of the product."""
    return steps[0], steps[2], steps[1]


def _layout(rows: int, terms: int, columns: int, a: Steps, b: Steps) -> tuple[bool, bool] | None:
    """Return whether memory goes across the terms in a and in b, where the kernels read them."""
    left, right = _across(a, rows, terms), _across(_turned(b), columns, terms)
    return None if left is None or right is None or left > right else (left, right)


def _across(steps: Steps, length: int, terms: int) -> bool | None:
    """Return whether memory goes across the terms rather than along them, or None if neither."""
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
    """Return the map for copies of 128 rows of 64 terms, or of 64 terms of 64 rows."""
    distance, row, column = steps
    if across:
        shape, far, box = (terms, length), column, (64, 64)
    else:
        shape, far, box = (length, terms), row, (128, 64)
    strides = (0, 2 * distance, 2 * far, 2)
    return map_memory(pointer, 2, (1, batch if distance else 1, *shape), strides, (1, 1, *box))


def _result_map(pointer: int, item: int, shape: Shape) -> TensorMap:
    """Return the map for copies of 16 rows of 128 bytes to (parts, batch, rows, columns)."""
    _, batch, rows, columns = shape
    strides = (batch * rows * columns * item, rows * columns * item, columns * item, item)
    return map_memory(pointer, item, shape, strides, (1, 1, 16, 128 // item))
