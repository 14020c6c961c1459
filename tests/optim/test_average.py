"""The exponential moving average of the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.optim import SGD, WeightAverage
from tests.optim import toy


@pytest.mark.parametrize("several", [False, True], ids=["one group", "several groups"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_average_follows_its_formula(dtype: Any, several: bool, device: str) -> None:
    tensors = toy.parameters(dtype, device)
    groups = [{"params": [each]} for each in tensors.items()] if several else tensors.items()
    optimizer = SGD(groups, lr=0.1)
    average = WeightAverage(optimizer, decay=0.9)
    expected = {name: value.astype("float32") for name, value in toy.values(tensors).items()}
    for step in range(3):
        toy.set_gradients(tensors, step)
        optimizer.step()
        average.update()
        source = optimizer.flat.views(toy.weights(optimizer))
        for name in expected:
            expected[name] = 0.9 * expected[name] + 0.1 * source[name]
    for name, value in average.state_dict().items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(backend.to_numpy(value), expected[name], rtol=1e-5, atol=1e-6)
    own = toy.values(tensors)
    with average.applied():
        shown = toy.values(tensors)
    after = toy.values(tensors)
    for name, value in average.state_dict().items():
        rounded = backend.to_numpy(value.astype(tensors[name].dtype))
        assert toy.same_bits([shown[name], own[name]], [rounded, after[name]])


def test_the_average_is_saved_and_loaded() -> None:
    first, second = (WeightAverage(SGD(toy.parameters(seed=s).items())) for s in (0, 1))
    second.load_state_dict(first.state_dict())
    assert toy.same_bits(list(second.state_dict().values()), list(first.state_dict().values()))
    state = {**first.state_dict(), "norm": np.zeros(2, "float32")}
    with pytest.raises(CheckpointError, match=r"norm is \(\(2,\), .*, expected \(\(1,\)"):
        second.load_state_dict(state)
    del state["norm"]
    with pytest.raises(CheckpointError, match="norm is missing, expected"):
        second.load_state_dict(state)
    with pytest.raises(ArgumentError, match="decay is 2, expected 0 to 1"):
        WeightAverage(SGD(toy.parameters().items()), decay=2)
    state = {**first.state_dict(), "other": np.zeros(2)}
    with pytest.raises(CheckpointError, match=r"other is .*, expected no such entry"):
        second.load_state_dict(state)
    optimizer = SGD(toy.parameters().items(), lr=0.5)
    assert repr(WeightAverage(optimizer)) == (
        f"WeightAverage(decay=0.999, optimizer={optimizer!r})"
    )
    assert [WeightAverage(optimizer, decay).decay for decay in (0, 1)] == [0, 1]
    first._average += 1
    second.load_state_dict({name: Tensor(view) for name, view in first.state_dict().items()})
    assert toy.same_bits(list(second.state_dict().values()), list(first.state_dict().values()))
    (piece,) = optimizer.flat.shards
    optimizer.flat.shards = [piece._replace(data=piece.data[:64])]
    with pytest.raises(ArgumentError, match="the parameters are sharded, expected whole ones"):
        WeightAverage(optimizer)
