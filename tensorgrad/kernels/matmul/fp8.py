"""Matrix products of operands of 8 bits on Hopper, by cuBLASLt or matmul/fp8_sm90.cu.

Its tensor cores take the terms of a sum side by side: operands (M, K) and (N, K), y = a b^T. The
kernels of fp8_sm90.cu round y to 8 bits too, after GELU or times its derivative.
"""

from __future__ import annotations

from functools import cache

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import Dtype, bfloat16, float32
from tensorgrad.kernels import cublaslt
from tensorgrad.kernels.counter import counter
from tensorgrad.kernels.cublaslt import CublasProduct, Matrix
from tensorgrad.kernels.device import sm_count
from tensorgrad.kernels.fp8 import Fp8Operand, float8_e4m3, float8_e5m2
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.matmul.sm90 import derivative_for
from tensorgrad.kernels.structs import MatmulSm90Arguments, RoundedResult, address, by_value
from tensorgrad.kernels.tensor_map import TensorMap, map_memory

_FILE = "matmul/fp8_sm90.cu"
_SHARED = 226 * 1024  # bytes a block: all that there is but for the barriers
_THREADS = 512  # the kernels' constants, as the next ones
_ROWS, _COLUMNS, _CLUSTER, _STEP = 128, 192, 2, 64  # a block's tile; pairs of terms in a stage
_BAND = 8  # rows of tiles, in clusters, before the next column of them


def multiply(
    y: Array,
    a: Fp8Operand,
    b: Fp8Operand,
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
        bias: (N,), like y of 16 bits.
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
        address(bias), 0, (b.scale.data.ptr, a.scale.data.ptr),
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


def rounded_gelu(
    a: Fp8Operand, b: Fp8Operand, bias: Array | None, scale: Array, reports: bool = True
) -> tuple[Fp8Operand, Fp8Operand, Array]:
    """Return gelu(a b^T + bias) in e4m3, its transpose, and the derivative of GELU there.

    Args:
        a, b: (M, K) and (N, K), of e4m3.
        bias: (N,), any float dtype.
        scale: of the result.
        reports: whether its largest magnitude and the number of clipped elements are counted.

    Returns:
        Operands (M, N) and (N, M); and the derivative as of `sm90.derivative_for`.
    """
    if bias is not None and (bias.dtype not in (bfloat16, float32) or bias.data.ptr % 8):
        bias = bias.astype(float32)  # in new memory
    bias = None if bias is None else backend.contiguous(bias)
    derivative = derivative_for(len(a.bits), len(b.bits), a.bits)
    rows, columns = _round("GELU8", a, b, float8_e4m3, scale, reports, bias, derivative, None)
    return rows, columns, derivative


def rounded_scaled(
    a: Fp8Operand, b: Fp8Operand, derivative: Array, scale: Array, reports: bool = True
) -> tuple[Fp8Operand, Fp8Operand, Array]:
    """Return (a b^T) times the derivative of GELU in e5m2, its transpose, and sums over its rows.

    Args:
        a, b: (M, K) and (N, K), of e5m2 and e4m3.
        derivative: from `rounded_gelu`, of (M, N).
        scale, reports: as there.

    Returns:
        Operands (M, N) and (N, M); and (parts, N), float32, whose rows add up to the sums.
    """
    parts = -(-len(a.bits) // 32)
    sums = backend.empty((parts, len(b.bits)), float32, like=a.bits)
    rows, columns = _round("SCALED8", a, b, float8_e5m2, scale, reports, None, derivative, sums)
    return rows, columns, sums


def _round(
    epilogue: str, a: Fp8Operand, b: Fp8Operand, dtype: Dtype, scale: Array, reports: bool,
    bias: Array | None, derivative: Array, sums: Array | None,
) -> tuple[Fp8Operand, Fp8Operand]:  # fmt: skip
    """Launch a product whose result is rounded to 8 bits; return it and its transpose."""
    (rows, width), columns, x = a.bits.shape, len(b.bits), a.bits
    y, transposed = (
        backend.empty(shape, x.dtype, like=x) for shape in ((rows, columns), (columns, rows))
    )
    tile_rows, device = -(-rows // (_ROWS * _CLUSTER)), x.device.id
    clusters = min(tile_rows * -(-columns // _COLUMNS), sm_count(device) // _CLUSTER)
    sizes = MatmulSm90Arguments(
        address(bias), 0, address(derivative), address(sums), rows, columns, width // 2, 1, 0, 0,
        _BAND, 0, bias is not None and bias.dtype == float32, False, False,
    )  # fmt: skip
    factors = a.scale.data.ptr, b.scale.data.ptr  # inverses come first
    result = RoundedResult(*map(address, (y, transposed, scale)), *factors, rows, reports)
    maps = _map(a.bits, _ROWS), _map(b.bits, _COLUMNS // _CLUSTER)
    kernel = load(_FILE, f"matmul_fp8<__nv_bfloat16, {epilogue}>")
    arguments = (*maps, by_value(sizes), by_value(result), counter(x))
    kernel((clusters * _CLUSTER,), (_THREADS,), arguments, _SHARED)
    return Fp8Operand(y, dtype, scale), Fp8Operand(transposed, dtype, scale)


def _map(bits: Array, rows: int) -> TensorMap:
    """Return the tensor map for boxes of some rows of 128 terms, two of which move as one of 16."""
    length, terms = bits.shape
    shape, strides = (1, 1, length, terms // 2), (0, 0, terms, 2)
    return map_memory(bits.data.ptr, 2, shape, strides, (1, 1, rows, _STEP))
