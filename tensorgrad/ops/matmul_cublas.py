"""Matrix products by cuBLAS, through CuPy.

cuBLAS counts in columns: it takes our rows for the transpose, so it is asked for y^T = b^T a^T.
"""

from __future__ import annotations

import numpy as np

from tensorgrad import backend
from tensorgrad.dtypes import bfloat16, float16, float32, float64
from tensorgrad.ops.matmul_problem import Operand, Problem

# From library_types.h and cublas_api.h
TYPES = {float32: 0, float64: 1, float16: 2, bfloat16: 14}
_COMPUTE_32F, _COMPUTE_64F, _ANY_ALGORITHM = 68, 70, -1


def refusal(p: Problem) -> str | None:
    """Say what of the problem cuBLAS cannot do."""
    if p.bias is not None or p.before_gelu is not None or p.residual is not None:
        return "a product that nothing but an addition follows"
    return None


def multiply(p: Problem) -> None:
    """Compute y, which has elements."""
    y = p.y
    if not p.width:
        if not p.add:
            y[...] = 0
        return
    a, a_transposed, a_leading = layout(p.a, p.rows, p.width)
    b, b_transposed, b_leading = layout(p.b, p.width, p.columns)
    double = y.dtype == float64
    number = np.float64 if double else np.float32
    one, beta = np.ones(1, number), np.full(1, p.add, number)
    cublas, handle = backend.cupy.cuda.cublas, backend.cupy.cuda.device.get_cublas_handle()
    cublas.gemmStridedBatchedEx(
        handle, b_transposed, a_transposed, p.columns, p.rows, p.width,
        one.ctypes.data,
        b.array.data.ptr, TYPES[b.array.dtype], b_leading, b.batch,
        a.array.data.ptr, TYPES[a.array.dtype], a_leading, a.batch,
        beta.ctypes.data,
        y.data.ptr, TYPES[y.dtype], p.columns, p.rows * p.columns,
        p.batch, _COMPUTE_64F if double else _COMPUTE_32F, _ANY_ALGORITHM,
    )  # fmt: skip


def layout(operand: Operand, rows: int, columns: int) -> tuple[Operand, bool, int]:
    """Return matrices as cuBLAS reads them, whether transposed, and the leading dimension.

    One of the strides must be 1 and the other as long as a row or more; else they are copied.
    """
    array, _, row, column = operand
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        return operand, False, max(row, columns)
    if (row == 1 or rows == 1) and (column >= rows or columns == 1):
        return operand, True, max(column, rows)
    step = rows * columns
    if operand.batch == 0:  # one matrix for all
        array, step = array[(0,) * (array.ndim - 2)], 0
    return Operand(backend.contiguous(array), step, columns, 1), False, columns
