"""Numbers of 8 bits and their scales on the GPU: launches fp8.cu."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import Dtype, c_name, float32
from tensorgrad.kernels.device import capability, sm_count
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.structs import Fp8Matrix, address, number, pointer

float8_e4m3 = np.dtype(ml_dtypes.float8_e4m3fn)  # 4 bits of exponent, 3 of mantissa
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
MULTIPLE = 16  # elements, which divide the lengths of operands
_FILE = "fp8.cu"
_ROWS, _COLUMNS, _THREADS = 128, 64, 256  # a block's: the kernels' constants
_UINT8 = np.dtype(np.uint8)


class Fp8Operand(NamedTuple):
    """A matrix as an operand of products of 8 bits: `bits` times the inverse of its scale.

    Attributes:
        bits: (length, terms), uint8, C order.
        dtype: float8_e4m3 or float8_e5m2, of which `bits` are the bits.
        scale: (4,), float32: the inverse of the scale, the scale, and counts; see fp8.cuh.
    """

    bits: Array
    dtype: Dtype
    scale: Array


def refusal(device: int) -> str | None:
    """Return what products of 8 bits would need, or None."""
    return None if capability(device) == 90 else "a GPU of compute capability 9.0 (Hopper)"


def quantize(
    x: Array,
    dtype: Dtype,
    scale: Array,
    *,
    rows: bool = True,
    columns: bool = True,
    sums: bool = False,
    reports: bool = True,
    gelu: bool = False,
    gelu_of: Array | None = None,
) -> tuple[Fp8Operand | None, Fp8Operand | None, Array | None]:
    """Return x and its transpose as operands, and sums over the rows of x.

    With `gelu` gelu(x) takes the place of x, with `gelu_of` x times the derivative of GELU there.

    Args:
        x: (N, C), multiples of 16, C order, of 16 bits or float32.
        dtype: float8_e4m3 or float8_e5m2.
        scale: of the tensor.
        rows, columns, sums: which results are wanted, the others are None.
        reports: whether the largest |x| and the number of clipped values are added to the scale's
            state.
        gelu: of 16 bits; tanh form.
        gelu_of: like x, of 16 bits.

    Returns:
        Operands (N, C) and (C, N), and sums (parts, C), float32, whose rows add up to that of x.
    """
    height, width = x.shape
    grid = (-(-width // _COLUMNS), -(-height // _ROWS))
    q = backend.empty((height, width), _UINT8, like=x) if rows else None
    transposed = backend.empty((width, height), _UINT8, like=x) if columns else None
    parts = backend.empty((grid[1], width), float32, like=x) if sums else None
    before = "GELU" if gelu else "PLAIN" if gelu_of is None else "GELU_BACKWARD"
    flags = ", ".join("true" if flag else "false" for flag in (rows, columns, sums))
    kernel = load(_FILE, f"fp8_quantize<{c_name(x.dtype)}, {_format(dtype)}, {before}, {flags}>")
    arguments = (pointer(q), pointer(transposed), pointer(parts), scale, x, pointer(gelu_of))
    sizes = height, width, height
    numbers = (*(number("i4", size) for size in sizes), number("?", reports))
    kernel(grid, (_THREADS,), (*arguments, *numbers))
    return (
        None if q is None else Fp8Operand(q, dtype, scale),
        None if transposed is None else Fp8Operand(transposed, dtype, scale),
        parts,
    )


def largest(x: Array, scale: Array) -> None:
    """Add the largest |x| to the state of a tensor; the size of x is a multiple of 16."""
    blocks = min(-(-x.size // (_THREADS * 8)), 8 * sm_count(x.device.id))
    kernel = load(_FILE, f"fp8_largest<{c_name(x.dtype)}>")
    kernel((blocks,), (_THREADS,), (scale, x, np.int64(x.size)))


def update_scales(scales: Array, history: Array, turn: Array, limits: Array) -> None:
    """Choose the scales of the next step, and begin to count anew.

    Args:
        scales: (n, 4), float32, of all tensors.
        history: (steps, n), float32, the largest values of former steps; at first zeros.
        turn: (1,), int32, the number of updates so far.
        limits: (n,), float32, the largest number of the format of each tensor.
    """
    steps, count = history.shape
    arguments = (scales, history, turn, limits, number("i4", count), number("i4", steps))
    load(_FILE, "fp8_update_scales")((1,), (_THREADS,), arguments)


class Matrices:
    """Matrices that are quantized together, in one launch, in memory that stays.

    Args:
        matrices: each (N, C), multiples of 16, C order, all of one dtype.
        scales: of each of them.

    Attributes:
        rows, columns: the operands, (N, C) and (C, N), of each of the matrices.
    """

    def __init__(self, matrices: Sequence[Array], scales: Sequence[Array]) -> None:
        size = sum(x.size for x in matrices)
        memory = backend.empty((2, size), _UINT8, like=matrices[0])
        self.rows: list[Fp8Operand] = []
        self.columns: list[Fp8Operand] = []
        self._matrices, self._tiles = list(matrices), 0
        entries, begin = [], 0
        for x, scale in zip(matrices, scales, strict=True):
            (height, width), place = x.shape, slice(begin, begin + x.size)
            begin += x.size
            q, transposed = memory[0, place], memory[1, place]
            self.rows.append(Fp8Operand(q.reshape(height, width), float8_e4m3, scale))
            self.columns.append(Fp8Operand(transposed.reshape(width, height), float8_e4m3, scale))
            entries.append(
                Fp8Matrix(*map(address, (x, q, transposed, scale)), height, width, self._tiles, 0)
            )
            self._tiles += -(-width // _COLUMNS) * -(-height // _ROWS)
        table = np.frombuffer(b"".join(map(bytes, entries)), np.uint8)
        self._table = backend.asarray_like(table, memory)

    def are(self, matrices: Sequence[Array]) -> bool:
        """Whether these are the matrices."""
        return all(map(is_, self._matrices, matrices))

    def quantize(self) -> None:
        """Write the operands."""
        dtype = self._matrices[0].dtype
        kernel = load(_FILE, f"fp8_quantize_matrices<{c_name(dtype)}>")
        count = number("i4", len(self._matrices))
        kernel((self._tiles,), (_THREADS,), (self._table, count))


def _format(dtype: Dtype) -> str:
    """Return the name of a dtype in the kernels."""
    return "E4M3" if dtype == float8_e4m3 else "E5M2"
