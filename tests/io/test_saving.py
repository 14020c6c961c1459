"""`save` and `load`: what is written comes back, and other programs can read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tensorgrad as tg
from tensorgrad import Tensor, nn, optim
from tensorgrad.errors import ArgumentError, CheckpointError, DamagedError, DtypeError


def test_a_model_and_its_optimizer_resume_to_the_same_bits(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, optim.Optimizer]:
        model = nn.Linear(3, 2)
        return model, optim.AdamW(model.parameters(), lr=0.1)

    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(Tensor(np.ones((4, 3), "float32"))).sum().backward()
        optimizer.step()

    model, optimizer = make()
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": None}
    tg.save(state, tmp_path / "a")
    train(model, optimizer)
    twin, twin_optimizer = make()
    found = tg.load(tmp_path / "a")
    assert found["best"] is None
    twin.load_state_dict(found["model"])
    twin_optimizer.load_state_dict(found["optimizer"])
    train(twin, twin_optimizer)
    np.testing.assert_array_equal(twin_optimizer.flat.data, optimizer.flat.data)
    assert sorted(load_file(tmp_path / "a"))[:2] == ["model/bias", "model/weight"]


def test_values_keep_their_kind(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "x": {"half": np.ones(2, "float16"), "lr": 0.1, "on": True, "none": {}},
        "name": "a/b",
        "n": 2**60,
    }
    tg.save(values, tmp_path / "a")
    found = tg.load(tmp_path / "a")
    half = found["x"].pop("half")
    assert isinstance(half, Tensor)
    assert half.dtype == np.float16
    del values["x"]["half"]
    assert found == values


def test_files_of_other_programs_are_read(tmp_path: Path) -> None:
    save_file({"a.b": np.arange(3)}, tmp_path / "a")
    assert tg.load(tmp_path / "a")["a.b"].tolist() == [0, 1, 2]
    save_file({"a": np.arange(3)}, tmp_path / "b", {"tensorgrad": '{"x": ["lost"]}'})
    with pytest.raises(DamagedError, match="its tree is damaged: 'lost'"):
        tg.load(tmp_path / "b")
    for tree in ("[1]", "{", '{"x": [3]}', '{"x": [["a"]]}'):
        save_file({"a": np.arange(3)}, tmp_path / "b", {"tensorgrad": tree})
        with pytest.raises(DamagedError, match=r"load: .*b: its tree is damaged: "):
            tg.load(tmp_path / "b")
    save_file({"a": np.arange(3)}, tmp_path / "b", {"tensorgrad": '{"x": {"y": ["a"], "z": 3}}'})
    found = tg.load(tmp_path / "b")
    assert found["x"]["y"].tolist() == [0, 1, 2]
    assert found["x"]["z"] == 3
    with pytest.raises(CheckpointError, match="does not exist"):
        tg.load(tmp_path / "c")


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    for values, error, message in (
        (tmp_path, ArgumentError, "values is a PosixPath, expected a dictionary"),
        ({"a": {1: 2}}, ArgumentError, "a has the name 1, expected text"),
        ({"a": {"b": np.ones(1)}, "a/b": np.ones(1)}, ArgumentError, "two tensors have the path"),
        ({"a": float("nan")}, ArgumentError, "a is nan, expected a finite number"),
        ({"a": [np.ones(1)]}, DtypeError, "a has type list, expected a tensor"),
    ):
        with pytest.raises(error, match=message):
            tg.save(values, tmp_path / "a")  # type: ignore[arg-type]
    nested: Any = 1
    for _ in range(5000):
        nested = {"a": nested}
    with pytest.raises(ArgumentError, match="values is nested more than 64 deep, expected less"):
        tg.save(nested, tmp_path / "a")
    with pytest.raises(ArgumentError, match="values has the name 1, expected text"):
        tg.save({1: 2}, tmp_path / "a")  # type: ignore[dict-item]
    assert not (tmp_path / "a").exists()
