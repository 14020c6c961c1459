"""Matrix products by shared-memory tiles (tiled.cu) and by mma.sync on tensor cores (sm80.cu).

The size of a tile depends on whether tiles of the larger size occupy every SM.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad.core.dtypes import c_name, float32, float64
from tensorgrad.kernels.device import capability, shared_memory_per_block, sm_count
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.matmul.problem import MatmulProblem, MatrixOperand
from tensorgrad.kernels.structs import MatmulArguments, address, by_value

_TILE_STAGES, _TILE_TERMS = 3, 16
_MMA_LINE, _MMA_STAGES = 128, 4
_EPILOGUE = 8  # elements of a row that a thread finishes together


def refusal(p: MatmulProblem) -> str | None:
    """Return what the kernels would need to do this product, or None."""
    if p.derivative is not None or p.scale is not None or p.gate is not None:
        return "the operand of GELU instead of its derivative, and no gate"
    found = capability(p.y.device.id)
    return None if found >= 80 else f"sm_80 or later (this GPU is sm_{found})"


def multiply(p: MatmulProblem) -> None:
    """Compute y, which has elements: 16 bits and TF32 on tensor cores."""
    if p.tf32 or p.a.array.dtype.itemsize == 2:
        _multiply_mma(p)
        return
    dtype = p.a.array.dtype
    fills = _tiles(p, 128, 128) >= sm_count(p.y.device.id)
    repeat = 2 if fills and dtype != float64 else 1
    a, b, packed = _pack(p)
    pitch = 64 * repeat + 16 // dtype.itemsize
    vectors = f"{_flag(a == (False, True))}, {_flag(b == (False, True))}"
    load("matmul/tiled.cu", f"matmul_tile<{c_name(dtype)}, {vectors}, {repeat}>")(
        (_tiles(p, 64 * repeat, 64 * repeat),),
        (256,),
        (packed,),
        2 * _TILE_STAGES * _TILE_TERMS * pitch * dtype.itemsize,
    )


def _multiply_mma(p: MatmulProblem) -> None:
    """Compute y, which has elements, on tensor cores; float32 operands are rounded to TF32."""
    warps, size = (4, 64) if _tiles(p, 128, 256) >= sm_count(p.y.device.id) else (2, 32)
    a, b, packed = _pack(p)
    along = f"{_flag(a[0])}, {_flag(b[0])}"
    stage = (2 * size + warps * size) * _MMA_LINE
    stages = min(_MMA_STAGES, shared_memory_per_block(p.y.device.id) // stage)
    load("matmul/sm80.cu", f"matmul_mma<{c_name(p.a.array.dtype)}, {along}, {warps}, {size}>")(
        (_tiles(p, 2 * size, warps * size),),
        (64 * warps,),
        (packed, np.int32(stages)),
        stages * stage,
    )


def _tiles(p: MatmulProblem, rows: int, columns: int) -> int:
    """Return the number of tiles that cover y."""
    return p.batch * -(-p.rows // rows) * -(-p.columns // columns)


def _flag(condition: bool) -> str:
    """Return the condition in C++."""
    return "true" if condition else "false"


def _pack(p: MatmulProblem) -> tuple[tuple[bool, bool], tuple[bool, bool], Any]:
    """Return how to read a and b (see `_reading`), and the struct MatmulArguments."""
    a, b = p.a, p.b
    a_reading = _reading(a, a.row, a.column, p.rows, p.width)
    b_reading = _reading(b, b.column, b.row, p.columns, p.width)
    results = (p.y, p.bias, p.before_gelu, p.residual, p.gelu_of)
    aligned = all(x is None or x.data.ptr % (_EPILOGUE * x.itemsize) == 0 for x in results)
    packed = MatmulArguments(
        (a.array.data.ptr, *a[1:]), (b.array.data.ptr, *b[1:]), *map(address, results),
        p.rows, p.width, p.columns, a_reading[1], b_reading[1],
        aligned and p.columns % _EPILOGUE == 0,
        p.y.dtype == float32,
        p.bias is not None and p.bias.dtype == float32,
        p.add,
        p.gelu or p.before_gelu is not None,
    )  # fmt: skip
    return a_reading, b_reading, by_value(packed)


def _reading(
    operand: MatrixOperand, step: int, term_step: int, length: int, width: int
) -> tuple[bool, bool]:
    """Return whether to read along the terms, and whether in aligned vectors of 16 bytes.

    The operand has `length` lines of `width` terms.
    """
    piece = 16 // operand.array.itemsize
    aligned = operand.array.data.ptr % 16 == 0 and operand.batch % piece == 0
    if aligned and term_step == 1 and width % piece == 0 and (step % piece == 0 or length == 1):
        return True, True
    if aligned and step == 1 and length % piece == 0 and (term_step % piece == 0 or width == 1):
        return False, True
    return step != 1, False
