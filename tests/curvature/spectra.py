"""Symmetric matrices with known eigenvalues, as operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorgrad.curvature import Operator


def matrix_of(values: Sequence[float] | NDArray[Any], dtype: str = "float64") -> NDArray[Any]:
    """Return a symmetric matrix with these eigenvalues and random eigenvectors."""
    rng = np.random.default_rng(0)
    vectors, _ = np.linalg.qr(rng.standard_normal((len(values), len(values))))
    matrix = (vectors * np.asarray(values)) @ vectors.T
    symmetric: NDArray[Any] = ((matrix + matrix.T) / 2).astype(dtype)
    return symmetric


def operator_of(matrix: NDArray[Any]) -> Operator:
    return Operator(lambda v: matrix @ v, len(matrix), matrix.dtype)
