"""Matrix products on the GPU: which kernel does them.

Each kernel is a module with two functions: `refusal(problem)` says what the kernel needs and the
problem has not, or None, and `multiply(problem)` computes y, which has elements. `KERNELS` lists
them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.dtypes import Dtype, compute_dtype, is_float
from tensorgrad.errors import ArgumentError
from tensorgrad.ops import matmul_cublas
from tensorgrad.ops.matmul_problem import Problem, problem
from tensorgrad.ops.operand import widened

KERNELS: dict[str, Any] = {"cublas": matmul_cublas}


def product(a: Array, b: Array, dtype: Dtype, kernel: str | None = None) -> Array:
    """Return the matrix product of GPU arrays by NumPy's rules, rounded to `dtype` once.

    Args:
        a: (..., M, K) or (K,).
        b: (..., K, N) or (K,).
        dtype: of the result.
        kernel: a name in KERNELS; None takes what is fastest.

    Raises:
        ArgumentError: there is no such kernel, or it does not do this product.
    """
    if a.dtype != b.dtype:
        a, b = widened(a), widened(b)
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
    batch = a.shape[:-2]
    if batch != b.shape[:-2]:
        batch = np.broadcast_shapes(batch, b.shape[:-2])
    stored = dtype if dtype == a.dtype else compute_dtype(a.dtype)
    y = backend.empty((*batch, a.shape[-2], b.shape[-1]), stored, like=a)
    run(problem(a, b, y), kernel)
    return y.astype(dtype, copy=False)


def run(p: Problem, kernel: str | None = None) -> None:
    """Compute y.

    Raises:
        ArgumentError: there is no such kernel, or it does not do this product.
    """
    if kernel is None:
        kernel = "cublas"
    elif kernel not in KERNELS:
        names = ", ".join(map(repr, KERNELS))
        raise ArgumentError(f"matmul: kernel is {kernel!r}, expected None or one of {names}")
    chosen = KERNELS[kernel]
    reason = chosen.refusal(p)
    if reason is not None:
        raise ArgumentError(f"matmul: kernel is {kernel!r}, which needs {reason}")
    if p.y.size:
        chosen.multiply(p)
