"""Matrix products of few rows, which cost reading the second matrix once: launches few_rows.cu."""

from __future__ import annotations

import numpy as np

from tensorgrad.dtypes import bfloat16, c_name, float16, float32
from tensorgrad.kernels import overlap
from tensorgrad.kernels.device import capability
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.matmul.problem import MatmulProblem
from tensorgrad.kernels.rows import power_of_two
from tensorgrad.kernels.structs import NULL, pointer

MOST_ROWS = 32
_PROCESSORS = 132  # of an H200; results do not depend on the chip
_MOST_STAGED = 226 * 1024  # bytes a block
_LARGE = 2_500_000  # weights
_WIDE = 2048  # terms, from which on a block has 16 warps


def refusal(p: MatmulProblem) -> str | None:
    """Return what the kernels would need to do this product, or None."""
    a, b, dtype = p.a.array, p.b.array, p.a.array.dtype
    if p.batch != 1 or p.rows > MOST_ROWS:
        return f"one matrix of at most {MOST_ROWS} rows"
    if dtype not in (float32, float16, bfloat16) or capability(p.y.device.id) < 80:
        return "float32, float16 or bfloat16 on a GPU of compute capability 8.0 or later"
    if not (a.flags.c_contiguous and b.flags.f_contiguous):
        return "a in C order and b in Fortran order"
    if any(each is not None and each.dtype != dtype for each in (p.bias, p.gate, p.residual)):
        return "a bias, gate and residual of the dtype of the operands"
    if p.add or any(
        each is not None for each in (p.before_gelu, p.gelu_of, p.derivative, p.scale, p.row_sums)
    ):
        return "no epilogue but bias, GELU without its input, gate and residual"
    return None


def multiply(p: MatmulProblem) -> None:
    """Compute y, which has elements."""
    x, weight, dtype = p.a.array, p.b.array, p.a.array.dtype
    name = c_name(dtype)
    to = (p.y, NULL) if p.y.dtype == dtype else (NULL, p.y)
    others = map(pointer, (p.bias, p.gate, p.residual))
    sizes = map(np.int32, (p.rows, p.width, p.columns, p.gelu))
    arguments = (*to, x, weight, *others, *sizes)
    file = "matmul/few_rows.cu"
    if dtype.itemsize > 2 or p.width % 8 or any(each.data.ptr % 16 for each in (x, weight)):
        kernel = load(file, f"matmul_few_rows_plain<{name}>")
        overlap.launch(
            kernel, (-(-p.columns // 8), -(-p.rows // 8)), (256,), arguments,
            early=(weight, p.bias), writes=(p.y,),
        )  # fmt: skip
        return
    rows = max(8, power_of_two(p.rows))
    warps = 16 if p.width >= _WIDE else 8
    few = p.columns <= 16 * _PROCESSORS
    # Of megabytes that few blocks read, some multiprocessors read none: they may copy those of the
    # next product meanwhile.
    at_once = few and p.width * p.columns >= _LARGE
    if _is_staged(p):
        file, kernel = "matmul/few_rows_sm90.cu", f"matmul_few_rows_staged<{name}, {warps}>"
        arguments, columns, shared = (*arguments, np.int32(_pitch(p.width))), 16, _staged(p.width)
    else:
        # Few columns are divided among more blocks; many rows are read by fewer.
        bands = 2
        if rows == MOST_ROWS and p.columns >= 4096:
            bands = 4
        elif rows < MOST_ROWS and p.columns <= 8 * _PROCESSORS:
            bands = 1
        warps = 16 if few and p.width >= 1024 else warps
        kernel = f"matmul_few_rows<{name}, {rows}, {bands}, {warps}>"
        columns, shared = 8 * bands, 32 * rows * bands * warps
    overlap.launch(
        load(file, kernel), (-(-p.columns // columns),), (32 * warps,),
        (*arguments, np.bool_(at_once)), shared, early=(weight, p.bias), writes=(p.y,),
        starts_next_at_once=at_once,
    )  # fmt: skip


def _is_staged(p: MatmulProblem) -> bool:
    """Whether weights had better be staged in shared memory, as measured on an H200.

    They are of several megabytes in long rows, and so few that all blocks run at once.
    """
    by_registers = 4 if p.width < _WIDE else 1  # blocks of a multiprocessor
    resident = _PROCESSORS * min(_MOST_STAGED // _staged(p.width), by_registers)
    return (
        p.rows <= 8
        and p.width >= 1280
        and p.width * p.columns >= 3_000_000
        and p.columns <= 16 * resident
        and capability(p.y.device.id) >= 90
    )


def _pitch(width: int) -> int:
    """Return the bytes from one row of staged weights to the next."""
    return -(-2 * width // 128) * 128 + 64


def _staged(width: int) -> int:
    """Return the bytes of shared memory for staged weights, 16 rows of them."""
    return 16 * _pitch(width)
