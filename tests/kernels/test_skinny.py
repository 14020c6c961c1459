"""Products of few rows against float64, and when the ops take their kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, no_grad
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16
from tensorgrad.kernels import matmul as matmul_cuda
from tensorgrad.kernels import overlap
from tensorgrad.kernels.matmul import skinny
from tensorgrad.kernels.matmul.problem import problem
from tests.gpu_array import on_gpu
from tests.kernels.hopper import hopper

EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def draw(rng: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    """Return random numbers in float64, and the same on the GPU."""
    values = rng.standard_normal(shape).astype(dtype)
    return values.astype(np.float64), backend.to_device(values, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 40, 2101, 4243])
@pytest.mark.parametrize("width", [1, 72, 520, 768, 1096, 1600, 2056, 6400])
def test_products_and_epilogues(width: int, columns: int, dtype: Any) -> None:
    rng = np.random.default_rng(width * columns)
    for rows in (1, 7, 8, 9, 16, 17, 32):
        x, x_gpu = draw(rng, (rows, width), dtype)
        weight, weight_gpu = draw(rng, (columns, width), dtype)
        bias, bias_gpu = draw(rng, (columns,), dtype)
        other, other_gpu = draw(rng, (rows, columns), dtype)
        total = x @ weight.T
        inside = EPSILON["float32"] * (4 + 2 * width**0.5) * (np.abs(x) @ np.abs(weight).T + 1)
        silu = other / (1 + np.exp(-other))
        tanh = np.tanh((2 / np.pi) ** 0.5 * ((total + bias) + 0.044715 * (total + bias) ** 3))
        gelu = 0.5 * (total + bias) * (1 + tanh)
        for expected, options in (
            (total, {}),
            (total + bias + other, {"bias": bias_gpu, "residual": other_gpu}),
            (gelu, {"bias": bias_gpu, "gelu": True}),
            ((total + bias) * silu, {"bias": bias_gpu, "gate": other_gpu}),
        ):
            scale = np.maximum(1, np.abs(silu)) if "gate" in options else 2
            for wide in (False, True):
                found = []
                for _ in range(2):
                    y = backend.cupy.full((rows, columns), np.nan, "float32" if wide else dtype)
                    p = problem(x_gpu, weight_gpu.T, y, **options)
                    assert matmul_cuda.run_skinny(p)
                    found.append(backend.to_numpy(y))
                assert found[0].tobytes() == found[1].tobytes()
                stored = EPSILON[str(y.dtype)]
                bound = 1.01 * stored * np.abs(expected) + scale * inside + 2.0**-25
                error = np.abs(found[0].astype(np.float64) - expected)
                worst = np.max(error / bound)
                assert worst <= 1, f"{rows} {options.keys()} {worst:.2f} times the bound"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", bfloat16], ids=str)
def test_ops_take_them_where_no_gradient_is_recorded(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x, up, down, bias, residual = (
        Tensor(backend.to_device((rng.standard_normal(shape) / 8).astype(dtype), "cuda"), True)
        for shape in ((2, 5, 64), (96, 64), (64, 96), (96,), (2, 5, 64))
    )
    taken: list[None] = []
    run = matmul_cuda.run_skinny

    def counted(p: Any) -> bool:
        taken.append(None)
        return run(p)

    monkeypatch.setattr(matmul_cuda, "run_skinny", counted)
    calls: list[tuple[int, Any]] = [
        (1, lambda: tg.linear(x, up, bias)),
        (1, lambda: tg.linear_gelu(x, up, bias)),
        (2, lambda: tg.feed_forward(x, up, bias, down, None, residual)),
        (2, lambda: tg.gated_linear(x, up, up, bias, bias)),
    ]
    for count, call in calls:
        with_gradient = call()
        with_gradient.sum().backward()
        assert not taken
        with no_grad():
            without = call()
        assert len(taken) == count
        taken.clear()
        np.testing.assert_allclose(
            without.numpy().astype("float64"),
            with_gradient.numpy().astype("float64"),
            atol=2e-2 if dtype == bfloat16 else 1e-5,
        )


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [9, 16, 31])
@pytest.mark.parametrize("dtype", ["float16", bfloat16], ids=str)
def test_clusters_with_any_split_and_number_of_stages(split: int, rows: int, dtype: Any) -> None:
    rng = np.random.default_rng(split)
    for width, columns in ((1096, 200), (520, 63), (2048, 64)):  # 18, 9 and 32 steps
        x, x_gpu = draw(rng, (rows, width), dtype)
        weight, weight_gpu = draw(rng, (columns, width), dtype)
        expected = x @ weight.T
        bound = EPSILON["float32"] * (4 + 2 * width**0.5) * (np.abs(x) @ np.abs(weight).T)
        found = []
        for stages in (2, 3, 16):
            y = backend.cupy.full((rows, columns), np.nan, "float32")
            p = problem(x_gpu, weight_gpu.T, y)
            for at_once in (False, True):
                tiling = skinny.ClusterTiling(split, stages)
                skinny.run(p, skinny.in_clusters(p, tiling, at_once))
                found.append(y.tobytes())
        assert len(set(found)) == 1, "depends on the stages"
        assert (np.abs(backend.to_numpy(y) - expected) <= bound).all()


@pytest.mark.parametrize(
    ("rows", "width", "columns", "kernel", "at_once"),
    [
        (1, 768, 3072, "matmul_skinny<__half, 8, 2, 8>", False),
        (1, 3072, 768, "matmul_skinny<__half, 8, 1, 16>", False),
        (1, 1600, 4800, "matmul_skinny_staged<__half, 8>", False),
        (1, 1600, 1600, "matmul_skinny<__half, 8, 2, 16>", True),
        (8, 1600, 6400, "matmul_skinny_staged<__half, 8>", False),
        (8, 6400, 1600, "matmul_skinny_staged<__half, 16>", True),
        (1, 2048, 2112, "matmul_skinny_staged<__half, 16>", True),
        # 132 of 133 blocks of 16 warps run at once.
        (1, 2048, 2128, "matmul_skinny<__half, 8, 2, 16>", False),
        (1, 1600, 50304, "matmul_skinny<__half, 8, 2, 8>", False),
        (9, 6400, 1600, "matmul_skinny_cluster<__half, 16, 8>", True),
        (32, 1600, 4800, "matmul_skinny_cluster<__half, 32, 4>", False),
        (32, 1600, 12800, "matmul_skinny_cluster<__half, 32, 2>", False),
        (17, 768, 50304, "matmul_skinny_tile<__half, 32>", False),
        (32, 768, 3072, "matmul_skinny<__half, 32, 2, 8>", False),
        (32, 96, 50304, "matmul_skinny_tile<__half, 32>", False),
        (32, 100_004, 40, "matmul_skinny_plain<__half>", False),
    ],
)
def test_which_kernel_takes_a_product_and_whether_it_starts_the_next_at_once(
    rows: int, width: int, columns: int, kernel: str, at_once: bool, monkeypatch: Any
) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(skinny, "capability", lambda device: 90)
    monkeypatch.setattr(skinny, "load", lambda file, kernel: kernel)
    monkeypatch.setattr(skinny, "map_memory", lambda *_: None)
    monkeypatch.setattr(
        overlap,
        "launch",
        lambda kernel, grid, block, arguments, shared, **options: launched.append(
            (kernel, options["trigger_early"], "plain" in kernel or arguments[-1])
        ),
    )
    x, w, y = (
        on_gpu(np.zeros(shape, np.float16))
        for shape in ((rows, width), (columns, width), (rows, columns))
    )
    skinny.multiply(problem(x, w.T, y))
    assert [each[:2] for each in launched] == [(kernel, at_once)]
    assert launched[0][2] == at_once or "plain" in kernel


@pytest.mark.parametrize("rows", [1, 32])
def test_gpus_other_than_hopper_take_the_kernel_that_runs_on_all(
    rows: int, monkeypatch: Any
) -> None:
    files: list[str] = []
    monkeypatch.setattr(skinny, "load", lambda file, kernel: files.append(file))
    monkeypatch.setattr(overlap, "launch", lambda *_, **__: None)
    x, w, y = (
        on_gpu(np.zeros(shape, np.float16)) for shape in ((rows, 1600), (4800, 1600), (rows, 4800))
    )
    for found in (80, 89, 100, 120):
        monkeypatch.setattr(skinny, "capability", lambda device, found=found: found)
        skinny.multiply(problem(x, w.T, y))
    assert files == 4 * ["matmul/skinny.cu"]


@pytest.mark.parametrize(
    ("rows", "width", "columns", "tiling"),
    [
        (32, 1600, 4800, (4, 5)),
        (32, 1600, 1600, (8, 4)),
        (32, 1600, 6400, (4, 3)),  # 400 blocks, four per SM
        (32, 6400, 1600, (8, 8)),
        (16, 6400, 1600, (8, 10)),
        (32, 1600, 50304, (1, 5)),
        (32, 320, 8192, (4, 2)),
        (32, 64, 50304, (1, 1)),
        (32, 1 << 20, 64, (8, 16)),
    ],
)
def test_tilings_of_clusters(rows: int, width: int, columns: int, tiling: Any) -> None:
    x, w, y = (
        on_gpu(np.zeros(shape, np.float16)) for shape in ((rows, 1), (columns, 1), (rows, columns))
    )
    p = problem(x, w.T, y)._replace(width=width)
    split, stages = found = skinny.cluster_tiling(p)
    assert found == tiling
    resident = min(4, -(-(-(-columns // 64) * split) // 132))
    assert stages == 1 or min(3, resident) * (skinny._cluster_bytes(rows, stages) + 1024) < 228e3


def test_what_they_do_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "capability", lambda device: 90)
    x, w = on_gpu(np.zeros((4, 8), np.float32)), on_gpu(np.zeros((6, 8), np.float32))
    y, tall = on_gpu(np.zeros((4, 6), np.float32)), on_gpu(np.zeros((33, 8), np.float32))
    wide = np.zeros(6)
    assert skinny.refusal(problem(x, w.T, y, bias=y[0], gelu=True, residual=y, gate=y)) is None
    for p, needs in (
        (problem(tall, w.T, on_gpu(np.zeros((33, 6), np.float32))), "at most 32 rows"),
        (problem(x, w[:, ::2].T, y[:, :3]), "b in Fortran order"),
        (problem(x[:, ::2], w[:, :4].copy().T, y), "a in C order"),
        (problem(x, w.T, y, bias=wide), "a bias, gate and residual of the dtype"),
        (problem(x, w.T, y, add=True), "no epilogue but bias"),
        (problem(x, w.T, y, before_gelu=y), "no epilogue but bias"),
        (problem(x.astype("float64"), w.astype("float64").T, y), "float32, float16 or bfloat16"),
    ):
        assert needs in str(skinny.refusal(p))
