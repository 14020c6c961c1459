from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, dtypes
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError
from tensorgrad.optim import FlatParameters, clip_grad_norm, grad_norm
from tensorgrad.optim.clip import clip_factor, sum_of_squares
from tests.optim import toy


def flat_with_gradients(device: str, dtype: Any = np.float32) -> FlatParameters:
    tensors = toy.parameters(dtype, device)
    flat = FlatParameters(tensors.items())
    toy.set_gradients(tensors, 0)
    return flat


@pytest.mark.parametrize("length", [0, 1, 31, 64, 4095, 4096, 4097, 100_001])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sum_of_squares(length: int, dtype: Any, device: str) -> None:
    array = np.random.default_rng(length).standard_normal(length).astype(dtype)
    on_device = backend.to_device(array, device)
    found = sum_of_squares(on_device)
    assert (found.shape, found.dtype) == ((), np.float64)
    exact = math.fsum(array.astype(np.float64) ** 2)
    assert float(found) == pytest.approx(exact, rel=3e-6 if dtype == np.float32 else 1e-13)
    assert toy.same_bits([found], [sum_of_squares(on_device)])


def test_the_sum_is_accurate_where_float32_would_not_be(device: str) -> None:
    array = np.full(20_000_000, 1e-3, np.float32)
    found = float(sum_of_squares(backend.to_device(array, device)))
    assert found == pytest.approx(20_000_000 * float(np.float32(1e-3)) ** 2, rel=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e25])
def test_squares_that_float32_does_not_hold_count(size: float, device: str) -> None:
    array = np.full(5000, size, np.float32)
    found = float(sum_of_squares(backend.to_device(array, device)))
    assert found == pytest.approx(5000 * float(np.float32(size)) ** 2, rel=1e-12, abs=0)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.random.default_rng(0).standard_normal(1_000_003).astype(np.float32)
    expected = sum_of_squares(array)
    monkeypatch.setattr(backend, "threads", lambda: threads)
    assert toy.same_bits([sum_of_squares(array)], [expected])


def test_the_norm_is_that_of_all_gradients(device: str) -> None:
    flat = flat_with_gradients(device)
    expected = math.sqrt(sum(float((g**2).sum()) for g in toy.gradients().values()))
    assert float(grad_norm(flat)) == pytest.approx(expected, rel=1e-6)


def test_squares_of_other_ranks_count(device: str) -> None:
    def add(squares: Any) -> None:
        assert squares.shape == ()
        squares += 16

    tensor = Tensor(backend.to_device(np.zeros(1), device))
    tensor.grad = backend.to_device(np.full(1, 3.0), device)
    assert float(grad_norm([tensor], add)) == 5
    assert float(clip_grad_norm([tensor], 1.0, reduce_norm=add)) == 5
    np.testing.assert_allclose(backend.to_numpy(tensor.grad), 3 / (5 + 1e-6), rtol=1e-12)
    assert float(grad_norm([], add)) == 4


@pytest.mark.parametrize(
    ("squares", "limit", "scale", "norm", "factor"),
    [
        (25.0, 1.0, None, 5, 1 / (5 + 1e-6)),
        (25.0, 5.0, None, 5, 5 / (5 + 1e-6)),
        (25.0, 6.0, None, 5, 1),
        (25.0, 1.0, 2.0, 2.5, 1 / (2.5 + 1e-6) / 2),
        (25.0, math.inf, 4.0, 1.25, 0.25),
        (0.0, 1.0, None, 0, 1),
        (math.inf, 1.0, None, math.inf, 0),
        (-1.0, 1.0, None, math.nan, 0),
        (math.nan, 1.0, 2.0, math.nan, 0),
    ],
)
def test_the_factor_by_its_formula(
    squares: float, limit: float, scale: float | None, norm: float, factor: float
) -> None:
    found = clip_factor(np.asarray(squares), limit, None if scale is None else np.asarray(scale))
    assert [float(each) for each in found] == pytest.approx([norm, factor], rel=1e-15, nan_ok=True)
    assert all(each.shape == () and each.dtype == np.float64 for each in found)


@pytest.mark.parametrize("limit", [0.25, 3.0])
def test_clipping_scales_all_gradients_alike(limit: float, device: str) -> None:
    flat = flat_with_gradients(device)
    before = backend.to_numpy(flat.grad).copy()
    norm = clip_grad_norm(flat, limit)
    assert not isinstance(norm, float)
    assert backend.device_of(norm) == device
    scaled = before * limit / (float(norm) + 1e-6)
    np.testing.assert_allclose(backend.to_numpy(flat.grad), scaled, rtol=1e-6)
    assert float(grad_norm(flat)) == pytest.approx(limit, rel=1e-5)


def test_gradients_of_tensors_are_clipped_as_those_of_flat_parameters(device: str) -> None:
    flat, tensors = flat_with_gradients(device), toy.parameters(np.float32, device)
    for name, tensor in tensors.items():  # in Fortran order, as a gradient of x.T may be
        tensor.grad = flat.parameters[name].grad.T.copy().T  # type: ignore[union-attr]
    frozen = Tensor(backend.to_device(np.ones(3, np.float32), device))  # has no gradient
    norm = clip_grad_norm(iter([*tensors.values(), frozen]), 0.25)
    assert float(norm) == pytest.approx(float(clip_grad_norm(flat, 0.25)), rel=1e-6)
    for name, tensor in tensors.items():
        expected = backend.to_numpy(flat.parameters[name].grad)
        np.testing.assert_allclose(backend.to_numpy(tensor.grad), expected, rtol=1e-6)
    assert float(grad_norm([frozen])) == 0


@pytest.mark.parametrize("dtype", [np.float16, dtypes.bfloat16], ids=str)
def test_16_bit_gradients_are_rounded_once(dtype: Any, device: str) -> None:
    before = np.random.default_rng(0).standard_normal(10_001).astype(dtype)
    tensor = Tensor(backend.to_device(np.zeros(10_001, dtype), device))
    tensor.grad = backend.to_device(before.copy(), device)
    norm = float(clip_grad_norm([tensor], 3.0))
    assert norm == pytest.approx(float(np.linalg.norm(before.astype("float64"))), rel=1e-6)
    scaled = before.astype("float32") * np.float32(3.0 / (norm + 1e-6))
    np.testing.assert_array_equal(backend.to_numpy(tensor.grad), scaled.astype(dtype))


@pytest.mark.parametrize("bad", [None, np.inf, np.nan])
def test_gradients_within_the_limit_or_not_finite_stay(bad: float | None, device: str) -> None:
    flat = flat_with_gradients(device)
    if bad is not None:
        flat.grad[3] = bad
    before = flat.grad.copy()
    norm = float(clip_grad_norm(flat, 1e6 if bad is None else 1.0))
    assert math.isfinite(norm) == (bad is None)
    assert toy.same_bits([before], [flat.grad])


def test_zero_gradients(device: str) -> None:
    flat = FlatParameters(toy.parameters(device=device).items())
    assert float(clip_grad_norm(flat, 1.0)) == 0
    assert not backend.to_numpy(flat.grad).any()


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, "x", None])
def test_a_wrong_limit_is_refused(limit: Any) -> None:
    with pytest.raises(ArgumentError, match="clip_grad_norm: max_norm is"):
        clip_grad_norm(flat_with_gradients("cpu"), limit)
