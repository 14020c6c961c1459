from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad import random
from tensorgrad.io.weights import load_arrays, load_metadata
from tensorgrad.models.generation import generate
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.parallel import Mesh
from tensorgrad.parallel.merge import main, merge, open_checkpoint
from tests.checkpoints import save_checkpoint
from tests.parallel.test_checkpoint import save_on

CONFIG = GPT2Config(vocab_size=12, context=8, layers=2, heads=2, width=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_ranks_becomes_a_plain_model_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    random.seed(3)
    model = GPT2(CONFIG).to(dtype)
    arrays = {name: tensor.data for name, tensor in model.state_dict().items()}
    full = {f"model/{name}": array for name, array in arrays.items()}
    full |= {f"optimizer/m/{name}": np.ones_like(array) for name, array in arrays.items()}
    (tmp_path / "run").mkdir()
    save_on(Mesh(2, 2, 2), True, full, tmp_path / "run" / "checkpoints", step=7)
    out = tmp_path / "model.safetensors"
    assert main([str(tmp_path / "run"), str(out)]) == 0
    assert f"{len(arrays)} arrays of {tmp_path / 'run' / 'checkpoints'}" in capsys.readouterr().out
    merged = load_arrays(out)
    assert merged.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (merged[name].shape, merged[name].dtype) == (array.shape, array.dtype)
        assert merged[name].tobytes() == array.tobytes()
    assert load_metadata(out) == {"step": "7"}
    other = GPT2(CONFIG).to(dtype)
    other.load_state_dict(merged)
    assert generate(other, [1, 2], 4, temperature=0) == generate(model, [1, 2], 4, temperature=0)


def test_a_checkpoint_of_one_process_is_merged_too(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"w": np.arange(6.0).reshape(2, 3), "count": np.asarray(3)}
    settings = {"model": "gpt2", "lr": 0.1}
    state = {"metrics": {}, "model": asdict(CONFIG), "tokenizer": "abc", "settings": settings}
    path = save_checkpoint(tmp_path, 1, {"model": arrays, "optimizer": {}}, state)
    out = tmp_path / "model.safetensors"
    assert main([str(path), str(out)]) == 0
    for name, array in load_arrays(out).items():
        np.testing.assert_array_equal(array, arrays[name], strict=True)
    found = {name: json.loads(text) for name, text in load_metadata(out).items()}
    assert found == {
        "step": 1, "model": asdict(CONFIG), "tokenizer": "abc", "settings": {"model": "gpt2"}
    }  # fmt: skip
    assert merge(open_checkpoint(tmp_path), out) == 2
    assert open_checkpoint(path).path == path


def test_errors_are_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"merge: {tmp_path} has no checkpoint, expected one or more"
    ]
    path = save_checkpoint(tmp_path, 1, {"optimizer": {}}, {"metrics": {}})
    assert main([str(path), str(tmp_path / "out")]) == 1
    assert "has no arrays of a model" in caplog.text
    path = save_checkpoint(tmp_path, 1, {"model": {"w": np.ones(3)}}, {"metrics": {}})
    assert main([str(path), str(tmp_path / "no" / "out")]) == 1
    assert "cannot write" in caplog.text
    (path / "rank-00000.safetensors").write_bytes(b"")
    assert main([str(path), str(tmp_path / "out")]) == 1
    assert "rank-00000.safetensors has 0 bytes, expected" in caplog.text
