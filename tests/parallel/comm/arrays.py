"""Arrays that the ranks of a test send, and their comparison."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorgrad import dtypes
from tensorgrad.core import backend

Array = Any
Host = np.ndarray[Any, Any]
DTYPES = dtypes.ALL


def values(rank: int, shape: tuple[int, ...], dtype: Any) -> Host:
    """Small whole numbers, different on every rank, whose sums every dtype holds exactly."""
    numbers = np.random.default_rng(rank).integers(0, 2 if dtype == dtypes.bool_ else 8, shape)
    return np.asarray(numbers).astype(dtype)


def same(found: Array, expected: Host) -> None:
    """Compare bits, not values, so that NaN equals itself and -0 does not equal 0."""
    host = backend.to_numpy(found)
    assert (host.dtype, host.shape) == (expected.dtype, expected.shape)
    assert host.tobytes() == expected.tobytes(), (host, expected)
