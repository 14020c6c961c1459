"""Matrix products by cuBLASLt.

Its matrices are in column-major order, in which ours are transposed: it computes y^T = b^T a^T.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from tensorgrad.core import backend
from tensorgrad.core.dtypes import Dtype, float64
from tensorgrad.core.errors import KernelError
from tensorgrad.kernels import cublaslt
from tensorgrad.kernels.matmul.problem import MatmulProblem, MatrixOperand
from tensorgrad.kernels.structs import address

Steps = tuple[int, int, int]  # from one matrix to the next, row to row and column to column


def refusal(p: MatmulProblem) -> str | None:
    """Return what cuBLASLt would need to do this product, or None."""
    gelu = _gelu(p)
    if p.derivative is not None or p.scale is not None or p.gate is not None:
        return "the operand of GELU instead of its derivative, and no gate"
    if p.y.dtype == float64 and (p.bias is not None or gelu):
        return "another dtype than float64 for a bias or GELU"
    if p.residual is not None and (p.add or gelu):
        return "a residual alone, not one that is added after GELU or together with y"
    if p.gelu_of is not None and (gelu != "derivative of gelu" or p.add or p.bias is not None):
        return "the derivative of GELU alone"
    if gelu and p.columns == 1:  # proposed by the library, refused by its call
        return "more than one column for GELU"
    if p.y.size and p.width and isinstance(_plan_of(p)[0], str):
        return "sizes, strides and dtypes that the library has a way for"
    return None


def _gelu(p: MatmulProblem) -> str:
    """Return the epilogue with GELU, as cublaslt.EPILOGUES names it."""
    if p.before_gelu is not None:
        return "gelu, stored"
    return "gelu" if p.gelu else "" if p.gelu_of is None else "derivative of gelu"


def multiply(p: MatmulProblem) -> None:
    """Compute y, which has elements."""
    if not p.width:  # a single term that is 0, for the epilogue
        zeros = backend.cupy.zeros(max(p.rows, p.columns), p.a.array.dtype)
        p = p._replace(
            width=1, a=MatrixOperand(zeros, 0, 1, 1), b=MatrixOperand(zeros, 0, p.columns, 1)
        )
    plan, in_place = _plan_of(p)
    if isinstance(plan, str):
        raise KernelError(plan)
    if not in_place:
        a, b = _readable(p.a, p.rows, p.width), _readable(p.b, p.width, p.columns)
        p = p._replace(a=a, b=b)
    run(plan, p)


def planned(p: MatmulProblem) -> Callable[[MatmulProblem], None]:
    """Return `multiply` for problems of this signature."""
    if not (p.width and p.y.size):
        return multiply
    plan, in_place = _plan_of(p)
    return multiply if isinstance(plan, str) or not in_place else partial(run, plan)


def run(plan: cublaslt.CublasPlan, p: MatmulProblem) -> None:
    """Compute y, whose operands are read in place, by a plan for a product of this signature."""
    y, bias, residual = p.y.data.ptr, p.bias, p.residual
    auxiliary = p.gelu_of if p.before_gelu is None else p.before_gelu
    cublaslt.run(
        plan, p.b.array.data.ptr, p.a.array.data.ptr,
        y if residual is None else residual.data.ptr, y,
        p.add or residual is not None,
        address(bias), address(auxiliary),
    )  # fmt: skip


def _plan_of(p: MatmulProblem) -> tuple[cublaslt.CublasPlan | str, bool]:
    """Return the plan or an error, and whether the operands are read in place."""
    signature, in_place = _signature(p)
    return _plan(signature, backend.cupy.cuda.runtime.getDevice()), in_place


class _Signature(NamedTuple):
    """The key of a plan, but for the device."""

    batch: int
    rows: int
    width: int
    columns: int
    a: Steps
    b: Steps
    dtype: Dtype
    y_dtype: Dtype
    alignment: int
    bias: Dtype | None
    gelu: str
    tf32: bool


def _signature(p: MatmulProblem) -> tuple[_Signature, bool]:
    """Return it with the steps of what is read, and whether the operands are read in place."""
    a, b = p.a, p.b
    addresses = p.y.data.ptr | 256
    for array in (p.bias, p.before_gelu, p.residual, p.gelu_of):
        if array is not None:
            addresses |= array.data.ptr
    steps: list[Steps] = []
    for operand, rows, columns in ((a, p.rows, p.width), (b, p.width, p.columns)):
        if _layout(*operand[1:], rows, columns) is None:
            steps.append(_copied(operand, rows, columns))
        else:
            steps.append(operand[1:])
            addresses |= operand.array.data.ptr
    signature = _Signature(
        p.batch, p.rows, p.width, p.columns, steps[0], steps[1], a.array.dtype, p.y.dtype,
        addresses & -addresses, None if p.bias is None else p.bias.dtype, _gelu(p), p.tf32,
    )  # fmt: skip
    return signature, steps == [a[1:], b[1:]]


@cache  # a plan takes some hundred bytes
def _plan(signature: _Signature, device: int) -> cublaslt.CublasPlan | str:
    """See `_plan_of`."""
    try:
        return cublaslt.prepare(_described(signature), device)
    except KernelError as error:
        return str(error)


def described(p: MatmulProblem) -> cublaslt.CublasProduct:
    """Return a problem as the library takes it."""
    return _described(_signature(p)[0])


def _described(s: _Signature) -> cublaslt.CublasProduct:
    a_layout, b_layout = _layout(*s.a, s.rows, s.width), _layout(*s.b, s.width, s.columns)
    assert a_layout is not None, "copied"
    assert b_layout is not None, "copied"
    return cublaslt.CublasProduct(
        _matrix(s.dtype, s.batch, s.width, s.columns, s.b[0], *b_layout),
        _matrix(s.dtype, s.batch, s.rows, s.width, s.a[0], *a_layout),
        _matrix(s.y_dtype, s.batch, s.rows, s.columns, s.rows * s.columns, False, s.columns),
        b_layout[0], a_layout[0], s.alignment, s.bias, s.gelu, s.tf32,
    )  # fmt: skip


def _matrix(
    dtype: Dtype, batch: int, rows: int, columns: int, step: int, transposed: bool, leading: int
) -> cublaslt.Matrix:
    """Describe row-major matrices as their transposes in column-major order."""
    if not transposed:
        rows, columns = columns, rows
    return cublaslt.Matrix(dtype, rows, columns, leading, batch, step)


def _layout(step: int, row: int, column: int, rows: int, columns: int) -> tuple[bool, int] | None:
    """Return whether matrices are transposed, and the leading dimension.

    One of the strides must be 1 and the other as long as a row or more; else None.
    """
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        return False, max(row, columns)
    if (row == 1 or rows == 1) and (column >= rows or columns == 1):
        return True, max(column, rows)
    return None


def _copied(operand: MatrixOperand, rows: int, columns: int) -> Steps:
    """Return the steps of a copy in C order."""
    return (rows * columns if operand.batch else 0), columns, 1


def _readable(operand: MatrixOperand, rows: int, columns: int) -> MatrixOperand:
    """Return the operand, copied where cuBLAS cannot read it."""
    if _layout(*operand[1:], rows, columns) is not None:
        return operand
    array = operand.array
    if operand.batch == 0:  # the same matrix for all
        array = array[(0,) * (array.ndim - 2)]
    return MatrixOperand(backend.contiguous(array), *_copied(operand, rows, columns))
