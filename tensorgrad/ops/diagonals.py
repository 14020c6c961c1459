"""Diagonals, triangles and products that follow from einsum.

Names and meanings are NumPy's, gradients those of the ops they are made of.
Tests: tests/ops/test_diagonals.py.
"""

from __future__ import annotations

from typing import Any, Never, SupportsIndex

import numpy as np

from tensorgrad.core.backend import Array, namespace, namespace_on
from tensorgrad.core.checks import axis_index
from tensorgrad.core.dtypes import (
    DtypeLike,
    as_dtype,
    float32,
    float64,
    int64,
    is_complex,
    is_float,
)
from tensorgrad.core.errors import ShapeError
from tensorgrad.core.operands import operands
from tensorgrad.core.signature import Shaped, Signatures, Size
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.ops.creation import below
from tensorgrad.ops.einsum import dot, tensordot
from tensorgrad.ops.elementwise import conj, multiply, power
from tensorgrad.ops.indexing import getitem
from tensorgrad.ops.matmul import matmul
from tensorgrad.ops.reduce import sum
from tensorgrad.ops.scatter import diagonal_scatter, two_axes
from tensorgrad.ops.shape import (
    astype,
    concatenate,
    expand_dims,
    moveaxis,
    pad,
    ravel,
    reshape,
    squeeze,
)

__all__ = [
    "block_diag", "cross", "diag", "diag_embed", "diagflat", "diagonal", "inner", "kron", "matvec",
    "trace", "tri", "tril_indices", "triu_indices", "vander", "vdot", "vecdot", "vecmat",
]  # fmt: skip

takes = Signatures(globals())


def diagonal(
    x: ArrayLike, offset: int = 0, axis1: SupportsIndex = 0, axis2: SupportsIndex = 1
) -> Tensor:
    """Return the diagonal of two axes as the last axis of the result.

    Args:
        x: two axes or more.
        offset: how far above the main diagonal; negative: below.
        axis1, axis2: the axes of the rows and the columns.

    Returns:
        The remaining axes of x and the diagonal.

    Raises:
        ShapeError: x has fewer than two axes.
        ArgumentError: the axes are the same, or x lacks one.

    Example:
        >>> tg.diagonal([[1, 2, 3], [4, 5, 6]], 1)
        tensor([2, 6], dtype=int64)
    """
    (x,) = takes.diagonal(x, offset)
    if x.ndim < 2:
        raise ShapeError(f"diagonal: x has shape {x.shape}, expected two axes or more")
    x = moveaxis(x, two_axes("diagonal", axis1, axis2, x.ndim), (-2, -1))
    rows, columns = x.shape[-2:]
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    steps = namespace(x.data).arange(length)
    return getitem(x, (..., steps + max(-offset, 0), steps + max(offset, 0)))


def trace(
    x: ArrayLike,
    offset: int = 0,
    axis1: SupportsIndex = 0,
    axis2: SupportsIndex = 1,
    dtype: DtypeLike | None = None,
) -> Tensor:
    """Return the sum along a diagonal.

    Args:
        x: two axes or more.
        offset: how far above the main diagonal; negative: below.
        axis1, axis2: the axes of the rows and the columns.
        dtype: of the sum; default: that of x, 64 bits for integers and bool.

    Returns:
        The remaining axes of x; errors are those of `diagonal`.

    Example:
        >>> tg.trace([[1, 2], [3, 4]])
        tensor(5, dtype=int64)
    """
    return sum(diagonal(x, offset, axis1, axis2), -1, dtype=dtype)


def diag(x: ArrayLike, k: int = 0) -> Tensor:
    """Return the k-th diagonal of a matrix, or a matrix of zeros with the vector x on it.

    Args:
        x: (M, N) or (n,).
        k: how far above the main diagonal; negative: below.

    Returns:
        A vector, or (n + |k|, n + |k|).

    Raises:
        ShapeError: x is neither a vector nor a matrix.

    Example:
        >>> tg.diag([1, 2])
        tensor([[1, 0],
                [0, 2]], dtype=int64)
        >>> tg.diag([[1, 2], [3, 4]])
        tensor([1, 4], dtype=int64)
    """
    (x,) = takes.diag(x, k)
    if x.ndim == 2:
        return diagonal(x, k)
    if x.ndim != 1:
        raise ShapeError(f"diag: x has shape {x.shape}, expected a vector or a matrix")
    n = x.shape[0]
    if not n:
        return pad(reshape(x, (0, 0)), ((0, abs(k)), (0, abs(k))))
    rows = pad(expand_dims(x, 1), ((0, 0), (0, n)))  # row i begins with x[i]
    square = reshape(ravel(rows)[: n * n], (n, n))
    return pad(square, ((max(-k, 0), max(k, 0)), (max(k, 0), max(-k, 0))))


def diag_embed(
    x: Shaped[ArrayLike, "... N"],
    offset: int = 0,
    axis1: SupportsIndex = -2,
    axis2: SupportsIndex = -1,
) -> Tensor:
    """Return zeros with the last axis of x on a diagonal of two new axes: see `diagonal`.

    Args:
        x: (..., N).
        offset: which diagonal; above the main one where it is positive.
        axis1, axis2: the two axes in the result.

    Returns:
        One axis more than x has; the two axes have length N + |offset|.

    Raises:
        ShapeError: x is not (..., N).
        ArgumentError: the two axes are one.

    Example:
        >>> tg.diag_embed([[1, 2], [3, 4]]).tolist()
        [[[1, 0], [0, 2]], [[3, 0], [0, 4]]]
    """
    (x,) = takes.diag_embed(x, offset)
    axes = two_axes("diag_embed", axis1, axis2, x.ndim + 1)
    length = x.shape[-1] + abs(int(offset))
    zeros = Tensor(namespace(x.data).zeros((*x.shape[:-1], length, length), x.dtype))
    return moveaxis(diagonal_scatter(zeros, x, offset, -2, -1), (-2, -1), axes)


def block_diag(*matrices: Any) -> Tensor:
    """Return matrices along the diagonal of one, zeros elsewhere.

    Args:
        *matrices: (M, N) each; vectors count as rows, numbers as (1, 1).

    Returns:
        One matrix, as many rows and columns as all have together, in the dtype that they have in
        common.

    Raises:
        ShapeError: one has more than two axes.

    Example:
        >>> tg.block_diag([[1, 2], [3, 4]], 5)
        tensor([[1, 2, 0],
                [3, 4, 0],
                [0, 0, 5]], dtype=int64)
    """
    blocks = operands("block_diag", [f"matrices[{i}]" for i in range(len(matrices))], matrices)
    for i, block in enumerate(blocks):
        if block.ndim > 2:
            raise ShapeError(
                f"block_diag: matrices[{i}] has shape {block.shape}, expected two axes at most"
            )
    blocks = [reshape(block, (1,) * (2 - block.ndim) + block.shape) for block in blocks]
    if not blocks:
        return Tensor(np.zeros((1, 0), "float32"))
    total, before, rows = int(np.sum([block.shape[1] for block in blocks])), 0, []
    for block in blocks:
        after = total - before - block.shape[1]
        rows.append(pad(block, [(0, 0), (before, after)]))
        before += block.shape[1]
    return concatenate(rows, 0)


def diagflat(x: ArrayLike, k: int = 0) -> Tensor:
    """Return a matrix of zeros with the elements of x on its k-th diagonal.

    Args:
        x: any shape; n elements.
        k: how far above the main diagonal; negative: below.

    Returns:
        (n + |k|, n + |k|).

    Example:
        >>> tg.diagflat([[1], [2]])
        tensor([[1, 0],
                [0, 2]], dtype=int64)
    """
    return diag(ravel(x), k)


def tri(
    rows: Size,
    columns: Size | None = None,
    k: int = 0,
    dtype: DtypeLike = float32,
    *,
    device: str = "cpu",
) -> Tensor:
    """Return a matrix with ones on and below the k-th diagonal and zeros above.

    Args:
        rows: how many.
        columns: as many as rows by default.
        k: the diagonal; 0 is the main one, positive ones lie above it.
        dtype: of the result.
        device: "cpu", "cuda" or "cuda:N".

    Returns:
        (rows, columns).

    Raises:
        ArgumentError: rows is not 0 or more.
        ArgumentError: columns is not 0 or more.

    Example:
        >>> tg.tri(2, 3)
        tensor([[1., 0., 0.],
                [1., 1., 0.]], dtype=float32)
    """
    takes.tri(rows, columns, k)
    return Tensor(_lower(namespace_on(device), rows, columns, k).astype(as_dtype(dtype)))


def _lower(xp: Any, rows: int, columns: int | None, k: int) -> Array:
    return below(xp, (int(rows), int(rows if columns is None else columns)), int(k))


def tril_indices(rows: Size, k: int = 0, columns: Size | None = None) -> tuple[Tensor, Tensor]:
    """Return the row and column indices of a matrix on and below its k-th diagonal.

    Args:
        rows: how many.
        k: the diagonal; 0 is the main one, positive ones lie above it.
        columns: as many as rows by default.

    Returns:
        Two vectors, int64.

    Raises:
        ArgumentError: rows is not 0 or more.
        ArgumentError: columns is not 0 or more.

    Example:
        >>> rows, columns = tg.tril_indices(2)
        >>> rows.tolist(), columns.tolist()
        ([0, 1, 1], [0, 0, 1])
    """
    takes.tril_indices(rows, k, columns)
    first, second = _lower(np, rows, columns, k).nonzero()
    return Tensor(first), Tensor(second)


def triu_indices(rows: Size, k: int = 0, columns: Size | None = None) -> tuple[Tensor, Tensor]:
    """Return the row and column indices of a matrix on and above its k-th diagonal.

    Args:
        rows: how many.
        k: the diagonal; 0 is the main one, positive ones lie above it.
        columns: as many as rows by default.

    Returns:
        Two vectors, int64.

    Raises:
        ArgumentError: rows is not 0 or more.
        ArgumentError: columns is not 0 or more.

    Example:
        >>> rows, columns = tg.triu_indices(2, 1, 3)
        >>> rows.tolist(), columns.tolist()
        ([0, 0, 1], [1, 2, 2])
    """
    takes.triu_indices(rows, k, columns)
    first, second = (~_lower(np, rows, columns, int(k) - 1)).nonzero()
    return Tensor(first), Tensor(second)


def inner(a: ArrayLike, b: ArrayLike) -> Tensor:
    """Return the sums of products over the last axes of a and b; a number multiplies.

    Args:
        a: (..., N).
        b: (..., N).

    Returns:
        The other axes of a, then those of b.

    Raises:
        DeviceError: the operands are on different devices.
        ShapeError: the last axes differ in length.

    Example:
        >>> tg.inner([1, 2], [[3, 4], [5, 6]])
        tensor([11, 17], dtype=int64)
    """
    a, b = takes.inner(a, b)
    return tensordot(a, b, (-1, -1)) if a.ndim and b.ndim else multiply(a, b)


def vdot(a: ArrayLike, b: ArrayLike) -> Tensor:
    """Return the sum of the products of the flattened a and b; complex a is conjugated.

    Args:
        a, b: equally many elements.

    Returns:
        One number.

    Raises:
        DeviceError: the operands are on different devices.
        ShapeError: they differ in size.

    Example:
        >>> tg.vdot([1j, 2], [1j, 3])
        tensor(7.+0.j, dtype=complex64)
    """
    a, b = takes.vdot(a, b)
    return dot(ravel(_conjugated(a)), ravel(b))


def vecdot(a: ArrayLike, b: ArrayLike, *, axis: SupportsIndex = -1, **unknown: Never) -> Tensor:
    """Return the sums of products along an axis; the others broadcast. Complex a is conjugated.

    Args:
        a, b: of equal length along the axis.
        axis: the axis to sum over, of both.

    Returns:
        The other axes, broadcast.

    Raises:
        DeviceError: the operands are on different devices.
        ShapeError: the axes differ in length, or the others do not broadcast.

    Example:
        >>> tg.vecdot([[1, 2], [3, 4]], [10, 1])
        tensor([12, 34], dtype=int64)
    """
    a, b = takes.vecdot(a, b, unknown)
    a = moveaxis(_conjugated(a), axis_index("vecdot", axis, a.ndim), -1)
    b = moveaxis(b, axis_index("vecdot", axis, b.ndim), -1)
    if a.shape[-1] != b.shape[-1]:
        raise ShapeError(
            f"vecdot: b has length {b.shape[-1]} along the axis, expected {a.shape[-1]} as a"
        )
    return squeeze(matmul(expand_dims(a, -2), expand_dims(b, -1)), (-1, -2))


def _conjugated(a: Tensor) -> Tensor:
    return conj(a) if is_complex(a.dtype) else a


def matvec(a: ArrayLike, b: ArrayLike) -> Tensor:
    """Return the products of matrices with vectors; the other axes broadcast.

    Args:
        a: (..., M, N).
        b: (..., N).

    Returns:
        (..., M); errors are those of `matmul`.

    Raises:
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.matvec([[1, 2], [3, 4]], [10, 1])
        tensor([12, 34], dtype=int64)
    """
    a, b = takes.matvec(a, b)
    return squeeze(matmul(a, expand_dims(b, -1)), -1)


def vecmat(a: ArrayLike, b: ArrayLike) -> Tensor:
    """Return the products of vectors with matrices; the other axes broadcast.

    Args:
        a: (..., M).
        b: (..., M, N).

    Returns:
        (..., N); errors are those of `matmul`.

    Raises:
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.vecmat([10, 1], [[1, 2], [3, 4]])
        tensor([13, 24], dtype=int64)
    """
    a, b = takes.vecmat(a, b)
    return squeeze(matmul(expand_dims(a, -2), b), -2)


def kron(a: ArrayLike, b: ArrayLike) -> Tensor:
    """Return the Kronecker product: every element of a times all of b.

    Args:
        a, b: any shapes; the one with fewer axes gets axes of length 1 in front.

    Returns:
        Along each axis the product of their lengths.

    Raises:
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.kron([1, 10], [1, 2, 3])
        tensor([ 1,  2,  3, 10, 20, 30], dtype=int64)
    """
    a, b = takes.kron(a, b)
    ndim = max(a.ndim, b.ndim)
    of_a = (1,) * (ndim - a.ndim) + a.shape
    of_b = (1,) * (ndim - b.ndim) + b.shape
    first = reshape(a, [n for length in of_a for n in (length, 1)])
    second = reshape(b, [n for length in of_b for n in (1, length)])
    return reshape(first * second, [m * n for m, n in zip(of_a, of_b, strict=True)])


def cross(a: ArrayLike, b: ArrayLike, *, axis: SupportsIndex = -1, **unknown: Never) -> Tensor:
    """Return the vector product of vectors of three elements along an axis.

    Args:
        a, b: of length 3 along the axis; the other axes broadcast.
        axis: the axis of the vectors, in both and in the result.

    Returns:
        The other axes, broadcast, and that of the vectors.

    Raises:
        DeviceError: the operands are on different devices.
        ShapeError: the axis has another length, or the other axes do not broadcast.

    Example:
        >>> tg.cross([1, 0, 0], [0, 1, 0])
        tensor([0, 0, 1], dtype=int64)
    """
    a, b = takes.cross(a, b, unknown)
    for name, x in (("a", a), ("b", b)):
        length = x.shape[axis_index("cross", axis, x.ndim)]
        if length != 3:
            raise ShapeError(f"cross: {name} has length {length} along the axis, expected 3")
    a, b = moveaxis(a, axis, -1), moveaxis(b, axis, -1)
    parts = [
        a[..., i, None] * b[..., j, None] - a[..., j, None] * b[..., i, None]
        for i, j in ((1, 2), (2, 0), (0, 1))
    ]
    return moveaxis(concatenate(parts, -1), -1, axis)


def vander(
    x: Shaped[ArrayLike, "N"], columns: Size | None = None, increasing: bool = False
) -> Tensor:
    """Return the matrix of the powers of a vector, the highest first unless `increasing`.

    Args:
        x: (N,).
        columns: how many powers, from 0; N by default.
        increasing: whether the powers ascend.

    Returns:
        (N, columns), in the dtype that x and int64 have in common, as in NumPy: int64 for bool
        and small integers, float64 for floats.

    Raises:
        ShapeError: x is not (N,).
        ArgumentError: columns is not 0 or more.

    Example:
        >>> tg.vander([2, 3], 3)
        tensor([[4, 2, 1],
                [9, 3, 1]], dtype=int64)
    """
    (x,) = takes.vander(x, columns, increasing)
    count = len(x) if columns is None else columns
    dtype = float64 if is_float(x.dtype) else np.promote_types(x.dtype, int64)
    x = astype(x, dtype, copy=False)
    powers = namespace(x.data).arange(count, dtype=x.dtype)
    return power(expand_dims(x, 1), powers if increasing else powers[::-1])
