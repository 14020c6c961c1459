"""Skinny GEMM: matrix products of few rows, which cost reading the second matrix once.

Kernels of three files do those of 16 bits. skinny.cu loads weights into registers. On Hopper,
where weights have megabytes, skinny_sm90.cu stages them in shared memory for up to 8 rows, and
skinny_cluster_sm90.cu takes larger tiles for up to 32. Figures: docs/chapters/decoding.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tensorgrad.core.dtypes import bfloat16, c_name, float16, float32
from tensorgrad.kernels import overlap
from tensorgrad.kernels.device import capability
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.matmul.problem import MatmulProblem
from tensorgrad.kernels.rows import power_of_two
from tensorgrad.kernels.structs import NULL, pointer
from tensorgrad.kernels.tensor_map import TensorMap, map_memory

MOST_ROWS = 32
_PROCESSORS = 132  # SMs of an H200; results do not depend on the chip
_MOST_SHARED = 226 * 1024  # bytes a block
_LARGE = 2_500_000  # weights
_WIDE = 2048  # terms, from which on a block has 16 warps
_TILE, _TERMS, _MOST_STAGES = 64, 64, 16  # constants of skinny_cluster_sm90.cu
_RESIDENT = 4  # blocks of it that an SM has registers for


def refusal(p: MatmulProblem) -> str | None:
    """Return what the kernels would need to do this product, or None."""
    a, b, dtype = p.a.array, p.b.array, p.a.array.dtype
    if p.batch != 1 or p.rows > MOST_ROWS:
        return f"one matrix of at most {MOST_ROWS} rows"
    if dtype not in (float32, float16, bfloat16) or capability(p.y.device.id) < 80:
        return "float32, float16 or bfloat16 on a GPU of compute capability 8.0 or later"
    if not (a.flags.c_contiguous and b.flags.f_contiguous):
        return "a in C order and b in Fortran order"
    if any(array is not None and array.dtype != dtype for array in (p.bias, p.gate, p.residual)):
        return "a bias, gate and residual of the dtype of the operands"
    if p.add or any(
        array is not None
        for array in (p.before_gelu, p.gelu_of, p.derivative, p.scale, p.column_sums)
    ):
        return "no epilogue but bias, GELU without its input, gate and residual"
    return None


def multiply(p: MatmulProblem) -> None:
    """Compute y, which has elements."""
    x, weight = p.a.array, p.b.array
    few = p.columns <= 16 * _PROCESSORS
    large = p.width * p.columns >= _LARGE
    # Where few blocks read megabytes, some SMs read none: they may copy those of the
    # next product meanwhile.
    at_once = few and large
    if x.itemsize > 2 or p.width % 8 or any(array.data.ptr % 16 for array in (x, weight)):
        launch = _plain(p)
    elif p.rows > 8 and large and capability(p.y.device.id) == 90:
        launch = in_clusters(p, cluster_tiling(p), at_once)
    elif _is_staged(p):
        launch = _staged(p, at_once)
    else:
        launch = _in_registers(p, few, at_once)
    run(p, launch)


class Launch(NamedTuple):
    """A kernel, its numbers of blocks and threads, its arguments, and bytes of shared memory.

    at_once: it lets the next kernel start before it waits; its last argument says so too.
    """

    file: str
    kernel: str
    grid: tuple[int, ...]
    threads: int
    arguments: tuple[Any, ...]
    shared: int = 0
    at_once: bool = False


class ClusterTiling(NamedTuple):
    """Blocks of a cluster, which divide the terms, and stages of a block.

    A block with several steps of 64 terms needs two stages or more: it would wait forever for one.
    """

    split: int
    stages: int


def run(p: MatmulProblem, launch: Launch) -> None:
    """Launch a kernel."""
    overlap.launch(
        load(launch.file, launch.kernel), launch.grid, (launch.threads,), launch.arguments,
        launch.shared, prefetch=(p.b.array, p.bias), writes=(p.y,), trigger_early=launch.at_once,
    )  # fmt: skip


def _plain(p: MatmulProblem) -> Launch:
    kernel = f"matmul_skinny_plain<{c_name(p.a.array.dtype)}>"
    grid = (-(-p.columns // 8), -(-p.rows // 8))
    return Launch("matmul/skinny.cu", kernel, grid, 256, _arguments(p))


def _in_registers(p: MatmulProblem, few: bool, at_once: bool) -> Launch:
    """Return the launch of the kernel that loads weights into registers."""
    rows = _tile_rows(p)
    # Few columns are divided among more blocks; many rows are read by fewer.
    bands = 2
    if rows == MOST_ROWS and p.columns >= 4096:
        bands = 4
    elif rows < MOST_ROWS and p.columns <= 8 * _PROCESSORS:
        bands = 1
    warps = 16 if p.width >= (1024 if few else _WIDE) else 8
    return Launch(
        "matmul/skinny.cu",
        f"matmul_skinny<{c_name(p.a.array.dtype)}, {rows}, {bands}, {warps}>",
        (-(-p.columns // (8 * bands)),),
        32 * warps,
        (*_arguments(p), np.bool_(at_once)),
        32 * rows * bands * warps,
        at_once,
    )


def _staged(p: MatmulProblem, at_once: bool) -> Launch:
    """Return the launch of the kernel that stages weights in shared memory."""
    warps = 16 if p.width >= _WIDE else 8
    return Launch(
        "matmul/skinny_sm90.cu",
        f"matmul_skinny_staged<{c_name(p.a.array.dtype)}, {warps}>",
        (-(-p.columns // 16),),
        32 * warps,
        (*_arguments(p), np.int32(_pitch(p.width)), np.bool_(at_once)),
        _staged_bytes(p.width),
        at_once,
    )


def in_clusters(p: MatmulProblem, tiling: ClusterTiling, at_once: bool) -> Launch:
    """Return the launch of the kernel with large tiles, whose terms clusters divide."""
    rows = _tile_rows(p)
    maps = (
        _tensor_map(p.a.array.data.ptr, p.rows, p.width, rows),
        _tensor_map(p.b.array.data.ptr, p.columns, p.width, _TILE),
    )
    options = f"{c_name(p.a.array.dtype)}, {rows}"
    kernel = f"matmul_skinny_tile<{options}>"
    if tiling.split > 1:
        kernel = f"matmul_skinny_cluster<{options}, {tiling.split}>"
    return Launch(
        "matmul/skinny_cluster_sm90.cu",
        kernel,
        (-(-p.columns // _TILE) * tiling.split,),
        128,
        (*_arguments(p, maps), np.int32(tiling.stages), np.bool_(at_once)),
        _cluster_bytes(rows, tiling.stages),
        at_once,
    )


def _arguments(p: MatmulProblem, operands: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
    """Return the arguments that all kernels have; `operands` are x and weight."""
    x = p.a.array
    to = (p.y, NULL) if p.y.dtype == x.dtype else (NULL, p.y)
    others = map(pointer, (p.bias, p.gate, p.residual))
    sizes = map(np.int32, (p.rows, p.width, p.columns, p.gelu))
    return (*to, *(operands or (x, p.b.array)), *others, *sizes)


def _tile_rows(p: MatmulProblem) -> int:
    """Return the rows of x of a kernel: 8, 16 or 32."""
    return max(8, power_of_two(p.rows))


def _is_staged(p: MatmulProblem) -> bool:
    """Whether weights had better be staged in shared memory, as measured on an H200.

    They are of several megabytes in long rows, and so few that all blocks run at once.
    """
    by_registers = 4 if p.width < _WIDE else 1  # blocks of an SM
    resident = _PROCESSORS * min(_MOST_SHARED // _staged_bytes(p.width), by_registers)
    return (
        p.rows <= 8
        and p.width >= 1280
        and p.width * p.columns >= 3_000_000
        and p.columns <= 16 * resident
        and capability(p.y.device.id) == 90
    )


def _pitch(width: int) -> int:
    """Return the bytes from one row of staged weights to the next."""
    return -(-2 * width // 128) * 128 + 64


def _staged_bytes(width: int) -> int:
    """Return the bytes of shared memory for staged weights, 16 rows of them."""
    return 16 * _pitch(width)


def cluster_tiling(p: MatmulProblem) -> ClusterTiling:
    """Return the tiling with the most blocks that run at once, and the stages they have space for.

    More blocks have more weights under way, all of them from the start.
    """
    tiles, steps = -(-p.columns // _TILE), -(-p.width // _TERMS)
    most = _RESIDENT * _PROCESSORS
    split = next((s for s in (8, 4, 2) if s <= steps and tiles * s <= most), 1)
    blocks = tiles * split
    resident = -(-blocks // _PROCESSORS) if blocks <= most else 3  # blocks of an SM
    empty, one = (_cluster_bytes(_tile_rows(p), stages) for stages in (0, 1))
    fitting = (_MOST_SHARED // resident - 1024 - empty) // (one - empty)  # 1 KiB is the driver's
    return ClusterTiling(split, min(-(-steps // split), fitting, _MOST_STAGES))


def _cluster_bytes(rows: int, stages: int) -> int:
    """Return the bytes of shared memory of a block of a cluster."""
    return 1024 + stages * (_TILE + rows) * 2 * _TERMS + 4 * rows * (_TILE + 4)


def _tensor_map(address: int, rows: int, width: int, box: int) -> TensorMap:
    """Return the tensor map of a matrix of 16 bits, for boxes of 64 terms."""
    strides = (0, 0, 2 * width, 2)
    return map_memory(address, 2, (1, 1, rows, width), strides, (1, 1, box, _TERMS))
