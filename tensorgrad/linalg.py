"""Linear algebra with gradients, under NumPy's and the array API standard's names.

Matrices are the last two axes, those before them a batch that broadcasts. Computed in float32,
float64, complex64 or complex128; 16-bit floats are converted and the result rounded, integers
become float64. Complex matrices have no gradients; for them ^T below is the conjugate transpose,
and symmetric means equal to it. cuSOLVER's functions wait for the GPU, so no CUDA graph can capture
them. Tests: tests/test_linalg.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Never

import numpy as np

from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.compat.omitted import missing as _missing
from tensorgrad.core.backend import Array, Axis, namespace
from tensorgrad.core.checks import axis_tuple
from tensorgrad.core.dtypes import DtypeLike, compute_dtype, float64, is_complex, is_float
from tensorgrad.core.errors import ArgumentError, GradError, ShapeError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.operands import array_beside, constant_of, operands, tensor_of
from tensorgrad.core.record import record
from tensorgrad.core.signature import Shaped, Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.ops.arguments import tensors_of
from tensorgrad.ops.diagonals import cross, vecdot
from tensorgrad.ops.diagonals import diagonal as _diagonal
from tensorgrad.ops.diagonals import trace as _trace
from tensorgrad.ops.einsum import outer, tensordot
from tensorgrad.ops.elementwise import abs, conj, isnan, not_equal, where
from tensorgrad.ops.matmul import matmul
from tensorgrad.ops.reduce import max, min, sum
from tensorgrad.ops.reduce import norm as _norm
from tensorgrad.ops.shape import astype, expand_dims, moveaxis, reshape, squeeze
from tensorgrad.ops.stacking import matrix_transpose

__all__ = [
    "cholesky", "cond", "cross", "det", "diagonal", "eigh", "eigvalsh", "inv", "matmul",
    "matrix_norm", "matrix_power", "matrix_rank", "matrix_transpose", "multi_dot", "norm", "outer",
    "pinv", "qr", "slogdet", "solve", "svd", "svdvals", "tensordot", "tensorinv", "tensorsolve",
    "trace", "vecdot", "vector_norm",
]  # fmt: skip

Order = float | Literal["fro", "nuc"] | None

takes = Signatures(globals())


class EighResult(NamedTuple):
    """Eigenvalues in ascending order, and eigenvectors as columns; see `eigh`."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class QRResult(NamedTuple):
    """Orthonormal columns and the upper triangle."""

    Q: Tensor
    R: Tensor


class SlogdetResult(NamedTuple):
    """The sign of the determinant, and the logarithm of its absolute value."""

    sign: Tensor
    logabsdet: Tensor


class SVDResult(NamedTuple):
    """Left singular vectors as columns, singular values descending, right ones as rows."""

    U: Tensor
    S: Tensor
    Vh: Tensor


def diagonal(x: ArrayLike, *, offset: int = 0) -> Tensor:
    """Return the diagonals of the matrices; see `tensorgrad.diagonal`.

    Args:
        x: (..., M, N), any dtype.
        offset: which diagonal: above 0 to the right of the main one, below 0 to the left.

    Returns:
        (..., K), in the dtype of x.

    Example:
        >>> tg.linalg.diagonal([[1, 2], [3, 4]]).tolist()
        [1, 4]
    """
    return _diagonal(x, offset, -2, -1)


def trace(x: ArrayLike, *, offset: int = 0, dtype: DtypeLike | None = None) -> Tensor:
    """Return the sums of the diagonals of the matrices; see `tensorgrad.trace`.

    Args:
        x: (..., M, N), any dtype.
        offset: which diagonal: above 0 to the right of the main one, below 0 to the left.
        dtype: the dtype of the sums; None: the one that NumPy gives.

    Returns:
        (...,).

    Example:
        >>> tg.linalg.trace([[1, 2], [3, 4]]).item()
        5
    """
    return _trace(x, offset, -2, -1, dtype)


def inv(x: Shaped[ArrayLike, "... N N"]) -> Tensor:
    """Return the inverse of square matrices.

    Args:
        x: (..., N, N).

    Returns:
        (..., N, N), in the dtype of x; float64 for integers.

    Raises:
        ShapeError: x is not (..., N, N).
        ArgumentError: one is singular (on the GPU the result is not finite instead).

    Example:
        >>> tg.linalg.inv([[2, 0], [0, 4]]).tolist()
        [[0.5, 0.0], [0.0, 0.25]]
    """
    x, dtype = _floats(*takes.inv(x))
    y = _computed("inv", namespace(x.data).linalg.inv, x.data)
    return _rounded(record("inv", y, (x,), _inv_backward, (y,)), dtype)


def _inv_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    y = _transposed(saved[0])
    return (-(y @ dy @ y),)


@tangent_of(_inv_backward)
def _inv_tangent(op: Op, t: Tensor) -> Tensor:
    y = op.output(*op.saved)
    return -(y @ t @ y)


def solve(a: Shaped[ArrayLike, "... N N"], b: ArrayLike) -> Tensor:
    """Return x with a @ x = b.

    Args:
        a: (..., N, N).
        b: (N,) or (..., N, K).

    Returns:
        (..., N) or (..., N, K), in the dtype that both promote to; float64 for integers.

    Raises:
        ShapeError: a is not (..., N, N).
        DeviceError: the operands are on different devices.
        ShapeError: b does not fit a.
        ArgumentError: a is singular (on the GPU the result is not finite instead).

    Example:
        >>> tg.linalg.solve([[2, 0], [0, 4]], [2, 2]).round(6).tolist()
        [1.0, 0.5]
    """
    a, b = takes.solve(a, b)
    a, first = _floats(a)
    b, second = _floats(b)
    vector = b.ndim == 1
    columns = expand_dims(b, 1) if vector else b
    if columns.ndim < 2 or columns.shape[-2] != a.shape[-1]:
        raise ShapeError(f"solve: b has shape {b.shape}, expected {a.shape[-1]} rows as a has")
    dtype = np.result_type(first, second)
    a, columns = (astype(t, compute_dtype(dtype), copy=False) for t in (a, columns))
    y = _computed("solve", _solve, a.data, columns.data)
    x = record("solve", y, (a, columns), _solve_backward, (a.data, y))
    return _rounded(squeeze(x, -1) if vector else x, dtype)


def _solve(a: Array, b: Array) -> Array:
    """Return x with a @ x = b; CuPy wants the same batches in both."""
    xp = namespace(a)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return xp.linalg.solve(*(xp.broadcast_to(x, batch + x.shape[-2:]) for x in (a, b)))


def _solve_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    a, x = saved
    db = _solve(_transposed(a), dy)
    return -(db @ _transposed(x)) if needs[0] else None, db


@tangent_of(_solve_backward)
def _solve_tangent(op: Op, ta: Tensor | None, tb: Tensor | None) -> Tensor:
    a, x = op.saved
    right: Any = tb
    if ta is not None:
        moved = ta @ op.output(x)
        right = -moved if tb is None else tb - moved
    return solve(op.input(0, a), right)


def tensorinv(x: ArrayLike, ind: int = 2) -> Tensor:
    """Return the inverse of x as a map: tensordot(y, x, ind) is the identity.

    Args:
        x: lengths of the first `ind` axes and of the others have equal products.
        ind: above 0.

    Returns:
        The last axes of x, then its first; in the dtype of x, float64 for integers.

    Raises:
        ArgumentError: ind is below 1, or the map is singular.
        ShapeError: the products differ.

    Example:
        >>> tg.linalg.tensorinv(tg.reshape(tg.eye(6), (6, 2, 3)), ind=1).shape
        (2, 3, 6)
    """
    (x,) = takes.tensorinv(x, ind)
    if not 0 < ind <= x.ndim:
        raise ArgumentError(f"tensorinv: ind is {ind}, expected 1 to {x.ndim}")
    rows, columns = math.prod(x.shape[:ind]), math.prod(x.shape[ind:])
    if rows != columns:
        raise ShapeError(f"tensorinv: x has shape {x.shape}, expected the product of the first "
                         f"{ind} lengths to be that of the others")  # fmt: skip
    return reshape(inv(reshape(x, (rows, columns))), x.shape[ind:] + x.shape[:ind])


def tensorsolve(a: ArrayLike, b: ArrayLike, axes: Sequence[int] | None = None) -> Tensor:
    """Return x with tensordot(a, x, x.ndim) = b.

    Args:
        a: b.shape, then the shape of x, which has as many elements as b.
        b: any shape.
        axes: axes of a that are moved to the end first; None: no axis is.

    Returns:
        The last axes of a, in the dtype that both promote to; float64 for integers.

    Raises:
        DeviceError: the operands are on different devices.
        ShapeError: a does not fit b.
        ArgumentError: a is singular.

    Example:
        >>> tg.linalg.tensorsolve(2 * tg.reshape(tg.eye(4), (4, 2, 2)), [2, 4, 6, 8]).tolist()
        [[1.0, 2.0], [3.0, 4.0]]
    """
    a, b = takes.tensorsolve(a, b)
    if axes is not None:
        places = axis_tuple("tensorsolve", axes, a.ndim, "axes")
        a = moveaxis(a, places, tuple(range(a.ndim - len(places), a.ndim)))
    own = a.shape[b.ndim :]
    if math.prod(own) != b.size or a.size != b.size**2:
        raise ShapeError(f"tensorsolve: a has shape {a.shape}, expected that of b, {b.shape}, and "
                         f"as many elements again")  # fmt: skip
    return reshape(solve(reshape(a, (b.size, b.size)), reshape(b, (b.size,))), own)


def det(x: Shaped[ArrayLike, "... N N"]) -> Tensor:
    """Return the determinants of square matrices; the gradient needs an inverse.

    Args:
        x: (..., N, N).

    Returns:
        (...,), in the dtype of x; float64 for integers.

    Raises:
        ShapeError: x is not (..., N, N).

    Example:
        >>> tg.linalg.det([[2, 0], [0, 4]]).round(6).item()
        8.0
    """
    x, dtype = _floats(*takes.det(x))
    xp = namespace(x.data)
    y = xp.asarray(xp.linalg.det(x.data))
    return _rounded(record("det", y, (x,), _det_backward, (x.data, y)), dtype)


def _det_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    x, y = saved
    inverse = _computed("det", namespace(x).linalg.inv, x)
    return ((dy * y)[..., None, None] * _transposed(inverse),)


@tangent_of(_det_backward)
def _det_tangent(op: Op, t: Tensor) -> Tensor:
    x, y = op.saved
    return op.output(y) * _trace_of_quotient(op.input(0, x), t)


def _trace_of_quotient(x: Tensor, t: Tensor) -> Tensor:
    """Return the traces of inv(x) @ t, the tangent of log|det x|."""
    return sum(matrix_transpose(inv(x)) * t, (-2, -1))


def slogdet(x: Shaped[ArrayLike, "... N N"]) -> SlogdetResult:
    """Return sign and log|det| of square matrices; the gradient needs an inverse.

    Args:
        x: (..., N, N).

    Returns:
        sign and logabsdet, (...,) each, in the dtype of x; float64 for integers.

    Raises:
        ShapeError: x is not (..., N, N).

    Example:
        >>> sign, logabsdet = tg.linalg.slogdet([[0, 1], [1, 0]])
        >>> sign.item(), logabsdet.item()
        (-1.0, 0.0)
    """
    x, dtype = _floats(*takes.slogdet(x))
    xp = namespace(x.data)
    sign, value = xp.linalg.slogdet(x.data)
    y = record("slogdet", xp.asarray(value), (x,), _slogdet_backward, (x.data,))
    return SlogdetResult(Tensor(xp.asarray(sign, dtype)), _rounded(y, dtype))


def _slogdet_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    (x,) = saved
    inverse = _computed("slogdet", namespace(x).linalg.inv, x)
    return (dy[..., None, None] * _transposed(inverse),)


@tangent_of(_slogdet_backward)
def _slogdet_tangent(op: Op, t: Tensor) -> Tensor:
    return _trace_of_quotient(op.input(0, *op.saved), t)


def cholesky(x: Shaped[ArrayLike, "... N N"], *, upper: bool = False) -> Tensor:
    """Return the lower triangle L with L L^T = x, or the upper one with U^T U = x.

    Args:
        x: (..., N, N), symmetric and positive definite; only its lower triangle is read.
        upper: whether to return L^T.

    Returns:
        (..., N, N), in the dtype of x; float64 for integers.

    Raises:
        ShapeError: x is not (..., N, N).
        ArgumentError: one is not positive definite.
    Source: Murray 2016, arXiv:1602.07527, eq. 10; the gradient is symmetric.

    Example:
        >>> tg.linalg.cholesky([[4, 2], [2, 2]]).tolist()
        [[2.0, 0.0], [1.0, 1.0]]
    """
    x, dtype = _floats(*takes.cholesky(x, upper))
    y = _computed("cholesky", namespace(x.data).linalg.cholesky, x.data)
    factor = _rounded(record("cholesky", y, (x,), _cholesky_backward, (y,)), dtype)
    if not upper:
        return factor
    return matrix_transpose(conj(factor) if is_complex(x.dtype) else factor)


def _cholesky_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    (lower,) = saved
    xp = namespace(lower)
    inner = xp.tril(_transposed(lower) @ dy)
    inner = inner - inner * xp.eye(lower.shape[-1], dtype=lower.dtype) / 2
    inverse = xp.linalg.inv(lower)
    dx = _transposed(inverse) @ inner @ inverse
    return ((dx + _transposed(dx)) / 2,)


@tangent_of(_cholesky_backward)
def _cholesky_tangent(op: Op, t: Tensor) -> Tensor:
    lower = op.output(*op.saved)
    inverse = inv(lower)
    inner = inverse @ _symmetric(t) @ matrix_transpose(inverse)
    return matmul(lower, inner * ((_triangle(lower, 0) + _triangle(lower, -1)) / 2))


def _symmetric(t: Tensor) -> Tensor:
    """Return the tangents of matrices that count as symmetric."""
    return (t + matrix_transpose(t)) / 2


def _triangle(x: Tensor, k: int) -> Array:
    """Return ones up to the k-th diagonal of matrices, zeros above it."""
    n = x.shape[-1]
    ones: Array = namespace(x.data).tri(n, n, k, x.dtype)
    return ones


def eigh(x: Shaped[ArrayLike, "... N N"], UPLO: Literal["L", "U"] = "L") -> EighResult:
    """Return eigenvalues and eigenvectors of symmetric matrices.

    Args:
        x: (..., N, N). The gradient is symmetric; that of eigenvectors needs different
            eigenvalues, and a loss that ignores their signs.
        UPLO: which triangle is read, the lower or the upper.

    Returns:
        eigenvalues, (..., N), ascending, and eigenvectors, (..., N, N), as columns; in the dtype
        of x, float64 for integers.

    Raises:
        ShapeError: x is not (..., N, N).
        ArgumentError: another UPLO.

    Example:
        >>> values, vectors = tg.linalg.eigh([[3, 0], [0, 2]])
        >>> values.round(6).tolist(), tg.abs(vectors).round(6).tolist()
        ([2.0, 3.0], [[0.0, 1.0], [1.0, 0.0]])
    """
    x, dtype = _floats(*takes.eigh(x, UPLO))
    if UPLO == "U":
        x = matrix_transpose(conj(x) if is_complex(x.dtype) else x)
    return EighResult(*_factors("eigh", x, dtype, _eigh_backward))


def _eigh_backward(dys: Any, saved: Saved, needs: Needs) -> Gradients:
    values, vectors = saved
    dvalues, dvectors = dys
    inner: Any = 0
    if dvectors is not None:
        inner = _reciprocal_differences(values) * (_transposed(vectors) @ dvectors)
    if dvalues is not None:
        inner = inner + dvalues[..., None] * namespace(values).eye(values.shape[-1])
    dx = vectors @ inner.astype(values.dtype, copy=False) @ _transposed(vectors)
    return ((dx + _transposed(dx)) / 2,)


@tangent_of(_eigh_backward)
def _eigh_tangent(op: Op, t: Tensor) -> tuple[Tensor, Tensor | None]:
    values, vectors = map(op.output, op.saved, range(2))
    inner = matrix_transpose(vectors) @ _symmetric(t) @ vectors
    tvectors = vectors @ _over_differences(inner, values) if op.wanted[1] else None
    return diagonal(inner), tvectors


def _over_differences(x: Tensor, values: Tensor) -> Tensor:
    """Return x[i, j] / (values[j] - values[i]), 0 on the diagonal."""
    same = namespace(values.data).eye(values.shape[-1], dtype=values.dtype)
    difference = values[..., None, :] - values[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):  # equal values divide by 0
        factors: Tensor = (1 - same) / (difference + same)
        return x * factors


def eigvalsh(x: ArrayLike, UPLO: Literal["L", "U"] = "L") -> Tensor:
    """Return the eigenvalues of symmetric matrices, ascending; see `eigh`.

    Args:
        x: (..., N, N).
        UPLO: which triangle is read, the lower or the upper.

    Returns:
        (..., N), in the dtype of x; float64 for integers.

    Raises:
        ArgumentError: another UPLO.

    Example:
        >>> tg.linalg.eigvalsh([[3, 0], [0, 2]]).round(6).tolist()
        [2.0, 3.0]
    """
    return eigh(x, UPLO).eigenvalues


def qr(
    x: Shaped[ArrayLike, "... M N"], mode: Literal["reduced", "complete"] = "reduced"
) -> QRResult:
    """Return Q with orthonormal columns and the upper triangle R with Q R = x.

    Args:
        x: (..., M, N). The gradient needs M >= N and independent columns.
        mode: "reduced" gives Q min(M, N) columns, "complete" M, without a gradient unless M = N.

    Returns:
        Q, (..., M, K), and R, (..., K, N), K columns as said; in the dtype of x, float64 for
        integers.

    Raises:
        ShapeError: x is not (..., M, N).
        ArgumentError: another mode.
        GradError: in backward or forward mode, there is no gradient.
    Source: Walter & Lehmann 2018, arXiv:1009.6112.

    Example:
        >>> q, r = tg.linalg.qr([[3, 1], [4, 2], [0, 5]])
        >>> q.shape, tg.abs(q @ r).round(6).tolist()
        ((3, 2), [[3.0, 1.0], [4.0, 2.0], [0.0, 5.0]])
    """
    x, dtype = _floats(*takes.qr(x, mode))
    return QRResult(*_factors("qr", x, dtype, _qr_backward, mode))


def _qr_backward(dys: Any, saved: Saved, needs: Needs) -> Gradients:
    q, r = saved
    dq, dr = dys
    _check_qr(r)
    xp = namespace(q)
    dq = xp.zeros_like(q) if dq is None else dq
    inner = -(_transposed(dq) @ q)
    if dr is not None:
        inner = r @ _transposed(xp.triu(dr)) + inner
    lower = xp.tril(inner, -1)
    inner = lower + _transposed(lower) + inner * xp.eye(r.shape[-1], dtype=r.dtype)
    return (_transposed(xp.linalg.solve(r, _transposed(dq + q @ inner))),)


@tangent_of(_qr_backward)
def _qr_tangent(op: Op, t: Tensor) -> tuple[Tensor, Tensor]:
    q, r = map(op.output, op.saved, range(2))
    _check_qr(r)
    quotient = matrix_transpose(solve(matrix_transpose(r), matrix_transpose(t)))
    inner = matrix_transpose(q) @ quotient
    lower = inner * _triangle(r, -1)
    upper = inner - lower + matrix_transpose(lower)
    return quotient - q @ upper, upper @ r


def _check_qr(r: Array | Tensor) -> None:
    if r.shape[-1] != r.shape[-2]:
        raise GradError(f"qr: R has shape {r.shape}, expected a square one for a gradient")


def svd(x: Shaped[ArrayLike, "... M N"], full_matrices: bool = True) -> SVDResult:
    """Return U, S and Vh with U diag(S) Vh = x.

    Args:
        x: (..., M, N). The gradient needs different singular values, and for U and Vh a loss that
            ignores their signs.
        full_matrices: whether U is (..., M, M) and Vh (..., N, N), not (..., M, K) and
            (..., K, N) with K = min(M, N). Full ones have no gradient unless M = N.

    Returns:
        U, S of shape (..., K), descending, and Vh, in the dtype of x; float64 for integers.

    Raises:
        ShapeError: x is not (..., M, N).
        GradError: in backward or forward mode, there is no gradient.
    Source: Giles 2008, "Collected matrix derivative results for forward and reverse mode
        algorithmic differentiation", section 3.2.

    Example:
        >>> u, s, vh = tg.linalg.svd([[0, 2], [1, 0], [0, 0]], full_matrices=False)
        >>> u.shape, s.round(6).tolist(), vh.shape
        ((3, 2), [2.0, 1.0], (2, 2))
    """
    x, dtype = _floats(*takes.svd(x, full_matrices))
    return SVDResult(*_factors("svd", x, dtype, _svd_backward, full_matrices))


def _svd_backward(dys: Any, saved: Saved, needs: Needs) -> Gradients:
    u, s, vh = saved
    du, ds, dvh = dys
    k, xp = s.shape[-1], namespace(s)
    _check_svd(saved, [dy is not None for dy in dys])
    u, vh = u[..., :k], vh[..., :k, :]
    diagonal = xp.eye(k, dtype=s.dtype)
    inner = xp.zeros((*s.shape, k), s.dtype) if ds is None else ds[..., None] * diagonal
    factors = _reciprocal_differences(s * s)
    dx = 0
    if du is not None:
        rotation = factors * (_transposed(u) @ du)
        inner = inner + (rotation + _transposed(rotation)) * s[..., None, :]
        dx = dx + ((du - u @ (_transposed(u) @ du)) / s[..., None, :]) @ vh
    if dvh is not None:
        rotation = factors * (vh @ _transposed(dvh))
        inner = inner + s[..., None] * (rotation + _transposed(rotation))
        dx = dx + (u / s[..., None, :]) @ (dvh - (dvh @ _transposed(vh)) @ vh)
    return (u @ inner @ vh + dx,)


def _check_svd(saved: Saved, wanted: Sequence[bool]) -> None:
    u, s, vh = saved
    k = s.shape[-1]
    if (u.shape[-1] != k and wanted[0]) or (vh.shape[-2] != k and wanted[2]):
        raise GradError("svd: full matrices that are not square have no gradient, expected "
                        "full_matrices=False")  # fmt: skip


@tangent_of(_svd_backward)
def _svd_tangent(op: Op, t: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
    _check_svd(op.saved, op.wanted)
    u, s, vh = map(op.output, op.saved, range(3))
    k = s.shape[-1]
    if u.shape[-1] != vh.shape[-2]:  # only the reduced factors have derivatives
        saved = op.saved[0][..., :k], op.saved[1], op.saved[2][..., :k, :]
        x = op.input(0, (saved[0] * saved[1][..., None, :]) @ saved[2])
        u, s, vh = record("svd", saved, (x,), _svd_backward, saved)
    v = matrix_transpose(vh)
    inner = matrix_transpose(u) @ t @ v
    left = inner * s[..., None, :]  # U^T tU is the rotation of left + left^T
    right = inner * s[..., None]
    tu = tvh = None
    if op.wanted[0]:
        tu = u @ _over_differences(left + matrix_transpose(left), s * s)
        if u.shape[-2] > k:
            tu = tu + (t @ v - u @ inner) / s[..., None, :]
    if op.wanted[2]:
        tv = v @ _over_differences(right + matrix_transpose(right), s * s)
        if v.shape[-2] > k:
            tv = tv + (matrix_transpose(t) @ u - v @ matrix_transpose(inner)) / s[..., None, :]
        tvh = matrix_transpose(tv)
    return tu, diagonal(inner), tvh


def svdvals(x: ArrayLike) -> Tensor:
    """Return the singular values of matrices, descending; see `svd`.

    Args:
        x: (..., M, N).

    Returns:
        (..., K), K = min(M, N), in the dtype of x; float64 for integers.

    Example:
        >>> tg.linalg.svdvals([[0, 2], [1, 0]]).round(6).tolist()
        [2.0, 1.0]
    """
    return svd(x, full_matrices=False).S


def pinv(x: ArrayLike, *, rtol: ArrayLike | None = None) -> Tensor:
    """Return the Moore-Penrose pseudo-inverses of matrices.

    Args:
        x: (..., M, N). The gradient is that of constant rank.
        rtol: singular values up to this fraction of the largest count as 0, a number or (...,);
            by default max(M, N) times the spacing of the dtype at 1.

    Returns:
        (..., N, M), in the dtype of x; float64 for integers.

    Source: Golub & Pereyra 1973, doi:10.1137/0710036, eq. 4.12.

    Example:
        >>> tg.linalg.pinv([[1], [1]]).round(6).tolist()
        [[0.5, 0.5]]
    """
    x, dtype = _matrices("pinv", x)
    cut = _cutoff(x, rtol)
    shape = getattr(cut, "shape", ())
    if shape not in ((), x.shape[:-2]):
        raise ShapeError(f"pinv: rtol has shape {shape}, expected () or {x.shape[:-2]}")
    y = _computed("pinv", namespace(x.data).linalg.pinv, x.data, cut)
    return _rounded(record("pinv", y, (x,), _pinv_backward, (x.data, y)), dtype)


def _pinv_backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    x, y = saved
    xp, yt, dyt = namespace(x), _transposed(y), _transposed(dy)
    left = xp.eye(x.shape[-2], dtype=x.dtype) - x @ y
    right = xp.eye(x.shape[-1], dtype=x.dtype) - y @ x
    return (left @ dyt @ y @ yt + yt @ y @ dyt @ right - yt @ dy @ yt,)


@tangent_of(_pinv_backward)
def _pinv_tangent(op: Op, t: Tensor) -> Tensor:
    x, y = op.input(0, op.saved[0]), op.output(op.saved[1])
    yt, tt = matrix_transpose(y), matrix_transpose(t)
    left, right = y @ yt @ tt, tt @ yt @ y
    return left - left @ x @ y + right - y @ x @ right - y @ t @ y


def matrix_rank(x: ArrayLike, *, rtol: ArrayLike | None = None) -> Tensor:
    """Return how many singular values count as more than 0; see `pinv`.

    Args:
        x: (..., M, N).
        rtol: the fraction of the largest singular value up to which others count as 0; see `pinv`.

    Returns:
        (...,), int64.

    Example:
        >>> tg.linalg.matrix_rank([[1, 2], [2, 4]]).item()
        1
    """
    x, _ = _matrices("matrix_rank", x)
    values = svdvals(x.detach())
    largest = max(values, -1, keepdims=True) if values.shape[-1] else 0.0
    cut = _cutoff(x, rtol)
    if not isinstance(cut, float):  # an array has a number for each matrix
        cut = expand_dims(operands("matrix_rank", ("x", "rtol"), (x, cut))[1], -1)
    return sum(values > largest * cut, -1)


def _cutoff(x: Tensor, rtol: Any) -> Any:
    if rtol is None:
        return float(np.finfo(x.dtype).eps) * float(np.max(x.shape[-2:]))
    if not isinstance(rtol, Tensor):
        array_beside("pinv", "rtol", rtol, x)  # raises an error that names it
        return rtol
    return constant_of("pinv", "rtol", rtol, "the rank is constant")


def cond(x: Shaped[ArrayLike, "... M N"], p: Order = None) -> Tensor:
    """Return the condition numbers of matrices: the norm times that of the inverse.

    Args:
        x: (..., M, N), square but for p None, 2 and -2.
        p: the order of the norm, see `matrix_norm`; None is 2.

    Returns:
        (...,); inf for singular matrices, NaN for those that hold NaN.

    Raises:
        ShapeError: x is not (..., M, N).
        ShapeError: the matrices have no elements, or are not square for another p than 2 and -2.
        ArgumentError: another order, or a matrix has no singular values.

    Example:
        >>> tg.linalg.cond([[4, 0], [0, 2]]).round(6).item()
        2.0
    """
    x, dtype = _floats(*takes.cond(x))
    if not x.shape[-1] * x.shape[-2]:
        raise ShapeError(f"cond: x has shape {x.shape}, expected elements in the matrices")
    if not isinstance(p, (str, int, float, type(None))):
        raise _not_an_order("cond", "p", p)
    with np.errstate(all="ignore"):  # singular matrices divide by 0
        y = _cond(x, p)
    of_numbers = ~isnan(x.detach()).data.any((-2, -1))
    return _rounded(where(isnan(y).data & of_numbers, math.inf, y), dtype)


def _cond(x: Tensor, p: Order) -> Tensor:
    """Return `cond`, NaN for some singular matrices."""
    if p is None or p in (2, -2):
        values = svdvals(x)
        return values[..., -1] / values[..., 0] if p == -2 else values[..., 0] / values[..., -1]
    if x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"cond: x has shape {x.shape}, expected (..., N, N) for p {p!r}")
    singular = slogdet(x.detach()).sign.data == 0
    eye = namespace(x.data).eye(x.shape[-1], dtype=x.dtype)
    regular = where(singular[..., None, None], eye, x)
    return where(singular, math.nan, matrix_norm(x, ord=p) * matrix_norm(inv(regular), ord=p))


def matrix_power(x: Shaped[ArrayLike, "... N N"], n: int) -> Tensor:
    """Return square matrices multiplied by themselves n times; negative n: their inverses.

    Args:
        x: (..., N, N).
        n: an integer; 0 gives the identity.

    Returns:
        (..., N, N), in the dtype of x; for negative n of integers float64.

    Raises:
        ShapeError: x is not (..., N, N).

    Example:
        >>> tg.linalg.matrix_power([[1, 1], [0, 1]], 3).tolist()
        [[1, 3], [0, 1]]
    """
    (x,) = takes.matrix_power(x, n)
    base: Tensor | None = x if n >= 0 else inv(x)
    power, n = None, -n if n < 0 else n
    while n:
        if n % 2:
            power = base if power is None or base is None else matmul(power, base)
        n //= 2
        base = matmul(base, base) if n and base is not None else None
    if power is None:
        xp = namespace(x.data)
        eye = xp.eye(x.shape[-1], dtype=x.dtype)
        return Tensor(xp.broadcast_to(eye, x.shape).copy())
    return power


def multi_dot(matrices: Any) -> Tensor:
    """Return the product of matrices, from left to right; the first and last may be vectors.

    Args:
        matrices: two or more, (M, K), (K, L), ...

    Returns:
        (M, N), without M where the first is a vector, without N where the last is one.

    Raises:
        ArgumentError: there is one matrix.
        ShapeError: they do not fit.

    Example:
        >>> tg.linalg.multi_dot([[1, 2], [[1, 0], [0, 3]], [1, 1]]).item()
        7
    """
    y, *others = tensors_of("multi_dot", matrices)
    if not others:
        raise ArgumentError("multi_dot: got 1 matrix, expected two or more")
    for other in others:
        y = matmul(y, other)
    return y


def vector_norm(
    x: ArrayLike, *, axis: Axis = None, keepdims: bool = False, ord: float = 2, **unknown: Never
) -> Tensor:
    """Return sum(|x|^ord)^(1/ord), max(|x|) for inf, min(|x|) for -inf, the nonzeros for 0.

    The gradient at 0 is 0.

    Args:
        x: any shape.
        axis: the axes to reduce; None for all.
        keepdims: whether the reduced axes stay with length 1.
        ord: the order, a number.

    Returns:
        The shape of x without the reduced axes, in its dtype; float64 for integers.

    Raises:
        ArgumentError: the order is not a number.

    Example:
        >>> tg.linalg.vector_norm([3, -4]).item(), tg.linalg.vector_norm([3, -4], ord=1).item()
        (5.0, 7.0)
    """
    (x,) = takes.vector_norm(x, keepdims, ord, unknown)
    x = _magnitudes(x)
    if ord in (1, 2, math.inf):
        return _norm(x, axis, ord=ord, keepdims=keepdims)
    x, dtype = _floats(x)
    if ord == -math.inf:
        y = min(abs(x), axis, keepdims=keepdims)
    elif ord == 0:
        y = sum(not_equal(x, 0), axis, keepdims=keepdims)
    else:
        y = _root(sum(_powers(abs(x), float(ord)), axis, keepdims=keepdims), float(ord))
    return _rounded(y, dtype)


def _powers(x: Tensor, order: float) -> Tensor:
    """Return x^order of magnitudes, whose gradient at 0 is 0."""
    zero = x.data == 0
    return where(zero, 0.0 if order > 0 else math.inf, where(zero, 1.0, x) ** order)


def _root(x: Tensor, order: float) -> Tensor:
    """Return x^(1 / order) of sums, whose gradient at 0 and infinity is 0."""
    zero, infinite = x.data == 0, namespace(x.data).isinf(x.data)
    ends = where(zero, *((0.0, math.inf) if order > 0 else (math.inf, 0.0)))
    return where(zero | infinite, ends, where(zero | infinite, 1.0, x) ** (1 / order))


def matrix_norm(
    x: Shaped[ArrayLike, "... M N"], *, keepdims: bool = False, ord: Order = "fro", **unknown: Never
) -> Tensor:
    """Return the norms of matrices.

    Args:
        x: (..., M, N).
        keepdims: whether the last two axes stay with length 1.
        ord: "fro" (the root of the sum of squares), "nuc" (the sum of the singular values), 2 or
            -2 (the largest or smallest of them), 1 or -1 (the largest or smallest sum of |x| over
            a column), inf or -inf (over a row).

    Returns:
        (...,), in the dtype of x; float64 for integers.

    Raises:
        ShapeError: x is not (..., M, N).
        ArgumentError: another order.

    Example:
        >>> tg.linalg.matrix_norm([[3, 0], [0, 4]]).item()
        5.0
    """
    x, dtype = _floats(*takes.matrix_norm(x, keepdims, unknown))
    y: Tensor
    if not isinstance(ord, (str, int, float, type(None))):
        raise _not_an_order("norm", "ord", ord)
    if ord in ("fro", None):
        y = _norm(_magnitudes(x), (-2, -1), keepdims=keepdims)
    elif ord in ("nuc", 2, -2):
        function: Any = {"nuc": sum, 2: _largest, -2: min}[ord]
        y = function(svdvals(x), -1)
        y = reshape(y, (*y.shape, 1, 1)) if keepdims else y
    elif ord in (1, -1, math.inf, -math.inf):
        axis = -2 if ord in (1, -1) else -1
        choose: Any = _largest if float(ord) > 0 else min
        totals = sum(abs(x), axis, keepdims=True)
        y = choose(totals, (-2, -1), keepdims=keepdims)
    else:
        raise _not_an_order("norm", "ord", ord)
    return _rounded(y, dtype)


def _not_an_order(op: str, name: str, value: Any) -> ArgumentError:
    expected = "expected 'fro', 'nuc', 1, -1, 2, -2, inf or -inf for matrices"
    return ArgumentError(f"{op}: {name} is {value!r:.80}, {expected}")


def _largest(x: Tensor, axis: int | tuple[int, ...], keepdims: bool = False) -> Tensor:
    """Return the largest of the norms along the axes, 0 where there are none."""
    return max(x, axis, keepdims=keepdims) if x.size else sum(x, axis, keepdims=keepdims)


def norm(
    x: ArrayLike, ord: Order = None, axis: Axis = None, keepdims: bool = False, **unknown: Never
) -> Tensor:
    """Return the norm of vectors, or of matrices where `axis` names two axes, as in NumPy.

    Args:
        x: any shape; with `ord` and without `axis` one or two axes.
        ord: see `vector_norm` and `matrix_norm`; None is the root of the sum of squares.
        axis: one axis, two, or None.
        keepdims: whether the reduced axes stay with length 1.

    Returns:
        The shape of x without the reduced axes, in its dtype; float64 for integers.

    Raises:
        ArgumentError: there is no such order, or more than two axes.

    Example:
        >>> tg.linalg.norm([[3, 4], [6, 8]], axis=1).tolist()
        [5.0, 10.0]
    """
    (x,) = takes.norm(x, keepdims, unknown)
    if ord is None:
        return vector_norm(x, axis=axis, keepdims=keepdims)
    axes = axis_tuple("norm", tuple(axis) if isinstance(axis, list) else axis, x.ndim)
    if len(axes) == 1:
        if isinstance(ord, str):
            raise ArgumentError(f"norm: ord is {ord!r:.80}, expected a number for vectors")
        return vector_norm(x, axis=axes, keepdims=keepdims, ord=ord)
    if len(axes) != 2:
        raise ArgumentError(f"norm: axis is {axis} for x of {x.ndim} axes, expected one or two")
    y = matrix_norm(moveaxis(x, axes, (-2, -1)), ord=ord)
    return reshape(y, [1 if i in axes else n for i, n in enumerate(x.shape)]) if keepdims else y


def _floats(x: Tensor) -> tuple[Tensor, Any]:
    """Return x in float32, float64 or a complex dtype, and the dtype of the result."""
    dtype = x.dtype if is_float(x.dtype) or is_complex(x.dtype) else float64
    return astype(x, compute_dtype(dtype), copy=False), dtype


def _rounded(y: Tensor, dtype: Any) -> Tensor:
    """Return a result as `dtype`; one of complex numbers, which may be real, as it is."""
    return y if is_complex(dtype) else astype(y, dtype, copy=False)


def _matrices(op: str, x: Any) -> tuple[Tensor, Any]:
    """Do as `_floats`, for two axes or more."""
    x, dtype = _floats(tensor_of(op, "x", x))
    if x.ndim < 2:
        raise ShapeError(f"{op}: x has shape {x.shape}, expected (..., M, N)")
    return x, dtype


def _magnitudes(x: Tensor) -> Tensor:
    """Return |x| of complex numbers, real ones as they are."""
    return abs(x) if is_complex(x.dtype) else x


def _factors(op: str, x: Tensor, dtype: Any, backward: Any, *options: Any) -> list[Tensor]:
    """Return the factors of a decomposition, which its gradient needs too."""
    factors = tuple(_computed(op, getattr(namespace(x.data).linalg, op), x.data, *options))
    return [_rounded(factor, dtype) for factor in record(op, factors, (x,), backward, factors)]


def _computed(op: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function that may find the first matrix unfit."""
    try:
        return function(*arguments)
    except np.linalg.LinAlgError as error:
        raise ArgumentError(f"{op}: the matrix is unfit: {error}") from error


def _transposed(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _reciprocal_differences(values: Array) -> Array:
    """Return 1 / (values[j] - values[i]) at [i, j], 0 on the diagonal."""
    difference = values[..., None, :] - values[..., None]
    same = namespace(values).eye(values.shape[-1], dtype=values.dtype)
    return (1 - same) / (difference + same)


if not TYPE_CHECKING:  # to a type checker every name would exist

    def __getattr__(name: str) -> Any:
        raise _missing(__name__, name)
