"""A symmetric linear operator on flat vectors, such as a Hessian. Tests: tests/curvature/."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_function, check_integer
from tensorgrad.core.dtypes import DtypeLike, as_dtype, float32, float64
from tensorgrad.core.errors import ArgumentError, DtypeError, ShapeError

__all__ = ["Operator"]

_CHUNK = 1 << 18  # elements of a vector whose products are added in its dtype

Values = NDArray[np.float64]
Progress = Callable[[str, int, int], object]  # (unit, number done, total or 0)


class Operator:
    """A symmetric linear operator: a function that multiplies a vector, and the vector's size.

    Args:
        apply: takes an array (N,) and returns the product, of the same shape, dtype and device. It
            must not change its argument.
        size: N, 1 or more.
        dtype: float32 or float64.
        device: "cpu", "cuda" or "cuda:N".

    Attributes:
        products: how often `apply` was called.

    Raises:
        ArgumentError: apply is not a function, or size is below 1.
        DtypeError: dtype is neither float32 nor float64.

    Example:
        >>> from tensorgrad.curvature import Operator
        >>> operator = Operator(lambda v: 3 * v, size=2)
        >>> operator(np.ones(2, "float32")), operator.products
        (array([3., 3.], dtype=float32), 1)
    """

    def __init__(
        self,
        apply: Callable[[Any], Any],
        size: int,
        dtype: DtypeLike = float32,
        device: str = "cpu",
    ) -> None:
        check_function("Operator", apply, name="apply")
        check_integer("Operator", "size", size, 1)
        self.dtype = as_dtype(dtype)
        if self.dtype not in (float32, float64):
            raise DtypeError(f"Operator: dtype is {self.dtype}, expected float32 or float64")
        self.size, self.device, self.products = int(size), device, 0
        self.namespace: Any = backend.namespace_on(device)
        self._apply = apply

    def __call__(self, v: Array) -> Array:
        """Return the product with a vector, (N,).

        Raises:
            DtypeError, ShapeError: `apply` returned something else than such an array.
            ArgumentError: the product is not finite.
        """
        self.products += 1
        with np.errstate(over="ignore", invalid="ignore"):  # an error below says so
            product = self._apply(v)
        if not isinstance(product, self.namespace.ndarray) or product.dtype != self.dtype:
            kind = getattr(product, "dtype", type(product).__name__)
            raise DtypeError(f"Operator: apply returned {kind}, expected an array of {self.dtype}")
        if product.shape != (self.size,):
            raise ShapeError(f"Operator: apply returned {product.shape}, expected ({self.size},)")
        if not bool(self.namespace.isfinite(product).all()):
            raise ArgumentError(
                f"Operator: product {self.products} has NaN or infinity, expected finite values"
            )
        return product


def chunked(v: Array) -> Array:
    """Return a copy of a vector as rows of equal length, with zeros after its end."""
    chunks = -(-v.size // _CHUNK)
    rows: Array = backend.namespace(v).zeros((chunks, -(-v.size // chunks)), v.dtype)
    rows.reshape(-1)[: v.size] = v
    return rows


def dots(blocks: Array, w: Array) -> Values:
    """Return the products of vectors with one, always added in the same order.

    Args:
        blocks: (chunks, vectors, elements).
        w: (chunks, elements), from `chunked`.
    """
    parts = [block @ part for block, part in zip(blocks, w, strict=True)]
    total: Values = backend.to_numpy(backend.namespace(w).stack(parts)).sum(0, dtype=np.float64)
    return total


def dot(v: Array, w: Array) -> float:
    """Return the product of two vectors from `chunked`."""
    return float(dots(v[:, None], w)[0])


def norm(w: Array) -> float:
    """Return the Euclidean norm of a vector from `chunked`."""
    return math.sqrt(dot(w, w))
