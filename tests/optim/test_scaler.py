from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, dtypes
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.optim import SGD, AdamW, LossScaler
from tests.optim import toy


def scale_of(scaler: LossScaler) -> float:
    scale: float = scaler.state_dict()["scale"]
    return scale


@pytest.mark.parametrize("scale", [1024.0, 3.0])
def test_a_scaled_step_equals_a_plain_one(scale: float, device: str) -> None:
    def run(scaler: LossScaler | None, max_norm: float) -> Any:
        tensors = toy.parameters(np.float64, device, shapes={"w": (5, 3), "b": (3,)})
        optimizer = AdamW(tensors.items(), lr=0.1)
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = toy.total(*[t * t for t in tensors.values()])
            (scaler.scale(loss) if scaler else loss).backward()
            norms.append(float(optimizer.step(max_norm, scaler)))  # type: ignore[arg-type]
        return norms, backend.to_numpy(optimizer.flat.data)

    for max_norm in (1.0, math.inf):
        plain, scaled = run(None, max_norm), run(LossScaler(scale), max_norm)
        np.testing.assert_allclose(scaled[0], plain[0], rtol=1e-14)
        np.testing.assert_allclose(scaled[1], plain[1], rtol=1e-13)


def test_it_backs_off_and_grows(device: str) -> None:
    tensors = toy.parameters(device=device, shapes={"w": (3,)})
    optimizer = SGD(tensors.items(), lr=1.0)
    scaler = LossScaler(64.0, growth=4.0, backoff=0.25, interval=2)
    scales = []
    for bad in (True, False, False, False, True, False, False, True):
        optimizer.flat.grad.fill(np.inf if bad else 1)
        optimizer.step(scaler=scaler)
        scales.append(scale_of(scaler))
    assert scales == [16, 16, 64, 64, 16, 16, 64, 16]
    assert optimizer.state_dict()["step"] == 5


def test_skipped_steps_change_nothing(device: str) -> None:
    tensors = toy.parameters(device=device)
    optimizer = AdamW(tensors.items())
    before = optimizer.flat.data.copy()
    optimizer.flat.grad[7] = np.nan
    norm = optimizer.step(scaler=LossScaler())
    assert norm is not None
    assert math.isnan(float(norm))
    assert toy.same_bits([before], [optimizer.flat.data])


def test_the_scale_stays_a_usable_number(device: str) -> None:
    optimizer = SGD(toy.parameters(device=device, shapes={"w": (3,)}).items(), lr=0.0)
    high, low = LossScaler(2.0**126, interval=1), LossScaler(2.0**-125)
    for _ in range(4):
        optimizer.flat.grad.fill(1)
        optimizer.step(scaler=high)
        optimizer.flat.grad.fill(np.inf)
        optimizer.step(scaler=low)
    assert (scale_of(high), scale_of(low)) == (2.0**127, 2.0**-126)
    loss = toy.total(Tensor(backend.to_device(np.ones(1, np.float32), device), True))
    assert float(high.scale(loss).item()) == 2.0**127


def test_a_16_bit_loss_is_scaled_in_float32(device: str) -> None:
    loss = Tensor(backend.to_device(np.full((), 3, np.float16), device), requires_grad=True)
    scaled = LossScaler(2.0**15).scale(loss)
    assert scaled.dtype == np.float32
    assert scaled.item() == 3 * 2.0**15
    scaled.backward()
    assert loss.grad is not None
    assert float(loss.grad) == 2.0**15


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16, dtypes.float32], ids=str)
def test_small_gradients_survive_in_float16(dtype: Any, device: str) -> None:
    """A toy whose gradients are below the least float16 learns only with a scale."""

    def run(scaler: LossScaler | None) -> float:
        tensors = toy.parameters(dtype, device, shapes={"w": (20, 3)})
        target = toy.parameters(dtype, device, seed=1, shapes={"w": (20, 3)})["w"].detach()
        optimizer = AdamW(tensors.items(), lr=0.03, betas=(0.9, 0.9))
        for _ in range(300):
            optimizer.zero_grad()
            error = tensors["w"] - target
            loss = toy.total(error * error * 1e-4 * 1e-4)
            (scaler.scale(loss) if scaler else loss).backward()
            optimizer.step(1.0 if scaler else None, scaler)
        return float(np.abs(tensors["w"].numpy().astype(float) - target.numpy()).max())

    assert run(LossScaler(interval=50)) < 0.1
    if dtype == dtypes.float16:
        assert run(None) > 1.0, "the toy needs no scale"


def test_the_state_survives_json(device: str) -> None:
    optimizer = SGD(toy.parameters(device=device).items(), lr=0.0)
    one = LossScaler(256.0, interval=3)
    for _ in range(5):
        optimizer.step(scaler=one)
    two = LossScaler(interval=3)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert one.state_dict() == two.state_dict() == {"scale": 512.0, "streak": 2}
    optimizer.step(scaler=two)
    assert scale_of(two) == 1024.0


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"scale": 1.0},
        {"scale": 0.0, "streak": 0},
        {"scale": "1", "streak": 0},
        {"scale": math.inf, "streak": 0},
        {"scale": 2.0**128, "streak": 0},
        {"scale": 1e-300, "streak": 0},
        {"scale": 10**400, "streak": 0},
        {"scale": 1.0, "streak": 10**400},
        [],
        {"scale": 1.0, "streak": -1},
        {"scale": 1.0, "streak": 0, "other": 1},
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(state: dict[str, Any]) -> None:
    scaler = LossScaler(8.0)
    with pytest.raises(CheckpointError, match=r"LossScaler\.load_state_dict: got"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == {"scale": 8.0, "streak": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": math.inf}, "scale is inf"),
        ({"scale": 1e-300}, r"scale is 1e-300, expected a number from 2\^-126"),
        ({"scale": 2.0**128}, r"scale is 3.4.*, expected a number from 2\^-126"),
        ({"growth": 0.5}, "growth is 0.5"),
        ({"backoff": 1.0}, "backoff is 1.0"),
        ({"interval": 0}, "interval is 0"),
        ({"scale": "x"}, "scale is 'x', expected a number"),
        ({"growth": None}, "growth is None, expected a number"),
        ({"backoff": "x"}, "backoff is 'x', expected a number"),
        ({"interval": 1.5}, "interval is 1.5, expected an integer"),
        ({"growth": math.inf}, "growth is inf, expected"),
        ({"backoff": 0}, "backoff is 0, expected a number between 0 and 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"LossScaler: {message}"):
        LossScaler(**options)


def test_the_options_at_their_bounds_and_by_default() -> None:
    scaler = LossScaler()
    assert repr(scaler) == "LossScaler(growth=2.0, backoff=0.5, interval=2000)"
    assert scaler.state_dict() == {"scale": 65536.0, "streak": 0}
    for scale in (2.0**-126, 2.0**127):
        state = LossScaler(scale, growth=1, interval=1).state_dict()
        scaler.load_state_dict(state)
        assert scaler.state_dict() == state
