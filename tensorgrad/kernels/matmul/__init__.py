"""Matrix products on the GPU: the choice of the kernel.

`KERNELS` lists the implementations. Each has two functions: `refusal(problem)` returns what it
would need to do a product that it cannot do, or None, and `multiply(problem)` computes y, which has
elements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, upcast
from tensorgrad.core.dtypes import Dtype, compute_dtype, float32, is_float
from tensorgrad.core.errors import ArgumentError, KernelError
from tensorgrad.kernels.device import has_tf32
from tensorgrad.kernels.matmul import cublas as matmul_cublas
from tensorgrad.kernels.matmul import skinny as matmul_skinny
from tensorgrad.kernels.matmul import sm90 as matmul_sm90
from tensorgrad.kernels.matmul import tiled as matmul_tiled
from tensorgrad.kernels.matmul.problem import MatmulProblem, problem
from tensorgrad.kernels.tuned import tuned

Multiply = Callable[[MatmulProblem], None]


class Implementation(NamedTuple):
    """A way to multiply.

    `planned(problem)`, where there is one, returns `multiply` for problems of that signature.
    """

    refusal: Callable[[MatmulProblem], str | None]
    multiply: Multiply
    planned: Callable[[MatmulProblem], Multiply] | None = None


KERNELS = {
    "cublas": Implementation(matmul_cublas.refusal, matmul_cublas.multiply, matmul_cublas.planned),
    "tiled": Implementation(matmul_tiled.refusal, matmul_tiled.multiply),
    "wgmma": Implementation(matmul_sm90.refusal, matmul_sm90.multiply),
    "skinny": Implementation(matmul_skinny.refusal, matmul_skinny.multiply),
}
SKINNY_ROWS = matmul_skinny.MOST_ROWS  # the limit of `run_skinny`
DEFAULT = "cublas"  # where tuned.json has no entry
TF32 = "tf32"  # in place of a kernel: the fastest that rounds float32 operands to TF32
_MOST_CHOSEN = 4096
_log = logging.getLogger(__name__)

_chosen: dict[tuple[Any, ...], Multiply] = {}  # by signature


def product(a: Array, b: Array, dtype: Dtype, kernel: str | None = None) -> Array:
    """Return the matrix product of GPU arrays by NumPy's rules, rounded to `dtype` once.

    Args:
        a: (..., M, K) or (K,).
        b: (..., K, N) or (K,).
        dtype: of the result.
        kernel: a name in KERNELS, or TF32; None takes what is fastest.

    Raises:
        ArgumentError: there is no such kernel, or it does not do this product.
    """
    if a.dtype != b.dtype:
        a, b = upcast(a), upcast(b)
        common = np.result_type(a.dtype, b.dtype)
        a, b = a.astype(common, copy=False), b.astype(common, copy=False)
    if b.ndim == 1:
        return product(a, b[:, None], dtype, kernel)[..., 0]
    if a.ndim == 1:
        return product(a[None], b, dtype, kernel)[..., 0, :]
    if not is_float(a.dtype):
        if kernel is not None:
            raise ArgumentError(f"matmul: kernel is {kernel!r}, expected None for {a.dtype}")
        return backend.cupy.matmul(a, b).astype(dtype, copy=False)
    left, right = a.shape, b.shape
    batch = left[:-2]
    if batch != right[:-2]:
        batch = np.broadcast_shapes(batch, right[:-2])
    stored = dtype if dtype == a.dtype else compute_dtype(a.dtype)
    y = backend.empty((*batch, left[-2], right[-1]), stored, like=a)
    run(problem(a, b, y), kernel)
    return y if stored == dtype else y.astype(dtype)


def run(p: MatmulProblem, kernel: str | None = None) -> None:
    """Compute y.

    Args:
        p: the product.
        kernel: a name in KERNELS, or TF32; None takes what is fastest.

    Raises:
        ArgumentError: there is no such kernel, or it does not do this product.
    """
    if kernel == TF32:
        p, kernel = _rounded(p), None
    if kernel is None:
        signature = p.signature()
        multiply = _chosen.get(signature)
        if multiply is None:
            _choose(signature, p)
            return
    elif not isinstance(kernel, str) or kernel not in KERNELS:
        names = ", ".join(map(repr, (*KERNELS, TF32)))
        raise ArgumentError(f"matmul: kernel is {kernel!r:.80}, expected None or one of {names}")
    else:
        multiply = _willing(kernel, p).multiply
    if p.y.size:
        multiply(p)


def _rounded(p: MatmulProblem) -> MatmulProblem:
    """Return the product with operands rounded to TF32.

    Raises:
        ArgumentError: they are not float32, or the GPU has no TF32.
    """
    needs = None if has_tf32(p.y.device.id) else "a GPU of compute capability 8.0 or later"
    if p.a.array.dtype != float32:
        needs = "float32 operands"
    if needs is not None:
        raise ArgumentError(f"matmul: kernel is {TF32!r}, which needs {needs}")
    return p._replace(tf32=True)


def derivative_for(p: MatmulProblem) -> Array | None:
    """Return an array in which a product with GELU had better keep its derivative, 8 bits each.

    None where it had better keep the operand of GELU.
    """
    if not matmul_sm90.is_fast(p._replace(gelu=False, derivative=p.y)):
        return None
    return matmul_sm90.derivative_for(p.rows, p.columns, p.y)


def run_skinny(p: MatmulProblem) -> bool:
    """Compute y by the skinny GEMM, as the ops do where no gradient is recorded.

    It adds in another order than the kernels of `run`, which training keeps.

    Returns:
        False if it does not do this product; nothing has been computed then.
    """
    if not p.y.size or matmul_skinny.refusal(p) is not None:
        return False
    matmul_skinny.multiply(p)
    return True


def times_derivative(a: Array, b: Array, kept: Array) -> tuple[Array, Array | None]:
    """Return a b, multiplied with the derivative of GELU, and parts of the sum of its rows.

    Args:
        a: (M, K), of 16 bits.
        b: (K, N).
        kept: from `derivative_for`, of a product (M, N).
    Returns:
        y, (M, N); and (parts, N), float32, whose rows add up to the sum of y's, or None where no
        kernel sums them up beside.
    """
    y = backend.empty((len(a), b.shape[1]), a.dtype, like=a)
    p = problem(a, b, y, scale=kept)
    if matmul_sm90.refusal(p) is not None:
        y = product(a, b, a.dtype)
        y *= matmul_sm90.derivative_values(kept, *y.shape).astype(y.dtype)
        return y, None
    column_sums = matmul_sm90.column_sums_for(p)
    run(p._replace(column_sums=column_sums))
    return y, column_sums


def _choose(signature: tuple[Any, ...], p: MatmulProblem) -> None:
    """Compute y by the fastest kernel, and remember it for the signature."""
    chosen = _fastest(p)
    multiply = chosen.multiply if chosen.planned is None else chosen.planned(p)
    try:
        if p.y.size:
            multiply(p)
    except KernelError as error:
        if chosen is not KERNELS[DEFAULT]:
            raise
        # cuBLASLt refuses some of its own proposals when called, before it has done anything.
        _log.info("matmul: the tiled kernel takes what cuBLASLt refused: %s", error)
        multiply = _willing("tiled", p).multiply
        multiply(p)
    if len(_chosen) == _MOST_CHOSEN:  # where each batch has another length
        _chosen.clear()
    _chosen[signature] = multiply


def _willing(kernel: str, p: MatmulProblem) -> Implementation:
    """Return the kernel of that name.

    Raises:
        ArgumentError: it does not do this product.
    """
    reason = KERNELS[kernel].refusal(p)
    if reason is not None:
        raise ArgumentError(f"matmul: kernel is {kernel!r}, which needs {reason}")
    return KERNELS[kernel]


def case(dtype: Dtype | str, layout: str, rows: int, width: int, columns: int, gelu: bool) -> str:
    """Return the name of a class of products in tuned.json.

    Args:
        dtype: of the operands; TF32 where they are rounded to it.
        layout: "n" where the rows of an operand are contiguous, "t" where its columns are; a, b.
        rows, width, columns: each counts as "s" (up to 256), "m" (up to 2048) or "l".
        gelu: whether GELU follows.
    """
    sizes = "".join("s" if n <= 256 else "m" if n <= 2048 else "l" for n in (rows, width, columns))
    return f"{dtype} {layout} {sizes}{' gelu' if gelu else ''}"


def _fastest(p: MatmulProblem) -> Implementation:
    """Return the fastest kernel, as measured, of those that do this product."""
    found = DEFAULT
    if p.scale is not None or p.derivative is not None:
        return _willing("wgmma", p)
    if matmul_sm90.is_fast(p):
        return KERNELS["wgmma"]
    if p.batch == 1:
        layout = "nt"[p.a.column != 1] + "nt"[p.b.column != 1]
        gelu = p.gelu or p.before_gelu is not None
        dtype = TF32 if p.tf32 else p.a.array.dtype
        name = case(dtype, layout, p.rows, p.width, p.columns, gelu)
        found = tuned("matmul", name, DEFAULT)
    for name in (found, DEFAULT):
        if KERNELS[name].refusal(p) is None:
            return KERNELS[name]
    return _willing("tiled", p)
