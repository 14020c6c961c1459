"""Matrix products of operands of 8 bits on Hopper, by cuBLASLt.

Its tensor cores take the terms of a sum side by side: operands (M, K) and (N, K), y = a b^T.
"""

from __future__ import annotations

from functools import cache

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import Dtype
from tensorgrad.kernels import cublaslt
from tensorgrad.kernels.cublaslt import CublasProduct, Matrix
from tensorgrad.kernels.fp8 import Operand
from tensorgrad.kernels.structs import address

_INVERSE = 4  # bytes from the beginning of a scale to its inverse


def multiply(
    y: Array,
    a: Operand,
    b: Operand,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    add: bool = False,
    fast: bool = True,
) -> None:
    """Compute y = a b^T + bias + residual.

    Args:
        y: (M, N), of 16 bits or float32, C order.
        a, b: (M, K) and (N, K), multiples of 16, not both e5m2.
        bias: (N,), bfloat16.
        residual: like y.
        add: add to y instead of overwriting it; without a residual.
        fast: whether sums stay in the tensor cores, which keep 14 bits of them; otherwise they are
            added up in float32 each 128 terms.

    Raises:
        KernelError: cuBLASLt has no way to do this.
    """
    plan = _plan(
        (*y.shape, a.bits.shape[1]), (a.dtype, b.dtype, y.dtype),
        None if bias is None else bias.dtype, _alignment(y, a.bits, b.bits, bias, residual), fast,
        backend.cupy.cuda.runtime.getDevice(),
    )  # fmt: skip
    to = y.data.ptr
    cublaslt.run(
        plan, b.bits.data.ptr, a.bits.data.ptr,
        to if residual is None else residual.data.ptr, to, add or residual is not None,
        address(bias), 0, (b.scale.data.ptr + _INVERSE, a.scale.data.ptr + _INVERSE),
    )  # fmt: skip


def _alignment(*arrays: Array | None) -> int:
    """Return the alignment of all addresses in bytes, up to 256."""
    addresses = 256
    for array in arrays:
        addresses |= address(array)
    return addresses & -addresses


@cache  # a plan takes some hundred bytes
def _plan(
    sizes: tuple[int, int, int],
    dtypes: tuple[Dtype, Dtype, Dtype],
    bias: Dtype | None,
    alignment: int,
    fast: bool,
    device: int,
) -> cublaslt.CublasPlan:
    return cublaslt.prepare(described(sizes, dtypes, bias, alignment, fast), device)


def described(
    sizes: tuple[int, int, int],
    dtypes: tuple[Dtype, Dtype, Dtype],
    bias: Dtype | None = None,
    alignment: int = 256,
    fast: bool = True,
) -> CublasProduct:
    """Return a product as cuBLASLt takes it: y^T = b a^T, in column-major order.

    Args:
        sizes: M, N and K.
        dtypes: of a, b and y.
        bias: its dtype, or None.
        alignment: of all addresses, in bytes.
        fast: as for `multiply`.
    """
    rows, columns, terms = sizes
    left, right, result = dtypes
    return CublasProduct(
        Matrix(right, terms, columns, terms, 1, 0),
        Matrix(left, terms, rows, terms, 1, 0),
        Matrix(result, columns, rows, columns, 1, 0),
        True, False, alignment, bias, "", fast=fast,
    )  # fmt: skip
