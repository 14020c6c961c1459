"""Matrix products. Tests: tests/ops/test_matmul.py.

16-bit operands are multiplied and summed in float32 and rounded once. Gradients of 16-bit
operands come in float32: the walk rounds them, but for leaves with a float32 gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tensorgrad.amp import cast_operands, product_kernel
from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.backend import Array, is_numpy, namespace, upcast
from tensorgrad.core.checks import promoted
from tensorgrad.core.dtypes import Dtype, compute_dtype, is_complex
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.modes import mode
from tensorgrad.core.record import record
from tensorgrad.core.signature import Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.kernels import matmul as matmul_cuda
from tensorgrad.kernels.matmul.problem import problem

__all__ = ["matmul"]

takes = Signatures(globals())

# Each tile packs both of its operands once more: tiles have as many rows as leave a few of them.
_TILE_ROWS, _TILES = 512, 4
_TILE_LEAST = 1 << 24  # multiplications, a third of a millisecond of one core
_BLAS_ALONE = 1 << 18  # multiplications, up to which OpenBLAS takes one thread anyway


def matmul(a: ArrayLike, b: ArrayLike, *, kernel: str | None = None) -> Tensor:
    """Return the matrix product over the last axis of a and the second-to-last of b.

    y[..., i, j] = sum_k a[..., i, k] b[..., k, j]

    Args:
        a: (..., M, K), or (K,), which counts as one row that the result lacks.
        b: (..., K, N), or (K,), which counts as one column that the result lacks. The leading
            axes of a and b broadcast.
        kernel: on the GPU, which of the kernels in docs/matmul.md multiplies, also in backward;
            None takes the one that was the fastest, of TF32 in a block of `autocast("tf32")`.

    Returns:
        (..., M, N) in the dtype that NumPy promotes to.

    Raises:
        DeviceError: the operands are on different devices.
        ShapeError: an operand has no axes, K differs, or the leading axes do not broadcast.
        DtypeError: NumPy has no common dtype for them.
        ArgumentError: there is no such kernel here, or it does not support this product.

    Example:
        >>> tg.matmul([[1, 2], [3, 4]], [[1], [10]]).tolist()
        [[21], [43]]
    """
    a, b = takes.matmul(a, b)
    if mode.autocast is not None:
        a, b = cast_operands(a, b)
    x, z = a.data, b.data
    if not x.ndim or not z.ndim:
        raise ShapeError(f"matmul: a has shape {x.shape}, b {z.shape}, expected an axis or more")
    if x.shape[-1] != z.shape[-min(z.ndim, 2)]:
        raise ShapeError(
            f"matmul: b has shape {z.shape}, expected {x.shape[-1]} in axis {-min(z.ndim, 2)} "
            f"as a has shape {x.shape}"
        )
    dtype = promoted("matmul", ("a", "b"), (x, z))
    if x.ndim > 2 and z.ndim > 2 and x.shape[:-2] != z.shape[:-2]:
        try:
            np.broadcast_shapes(x.shape[:-2], z.shape[:-2])
        except ValueError as error:
            raise ShapeError(
                f"matmul: a has shape {x.shape}, b {z.shape}, expected leading axes that broadcast"
            ) from error
    kernel = product_kernel(x, z) if kernel is None else kernel
    y = product(x, z, dtype, kernel)
    return record("matmul", y, (a, b), _matmul_backward, (x, z, kernel))


def _matmul_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    a, b, kernel = saved
    wide = compute_dtype(dy.dtype)
    if a.ndim == 1 and b.ndim == 1:
        dy = dy.reshape(1, 1)
    elif a.ndim == 1:
        dy = dy[..., None, :]
    elif b.ndim == 1:
        dy = dy[..., None]
    rows = a[None] if a.ndim == 1 else a
    columns = b[:, None] if b.ndim == 1 else b
    da = db = None
    if needs[0]:
        da = product(dy, columns.swapaxes(-1, -2), wide, kernel)
        da = da[..., 0, :] if a.ndim == 1 else da
    if needs[1]:
        if columns.ndim == 2 and rows.ndim > 2:  # a single product sums over the leading axes too
            rows, dy = flat(rows), flat(dy)
        db = product(rows.swapaxes(-1, -2), dy, wide, kernel)
        db = db[..., 0] if b.ndim == 1 else db
    return da, db


@tangent_of(_matmul_backward)
def _matmul_tangent(op: Op, ta: Tensor | None, tb: Tensor | None) -> Tensor:
    a, b, kernel = op.saved
    terms = []
    if ta is not None:
        terms.append(matmul(cast_like(ta, a), op.input(1, b), kernel=kernel))
    if tb is not None:
        terms.append(matmul(op.input(0, a), cast_like(tb, b), kernel=kernel))
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def cast_like(t: Tensor, operand: Array) -> Tensor:
    """Return a tangent in the dtype of the saved operand: under autocast, that of its cast."""
    return t.astype(operand.dtype, copy=False)


def product(a: Array, b: Array, dtype: Dtype, kernel: str | None = None) -> Array:
    """Return the matrix product of arrays by NumPy's rules, computed wide and rounded to `dtype`.

    Where b is one matrix, the leading axes of a are rows of one product.
    """
    if b.ndim == 2 and a.ndim > 2:
        return product(flat(a), b, dtype, kernel).reshape(*a.shape[:-1], b.shape[-1])
    if not is_numpy(a):
        if is_complex(dtype):
            return namespace(a).matmul(a, b).astype(dtype, copy=False)
        return matmul_cuda.product(a, b, dtype, kernel)
    if kernel is not None:
        raise ArgumentError(f"matmul: kernel is {kernel!r:.60}, expected None for arrays on a CPU")
    if a.dtype.itemsize == 2 or b.dtype.itemsize == 2:
        a, b = upcast(a), upcast(b)
    if a.ndim != 2 or b.ndim != 2 or a.size * b.shape[1] <= _BLAS_ALONE:
        y = np.matmul(a, b)
    else:
        y = np.empty((len(a), b.shape[1]), np.result_type(a, b))
        in_tiles(y, a, b)
    return y if y.dtype is dtype else np.asarray(y, dtype)


def product_into(
    y: Array, a: Array, b: Array, add: bool = False, kernel: str | None = None
) -> None:
    """Write, or add, the product of two matrices of one dtype to y: that dtype, or float32."""
    if not is_numpy(a):
        matmul_cuda.run(problem(a, b, y, add=add), kernel)
    else:
        in_tiles(y, a, b, add)


def in_tiles(
    y: Array,
    a: Array,
    b: Array,
    add: bool = False,
    finish: Callable[[slice, slice], None] | None = None,
) -> None:
    """Write, or add, the product of two NumPy matrices to y, tile by tile on all cores.

    Tiles depend on the shapes alone and none is a part of a sum: any number of threads gives the
    same bits. `finish` gets the rows and columns of each tile, while it is in a cache.
    """
    (rows, length), columns = a.shape, b.shape[1]
    height, width, tiles = rows, columns, 1
    while height > _TILE_ROWS or (tiles < _TILES and height * width * length > _TILE_LEAST):
        if height > _TILE_ROWS or height >= width:
            height = -(-height // 32) * 16
        else:
            width = -(-width // 32) * 16
        tiles *= 2
    across = max(1, -(-columns // max(1, width)))
    tiles = -(-rows // max(1, height)) * across

    def run(tile: slice) -> None:
        i, j = divmod(tile.start, across)
        down, right = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
        if add:
            y[down, right] += np.matmul(a[down], b[:, right])
        else:
            np.matmul(a[down], b[:, right], out=y[down, right])
        if finish is not None:
            finish(down, right)

    backend.parallel_blocks(run, tiles, 1, rows * columns * length > _BLAS_ALONE)


def flat(array: Array) -> Array:
    """Return the array as one matrix, a row for each index of its leading axes."""
    if array.ndim == 2:
        return array
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])
