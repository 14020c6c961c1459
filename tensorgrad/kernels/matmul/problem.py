"""A matrix product and its epilogue, as every implementation takes it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape


class MatrixOperand(NamedTuple):
    """A batch of matrices in memory; strides in elements."""

    array: Array  # keeps the memory; its dtype is that of the matrices
    batch: int
    row: int
    column: int


class MatmulProblem(NamedTuple):
    """y[i] = a[i] b[i] for a batch of matrices; the sum over `width` terms is in float32.

    With `tf32` float32 operands are rounded to TF32.

    The epilogue, in this order: add y (float32), add a bias to each column; then either take GELU
    (tanh) of the sum, and store the sum in `before_gelu` or the derivative of GELU there in
    `derivative`, or multiply it with the derivative of GELU at `gelu_of`, with `scale` or with
    silu(gate); add a residual.
    """

    batch: int
    rows: int
    width: int
    columns: int
    a: MatrixOperand  # rows x width
    b: MatrixOperand  # width x columns, of the dtype of a
    y: Array  # (..., rows, columns) in C order; of the dtype of a, or float32
    bias: Array | None = None  # (columns,), C order, of the dtype of a or float32
    before_gelu: Array | None = None  # like y; given, it asks for GELU
    residual: Array | None = None  # like y
    gelu_of: Array | None = None  # like y
    derivative: Array | None = None  # see `sm90.derivative_for`; given, it asks for GELU
    scale: Array | None = None  # such a derivative
    gate: Array | None = None  # like y
    column_sums: Array | None = None  # with `scale`: sums of y over rows, in parts; see `sm90`
    add: bool = False
    gelu: bool = False  # take GELU without storing its input
    tf32: bool = False

    def signature(self) -> tuple[Any, ...]:
        """Return a key for the choice of the kernel, which differs in no address.

        It has the alignment of addresses, up to 256 bytes.
        """
        a, b, y, bias = self.a, self.b, self.y, self.bias
        addresses = a.array.data.ptr | b.array.data.ptr | y.data.ptr | 256
        alignments = [
            None if array is None else (address := array.data.ptr | 256) & -address
            for array in self[7:-3]  # arrays of the epilogue
        ]
        return (
            self.batch, self.rows, self.width, self.columns, a[1:], b[1:], a.array.dtype, y.dtype,
            addresses & -addresses, *alignments, self.add, self.gelu, self.tf32,
            None if bias is None else bias.dtype,
            backend.cupy.cuda.runtime.getDevice(),
        )  # fmt: skip


def problem(a: Array, b: Array, y: Array, **epilogue: Any) -> MatmulProblem:
    """Describe y = a b for arrays of two or more axes whose leading axes broadcast to y's."""
    *batch, rows, columns = y.shape
    left, right = _operand(a, tuple(batch)), _operand(b, tuple(batch))
    return MatmulProblem(math.prod(batch), rows, a.shape[-1], columns, left, right, y, **epilogue)


def _operand(array: Array, batch: Shape) -> MatrixOperand:
    """Return the matrices of an array whose leading axes broadcast to `batch`, one step apart."""
    item = array.itemsize
    *_, row, column = array.strides
    row, column = row // item, column // item
    if array.ndim == 2 or array.size == 0:
        return MatrixOperand(array, 0, row, column)
    if array.shape[:-2] != batch:
        array = backend.cupy.broadcast_to(array, (*batch, *array.shape[-2:]))
    step = 0
    reach = 1  # matrices in the axes seen so far
    for length, stride in zip(reversed(batch), reversed(array.strides[:-2]), strict=True):
        if length == 1:
            continue
        if reach == 1:
            step = stride
        elif stride != step * reach:  # no single step leads from each to the next
            return _operand(backend.contiguous(array), batch)
        reach *= length
    if step < 0:  # not every kernel takes negative strides
        return _operand(backend.contiguous(array), batch)
    return MatrixOperand(array, step // item, row, column)
