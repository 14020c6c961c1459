from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.train import average_checkpoints
from tensorgrad.train.checkpoint import save_checkpoint


def save(folder: Path, step: int, **arrays: np.ndarray[Any, Any]) -> Path:
    return save_checkpoint(folder, step, {"model": arrays}, {}, keep=10)


def test_the_newest_are_averaged_in_their_dtype(tmp_path: Path) -> None:
    for step, value in enumerate((100, 1, 2, 6)):
        weight = np.array([value, -value], np.float32)
        half = np.array([value], ml_dtypes.bfloat16)
        save(tmp_path, step, weight=weight, half=half)
    found = average_checkpoints(tmp_path, 3)
    assert found["weight"].tolist() == [3, -3]
    assert found["weight"].dtype == np.float32
    assert found["half"].dtype == ml_dtypes.bfloat16
    assert found["half"].tolist() == [3]
    assert average_checkpoints(tmp_path, 1)["weight"].tolist() == [6, -6]
    assert average_checkpoints(tmp_path, 99)["weight"].tolist() == [109 / 4, -109 / 4]
    assert average_checkpoints(tmp_path, 2, every=2)["weight"].tolist() == [4, -4]  # 6 and 2
    assert average_checkpoints(tmp_path, 99, every=2)["weight"].tolist() == [36, -36]


def test_what_cannot_be_averaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        average_checkpoints(tmp_path, 2)
    with pytest.raises(ArgumentError, match="count is 0"):
        average_checkpoints(tmp_path, 0)
    save(tmp_path, 1, weight=np.zeros(2, np.float32))
    newest = save(tmp_path, 2, weight=np.zeros(3, np.float32))
    with pytest.raises(CheckpointError, match=r"step-00000001 is of another model than .*00000002"):
        average_checkpoints(tmp_path, 2)
    (newest / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="it is damaged"):
        average_checkpoints(tmp_path, 1)
