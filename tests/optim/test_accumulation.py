"""Micro-batches whose losses are divided by their number give the gradient of the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, dtypes
from tensorgrad.core import backend
from tensorgrad.optim import AdamW
from tests.optim import toy

SHAPES = {"first": (16, 5), "bias": (16,), "second": (3, 16)}
BATCH = 24


def loss_of(tensors: dict[str, Tensor], x: Any, y: Any) -> Tensor:
    """Return the mean over the batch of the squared error of a small network."""
    hidden = tg.tanh(tg.linear(Tensor(x), tensors["first"], tensors["bias"]))
    error = tg.linear(hidden, tensors["second"]) - Tensor(y)
    return toy.total(error * error) * (1 / len(x))


def gradient(micro_batches: int, dtype: Any, device: str, exact: bool = False) -> Any:
    rng = np.random.default_rng(3)
    tensors = toy.parameters(dtype, device, shapes=SHAPES)
    optimizer = AdamW(tensors.items())
    x, y = rng.standard_normal((BATCH, 5)), rng.standard_normal((BATCH, 3))
    if exact:  # few bits, so that no sum is ever rounded
        x, y = np.round(x * 4) / 4, np.round(y * 4) / 4
        for tensor in tensors.values():
            tensor.data[...] = (tensor.data * 4).round() / 4
    size = BATCH // micro_batches
    for begin in range(0, BATCH, size):
        part = slice(begin, begin + size)
        inputs = [backend.to_device(a[part].astype(dtype), device) for a in (x, y)]
        if exact:
            hidden = tg.linear(Tensor(inputs[0]), tensors["first"], tensors["bias"])
            error = tg.linear(hidden, tensors["second"]) - Tensor(inputs[1])
            loss = toy.total(error * error)
        else:
            loss = loss_of(tensors, *inputs) * (1 / micro_batches)
        loss.backward()
    return backend.to_numpy(optimizer.flat.grad)


@pytest.mark.parametrize("micro_batches", [2, 3, 8, 24])
def test_float64_agrees_to_the_last_bits(micro_batches: int, device: str) -> None:
    whole = gradient(1, np.float64, device)
    parts = gradient(micro_batches, np.float64, device)
    np.testing.assert_allclose(parts, whole, rtol=1e-13, atol=1e-15 * np.abs(whole).max())


@pytest.mark.parametrize("micro_batches", [2, 3, 8, 24])
def test_where_no_sum_is_rounded_every_bit_is_equal(micro_batches: int, device: str) -> None:
    whole = gradient(1, np.float64, device, exact=True)
    assert np.abs(whole).max() > 10
    assert toy.same_bits([gradient(micro_batches, np.float64, device, exact=True)], [whole])


def test_16_bit_parameters_accumulate_in_float32(device: str) -> None:
    exact = gradient(1, np.float64, device)
    found = gradient(24, dtypes.bfloat16, device)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, atol=0.03 * np.abs(exact).max())
