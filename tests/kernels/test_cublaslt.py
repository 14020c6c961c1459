"""Which of cuBLASLt's proposals a product takes, and what it computes then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tensorgrad.core import backend
from tensorgrad.dtypes import as_dtype, bfloat16, float32
from tensorgrad.kernels import cublaslt
from tensorgrad.kernels import matmul as matmul_cuda
from tensorgrad.kernels.cublaslt import CublasProduct, Matrix
from tensorgrad.kernels.device import capability
from tensorgrad.kernels.fp8 import float8_e4m3, float8_e5m2
from tensorgrad.kernels.matmul import cublas
from tensorgrad.kernels.matmul.problem import problem
from tests.kernels.test_matmul import assert_close, draw, exact, stored

# 192 x 192, 256 x 128, 176 x 128, 128 x 160, 128 x 128, 192 x 128, as cuBLASLt numbers them
TILES = [209, 24, 201, 29, 20, 31]
PROCESSORS = 132


def described(
    terms: int, layout: str, dtype: Any = bfloat16, gelu: str = "", columns: int = 2304
) -> CublasProduct:
    """Return a product of 4096 rows; layout "nt" is that of x W^T."""
    left, right = layout[0], layout[1]  # cuBLASLt's a is our b
    b = Matrix(bfloat16, *((terms, columns) if right == "t" else (columns, terms)), terms, 1, 0)
    a = Matrix(bfloat16, *((4096, terms) if left == "t" else (terms, 4096)), terms, 1, 0)
    d = Matrix(dtype, columns, 4096, columns, 1, 0)
    return CublasProduct(b, a, d, right == "t", left == "t", 256, None, gelu)


def preferred(product: CublasProduct, tiles: Sequence[int], processors: int = PROCESSORS) -> int:
    """Return the tile of what is taken."""
    return tiles[cublaslt.preferred(product, tiles, processors)]


@pytest.mark.parametrize(
    ("layout", "dtype", "most"),
    [("nt", bfloat16, 2048), ("nn", bfloat16, 1024), ("tn", bfloat16, 1024), ("tn", float32, 4096)],
)
def test_short_sums_take_small_tiles(layout: str, dtype: Any, most: int) -> None:
    product = described(most, layout, dtype)
    assert preferred(product, TILES) == 20
    assert preferred(product, TILES[:4]) == 29
    assert preferred(product, TILES[:3]) == 201
    assert preferred(product, TILES[:2]) == 24
    assert preferred(product, [209, 31]) == 209
    assert preferred(described(most + 8, layout, dtype), TILES) == 209
    assert preferred(described(most, layout, dtype, "gelu"), TILES) == 209


def test_short_sums_of_8_bits_take_small_tiles() -> None:
    def narrow(terms: int) -> CublasProduct:
        product = described(terms, "nt")
        return product._replace(
            a=product.a._replace(dtype=float8_e4m3), b=product.b._replace(dtype=float8_e5m2)
        )

    assert preferred(narrow(1024), TILES) == 29
    assert preferred(narrow(1040), TILES) == 209
    assert preferred(narrow(768), [209, 20]) == 20
    with_bias = narrow(768)._replace(bias=bfloat16)
    assert preferred(with_bias, TILES) == 20
    assert preferred(with_bias, [209, 29]) == 209


def test_longer_sums_take_narrow_tiles_where_they_divide_the_work_better() -> None:
    # 1600 columns and 4096 rows: 9 x 22 tiles of 192 x 192 or 5 x 64 of 320 x 64. The busiest of
    # 132 SMs computes 2 x 36,864 or 3 x 20,480 elements.
    product = described(6400, "nn", columns=1600)
    assert preferred(product, [209, 20, 247]) == 247
    assert preferred(product, [209, 20]) == 209
    assert preferred(product, [20, 209, 247]) == 20
    assert preferred(described(6400, "nn", gelu="gelu", columns=1600), [209, 20, 247]) == 209
    # 2304 columns: 12 x 22 or 8 x 64 tiles, 2 x 36,864 or 4 x 20,480 elements.
    assert preferred(described(6400, "nn"), [209, 247]) == 209
    # On 64 SMs: 5 x 36,864 or 8 x 20,480.
    assert preferred(described(6400, "nn"), [209, 247], 64) == 247


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(4224, 520, 1160), (4201, 333, 1151)])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_short_sums_and_many_tiles(
    dtype: str, layout: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    choose = cublaslt.preferred

    def noted(product: CublasProduct, tiles: Sequence[int], processors: int) -> int:
        asked.append(len(tiles))
        return choose(product, tiles, processors)

    monkeypatch.setattr(cublaslt, "preferred", noted)
    cublas._plan.cache_clear()
    rows, terms, columns = sizes
    rng = np.random.default_rng()
    (a, a_gpu), (b, b_gpu) = draw(rng, (rows, terms), dtype), draw(rng, (terms, columns), dtype)
    bias, bias_gpu = draw(rng, (columns,), dtype)
    a_gpu, b_gpu = stored(a_gpu, layout[0]), stored(b_gpu, layout[1])
    for out in (as_dtype(dtype), np.dtype(np.float32)):
        y = backend.cupy.full((rows, columns), np.nan, out)
        matmul_cuda.run(problem(a_gpu, b_gpu, y), "cublas")
        assert_close(y, a, b, "cublas", dtype)
    assert len(asked) == (2 if capability(0) == 90 else 0)

    product = exact(a, b)[0]
    y = backend.cupy.full((rows, columns), np.nan, a.dtype)
    matmul_cuda.run(problem(a_gpu, b_gpu, y, bias=bias_gpu), "cublas")
    np.testing.assert_allclose(y.get().astype(float), product + bias, rtol=0.01, atol=0.02)
    total = backend.cupy.full((rows, columns), 1000, "float32")
    matmul_cuda.run(problem(a_gpu, b_gpu, total, add=True), "cublas")
    np.testing.assert_allclose(total.get() - 1000.0, product, rtol=0, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_every_proposal_computes_the_product(layout: str) -> None:
    rng = np.random.default_rng()
    (a, a_gpu), (b, b_gpu) = (
        draw(rng, (4096, 1104), "bfloat16"),
        draw(rng, (1104, 1600), "bfloat16"),
    )
    a_gpu, b_gpu = stored(a_gpu, layout[0]), stored(b_gpu, layout[1])
    y = backend.cupy.empty((4096, 1600), bfloat16)
    p = problem(a_gpu, b_gpu, y)
    found = cublaslt.proposals(cublas.described(p), 0)
    assert len({each.tile for each in found}) > 1
    product = exact(a, b)[0]
    for each in found:
        y.fill(np.nan)
        cublas.run(each.plan, p)
        np.testing.assert_allclose(y.get().astype(float), product, rtol=0.01, atol=0.02)
