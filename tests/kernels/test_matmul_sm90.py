"""The matrix products of Hopper against float64: layouts, sizes, batches and what follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError
from tensorgrad.kernels import loader
from tensorgrad.kernels import matmul as matmul_cuda
from tensorgrad.kernels.device import sm_count
from tensorgrad.kernels.matmul import sm90 as matmul_sm90
from tensorgrad.kernels.matmul.problem import MatmulProblem, problem
from tensorgrad.kernels.matmul.sm90 import Tiling
from tensorgrad.kernels.special import gelu_tanh, gelu_tanh_derivative
from tensorgrad.testing import Ulps, assert_within
from tests.kernels.compiled import compile_all
from tests.kernels.hopper import IS_HOPPER, hopper

LAYOUTS = ["nt", "nn", "tn"]  # a (M, K) and b (K, N): in C ("n") or Fortran ("t") order
LARGE, SMALL = Tiling(256, 2, 0), Tiling(128, 1, 0)
SIZES = [(1, 8, 8), (8, 16, 8), (127, 64, 264), (129, 72, 128), (300, 200, 520), (513, 1000, 776)]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All instantiations, compiled on all cores at once."""
    if IS_HOPPER:
        file = "matmul/sm90.cu"
        compile_all([(file, kernel) for kernel in loader._read(file).kernels])


def draw(rng: Any, shape: tuple[int, ...], dtype: str, layout: str = "n") -> tuple[Any, Any]:
    """Return random numbers in float64, and the same on the GPU in an order of the last axes."""
    values = rng.standard_normal(shape).astype(tensorgrad.dtypes.as_dtype(dtype))
    stored = backend.cupy.asarray(values)
    if layout == "t":
        stored = stored.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    return values.astype("float64"), stored


def guarded(shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    """Return an array full of NaN, and the memory that it lies in the middle of."""
    size, edge = int(np.prod(shape)), 64
    room = backend.cupy.full(size + 2 * edge, np.nan, dtype)
    return room[edge : edge + size].reshape(shape), room


def assert_close(got: Any, expected: Any, terms: int) -> None:
    assert_within(backend.to_numpy(got), expected, Ulps(2, "row"), terms=terms)


def run(p: MatmulProblem, tiling: Tiling | None = None) -> Any:
    """Return y, computed twice for equal bits."""
    assert matmul_sm90.refusal(p) is None
    before = p.y.copy()
    matmul_sm90.multiply(p, tiling)
    first = p.y.copy()
    p.y[...] = before
    matmul_sm90.multiply(p, tiling)
    assert first.tobytes() == p.y.tobytes()
    return p.y


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("tiling", [LARGE, SMALL, None], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_layouts_and_sizes(dtype: str, layout: str, tiling: Tiling | None) -> None:
    rng = np.random.default_rng()
    for rows, width, columns in SIZES:
        if layout[0] == "t":
            rows = -(-rows // 8) * 8
        a, a_gpu = draw(rng, (rows, width), dtype, layout[0])
        b, b_gpu = draw(rng, (width, columns), dtype, layout[1])
        for out in (dtype, "float32"):
            y, room = guarded((rows, columns), tensorgrad.dtypes.as_dtype(out))
            assert_close(run(problem(a_gpu, b_gpu, y), tiling), a @ b, width)
            assert int(backend.cupy.isnan(room.astype("float32")).sum()) == 128, "wrote outside"
        y[...] = 3
        y = run(problem(a_gpu, b_gpu, y, add=True), tiling)
        assert_close(y, a @ b + 3, width)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("tiles", [(256, 2), (128, 1)])
@pytest.mark.parametrize(("rows", "width", "columns"), [(264, 8200, 520), (768, 30000, 768)])
def test_stream_k_of_long_sums(
    tiles: tuple[int, int], rows: int, width: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nan(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        return backend.cupy.full(shape, np.nan, dtype)

    monkeypatch.setattr(backend, "empty", nan)  # a part that nobody wrote would show
    rng = np.random.default_rng()
    a, a_gpu = draw(rng, (rows, width), "bfloat16", "t")
    b, b_gpu = draw(rng, (width, columns), "bfloat16")
    expected = a @ b
    clusters = sm_count(0) // tiles[1]
    count = -(-rows // (128 * tiles[1])) * -(-columns // tiles[0])
    least = -(-count * -(-width // 64) // clusters)
    for split_steps in (least, least + 3):
        for dtype in ("float32", "bfloat16"):
            y = backend.cupy.full(expected.shape, np.nan, tensorgrad.dtypes.as_dtype(dtype))
            p = problem(a_gpu, b_gpu, y)
            assert_close(run(p, Tiling(*tiles, split_steps)), expected, width)
        y = backend.cupy.full(expected.shape, 2, "float32")
        assert_close(
            run(problem(a_gpu, b_gpu, y, add=True), Tiling(*tiles, split_steps)),
            expected + 2,
            width,
        )


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches(layout: str) -> None:
    rng = np.random.default_rng()
    for left, right in [((5,), (5,)), ((2, 3), (2, 3)), ((4,), ()), ((), (4,)), ((1,), (3,))]:
        a, a_gpu = draw(rng, (*left, 136, 72), "bfloat16", layout[0])
        b, b_gpu = draw(rng, (*right, 72, 264), "bfloat16", layout[1])
        expected = a @ b
        y = backend.cupy.full(expected.shape, np.nan, b_gpu.dtype)
        assert_close(run(problem(a_gpu, b_gpu, y)), expected, 72)
        assert_close(run(problem(a_gpu, b_gpu, y), SMALL), expected, 72)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("tiling", [LARGE, SMALL], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_follows(dtype: str, tiling: Tiling) -> None:
    rng = np.random.default_rng()
    for rows, width, columns in [(1, 8, 8), (129, 72, 264), (1000, 136, 776), (200, 1032, 264)]:
        x, x_gpu = draw(rng, (rows, width), dtype)
        w, w_gpu = draw(rng, (width, columns), dtype, "t")
        residual, residual_gpu = draw(rng, (rows, columns), dtype)
        w_gpu *= w_gpu.dtype.type(0.25)  # exact, and in place: its order stays
        sums = x @ w / 4  # moderate numbers for GELU

        def new(like: Any = residual_gpu) -> Any:
            return backend.cupy.full_like(like, np.nan)

        for kind in (dtype, "float32"):
            bias, bias_gpu = draw(rng, (columns,), kind)
            p = problem(x_gpu, w_gpu, new(), bias=bias_gpu)
            assert_close(run(p, tiling), sums + bias, width)
            p = problem(x_gpu, w_gpu, new(), bias=bias_gpu, residual=residual_gpu)
            assert_close(run(p, tiling), sums + bias + residual, width)
            kept = matmul_sm90.derivative_for(rows, columns, x_gpu)
            p = problem(x_gpu, w_gpu, new(), bias=bias_gpu, derivative=kept)
            assert_close(run(p, tiling), gelu_tanh(sums + bias), width)
            rounded = (sums + bias).astype(dtype).astype("float64")
            found = backend.to_numpy(matmul_sm90.derivative_values(kept, rows, columns))
            # half a step, and one of the operand's last digits
            bound = 0.0026 + 1.2 * abs(rounded) * float(np.finfo(found.dtype).eps)
            bound = bound + abs(rounded) * 2.0 ** (-10 if dtype == "float16" else -7)
            assert (abs(found - gelu_tanh_derivative(rounded)) <= bound).all()
            p = problem(x_gpu, w_gpu, new(), bias=bias_gpu, gelu=True)
            assert_close(run(p, tiling), gelu_tanh(sums + bias), width)
            wide = backend.cupy.zeros((rows, columns), "float32")
            assert_close(
                run(problem(x_gpu, w_gpu, wide, bias=bias_gpu), tiling), sums + bias, width
            )
        assert_close(run(problem(x_gpu, w_gpu, new(), residual=residual_gpu), tiling),
                     sums + residual, width)  # fmt: skip
        v, v_gpu = draw(rng, (width, columns), dtype)
        kept[...] = backend.cupy.asarray(rng.integers(0, 256, kept.shape))
        scale = backend.to_numpy(matmul_sm90.derivative_values(kept, rows, columns))
        p = problem(x_gpu, v_gpu, new(), scale=kept)
        assert_close(run(p, tiling), x @ v * scale, width)
        column_sums = matmul_sm90.column_sums_for(p)
        column_sums.fill(np.nan)
        y = run(p._replace(column_sums=column_sums), tiling)
        assert_close(y, x @ v * scale, width)
        total = backend.to_numpy(column_sums).astype("float64").sum(0)
        expected = backend.to_numpy(y).astype("float64")
        np.testing.assert_allclose(total, expected.sum(0), 1e-6, 1e-6 * abs(expected).sum(0).max())


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("kernel", ["wgmma", "cublas", "tiled"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_slope_of_gelu_far_from_zero(dtype: str, kernel: str) -> None:
    """The gradient's launches by the tiled kernels and cuBLASLt; wgmma's where GELU is computed."""
    far = np.geomspace(12, 6e4, 60)
    near = np.linspace(-5, 5, 264 - 2 * len(far))
    values = np.random.default_rng(0).permutation(np.concatenate([far, -far, near]))
    pre = backend.cupy.asarray(np.tile(values, (130, 1)).astype(dtype))
    a, b = backend.cupy.zeros((130, 8), dtype), backend.cupy.ones((8, 264), dtype)
    a[:, 0] = 1
    found = backend.cupy.full_like(pre, np.nan)
    if kernel == "wgmma":  # pre is the product: a value a row, times 1
        a, w = (backend.cupy.zeros((264, 8), dtype) for _ in "aw")
        a[:, 0], w[:, 0] = pre[0], 1
        pre = backend.cupy.repeat(a[:, :1], 264, 1)
        found = matmul_sm90.derivative_for(264, 264, pre)
        p = problem(a, w.T, backend.cupy.empty_like(pre), derivative=found)
    else:
        p = problem(a, b, found, gelu_of=pre)
    if matmul_cuda.KERNELS[kernel].refusal(p) is not None:
        pytest.skip(f"{kernel} does not do this product")
    matmul_cuda.run(p, kernel)
    expected = gelu_tanh_derivative(backend.to_numpy(pre).astype("float64"))
    bound = 2.0**-9 if dtype == "float16" else 2.0**-6
    if kernel == "wgmma":
        found, bound = matmul_sm90.derivative_values(found, 264, 264), 0.0026
    np.testing.assert_allclose(backend.to_numpy(found).astype("float64"), expected, 0, bound)


@pytest.mark.gpu
@hopper
def test_what_is_refused() -> None:
    half = backend.cupy.zeros((64, 72), "float16")
    y = backend.cupy.zeros((64, 64), "float16")
    odd = backend.cupy.zeros((64, 65), "float16")[:, 1:]
    refused = {
        "float16 or bfloat16": problem(half.astype("float32"), half.T.astype("float32"), y),
        "read": problem(odd, odd.T, y),
        "results": problem(half, half.T[:, :63], y[:, :63].copy()),
        "to add to": problem(half, half.T, y, add=True),
        "derivative of GELU": problem(half, half.T, y, gelu_of=y),
        "gradient for a scale": problem(
            half, half.T, y, scale=matmul_sm90.derivative_for(64, 64, y)
        ),
    }
    for words, p in refused.items():
        with pytest.raises(ArgumentError, match=words):
            matmul_cuda.run(p, "wgmma")


def test_plans_keep_the_chip_busy() -> None:
    assert matmul_sm90.tiling_of(1, 32768, 768, 3072, 132, True) == LARGE
    assert matmul_sm90.tiling_of(1, 256, 768, 768, 132, False) == SMALL
    tiling = matmul_sm90.tiling_of(1, 768, 32768, 768, 132, True)
    assert 0 < tiling.split_steps < 32768 // 64
    for rows, terms, columns in [(768, 32768, 768), (1600, 16384, 1600), (8, 100000, 8)]:
        tiling = matmul_sm90.tiling_of(1, rows, terms, columns, 132, True)
        tiles = -(-rows // (128 * tiling.cluster)) * -(-columns // tiling.columns)
        assert tiling.split_steps == 0 or tiling.split_steps * (132 // tiling.cluster) >= tiles * -(
            -terms // 64
        )
