"""Float32 master weights of bfloat16 parameters, in halves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16
from tensorgrad.optim import SGD
from tensorgrad.optim.master import halves, joined, low_bits_of
from tests.optim import toy

SPECIAL = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x80008000, 0x007FFFFF,
     0x00800000, 0x3F7FFFFF, 0x3F7F8000, 0x3F808000, 0x3F818000, 0xBF808000, 0x7F7FFFFF, 0xFF7FFFFF,
     0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0xFF800000],
    "uint32",
).view("float32")  # fmt: skip
NANS = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC01234, 0xFFFFFFFF], "uint32")


def every_half() -> Iterator[np.ndarray[Any, Any]]:
    """Yield float32 with each high half and several low ones, without NaN."""
    high = np.arange(1 << 16, dtype="uint32") << 16
    for low in (0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xCDEF, 0xFFFF):
        values = (high | np.uint32(low)).view("float32")
        yield values[~np.isnan(values)]


def test_every_float32_comes_back(device: str) -> None:
    for values in (SPECIAL, *every_half()):
        parameters, low = halves(backend.to_device(values, device))
        assert (parameters.dtype, low.dtype) == (bfloat16, "uint16")
        assert toy.same_bits([joined(parameters, low)], [values])


def test_parameters_are_rounded_to_nearest_with_ties_away_from_zero(device: str) -> None:
    for values in (SPECIAL, *every_half()):
        found = backend.to_numpy(halves(backend.to_device(values, device))[0])
        bits = values.view("uint32")
        tie = (bits & 0xFFFF) == 0x8000
        usual = values.astype(bfloat16)
        assert toy.same_bits([found[~tie]], [usual[~tie]])
        assert (found.view("uint16")[tie] == (bits[tie] >> 16) + 1).all()


def test_nan_stays_nan(device: str) -> None:
    parameters, low = halves(backend.to_device(NANS.view("float32"), device))
    assert (backend.to_numpy(parameters).view("uint16") == 0x7FC0).all()
    assert not backend.to_numpy(low).any()
    assert np.isnan(backend.to_numpy(joined(parameters, low))).all()


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_an_assigned_value_stays_whatever_the_low_bits_are(low: int, device: str) -> None:
    assigned = np.arange(1 << 16, dtype="uint16").view(bfloat16)  # every bfloat16
    values = joined(
        backend.to_device(assigned, device),
        backend.to_device(np.full(assigned.shape, low, "uint16"), device),
    )
    found, kept = backend.to_numpy(halves(values)[0]), backend.to_numpy(values)
    bits = np.arange(1 << 16, dtype="uint32") << 16
    high = bits.view("float32")
    nan, finite = np.isnan(high), np.isfinite(high)
    assert toy.same_bits([found[~nan]], [assigned[~nan]])
    assert np.isnan(kept[nan]).all()
    off = kept.view("int32").astype("int64") - bits.view("int32")
    assert (np.abs(off[finite]) <= 0x8000).all()


def test_former_master_weights_come_back(device: str) -> None:
    """Their parameters were rounded with ties to even; of ties one unit is lost."""
    for values in (SPECIAL, *every_half()):
        with np.errstate(over="ignore"):
            parameters = values.astype(bfloat16)
        low = low_bits_of(backend.to_device(values, device))
        found = backend.to_numpy(joined(backend.to_device(parameters, device), low))
        off = values.view("uint32") - found.view("uint32")
        tie = (values.view("uint32") & 0x1FFFF) == 0x8000
        assert (off == tie).all()


def step(values: np.ndarray[Any, Any], change: float, device: str) -> tuple[Any, Any]:
    """Return the master weights, and parameters and low bits, after a step of SGD by `change`."""
    high, low = halves(values)
    tensor = Tensor(backend.to_device(high, device), requires_grad=True)
    optimizer = SGD([tensor], lr=1.0)
    optimizer.state["low_bits"][: low.size] = backend.to_device(low, device)
    optimizer.flat.grad.fill(change)
    optimizer.step()
    (shard,) = optimizer.flat.shards
    (part,) = optimizer.flat.parameter_shards()
    return backend.to_numpy(optimizer.values(part)), (shard.data, optimizer.state["low_bits"])


def test_a_step_updates_the_joined_float32(device: str) -> None:
    """Gradients that are finite, and NaN: on a GPU 0 * inf, of no weight decay, is NaN."""
    for values in (SPECIAL, NANS.view("float32"), *every_half()):
        values = values[~np.isinf(values)]
        for change in (0.0, 1e-3, 2.0, np.inf, np.nan):
            with np.errstate(all="ignore"):
                expected = values - np.float32(change)
            found, stored = step(values, change, device)
            nan = np.isnan(expected)
            assert toy.same_bits([found[~nan]], [expected[~nan]])
            assert np.isnan(found[nan]).all()
            assert toy.same_bits(stored, step(values, change, "cpu")[1])


def test_zeros_that_were_assigned_stay_zero(device: str) -> None:
    """0 and a low half from 0x8000 on would be NaN."""
    tensor = Tensor(backend.to_device(np.ones(8, bfloat16), device), requires_grad=True)
    optimizer = SGD([tensor], lr=1.0)
    optimizer.state["low_bits"].fill(0x9000)
    tensor.data[::2] = 0
    tensor.data[1::4] = -0.0
    (tensor * 0).sum().backward()
    optimizer.step()
    assert (tensor.numpy() == np.array([0, 0, 0, 1] * 2, bfloat16)).all()
    assert not backend.to_numpy(optimizer.state["low_bits"])[:8:2].any()
