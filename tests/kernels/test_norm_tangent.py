"""Kernels of the tangent of a norm against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, backend
from tensorgrad.core.dtypes import as_dtype
from tensorgrad.ops.norm import add_layer_norm, layer_norm, rms_norm
from tests.derivatives import tangent_and_products

pytestmark = pytest.mark.gpu
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 4e-3, "bfloat16": 4e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(5, 768), (2, 3, 37), (3, 1), (1, 4100), (40, 1024), (0, 8)])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_layer_norm"])
def test_tangents_and_their_gradients_are_numpys(
    op: str, shape: tuple[int, ...], dtype: str
) -> None:
    rng = np.random.default_rng(0)
    width = shape[-1:]
    shapes: list[tuple[int, ...]] = [shape, width, width]
    functions: dict[str, Any] = {
        "layer_norm": layer_norm,
        "rms_norm": lambda x, w, b: rms_norm(x, w) + b,
        "add_layer_norm": lambda x, w, b: add_layer_norm(x, 2 * x, w, b)[1],
    }
    kind = as_dtype(dtype)
    arrays = [rng.standard_normal(s) for s in shapes]
    arrays = [(x + np.copysign(0.5, x)).astype(kind) for x in arrays]  # rows of 1 are not near 0
    tangents = [rng.standard_normal(s).astype(kind) for s in shapes]
    g = rng.standard_normal(shape).astype(kind)
    exact = tangent_and_products(functions[op], *_on("cpu", "float64", arrays, tangents, g))
    found = tangent_and_products(functions[op], *_on("cuda", dtype, arrays, tangents, g))
    for mine, right in zip(found, exact, strict=True):
        scale = np.abs(right).max(initial=1.0)
        values = backend.to_numpy(mine).astype("float64")
        np.testing.assert_allclose(values, right, rtol=0, atol=TOLERANCES[dtype] * scale)


def _on(device: str, dtype: str, *values: Any) -> list[Any]:
    """Return arrays, or lists of them, on a device in a dtype."""
    kind = as_dtype(dtype)
    return [
        _on(device, dtype, *value)
        if isinstance(value, list)
        else Tensor(backend.to_device(value.astype(kind), device))
        for value in values
    ]
