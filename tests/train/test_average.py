from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.train import average_checkpoints
from tests.checkpoints import save_checkpoint


def save(folder: Path, step: int, **arrays: np.ndarray[Any, Any]) -> Path:
    return save_checkpoint(folder, step, {"model": arrays}, {}, keep=10)


def test_they_are_averaged_in_the_dtype_of_the_first(tmp_path: Path) -> None:
    paths = []
    for step, value in enumerate((100, 1, 2, 6)):
        weight = np.array([value, -value], np.float32)
        half = np.array([value], ml_dtypes.bfloat16)
        paths.append(save(tmp_path, step, weight=weight, half=half))
    found = average_checkpoints(paths[1:])
    assert found["weight"].tolist() == [3, -3]
    assert found["weight"].dtype == np.float32
    assert found["half"].dtype == ml_dtypes.bfloat16
    assert found["half"].tolist() == [3]
    assert average_checkpoints(paths[3:])["weight"].tolist() == [6, -6]
    assert average_checkpoints(paths)["weight"].tolist() == [109 / 4, -109 / 4]


def test_what_cannot_be_averaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="paths is empty"):
        average_checkpoints([])
    with pytest.raises(CheckpointError, match=r"nowhere has no state\.json"):
        average_checkpoints([tmp_path / "nowhere"])
    older = save(tmp_path, 1, weight=np.zeros(2, np.float32))
    newest = save(tmp_path, 2, weight=np.zeros(3, np.float32))
    with pytest.raises(
        CheckpointError, match=r"step-00000001 was saved from a different model than .*00000002"
    ):
        average_checkpoints([newest, older])
    (newest / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="it is damaged"):
        average_checkpoints([newest])
    with pytest.raises(CheckpointError, match="step-00000003 has no array"):
        average_checkpoints([save(tmp_path, 3)])
