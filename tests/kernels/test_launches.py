"""The code that launches kernels, seen without a GPU: NumPy's arrays stand for CuPy's."""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16, float32
from tensorgrad.errors import ArgumentError, ShapeError
from tensorgrad.kernels import indexing as indexing_cuda
from tensorgrad.kernels import softmax as softmax_cuda
from tensorgrad.kernels.attention import short as attention_short
from tensorgrad.kernels.matmul.problem import problem
from tensorgrad.kernels.rotary import angles as _angles
from tensorgrad.ops.attention import attention_varlen
from tests.gpu_array import GpuArray, on_gpu

Launch = tuple[str, tuple[int, ...], tuple[Any, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return the launches to come, none of which happens: name, grid and arguments."""
    found: list[Launch] = []

    def load(file: str, kernel: str) -> Any:
        return lambda grid, block, arguments, shared=0: found.append((kernel, grid, arguments))

    namespace = SimpleNamespace(
        empty=lambda shape, dtype: on_gpu(np.empty(shape, dtype)),
        ascontiguousarray=lambda array: on_gpu(np.ascontiguousarray(array)),
        broadcast_to=lambda array, shape: np.broadcast_to(array, shape, subok=True),
    )
    monkeypatch.setattr(backend, "cupy", namespace)
    for module in (attention_short, indexing_cuda, softmax_cuda):
        monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(softmax_cuda, "by_value", lambda struct: struct)
    return found


@pytest.mark.parametrize("shape", [(3, 8), (3, 2100), (2, 2, 2, 2, 8)])
def test_a_mask_that_was_converted_lives_until_its_launch(
    shape: tuple[int, ...], launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    class Mask(GpuArray):
        def astype(self, *args: Any, **kwargs: Any) -> Any:
            copy = super().astype(*args, **kwargs)
            made.append(weakref.ref(copy))
            return copy

    def launch(*_: Any) -> None:
        gc.collect()
        assert made
        assert made[-1]() is not None

    monkeypatch.setattr(softmax_cuda, "_launch", launch)
    monkeypatch.setattr(softmax_cuda, "_held", lambda *_: None)
    mask = np.zeros(shape, np.float64).view(Mask)
    softmax_cuda.forward(on_gpu(np.zeros(shape, np.float32)), 1.0, mask, False, False)


@pytest.mark.parametrize("width", [2_097_121, 3_139_587, 12_000_000])
def test_wide_rows_are_added_in_launches_that_cuda_takes(
    width: int, launches: list[Launch]
) -> None:
    total, values = (on_gpu(np.empty((1, width), np.float32)) for _ in range(2))
    indexing_cuda.add_rows_cuda(total, on_gpu(np.zeros(1, np.int64)), values)
    windows = [launch for launch in launches if launch[0].startswith("add_rows")]
    assert all(grid[1] < 1 << 16 for _, grid, _ in windows)
    assert sum(arguments[-1] for _, _, arguments in windows) == 2 * width


def test_each_gpu_has_kernels_of_its_own(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_short, "load", lambda file, kernel: object())
    attention_short._kernel.cache_clear()
    kernels = [
        attention_short._kernel("attention_short", bfloat16, 32, 64, False, device)[0]
        for device in (0, 1, 0)
    ]
    attention_short._kernel.cache_clear()
    assert kernels[0] is kernels[2]
    assert kernels[0] is not kernels[1]


def test_matrices_in_reverse_order_are_copied() -> None:
    a, b = np.zeros((3, 4, 5), np.float32)[::-1], np.zeros((3, 5, 6), np.float32)
    described = problem(a, b, np.zeros((3, 4, 6), np.float32))
    assert (described.a.batch, described.b.batch) == (20, 30)


@pytest.mark.parametrize("shape", [(2, 3, 4, 0), (2, 3, 0, 8), (0, 3, 4, 8)])
def test_angles_of_nothing(shape: tuple[int, ...], launches: list[Launch]) -> None:
    x = np.zeros(shape, np.float32)
    cos = np.ones((*shape[:-1], shape[-1] // 2), np.float32)
    angles = _angles(cos, x, shape[2])
    assert angles.shape == (math.prod(shape[:2]), shape[2], shape[3] // 2)
    assert angles.dtype == float32


@pytest.mark.parametrize(
    ("starts", "longest", "error", "message"),
    [
        ([0, 3, 6], 0, ArgumentError, "max_length is 0, expected 1 or more"),
        ([0, 3, 6], 2.5, ArgumentError, "max_length is 2.5, expected"),
        ([0], 3, ShapeError, r"starts has shape \(1,\), expected \(sequences \+ 1,\)"),
    ],
)
def test_no_launch_of_packed_sequences_is_empty(
    starts: list[int], longest: Any, error: type[Exception], message: str, launches: list[Launch]
) -> None:
    q = Tensor(on_gpu(np.zeros((6, 2, 8), np.float32)))
    with pytest.raises(error, match=message):
        attention_varlen(q, q, q, on_gpu(np.array(starts)), max_length=longest)
