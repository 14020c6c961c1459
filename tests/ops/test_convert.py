"""Sums of gradients: the same bits as NumPy's, on either device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad import dtypes
from tensorgrad.core import backend
from tensorgrad.core.arrays import added

FLOATS = (dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (33, 129), (64, 512)])
def test_sums_have_the_bits_of_numpy(shape: Any, dtype: Any, wide: bool, device: str) -> None:
    other = dtypes.compute_dtype(dtype) if wide else dtype
    rng = np.random.default_rng(len(shape))
    x, z = (np.asarray(rng.standard_normal(shape)).astype(t) for t in (dtype, other))
    for target in (dtype, other):
        y = added(backend.to_device(x, device), backend.to_device(z, device), target)
        assert y.shape == shape
        assert y.dtype == target
        expected = x.astype(other) + z  # in the wider type
        np.testing.assert_array_equal(backend.to_numpy(y), np.asarray(expected, target))


def test_views_are_added_as_they_lie(device: str) -> None:
    x = np.random.default_rng(0).standard_normal((40, 64)).astype(dtypes.bfloat16)
    on_device = backend.to_device(x, device)
    for part in (np.s_[:, ::2], np.s_[1:, 1:33], np.s_[::-1, :32]):
        y = added(on_device[part], on_device[part], x.dtype)
        np.testing.assert_array_equal(backend.to_numpy(y), x[part] + x[part])
    np.testing.assert_array_equal(
        backend.to_numpy(added(on_device.T, on_device.T, x.dtype)), x.T + x.T
    )
